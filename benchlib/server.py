"""Life of the server under test: start, readiness, cause of death, end; or attach to a running one.

Whoever opens a server ends it, and nobody else. It is held by `benchlib.supervisor`, so it also ends when its opener
is killed. It is ready when its own process listens on the port (not a stale one that happens to answer there), says
so, and has generated a token.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchlib.client import call, generate_round, get_json, run_async
from benchlib.engines import Launch, build_launch, check_server_info, verify_tokens
from benchlib.errors import RequestError, ServerError
from benchlib.record import ServerRecord, write_atomic
from benchlib.spec import RunSpec
from benchlib.stream import request_record

__all__ = ["SERVER_FILE", "Server", "Starting", "attach_server", "open_server", "start_server"]

HOST = "127.0.0.1"
LOG_FILE = "server.log"
SERVER_FILE = "server.json"
POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
CANARY_TIMEOUT_S = 120.0
DEATH_S = 2.0  # from a lost connection until the process is seen to be gone
GRACE_S = 15.0  # SGLang sleeps five seconds in its shutdown
STOP_TIMEOUT_S = 30.0
LOG_LINES = 20
SECRET_WORDS = ("key", "token", "password", "secret")
# Names that hold "token" yet count or name no secret.
HARMLESS_WORDS = (
    "tokens",
    "tokenizer",
    "token_usage",
    "token_latency",
    "token_map",
    "time_to_first",
)


class Server:
    """A running server and its record; a context manager that ends what it started and leaves alone what it did not."""

    def __init__(self, record: ServerRecord, holder: _Holder | None = None) -> None:
        self.record = record
        self._holder = holder

    def stop(self) -> None:
        """End the server's whole process group; no effect on an attached one. ServerError if anything survives."""
        if self._holder is not None:
            self._holder.stop()

    def exit_code(self) -> int | None:
        """Its exit code once it has ended; None while it runs, and always for an attached one."""
        return self._holder.exit_code() if self._holder is not None else None

    def failure(self, what: str) -> ServerError:
        """The error `the server <what>`, with the log's last lines where the log is ours."""
        if self._holder is None:
            return ServerError(f"the server at {self.record.url} {what}")
        return self._holder.failure(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def open_server(spec: RunSpec, *, folder: Path, url: str = "") -> Server:
    """The server that measures `spec`: the one at `url`, the one `spec.attach` names, or a new one."""
    if url:
        held = _held(folder / SERVER_FILE, url, spec.startup_timeout_s)
        # The sweep that started and checked it left its record here; an address alone is somebody else's server.
        return Server(held) if held is not None else attach_server(spec, url=url)
    return attach_server(spec, url=spec.attach) if spec.attach else start_server(spec, folder=folder)


def _held(path: Path, url: str, timeout_s: float) -> ServerRecord | None:
    """The record of a sweep's server at `url`, waited for while that starts; None: no sweep holds one there."""
    until = time.monotonic() + timeout_s
    while path.is_file():
        held = ServerRecord.model_validate_json(path.read_bytes())
        if held.url != url or held.startup_s is not None:
            return held if held.url == url else None
        if time.monotonic() > until:
            raise ServerError(f"the server at {url} was not ready after {timeout_s:g} s (startup_timeout_s)")
        time.sleep(POLL_S / 4)
    return None


def attach_server(spec: RunSpec, *, url: str) -> Server:
    """A running server that is measured and never stopped. ServerError when it is not the one planned."""
    url = url.rstrip("/")
    try:
        info = get_json(f"{url}/server_info")
    except RequestError as error:
        raise ServerError(f"cannot attach to {url}: {error}") from error
    check_server_info(spec, info)
    return Server(_with_info(ServerRecord(url=url, attached=True), info))


def start_server(spec: RunSpec, *, folder: Path, port: int | None = None) -> Server:
    """Start a server and wait until it is ready.

    Raises UnavailableError before anything starts, ServerError with the log's last lines when it does not come up.
    """
    starting = Starting(spec, folder=folder, port=port)
    try:
        while (server := starting.poll()) is None:
            time.sleep(POLL_S)
    except BaseException:
        starting.stop()
        raise
    return server


class Starting:
    """A server on its way; a context manager that ends it. Its address is known and in `server.json` at once.

    Others may thus get ready meanwhile: a notebook's kernel takes as long to start as a small server.
    """

    def __init__(self, spec: RunSpec, *, folder: Path, port: int | None = None) -> None:
        self._spec, self._port = spec, port or _free_port()
        launch = build_launch(spec, host=HOST, port=self._port)
        self._path = folder / SERVER_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._holder = _Holder(launch, folder / LOG_FILE)
        self.server: Server | None = None
        self.record = ServerRecord(
            url=f"http://{HOST}:{self._port}",
            argv=tuple(_scrub(argument) for argument in launch.argv),
            env={name: _scrub(value) for name, value in launch.env.items() if not _secret(name)},
            pid=self._holder.pid,
            log=LOG_FILE,
        )
        self._write()

    def poll(self) -> Server | None:
        """The server once it is ready; ServerError when it died, is too late, or is not the one planned."""
        if self.server is None and self._is_ready():
            try:
                self._finish()
            except RequestError as error:
                raise self._holder.failure(f"stopped answering: {error}") from error
        return self.server

    def _finish(self) -> None:
        holder, limit = self._holder, self._holder.started + self._spec.startup_timeout_s
        _send_canary(holder, self.record.url, max(limit - time.monotonic(), 1.0))
        startup_s = time.monotonic() - holder.started
        info = get_json(f"{self.record.url}/server_info")
        check_server_info(self._spec, info)
        self.record = _with_info(self.record.model_copy(update={"startup_s": startup_s}), info)
        self._write()
        self.server = Server(self.record, holder)

    def _is_ready(self) -> bool:
        holder, limit = self._holder, self._spec.startup_timeout_s
        if (code := holder.exit_code()) is not None:
            raise holder.failure(f"exited with code {code} after {holder.seconds:.1f} s, before it was ready")
        if holder.seconds > limit:
            raise holder.failure(f"was not ready after {limit:g} s (startup_timeout_s)")
        return _says_ready(self.record.url) and _owns_port(holder.pid, self._port)

    def _write(self) -> None:
        write_atomic(self._path, self.record.model_dump_json(indent=1).encode())

    def stop(self) -> None:
        """End the server's whole process group. ServerError if anything survives."""
        self._holder.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Holder:
    """The supervisor process, and through it the server's process group."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.log = log
        self.started = time.monotonic()
        self._stopped = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchlib.supervisor", str(log), str(GRACE_S), *launch.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **launch.env},
            # Ctrl-C is for the opener, which then ends the server in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        first = self._process.stdout.readline().strip()
        if not first:
            _, errors = self._process.communicate()
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise ServerError(f"cannot start {launch.argv[0]}: {last}")
        self.pid = int(first)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def exit_code(self, *, wait_s: float = 0.0) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None

    def failure(self, what: str) -> ServerError:
        """An error that shows the failing thing itself: the log's end, and where the rest is."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        tail = "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (the log is empty)"
        return ServerError(f"the server {what}. Last log lines:\n{tail}\nFull log: {self.log}")

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        (self.log.parent / SERVER_FILE).unlink(missing_ok=True)
        # Noted now: a child that left the group is found through its parent only while that lives.
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        left = _survivors(self.pid, family)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(left, timeout=5)
        if alive:
            raise ServerError(f"processes of the server survived SIGKILL: {[p.pid for p in alive]}. End them by hand")


def _survivors(leader: int, family: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = {process for process in family if process.is_running()}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return list(found)


def _says_ready(url: str) -> bool:
    with suppress(RequestError):
        status, _ = call(f"{url}/ready", timeout_s=PROBE_TIMEOUT_S)
        if status == 404:  # older servers
            status, _ = call(f"{url}/model_info", timeout_s=PROBE_TIMEOUT_S)
        return status == 200
    return False


def _owns_port(leader: int, port: int) -> bool:
    """Whether the listener is the server's; ServerError when somebody else answers there."""
    owners = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    foreign = [pid for pid in owners if pid is None or not _in_session(pid, leader)]
    if foreign:
        raise ServerError(
            f"port {port} is answered by process {foreign[0] or 'of another user'}, not by the server started "
            f"(process {leader}). A stale server? End it, then run again"
        )
    return bool(owners)


def _in_session(pid: int, leader: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid) == leader
    return False


def _send_canary(holder: _Holder, url: str, timeout_s: float) -> None:
    """One token: a server may say that it is ready and yet not generate."""
    body = {
        "input_ids": [1, 2, 3, 4],
        "stream": True,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    }
    timeout_s = min(timeout_s, CANARY_TIMEOUT_S)
    exchange = run_async(generate_round(url, [body], timeout_s=timeout_s))[0]
    place = {"prompt": "canary", "max_new_tokens": 1, "concurrency": 1, "round": 0}
    error = request_record(exchange, epoch=exchange.sent, ignore_eos=True, **place).error
    if error is None:
        return
    if (code := holder.exit_code(wait_s=DEATH_S)) is not None:
        raise holder.failure(f"exited with code {code} at its first request, {holder.seconds:.1f} s after its start")
    raise holder.failure(f"said it was ready but did not generate one token: {error}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _with_info(record: ServerRecord, info: dict[str, Any]) -> ServerRecord:
    states = info.get("internal_states") or [{}]
    limit = states[0].get("effective_max_running_requests_per_dp", info.get("max_running_requests"))
    return record.model_copy(
        update={
            "version": info.get("version"),
            "verify_tokens": verify_tokens(info),
            "effective_max_running_requests": limit if isinstance(limit, int) else None,
            "info": _scrub(info),
        }
    )


def _secret(name: str) -> bool:
    low = name.lower()
    for word in HARMLESS_WORDS:
        low = low.replace(word, "")
    return any(word in low for word in SECRET_WORDS)


def _scrub(value: Any) -> Any:
    """Without what may be secret, and with paths as seen from here: records are published."""
    if isinstance(value, dict):
        return {key: _scrub(inner) for key, inner in value.items() if not _secret(key)}
    if isinstance(value, list | tuple):
        return [_scrub(inner) for inner in value]
    return _shown(value) if isinstance(value, str) else value


def _shown(text: str) -> str:
    if text == sys.executable:
        return "python"
    for folder, short in ((Path.cwd(), "."), (Path.home(), "~")):
        if len(folder.parts) > 2:
            text = short if text == str(folder) else text.replace(f"{folder}/", f"{short}/")
    return text
