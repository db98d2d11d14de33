"""Life of the server under test: start, readiness, cause of death, end; or attach to a running one.

Whoever opens a server ends it, and nobody else. It is held by `benchlib.supervisor`, so it also ends when its opener
is killed. It is ready when its own process listens on the port (not a stale one that happens to answer there), says
so, and has generated a token.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchlib.client import call, generate_round, get_json, run_async
from benchlib.engines import build_launch, check_server_info, verify_tokens
from benchlib.errors import RequestError, ServerError
from benchlib.host import read_gpu_states
from benchlib.machine import allot, check_devices, wait_for_release
from benchlib.record import ServerRecord, write_atomic
from benchlib.server_log import explain_death
from benchlib.spec import RunSpec
from benchlib.stream import request_record

__all__ = ["SERVER_FILE", "Server", "Starting", "attach_server", "open_server", "running_limit", "start_server"]

HOST = "127.0.0.1"
LOG_FILE = "server.log"
SERVER_FILE = "server.json"
POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
CANARY_TIMEOUT_S = 120.0
NOTICE_S = 2.5  # that a notebook has to record what it measured before its server died
DEATH_S = 2.0  # from a lost connection until the process is seen to be gone
GRACE_S = 15.0  # SGLang sleeps five seconds in its shutdown
STOP_TIMEOUT_S = 30.0
LOG_LINES = 20
LOOK_S, DOOMED_S, TAIL_BYTES = 1.0, 3.0, 2**18
# Some names hold "token" yet count or name no secret.
SECRET = re.compile(r"key|password|secret|(?<!first_)token(?!s|izer|_usage|_latency|_map)", re.IGNORECASE)


class Server:
    """A running server and its record, which somebody else ends; a context manager like those that are ended here."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record

    def poll(self) -> bool:
        """Whether it is ready. ServerError when it died, is too late, or is not the one planned."""
        return True

    def death(self) -> str | None:
        """Why it ended by itself once it was ready; None while it runs, and where that is not known here."""
        return None

    def stop(self) -> None:
        """End it, with its whole process group, where it was started here. ServerError if anything survives."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def open_server(spec: RunSpec, *, folder: Path, url: str = "") -> Server:
    """The server that measures `spec`: the one at `url`, the one `spec.attach` names, or a new one."""
    if url:
        # The sweep that started and checked it left its record here; an address alone is somebody else's server.
        held = _wait_for_record(folder / SERVER_FILE, url, spec.startup_timeout_s)
        return Server(held) if held is not None else attach_server(spec, url=url)
    return attach_server(spec, url=spec.attach) if spec.attach else start_server(spec, folder=folder)


def _wait_for_record(path: Path, url: str, timeout_s: float) -> ServerRecord | None:
    """The record of a sweep's server at `url` once that is ready; None: no sweep holds one there."""
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


def start_server(spec: RunSpec, *, folder: Path, port: int | None = None) -> Starting:
    """Start a server and wait until it is ready.

    Raises UnavailableError before anything starts, ServerError with the log's last lines when it does not come up.
    """
    server = Starting(spec, folder=folder, port=port)
    try:
        while not server.poll():
            time.sleep(POLL_S)
    except BaseException:
        server.stop()
        raise
    return server


