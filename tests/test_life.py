"""A server's life seen from outside: nothing stays behind it, and no failure of it is waited for or measured."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from benchlib.client import get_json
from benchlib.errors import ServerError
from benchlib.measure import measure_run
from benchlib.record import ServerRecord, load_record, load_requests
from benchlib.server import SERVER_FILE, Server, start_server
from benchlib.spec import RunSpec
from benchlib.sweep import run_sweep
from tests import fake_server
from tests.contract.conftest import LAPTOP, NEEDS_SGLANG, sglang_spec

ROOT = Path(__file__).parents[1]
SHARED = Path("/dev/shm")
MakeSpec = Callable[..., RunSpec]
Serve = Callable[..., str]
Started = Callable[[], list[list[str]]]


def files(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.is_dir() else set()


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


# ---- started and ended, again and again


@pytest.fixture
def leaves_nothing(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> Callable[[RunSpec, int, int], None]:
    """Start and stop a server `count` times, `at_once` side by side, and look for what is left."""
    scratch = tmp_path / "t"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))  # the servers', and their children's

    def one(spec: RunSpec, folder: Path) -> None:
        with start_server(spec, folder=folder) as server:
            port = urlsplit(server.record.url).port
            assert port in listening()
        assert port not in listening()
        assert [p.name for p in folder.iterdir()] == ["server.log"]

    def check(spec: RunSpec, count: int, at_once: int) -> None:
        one(spec, tmp_path / "first")  # what is imported, opened or cached once
        open_before, before = psutil.Process().num_fds(), files(SHARED) | files(scratch)
        with ThreadPoolExecutor(at_once) as pool:
            runs = list(pool.map(lambda n: one(spec, tmp_path / f"run{n}"), range(count)))
        assert len(runs) == count
        assert not started()
        assert psutil.Process().num_fds() <= open_before
        # Of shared memory, only what these engines would leave: others use this machine too.
        ours = ("benchlib-", "sglang_") if spec.engine == "sglang" else ("benchlib-",)
        shared = {path for path in files(SHARED) if path.name.startswith(ours)}
        assert not (files(scratch) | shared) - before

    return check


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_stays_behind(make_spec: MakeSpec, leaves_nothing: Callable[..., None], count: int) -> None:
    leaves_nothing(make_spec(), count, 2)


@pytest.mark.slow
def test_nothing_stays_behind_ranks_that_share_memory(leaves_nothing: Callable[..., None]) -> None:
    leaves_nothing(RunSpec(tp_size=2), 2, 1)


@pytest.mark.timeout(2400)  # five starts, of a minute or more each
@pytest.mark.parametrize("count", [pytest.param(4, marks=NEEDS_SGLANG, id="sglang")])
def test_nothing_stays_behind_sglang(leaves_nothing: Callable[..., None], count: int) -> None:
    leaves_nothing(sglang_spec(), count, 1)


def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(
    make_spec: MakeSpec, tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchlib.server.GRACE_S", 0.6)
    server = start_server(make_spec("stubborn"), folder=tmp_path)
    began = time.monotonic()
    server.stop()
    assert 0.6 <= time.monotonic() - began < 4
    assert server.exit_code() is not None
    assert not started()


# ---- killed while a sweep measures it


class Sweeping:
    """`benchlib sweep` of one long run, as a user starts it, and what it leaves in `folder`."""

    def __init__(self, results: Path, *options: str, sweep_file: Path | None = None, name: str = "tp1-auto") -> None:
        file = sweep_file or results / "s.toml"
        campaign = "laptop" if sweep_file else "c"
        if sweep_file is None:
            tp = name[2]
            work = 'prompts = ["fib"]\nmax_new_tokens = [256]\nrepeats = 500'
            file.write_text(f'name = "c"\nmethods = ["auto"]\ntp_size = [{tp}]\n[workload]\n{work}\n')
        self.folder = results / campaign / name
        code = "from benchlib.cli import main; main()"
        command = [sys.executable, "-c", code, "sweep", str(file), "--results", str(results), *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def server(self, *, ready: bool) -> int:
        """Process id of its server, once that is started, or ready."""
        until = time.monotonic() + 700
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(FileNotFoundError):
                record = ServerRecord.model_validate_json((self.folder / SERVER_FILE).read_bytes())
                if record.pid and (not ready or record.startup_s is not None):
                    return record.pid
            time.sleep(0.05)
        self.process.terminate()
        raise AssertionError(f"no server: {self.process.communicate()[0]}")

    def failed_after(self) -> float:
        """Seconds from now until its failed record stands."""
        began = time.monotonic()
        while not (self.folder / "record.json").exists() and time.monotonic() - began < 60:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 1, output
        assert "Traceback" not in output
        return seconds


def kill_group(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def kill_child(pid: int) -> None:
    """A rank or scheduler, which alone holds the model."""
    children = psutil.Process(pid).children(recursive=True)
    ranks = [c for c in children if "schedul" in " ".join(c.cmdline())] or children
    max(ranks, key=lambda c: c.memory_info().rss).kill()


def assert_killed(
    sweeping: Sweeping, moment_s: float, kill: Callable[[int], None], expected: str, *, within_s: float = 5.0
) -> None:
    try:
        pid = sweeping.server(ready=moment_s >= 0)
        time.sleep(max(moment_s, 0.0))
        kill(pid)
        seconds = sweeping.failed_after()
    finally:
        sweeping.process.terminate()  # which ends its server; no effect where it has ended
    record = load_record(sweeping.folder)
    assert record.status == "failed"
    assert expected in (record.error or ""), record.error
    assert "server.log" in (record.error or "")
    assert seconds < within_s, record.error
    load_requests(sweeping.folder)  # whole, as far as it came
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(pid)


KILLED = "the server exited with code 137 while it was measured. Cause: out of memory: "


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_a_killed_server_is_a_failed_run_at_once(tmp_path: Path, started: Started, seed: int) -> None:
    assert_killed(Sweeping(tmp_path), random.Random(seed).uniform(0, 6), kill_group, KILLED)
    assert not started()


@pytest.mark.slow
def test_a_server_killed_while_it_starts_is_a_failed_run_at_once(tmp_path: Path, started: Started) -> None:
    assert_killed(Sweeping(tmp_path), -1, kill_group, "the server exited with code 137 after")
    assert not started()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_rank_is_a_failed_run_at_once(tmp_path: Path, started: Started, seed: int) -> None:
    sweeping = Sweeping(tmp_path, name="tp2-auto")
    assert_killed(sweeping, random.Random(seed).uniform(1, 6), kill_child, "while it was measured. Cause: ")
    assert not started()


@pytest.mark.parametrize(
    ("kill", "expected", "within_s"),
    [
        pytest.param(kill_group, KILLED, 5.0, marks=NEEDS_SGLANG, id="sglang-group"),
        # Its HTTP side lives on: the death is told in the log a second later, and held for true after three more.
        pytest.param(kill_child, "Cause: out of memory: ", 9.0, marks=NEEDS_SGLANG, id="sglang-scheduler"),
    ],
)
def test_a_killed_sglang_is_a_failed_run_at_once(
    tmp_path: Path, started: Started, kill: Callable[[int], None], expected: str, within_s: float
) -> None:
    long = ("--set", "engine=sglang", "--set", "workload.repeats=500", "--only", "tp1-auto")
    sweeping = Sweeping(tmp_path, *long, sweep_file=LAPTOP)
    assert_killed(sweeping, random.Random(5).uniform(4, 9), kill, expected, within_s=within_s)
    assert not started()


# ---- servers that are not what they seem


@pytest.fixture
def variant(tmp_path: Path, make_spec: MakeSpec) -> Callable[..., RunSpec]:
    """A run of the fake server as some lines of code change it; `fake` is its module."""

    def make(code: str, **parameters: Any) -> RunSpec:
        script = tmp_path / "variant-python"
        program = tmp_path / "variant.py"
        program.write_text(
            f"import sys, threading, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests import fake_server as fake\n"
            f"{code}\nfake.main(sys.argv[1:])\n"
        )
        script.write_text(
            f'#!/bin/sh\nif [ "$1" = "-c" ]; then echo 0.0.1; exit; fi\nexec "{sys.executable}" "{program}" "$@"\n'
        )
        script.chmod(0o755)
        return make_spec(server_python=str(script), **parameters)

    return make


def test_a_foreign_server_is_never_measured_nor_ended(make_spec: MakeSpec, tmp_path: Path, started: Started) -> None:
    """It answers as ours would, on the port that ours was to have."""
    foreign = fake_server.serve_in_thread()
    generated = fake_server.Handler.generated
    try:
        with pytest.raises(ServerError, match=f"answered by process {os.getpid()}|exited with code 1"):
            start_server(make_spec(), folder=tmp_path, port=foreign.server_port)
        assert get_json(f"http://127.0.0.1:{foreign.server_port}/server_info")["version"] == "fake 1"
    finally:
        foreign.shutdown()
        foreign.server_close()
    assert fake_server.Handler.generated == generated  # not so much as the canary
    assert not started()


def test_a_server_that_is_ready_and_generates_nothing_is_given_up(
    variant: Callable[..., RunSpec], tmp_path: Path, started: Started
) -> None:
    spec = variant("fake.Handler.stream = lambda self, asked: time.sleep(3600)", startup_timeout_s=2.5)
    with pytest.raises(ServerError, match="said it was ready but did not generate one token: no end after"):
        start_server(spec, folder=tmp_path)
    assert not started()


def test_a_server_that_hangs_while_it_is_measured_is_given_up(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec("stall", stall_timeout_s=0.4, request_timeout_s=60.0)
    with start_server(spec, folder=tmp_path) as server:
        began = time.monotonic()
        measured = measure_run(spec, server.record)
    assert time.monotonic() - began < 10
    assert measured.error is not None
    assert "no byte for 0.4 s: it hangs" in measured.error
    assert [r.ticks for r in measured.requests] == [()] * len(measured.requests)


def watch(server: Server, seconds: float) -> None:
    """As a sweep does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        server.poll()
        time.sleep(0.1)


