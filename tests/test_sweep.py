"""Sweeps over the fake server: records are the truth, failures stay, nothing is left running.

The real notebook in a real kernel runs where the kernel matters; elsewhere the same calls are made in this process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from benchlib.environment import collect_environment
from benchlib.errors import RecordError, ServerError, SpecError
from benchlib.measure import measure_run, save_measurement
from benchlib.progress import PROGRESS_FILE, Moment
from benchlib.record import load_record, load_requests, run_folder, save_run
from benchlib.server import Starting, open_server
from benchlib.spec import Assumed, RunSpec, Sweep
from benchlib.sweep import Outcome, plan_sweep, run_sweep, select_runs, signals_raise
from tests import synthetic

MakeSpec = Callable[..., RunSpec]
Started = Callable[[], list[list[str]]]
Write = Callable[..., Path]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run what 02_measure.ipynb runs in this process; what the dictionary holds is added to the identity it sees."""
    extra: dict[str, Any] = {}

    def execute(source: Path, output: Path, parameters: dict[str, Any], *, watch: Callable[[], bool]) -> None:
        spec = RunSpec.from_parameters({name: parameters[name] for name in RunSpec.parameter_names()})
        while not watch():
            time.sleep(0.02)
        folder = run_folder(parameters["results_dir"], spec)
        environment = collect_environment(spec)
        environment["identity"] |= extra
        server = open_server(spec, folder=folder, url=parameters["server_url"]).record
        measured = measure_run(spec, server, folder=folder)
        save_measurement(folder, spec, environment=environment, server=server, measurement=measured)

    monkeypatch.setattr("benchlib.sweep.execute_notebook", execute)
    return extra


def run_one(spec: RunSpec, results: Path, **options: Any) -> Outcome:
    (outcome,) = run_sweep([spec], results=results, **options)
    return outcome


def states(runs: list[RunSpec], results: Path) -> list[str]:
    return [planned.state for planned in plan_sweep(runs, results)]


@pytest.mark.clock_check
def test_a_sweep_end_to_end(make_spec: MakeSpec, tmp_path: Path, started: Started) -> None:
    """By the real notebook: a run whose server dies while the kernel starts, and a good one."""
    good = make_spec(campaign="c", prompts=["fib"], repeats=1)
    dead = make_spec("die", campaign="c", prompts=["fib"], method="linear")
    seen: list[Moment] = []
    first = run_sweep([dead, good], results=tmp_path, listener=seen.append)
    assert [o.status for o in first] == ["failed", "ok"]
    assert [(m.number, m.run, m.ended) for m in seen if m.ended] == [(1, "tp1-linear", "failed"), (2, "tp1-auto", "ok")]
    assert [m.phase for m in seen][:2] == ["checking the clock", "placing"]
    phases = list(dict.fromkeys(m.phase.partition(":")[0] for m in seen if m.run == "tp1-auto"))
    assert phases[0] == "placing"
    assert phases[-2:] == ["ending", "ok"]
    assert set(phases[1:-2]) <= {
        "starting server",
        "starting notebook",
        "warm-up",
        "round 1 of 1",
        "asking gaps",
        "writing record",
    }

    failed = load_record(tmp_path / "c" / "tp1-linear")
    assert (failed.status, failed.cells) == ("failed", ())
    assert failed.server is not None
    assert (failed.server.startup_s, "--mode" in failed.server.argv) == (None, True)
    assert failed.error is not None
    assert failed.error.startswith("the server exited with code 7")
    assert "RuntimeError: the weights are nowhere" in failed.error
    assert failed.error.count("exited with code 7") == 1

    folder = tmp_path / "c" / "tp1-auto"
    assert sorted(p.name for p in folder.iterdir()) == [
        "gaps.json", "notebook.ipynb", "record.json", "requests.jsonl", "server.log",
    ]  # fmt: skip
    record = load_record(folder)
    clock = record.environment["clock"]
    assert (clock["streams"], clock["n"] > 0) == (1, True)
    assert abs(clock["bias_rate_percent"]) < 20
    assert record.spec == good
    assert record.server is not None
    assert not record.server.attached
    assert record.server.startup_s
    assert len(load_requests(folder)) == 2
    executed = json.loads((folder / "notebook.ipynb").read_text())
    assert executed["metadata"]["papermill"]["parameters"]["server_url"] == record.server.url
    assert str(ROOT) not in json.dumps(executed["metadata"])
    assert not [c for c in executed["cells"] if "TCP without encryption" in json.dumps(c)]

    assert states([dead, good], tmp_path) == ["failed", "finished"]
    assert run_one(good, tmp_path).status == "skipped"
    assert not started()


