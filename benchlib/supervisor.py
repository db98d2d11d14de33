"""`python -m benchlib.supervisor LOG GRACE_S CPUS ARGV...` holds one server and ends it when its opener goes away.

A notebook kernel, a sweep or a shell may be killed in ways that run none of their code. This small process (standard
library only) starts the server in a session of its own, waits until its own standard input closes, which the system
does for any death, and then ends the server's whole process group. Its exit code is the server's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]

REAP_S = 2.0
POLL_S = 0.1
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run until the server ends or standard input closes; prints the server's process id first."""
    log, grace_s, cpus, *argv = arguments
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))  # the server inherits it
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # as nohup wants it
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))
    # SGLang leaves sockets and files behind in the temporary folder: one of its own goes with it. Compiled kernels stay
    # where they are found again.
    shared = Path(tempfile.gettempdir())
    held = tempfile.TemporaryDirectory(prefix="benchlib-", ignore_cleanup_errors=True)
    cache = str(shared / f"torchinductor_{os.getuid()}")
    env = {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, "TMPDIR": held.name}
    with Path(log).open("wb") as output:
        # The server's own group, so that all of it can be ended; its stdin is not ours, which only signals death.
        server = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        sys.stdout.write(f"{server.pid}\n")
        sys.stdout.flush()
        while (code := server.poll()) is None:
            readable, _, _ = select.select([0], [], [], POLL_S)
            if readable and not os.read(0, 4096):
                return 0
        return code if code >= 0 else 128 - code
    finally:
        mapped = _shared_memory(server.pid)
        _end_group(server, float(grace_s))
        for path in mapped - _shared_memory(None):
            path.unlink(missing_ok=True)
        held.cleanup()


def _shared_memory(session: int | None) -> set[Path]:
    """Files in /dev/shm that processes of a session (None: any) hold; a killed server unlinks none of them."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if session in (None, os.getsid(int(maps.parent.name))):
                words = (line.split()[-1] for line in maps.read_text(encoding="utf-8").splitlines())
                found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
    return found


def _die_with_parent() -> None:  # pragma: no cover - runs between fork and exec, where nothing is recorded
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, then SIGKILL after the grace; children that outlived their leader included."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, REAP_S)):
        deadline = time.monotonic() + wait_s
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, number)
        while time.monotonic() < deadline:
            server.poll()
            try:
                os.killpg(server.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