def test_a_server_that_reports_its_end_and_lives_on_is_given_up(
    variant: Callable[..., RunSpec], tmp_path: Path, started: Started
) -> None:
    """As SGLang does whose scheduler died: the HTTP side still answers."""
    log = (ROOT / "tests" / "data" / "logs" / "oom_relaunch.log").read_text()
    code = f"tell = threading.Timer(1.0, fake.say, [{log!r}])\ntell.daemon = True\ntell.start()"
    with start_server(variant(code), folder=tmp_path) as server:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"reported a fatal error and did not end\. Cause: out of memory"):
            watch(server, 20.0)
        assert time.monotonic() - began < 1 + 5 + 1
        assert server.exit_code() is None
    assert not started()


def test_an_older_server_is_measured_as_any_other(make_spec: MakeSpec, tmp_path: Path) -> None:
    """It has no /ready, and its /model_info says as much."""
    spec = make_spec("old", prompts=["fib"], repeats=1)
    with start_server(spec, folder=tmp_path) as server:
        measured = measure_run(spec, server.record)
    assert (measured.error, [r.error for r in measured.requests]) == (None, [None, None])


def test_a_running_server_of_another_plan_is_refused_and_left_alone(
    make_spec: MakeSpec, serve: Serve, tmp_path: Path
) -> None:
    url = serve("--tp-size", "2")
    generated = fake_server.Handler.generated
    (outcome,) = run_sweep([make_spec(attach=url, campaign="c")], results=tmp_path)
    assert outcome.status == "failed"
    assert "the server is not the one planned for tp1-auto: tp_size is 2, planned 1" in (outcome.error or "")
    assert load_record(tmp_path / "c" / "tp1-auto").error == outcome.error
    assert fake_server.Handler.generated == generated
    assert get_json(f"{url}/server_info")["tp_size"] == 2
    assert json.loads((tmp_path / "c" / "tp1-auto" / "record.json").read_text())["server"] is None
