"""The server's life against a fake that dies, hangs, lies or leaves children: nothing stale is measured or left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchlib import engines
from benchlib.binding import Binding
from benchlib.errors import PlacementError, ServerError, UnavailableError
from benchlib.host import GpuState
from benchlib.record import ServerRecord
from benchlib.server import SERVER_FILE, Server, Starting, _scrub, attach_server, open_server, start_server
from benchlib.spec import RunSpec
from tests import fake_server

DATA = Path(__file__).parent / "data"
MakeSpec = Callable[..., RunSpec]
Serve = Callable[..., str]
Started = Callable[[], list[list[str]]]
Pretend = Callable[..., tuple[GpuState, ...]]
GIB = 2**30


def session(leader: int | None) -> list[int]:
    """Living processes of a server's session."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            inside = os.getsid(process.pid) == leader
        except (ProcessLookupError, PermissionError):
            continue
        if inside and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def gone(pid: int | None, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not session(pid):
            return True
        time.sleep(0.05)
    return False


def test_start_and_stop(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(method="ddtree", tree_budget=16, server_env={"FAKE_VARIABLE": "7"})
    with start_server(spec, folder=tmp_path / "run") as server:
        record = server.record
        assert session(record.pid)
        assert record.pid not in (os.getpid(), os.getsid(0))
        assert (record.version, record.verify_tokens, record.attached) == ("fake 1", 17, False)
        assert record.effective_max_running_requests == 8
        assert record.env == {"FAKE_VARIABLE": "7"}
        assert record.startup_s is not None
        assert 0 < record.startup_s < 20
        assert "--speculative-ddtree-budget" in record.argv
        assert server.exit_code() is None
        # As a notebook finds it, which is given the address alone.
        assert open_server(spec, folder=tmp_path / "run", url=record.url).record == record
    assert gone(record.pid, 0.5)
    assert "variable 7" in (tmp_path / "run" / record.log).read_text()
    server.stop()  # again: no effect


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "die",
            ["exited with code 7 after", "RuntimeError: the weights are nowhere", "server.log"],
        ),
        ("die-at-canary", ["exited with code 3 at its first request"]),
    ],
)
def test_death_is_noticed_at_once_and_explained(
    make_spec: MakeSpec, tmp_path: Path, mode: str, expected: list[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError) as caught:
        start_server(make_spec(mode), folder=tmp_path)
    assert time.monotonic() - began < 10  # of 20 allowed
    for text in expected:
        assert text in str(caught.value)


def test_a_server_that_is_never_ready_times_out_and_is_ended(
    make_spec: MakeSpec, tmp_path: Path, started: Started
) -> None:
    with pytest.raises(ServerError, match=r"not ready after 0.5 s \(startup_timeout_s\)"):
        start_server(make_spec("never-ready", startup_timeout_s=0.5), folder=tmp_path)
    assert not started()


def test_old_servers_without_ready_are_asked_for_their_model_and_get_another_port(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    with (
        start_server(make_spec("old"), folder=tmp_path / "a") as a,
        Starting(make_spec("hang"), folder=tmp_path / "b") as b,
    ):
        assert a.exit_code() is None
        assert a.record.url != b.record.url


def test_whoever_has_the_address_waits_until_the_server_is_ready(make_spec: MakeSpec, tmp_path: Path) -> None:
    """A sweep's notebook gets the address at once, and opens the server while that still starts."""
    spec = make_spec()
    with Starting(spec, folder=tmp_path) as server, ThreadPoolExecutor(1) as pool:
        early = ServerRecord.model_validate_json((tmp_path / SERVER_FILE).read_bytes())
        assert (early.url, early.pid, early.startup_s) == (server.record.url, server.record.pid, None)
        opened = pool.submit(open_server, spec, folder=tmp_path, url=server.record.url)
        time.sleep(0.2)
        assert not opened.done()
        while not server.poll():
            time.sleep(0.02)
        assert opened.result(5).record == server.record
        assert server.record.startup_s is not None
        assert type(opened.result()) is Server  # which ends nothing
    assert not (tmp_path / SERVER_FILE).exists()


def test_a_server_that_is_not_ready_in_time_is_not_waited_for(make_spec: MakeSpec, tmp_path: Path) -> None:
    record = ServerRecord(url="http://127.0.0.1:9")
    (tmp_path / SERVER_FILE).write_text(record.model_dump_json())
    with pytest.raises(ServerError, match=r"was not ready after 0.1 s"):
        open_server(make_spec(startup_timeout_s=0.1), folder=tmp_path, url=record.url)


def test_a_foreign_listener_is_never_taken_for_ours(make_spec: MakeSpec, tmp_path: Path) -> None:
    """A stale server answers on the port while ours is still loading, or has died."""
    stale = fake_server.serve_in_thread()
    try:
        with pytest.raises(ServerError, match=f"answered by process {os.getpid()}"):
            start_server(make_spec("hang"), folder=tmp_path, port=stale.server_port)
    finally:
        stale.shutdown()
        stale.server_close()


def test_a_port_in_use_kills_ours_and_is_reported(make_spec: MakeSpec, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(ServerError, match="exited with code 1"):
        start_server(make_spec(), folder=tmp_path, port=taken.getsockname()[1])
    assert "Address already in use" in (tmp_path / "server.log").read_text()


def test_children_that_ignore_sigterm_or_leave_the_group_are_ended(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchlib.server.GRACE_S", 0.5)
    with start_server(make_spec("children"), folder=tmp_path) as server:
        assert server.record.pid is not None
        children = psutil.Process(server.record.pid).children(recursive=True)
        assert len(children) == 2
    # One shares the group, which gets SIGKILL after its grace; the other has a session of its own.
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


OPENER = """
import sys, time
from pathlib import Path
from benchlib.server import start_server
from benchlib.spec import RunSpec
spec = RunSpec.model_validate_json(sys.argv[1])
server = start_server(spec, folder=Path(sys.argv[2]))
print(server.record.pid, flush=True)
time.sleep(60)
"""


def test_the_server_ends_when_its_opener_is_killed(make_spec: MakeSpec, tmp_path: Path) -> None:
    arguments = [make_spec().model_dump_json(), str(tmp_path)]
    opener = subprocess.Popen([sys.executable, "-c", OPENER, *arguments], stdout=subprocess.PIPE, text=True)
    with opener:
        assert opener.stdout is not None
        pid = int(opener.stdout.readline())
        assert session(pid)
        opener.kill()
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_the_server_ends_when_its_supervisor_is_killed(make_spec: MakeSpec, tmp_path: Path) -> None:
    server = start_server(make_spec(), folder=tmp_path)
    assert server.record.pid is not None
    supervisor = psutil.Process(server.record.pid).parent()
    assert supervisor is not None
    assert supervisor.pid != os.getpid()
    supervisor.kill()
    assert gone(server.record.pid)
    server.stop()


def test_an_absent_interpreter_is_a_clear_error(tmp_path: Path) -> None:
    spec = RunSpec(server_python=str(tmp_path / "no-python"))
    with pytest.raises(ServerError, match=r"cannot start .*no-python.*No such file"):
        start_server(spec, folder=tmp_path)


def test_unavailable_starts_nothing(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(engine="sglang", model_path="m")
    with pytest.raises(UnavailableError):
        start_server(spec, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_attach_checks_and_never_stops(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    url = serve("--tp-size", "2")
    spec = make_spec(tp_size=2, attach=url)
    with open_server(spec, folder=tmp_path) as server:
        assert (server.record.attached, server.record.pid, server.record.argv) == (True, None, ())
        assert server.poll()
    assert attach_server(spec, url=url).record.info["tp_size"] == 2


@pytest.mark.parametrize(
    ("flags", "parameters", "expected"),
    [
        (["--tp-size", "2"], {}, "tp_size is 2, planned 1"),
        (
            ["--speculative-algorithm", "DFLASH"],
            {},
            "speculative_algorithm is 'DFLASH', planned None",
        ),
        (
            ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "15"],
            {"method": "ddtree", "tree_budget": 16},
            "speculative_ddtree_budget is 15, planned 16",
        ),
        (
            ["--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "8"],
            {"method": "linear"},
            "speculative_num_draft_tokens is 8, planned 16",
        ),
    ],
)
def test_attaching_to_another_server_is_refused(
    make_spec: MakeSpec,
    serve: Serve,
    flags: list[str],
    parameters: dict[str, object],
    expected: str,
) -> None:
    with pytest.raises(ServerError, match="not the one planned") as caught:
        attach_server(make_spec(**parameters), url=serve(*flags))
    assert expected in str(caught.value)


def test_attaching_to_nothing_is_an_error(make_spec: MakeSpec) -> None:
    with pytest.raises(ServerError, match="cannot attach"):
        attach_server(make_spec(), url="http://127.0.0.1:9")


def test_a_record_beside_another_address_is_not_used(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    stale = ServerRecord(url="http://127.0.0.1:9")
    (tmp_path / SERVER_FILE).write_text(stale.model_dump_json())
    url = serve()
    server = open_server(make_spec(), folder=tmp_path, url=url)
    assert (server.record.url, server.record.attached) == (url, True)


def test_secrets_and_folders_stay_out_of_records() -> None:
    info = json.loads((DATA / "sglang_dflash_info.json").read_text())
    info["model_path"] = f"{Path.cwd()}/models/x"
    shown = _scrub(info)
    assert set(info) - set(shown) == {"api_key", "admin_api_key", "ssl_keyfile_password"}
    assert shown["max_total_num_tokens"] == 1083962
    assert shown["model_path"] == "./models/x"
    assert shown["internal_states"][0]["memory_usage"]["weight"] == 0.258
    assert _scrub(sys.executable) == "python"


@pytest.mark.parametrize("name", ["api_key", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ssl_keyfile_password", "token"])
def test_secret_names(name: str) -> None:
    assert _scrub({name: "x", "max_total_tokens": 1, "tokenizer_path": "t", "time_to_first_token": 2, "A": "1"}) == {
        "max_total_tokens": 1, "tokenizer_path": "t", "time_to_first_token": 2, "A": "1",
    }  # fmt: skip


# ---- after it was ready


def poll_until(server: Server, *, ready: bool) -> None:
    while server.poll() != ready:
        time.sleep(0.02)


def test_a_death_after_it_was_ready_is_raised_when_it_could_be_recorded(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchlib.server.NOTICE_S", 0.4)
    with start_server(make_spec(), folder=tmp_path) as server:
        assert server.death() is None
        assert server.record.pid is not None
        os.kill(server.record.pid, signal.SIGKILL)
        assert server.exit_code(wait_s=5) == 137
        began = time.monotonic()
        assert server.poll()  # whoever measures it may still write its record
        with pytest.raises(ServerError) as told:
            poll_until(server, ready=False)
        assert time.monotonic() - began >= 0.4
        death = server.death()
        assert str(told.value) == death
        assert server.record.death is None
    assert server.record.death == server.death() == death
    assert death is not None
    assert death.startswith("the server exited with code 137 while it was measured. Cause: out of memory:")
    assert "SIGKILL, as the kernel sends it when host memory runs out" in death
    assert "fake server, mode good" in death  # the log's end


def test_an_end_that_was_asked_for_is_no_death(make_spec: MakeSpec, tmp_path: Path) -> None:
    with start_server(make_spec(), folder=tmp_path) as server:
        pass
    assert server.exit_code() is not None
    assert (server.death(), server.record.death) == (None, None)


def test_a_server_that_is_never_ready_did_not_die_while_measured(make_spec: MakeSpec, tmp_path: Path) -> None:
    with Starting(make_spec("die"), folder=tmp_path) as server:
        with pytest.raises(ServerError, match="before it was ready"):
            poll_until(server, ready=True)
        assert server.death() is None
    assert server.record.death is None


# ---- on a machine with GPUs


@pytest.fixture
def on_gpus(make_spec: MakeSpec, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSpec]:
    """Runs of the fake server as SGLang's, on the pretended machine; `uses=(0, 1)`: the GPUs whose memory it takes."""
    monkeypatch.setattr(engines, "_known_flags", lambda *_: engines.SGLANG_FLAGS)

    def make(
        mode: str = "good", *, uses: tuple[int, ...] = (0, 1), keeps: bool = False, **parameters: object
    ) -> RunSpec:
        free = pretend()
        used = tuple(dataclasses.replace(s, memory_used_bytes=9 * GIB) if s.index in uses else s for s in free)
        monkeypatch.setattr("benchlib.server.read_gpu_states", lambda: used)
        looks = iter([free])  # the first look is before the start, the others after the end
        monkeypatch.setattr("benchlib.machine.read_gpu_states", lambda: next(looks, used if keeps else free))
        return make_spec(mode, engine="sglang", model_path="org/name", tp_size=2, **parameters)

    yield make
    engines.engine_version.cache_clear()


def test_a_placed_server_is_bound_verified_and_recorded(
    on_gpus: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = on_gpus(nccl_profile="production")
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr("benchlib.machine.plan_binding", lambda _: Binding((), (cpu,), f"CPU affinity to {cpu} alone"))
    with start_server(spec, folder=tmp_path) as server:
        record = server.record
        assert record.pid is not None
        process = psutil.Process(record.pid)
        seen = process.environ()
        assert process.cpu_affinity() == [cpu]
        assert open_server(spec, folder=tmp_path, url=record.url).record == record
    assert record.placement is not None
    assert (record.placement.label, record.binding) == ("0-1", f"CPU affinity to {cpu} alone")
    assert (record.devices, record.custom_all_reduce_expected) == ("verified by memory in use", True)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["NCCL_MIN_NCHANNELS"]) == ("0,1", "8")
    assert {name: seen[name] for name in record.env} == record.env
    assert len(os.sched_getaffinity(0)) > 1 or os.cpu_count() == 1  # this process keeps its own


def test_a_prefix_binds_and_is_recorded(on_gpus: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = on_gpus()
    binding = Binding(("env", "BOUND=1"), None, "env BOUND=1")
    monkeypatch.setattr("benchlib.machine.plan_binding", lambda _: binding)
    with start_server(spec, folder=tmp_path) as server:
        assert server.record.argv[:2] == ("env", "BOUND=1")
        assert server.record.pid is not None
        assert psutil.Process(server.record.pid).environ()["BOUND"] == "1"


def test_a_server_on_other_gpus_is_ended(on_gpus: MakeSpec, tmp_path: Path, started: Started) -> None:
    with pytest.raises(ServerError, match=r"runs on GPUs \[4, 5\] \(by memory in use\), planned were \[0, 1\]"):
        start_server(on_gpus(uses=(4, 5)), folder=tmp_path)
    assert not started()


def test_memory_that_is_not_given_back_is_told_after_the_end(
    on_gpus: MakeSpec, tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchlib.machine.RELEASE_S", 0.0)
    monkeypatch.setattr("benchlib.machine.RELEASE_POLL_S", 0.01)
    server = start_server(on_gpus(keeps=True), folder=tmp_path)
    with pytest.raises(ServerError, match="its GPUs still hold memory: GPU 0: 9216 MiB in use by no visible process"):
        server.stop()
    assert not started()


def test_what_the_engine_lacks_is_told_before_what_the_machine_lacks(
    make_spec: MakeSpec, pretend: Pretend, tmp_path: Path
) -> None:
    pretend("no_gpu")
    with pytest.raises(UnavailableError, match="engine sglang is unavailable"):
        start_server(make_spec(engine="sglang", model_path="m"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_placed_starts_nothing(
    on_gpus: MakeSpec, pretend: Pretend, tmp_path: Path, started: Started
) -> None:
    spec = on_gpus()
    pretend(gpus={index: {"memory_used_bytes": GIB} for index in range(7)})
    with pytest.raises(PlacementError, match="tp_size=2 needs as many free GPUs"):
        start_server(spec, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not started()