class Starting(Server):
    """A server that this process starts and ends. Its address is known, and in `server.json`, before it is ready.

    Others may thus get ready meanwhile: a notebook's kernel takes as long to start as a small server.
    """

    def __init__(self, spec: RunSpec, *, folder: Path, port: int | None = None) -> None:
        self._spec, self._folder, self._port = spec, folder, port or _free_port()
        build_launch(spec, host=HOST, port=self._port)  # what the engine lacks matters more than what the machine does
        self._allotment = given = allot(spec)
        launch = build_launch(spec, host=HOST, port=self._port, placement=given.placement)
        argv = (*given.binding.prefix, *launch.argv)
        cpus = ",".join(map(str, given.binding.cpus or ()))
        folder.mkdir(parents=True, exist_ok=True)
        self._stopped, self._died, self._doomed, self._look_at = False, 0.0, 0.0, 0.0
        self._began = time.monotonic()
        # The supervisor, and through it the server's process group.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchlib.supervisor", str(folder / LOG_FILE), str(GRACE_S), cpus, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **launch.env},
            # Ctrl-C is for the opener, which then ends the server in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        pid = self._process.stdout.readline().strip()
        if not pid:
            last = (self._process.communicate()[1].strip().splitlines() or ["no message"])[-1]
            raise ServerError(f"cannot start {argv[0]}: {last}")
        self._pid = int(pid)
        record = ServerRecord(
            url=f"http://{HOST}:{self._port}",
            argv=tuple(map(_shown, argv)),
            env=_scrub(launch.env),
            pid=self._pid,
            log=LOG_FILE,
            placement=given.placement,
            binding=given.binding.how,
            custom_all_reduce_expected=given.custom_all_reduce,
            links_disagree=given.links_disagree,
        )
        super().__init__(record)
        self._write()

    def poll(self) -> bool:
        if self.record.startup_s is not None:
            # Not at once: whoever measures it notices too, and keeps what was measured until then.
            if self.exit_code() is not None and self._since_death_s() > NOTICE_S:
                raise ServerError(self.death() or "")
            self._check_log()
            return True
        seconds, limit = time.monotonic() - self._began, self._spec.startup_timeout_s
        if (code := self.exit_code()) is not None:
            raise self.failure(f"exited with code {code} after {seconds:.1f} s, before it was ready")
        if seconds > limit:
            raise self.failure(f"was not ready after {limit:g} s (startup_timeout_s)")
        if not (_says_ready(self.record.url) and self._owns_port()):
            self._check_log()
            return False
        self._send_canary(min(max(limit - seconds, 1.0), CANARY_TIMEOUT_S))
        startup_s = time.monotonic() - self._began
        try:
            info = get_json(f"{self.record.url}/server_info")
        except RequestError as error:
            raise self.failure(f"stopped answering: {error}") from error
        check_server_info(self._spec, info)
        self.record = self.record.model_copy(update={"startup_s": startup_s, "devices": self._check_devices()})
        self.record = _with_info(self.record, info)
        self._write()
        return True

    def _check_log(self) -> None:
        """ServerError once the log has told of a fatal error for a while: SGLang may hang after one, or dump long.

        Only its end is looked at: what came before was survived.
        """
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + LOOK_S
        log = self._folder / LOG_FILE
        cause = explain_death(_tail(log), None) if log.is_file() else None
        if cause is None or cause.kind == "killed":
            self._doomed = 0.0
        elif not self._doomed:
            self._doomed = now
        elif now - self._doomed > DOOMED_S:
            raise self.failure("reported a fatal error and did not end")

    def _since_death_s(self) -> float:
        self._died = self._died or time.monotonic()
        return time.monotonic() - self._died

    def death(self) -> str | None:
        if self._stopped or self.record.startup_s is None:
            return self.record.death
        # Its supervisor notices a moment after it is gone.
        if (code := self.exit_code(wait_s=0.0 if _runs(self._pid) else DEATH_S)) is None:
            return None
        return str(self.failure(f"exited with code {code} while it was measured"))

    def _write(self) -> None:
        write_atomic(self._folder / SERVER_FILE, self.record.model_dump_json(indent=1).encode())

    def _owns_port(self) -> bool:
        """Whether the listener is this server; ServerError when somebody else answers there."""
        connections = psutil.net_connections("tcp")
        owners = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == self._port}
        if foreign := [pid for pid in owners if _session(pid) != self._pid]:
            raise ServerError(
                f"port {self._port} is answered by process {foreign[0] or 'of another user'}, not by the server "
                f"started (process {self._pid}). A stale server? End it, then run again"
            )
        return bool(owners)

    def _check_devices(self) -> str:
        """How the GPUs in use were found to be the planned ones; empty where none were planned."""
        given = self._allotment
        if given.placement is None:
            return ""
        pids = frozenset(pid for pid in psutil.pids() if _session(pid) == self._pid)
        return check_devices(given.placement, given.before, read_gpu_states(), pids)

    def _send_canary(self, timeout_s: float) -> None:
        """One token: a server may say that it is ready and yet not generate."""
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3, 4], "stream": True, "sampling_params": sampling}
        (exchange,) = run_async(generate_round(self.record.url, [body], timeout_s=timeout_s))
        place = {"prompt": "canary", "max_new_tokens": 1, "concurrency": 1, "round": 0}
        error = request_record(exchange, epoch=exchange.sent, ignore_eos=True, **place).error
        if error is None:
            return
        if (code := self.exit_code(wait_s=DEATH_S)) is not None:
            seconds = time.monotonic() - self._began
            raise self.failure(f"exited with code {code} at its first request, {seconds:.1f} s after its start")
        raise self.failure(f"said it was ready but did not generate one token: {error}")

    def exit_code(self, *, wait_s: float = 0.0) -> int | None:
        """Its exit code once it has ended; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None

    def failure(self, what: str) -> ServerError:
        """An error that shows the failing thing itself: its cause, the log's end, and where the rest is."""
        log = self._folder / LOG_FILE
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        cause = explain_death(text, self.exit_code())
        why = f" Cause: {cause.kind}: {cause.line} {cause.advice}" if cause else ""
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-LOG_LINES:]) or "  (the log is empty)"
        return ServerError(f"the server {what}.{why} Last log lines:\n{tail}\nFull log: {log}")

    def stop(self) -> None:
        if self._stopped:
            return
        self.record = self.record.model_copy(update={"death": self.death()})
        self._stopped = True
        (self._folder / SERVER_FILE).unlink(missing_ok=True)
        # Noted now: a child that left the group is found through its parent only while that lives.
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._pid).children(recursive=True)
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=STOP_TIMEOUT_S)  # closes its standard input, which ends the group
        self._process.kill()
        self._process.wait()
        left = [p for p in psutil.process_iter() if (p in family or _session(p.pid) == self._pid) and _lives(p)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=5)
        if survivors := [p.pid for p in alive if _lives(p)]:
            raise ServerError(f"processes of the server survived SIGKILL: {survivors}. End them by hand")
        if given := self._allotment.placement:
            wait_for_release(given, self._allotment.before)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _session(pid: int | None) -> int | None:
    with suppress(ProcessLookupError, PermissionError):
        return None if pid is None else os.getsid(pid)
    return None


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return _lives(psutil.Process(pid))
    return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _says_ready(url: str) -> bool:
    with suppress(RequestError):
        status, _ = call(f"{url}/ready", timeout_s=PROBE_TIMEOUT_S)
        if status == 404:  # older servers
            status, _ = call(f"{url}/model_info", timeout_s=PROBE_TIMEOUT_S)
        return status == 200
    return False


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def running_limit(info: dict[str, Any]) -> int | None:
    """How many requests a server runs at once, over all its replicas, by its /server_info; None: it does not tell."""
    states, replicas = info.get("internal_states"), info.get("dp_size")
    state = states[0] if isinstance(states, list) and states else None
    each = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
    if type(each) is int:  # and no bool
        return each * (replicas if type(replicas) is int and replicas > 1 else 1)
    total = info.get("max_running_requests")
    return total if type(total) is int else None


def _with_info(record: ServerRecord, info: dict[str, Any]) -> ServerRecord:
    told = {
        "version": info.get("version"),
        "verify_tokens": verify_tokens(info),
        "effective_max_running_requests": running_limit(info),
        "info": _scrub(info),
    }
    return record.model_copy(update=told)


def _scrub(value: Any) -> Any:
    """Without what may be secret, and with paths as seen from here: records are published."""
    if isinstance(value, dict):
        return {key: _scrub(inner) for key, inner in value.items() if not SECRET.search(key)}
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