@pytest.mark.usefixtures("no_kernel")
def test_what_changed_or_failed_is_made_again_and_the_old_record_kept(make_spec: MakeSpec, tmp_path: Path) -> None:
    quick = {"campaign": "c", "prompts": ["fib"], "repeats": 1}
    spec, dead = make_spec(**quick), make_spec("die", **quick)
    assert run_one(spec, tmp_path).status == "ok"
    record = load_record(tmp_path / "c" / "tp1-auto")
    changed = make_spec(**quick, server_env={"FAKE_VARIABLE": "1"})
    assert states([changed, spec], tmp_path) == ["stale", "finished"]
    assert run_one(changed, tmp_path).status == "ok"
    assert load_record(tmp_path / "c" / "superseded" / "tp1-auto-1") == record
    assert load_record(tmp_path / "c" / "tp1-auto").identity != record.identity
    assert run_one(dead, tmp_path).status == "failed"
    assert states([dead, spec], tmp_path) == ["failed", "failed"]
    assert run_one(spec, tmp_path).status == "ok"
    assert load_record(tmp_path / "c" / "superseded" / "tp1-auto-3").status == "failed"


@pytest.mark.usefixtures("no_kernel")
def test_the_time_left_comes_from_records_of_the_same_workload_else_is_assumed(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(campaign="c", prompts=["fib"], repeats=1)
    longer = make_spec(campaign="c", prompts=["fib"], repeats=2)
    seen: list[Moment] = []
    # A warm-up and a round of 16 tokens each.
    run_one(spec, tmp_path, listener=seen.append, assumed=Assumed(start_s=1000, decode_tok_s=0.5))
    assert seen[0].left_s == pytest.approx(1064, abs=5)
    assert {m.assumed for m in seen if not m.ended} == {True}
    seen.clear()
    folder = tmp_path / "c" / "tp1-auto"
    save_run(folder, load_record(folder).model_copy(update={"duration_s": 500.0}), load_requests(folder))
    run_one(spec, tmp_path, listener=seen.append, force=True)
    assert seen[0].left_s == pytest.approx(500, abs=5)  # it is finished, and made again
    assert not seen[0].assumed
    seen.clear()
    run_one(longer, tmp_path, listener=seen.append)
    assert seen[0].left_s is None


@pytest.mark.usefixtures("no_kernel")
def test_partial_and_damaged_runs_are_made_again(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(campaign="c", prompts=["fib"], repeats=1)
    folder = tmp_path / "c" / "tp1-auto"
    folder.mkdir(parents=True)
    (folder / "server.log").write_text("interrupted\n")
    assert states([spec], tmp_path) == ["partial"]
    assert run_one(spec, tmp_path).status == "ok"
    data = (folder / "requests.jsonl").read_bytes()
    (folder / "requests.jsonl").write_bytes(data[:-40])
    assert states([spec], tmp_path) == ["stale"]
    assert run_one(spec, tmp_path).status == "ok"
    assert (tmp_path / "c" / "superseded" / "tp1-auto-1" / "requests.jsonl").read_bytes() == data[:-40]
    assert run_one(spec, tmp_path, force=True).status == "ok"
    assert (tmp_path / "c" / "superseded" / "tp1-auto-2").is_dir()


@pytest.mark.usefixtures("no_kernel")
def test_a_server_that_dies_while_measured_fails_the_run_with_its_requests(make_spec: MakeSpec, tmp_path: Path) -> None:
    outcome = run_one(make_spec("die-later", campaign="c", repeats=3), tmp_path)
    assert outcome.status == "failed"
    record = load_record(tmp_path / "c" / "tp1-auto")
    assert (record.status, record.error) == ("failed", outcome.error)
    assert (record.error or "").startswith("the server exited with code 9 while it was measured.")
    assert "CUDA error: out of memory" in (record.error or "")  # its log's last line
    requests = load_requests(tmp_path / "c" / "tp1-auto")
    assert [r.error is None for r in requests][:3] == [True, True, True]
    assert "connect" in (requests[-1].error or "")


@pytest.mark.usefixtures("no_kernel")
def test_an_end_that_went_badly_spares_the_measurement(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Starting.stop

    def stop_badly(server: Starting) -> None:
        stop(server)
        raise ServerError("GPU 0 still holds 48 GiB")

    monkeypatch.setattr(Starting, "stop", stop_badly)
    assert run_one(make_spec(campaign="c", prompts=["fib"], repeats=1), tmp_path).status == "ok"
    record = load_record(tmp_path / "c" / "tp1-auto")
    assert record.warnings[-1].startswith("ended-badly: after the record was written: GPU 0 still holds 48 GiB.")
    assert len(load_requests(tmp_path / "c" / "tp1-auto")) == 2


@pytest.mark.usefixtures("no_kernel")
def test_a_running_server_is_measured_and_left_alone(
    make_spec: MakeSpec, tmp_path: Path, serve: Callable[..., str]
) -> None:
    spec = make_spec(campaign="c", prompts=["fib"], repeats=1, attach=serve())
    for _ in range(2):
        assert run_one(spec, tmp_path, force=True).status == "ok"
    record = load_record(tmp_path / "c" / "tp1-auto")
    assert record.server is not None
    assert (record.server.url, record.server.attached, record.server.argv) == (spec.attach, True, ())


def test_what_changes_during_a_run_fails_it_and_keeps_its_requests(
    make_spec: MakeSpec, tmp_path: Path, no_kernel: dict[str, Any]
) -> None:
    """The sweep plans with one engine, the kernel finds another: as when code is edited meanwhile."""
    no_kernel["engine_digest"] = "another"
    outcome = run_one(make_spec(campaign="c", prompts=["fib"], repeats=1), tmp_path)
    assert outcome.status == "failed"
    assert "changed between the sweep's plan and its notebook" in (outcome.error or "")
    assert len(load_requests(tmp_path / "c" / "tp1-auto")) == 2
    assert load_record(tmp_path / "c" / "tp1-auto").cells


def test_a_killed_kernel_is_a_failed_run(
    make_spec: MakeSpec, tmp_path: Path, started: Started, write_notebook: Write
) -> None:
    """papermill would call every cell of it completed."""
    names = [*make_spec().to_parameters(), "server_url", "results_dir"]
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    source = write_notebook(kill, parameters="\n".join(f"{name}: int = 0  # x" for name in names))
    outcome = run_one(make_spec(campaign="c"), tmp_path, notebook=source)
    assert outcome.status == "failed"
    assert "kernel failed: DeadKernelError" in (outcome.error or "")
    assert load_record(tmp_path / "c" / "tp1-auto").server is not None
    assert not started()


def test_a_notebook_without_a_record_is_a_failed_run(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(source: Path, output: Path, *_: Any, **__: Any) -> None:
        (output.parent / PROGRESS_FILE).write_text("{}")  # as a kernel that was killed leaves it

    monkeypatch.setattr("benchlib.sweep.execute_notebook", execute)
    assert "did not finish" in (run_one(make_spec(campaign="c"), tmp_path).error or "")
    assert not (tmp_path / "c" / "tp1-auto" / PROGRESS_FILE).exists()


def test_unknown_parameters_are_refused_before_anything_starts(
    make_spec: MakeSpec, tmp_path: Path, write_notebook: Write
) -> None:
    with pytest.raises(SpecError, match=r"has no parameter .*'tree_budget'"):
        run_sweep([make_spec()], results=tmp_path / "r", notebook=write_notebook())
    with pytest.raises(SpecError, match="no notebook"):
        run_sweep([make_spec()], results=tmp_path / "r", notebook=tmp_path / "none.ipynb")
    with pytest.raises(SpecError, match="nothing to run"):
        run_sweep([], results=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_two_sweeps_do_not_share_a_campaign(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with FileLock(tmp_path / "c" / ".lock"), pytest.raises(RecordError, match="another sweep"):
        run_sweep([make_spec(campaign="c")], results=tmp_path)


def test_selection() -> None:
    sweep = Sweep(name="s", tree_budgets=(16,), starts=2)
    assert {r.run_name for r in select_runs(sweep, ["tp1-b16"])} == {"tp1-b16", "tp1-b16.2"}
    assert [r.run_name for r in select_runs(sweep, ["tp1-b16.2"])] == ["tp1-b16.2"]
    assert len(select_runs(sweep)) == 6
    with pytest.raises(SpecError, match=r"no run \['tp9-auto'\]"):
        select_runs(sweep, ["tp9-auto"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_like_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match=number.name), signals_raise():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raise():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def write_sweep(folder: Path, spec: RunSpec, *flags: str) -> Path:
    """A sweep of one run of the fake server."""
    file = folder / "s.toml"
    file.write_text(
        f'name = "c"\nmethods = ["auto"]\n[workload]\nprompt_set = "random-ids"\n'
        f'[engines.reference]\nserver_python = "{spec.server_python}"\n'
        f"server_args = {json.dumps([*spec.server_args, *flags])}\n"
    )
    return file


def sweep_command(file: Path, results: Path, *options: str) -> list[str]:
    code = "from benchlib.cli import main; main()"
    return [sys.executable, "-c", code, "sweep", str(file), "--results", str(results), *options]


def test_a_sweep_under_nohup_outlives_its_terminal(make_spec: MakeSpec, tmp_path: Path, started: Started) -> None:
    command = ["nohup", *sweep_command(write_sweep(tmp_path, make_spec()), tmp_path, "--set", "workload.repeats=1")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=pipe, stdout=pipe, text=True) as sweep:
        deadline = time.monotonic() + 60
        while len(started()) < 4 and time.monotonic() < deadline:  # sweep, supervisor, server, kernel
            time.sleep(0.1)
        hung_up = [psutil.Process(sweep.pid), *psutil.Process(sweep.pid).children(recursive=True)]
        for process in hung_up:
            process.send_signal(signal.SIGHUP)
        output, errors = sweep.communicate(timeout=60)
    assert len(hung_up) >= 4
    # A kernel that is hung up as well may complain as it ends; what was measured is whole by then.
    assert sweep.returncode == 0, output + errors
    assert "1 of 1 runs ok" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_sweep_leaves_nothing_running(
    make_spec: MakeSpec, tmp_path: Path, number: signal.Signals, started: Started
) -> None:
    command = sweep_command(write_sweep(tmp_path, make_spec(), "--pause", "0.2"), tmp_path)
    sweep = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with sweep:
        deadline = time.monotonic() + 60
        while len(started()) < 4 and time.monotonic() < deadline:  # sweep, supervisor, server, kernel
            time.sleep(0.1)
        time.sleep(0.5)
        before = started()
        os.kill(sweep.pid, number)
        status = sweep.wait(30)
        assert sweep.stdout
        assert sweep.stderr
        output, errors = sweep.stdout.read(), sweep.stderr.read()
    assert len(before) >= 4
    deadline = time.monotonic() + 20
    while started() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not started()
    assert not (tmp_path / "c" / "tp1-auto" / "record.json").exists()
    if number != signal.SIGKILL:
        assert status == 130
        assert errors == "interrupted: the server is ended, finished runs are kept\n"
        assert re.match(r"\d\d:\d\d:\d\d \[1/1\] tp1-auto: ", output)
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", output)


def test_a_typo_puts_no_finished_run_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is superseded for a run that cannot start: neither for a prompt that is none nor for a missing flag."""
    folder = save_run_of(tmp_path)
    before = (folder / "record.json").read_bytes()
    typo = RunSpec.from_parameters({"campaign": "c", "prompts": ["qsrt"]})
    with pytest.raises(SpecError, match=r"has no \['qsrt'\]"):
        run_sweep([typo], results=tmp_path, listener=lambda _: None)
    monkeypatch.setattr("benchlib.sweep._check_clock", lambda *_: None)
    lacking = RunSpec.from_parameters({"campaign": "c", "engine": "sglang", "prompt_set": "random-ids"})
    (outcome,) = run_sweep([lacking], results=tmp_path, listener=lambda _: None)
    assert outcome.status == "failed"
    assert "its finished record stays where it is: engine sglang" in str(outcome.error)
    assert (folder / "record.json").read_bytes() == before
    assert not (tmp_path / "c" / "superseded").exists()


def save_run_of(results: Path) -> Path:
    """A finished run of `tp1-auto` of campaign c, of another spec than those tried."""
    record, requests = synthetic.build_run(RunSpec.from_parameters({"campaign": "c", "prompts": ["fib"]}))
    folder = results / "c" / "tp1-auto"
    save_run(folder, record, requests)
    return folder
