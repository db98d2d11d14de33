"""Sweeps over the fake server by the real notebook: records are the truth, failures stay, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from filelock import FileLock

from benchlib.errors import RecordError, SpecError
from benchlib.notebook import execute_notebook
from benchlib.record import load_record, load_requests
from benchlib.spec import RunSpec, Sweep
from benchlib.sweep import Outcome, plan_sweep, run_sweep, select_runs

MakeSpec = Callable[..., RunSpec]
Started = Callable[[], list[int]]
ROOT = Path(__file__).parents[1]


def notebook(folder: Path, *cells: str, parameters: str = "x: int = 1  # x") -> Path:
    path = folder / "source.ipynb"
    new = nbformat.v4.new_code_cell
    body = nbformat.v4.new_notebook(
        cells=[new(parameters, metadata={"tags": ["parameters"]}), *(new(cell) for cell in cells)],
        metadata={"kernelspec": {"name": "elsewhere", "language": "python", "display_name": "x"}},
    )
    nbformat.write(body, path)
    return path


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Living processes that this test started, directly or not: they inherit a mark."""
    monkeypatch.setenv("FAKE_MARK", str(tmp_path))

    def find() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("FAKE_MARK") == str(tmp_path):
                    found.append(process.pid)
        return [pid for pid in found if pid != os.getpid()]

    return find


def outcomes(runs: list[RunSpec], results: Path, **options: bool) -> list[str]:
    return [outcome.status for outcome in run_sweep(runs, results=results, **options)]


def test_a_sweep_end_to_end(make_spec: MakeSpec, tmp_path: Path, started: Started) -> None:
    """A good run, one whose server dies, one that the server refuses; then again; then with one thing changed."""
    results = tmp_path / "results"
    good = make_spec(campaign="c", prompts=["fib"], repeats=1)
    dead = make_spec("die", campaign="c", prompts=["fib"], method="linear")
    runs = [dead, good]
    seen: list[tuple[int, str, str | None]] = []

    def listen(done: int, total: int, spec: RunSpec, outcome: Outcome | None) -> None:
        seen.append((done, spec.run_name, outcome.status if outcome else None))

    first = run_sweep(runs, results=results, listener=listen)
    assert [o.status for o in first] == ["failed", "ok"]
    assert seen == [
        (0, "tp1-linear", None), (1, "tp1-linear", "failed"), (1, "tp1-auto", None), (2, "tp1-auto", "ok"),
    ]  # fmt: skip

    failed = load_record(results / "c" / "tp1-linear")
    assert (failed.status, failed.server, failed.cells) == ("failed", None, ())
    assert failed.error is not None
    assert "the weights are nowhere" in failed.error

    folder = results / "c" / "tp1-auto"
    assert sorted(p.name for p in folder.iterdir()) == [
        "notebook.ipynb", "record.json", "requests.jsonl", "server.log",
    ]  # fmt: skip
    record = load_record(folder)
    assert record.spec == good
    assert record.server is not None
    assert not record.server.attached
    assert record.server.startup_s
    assert len(load_requests(folder)) == 2
    executed = json.loads((folder / "notebook.ipynb").read_text())
    assert executed["metadata"]["papermill"]["parameters"]["server_url"] == record.server.url
    assert str(ROOT) not in json.dumps(executed["metadata"])
    assert not [c for c in executed["cells"] if "TCP without encryption" in json.dumps(c)]

    assert [state for _, state in plan_sweep(runs, results)] == ["failed", "finished"]
    assert outcomes(runs, results) == ["failed", "skipped"]
    assert load_record(results / "c" / "superseded" / "tp1-linear-1").status == "failed"

    changed = make_spec(campaign="c", prompts=["fib"], repeats=1, server_env={"FAKE_VARIABLE": "1"})
    assert [state for _, state in plan_sweep([changed], results)] == ["stale"]
    assert outcomes([changed], results) == ["ok"]
    assert load_record(results / "c" / "superseded" / "tp1-auto-1") == record
    assert load_record(folder).identity != record.identity
    assert not started()


def test_partial_and_damaged_runs_are_made_again(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(campaign="c", prompts=["fib"], repeats=1)
    folder = tmp_path / "c" / "tp1-auto"
    folder.mkdir(parents=True)
    (folder / "server.log").write_text("interrupted\n")
    assert [state for _, state in plan_sweep([spec], tmp_path)] == ["partial"]
    assert outcomes([spec], tmp_path) == ["ok"]
    data = (folder / "requests.jsonl").read_bytes()
    (folder / "requests.jsonl").write_bytes(data[:-40])
    assert [state for _, state in plan_sweep([spec], tmp_path)] == ["stale"]
    assert outcomes([spec], tmp_path) == ["ok"]
    assert (tmp_path / "c" / "superseded" / "tp1-auto-1" / "requests.jsonl").read_bytes() == data[:-40]
    assert outcomes([spec], tmp_path, force=True) == ["ok"]
    assert (tmp_path / "c" / "superseded" / "tp1-auto-2").is_dir()


def test_a_server_that_dies_while_measured_fails_the_run_with_its_requests(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec("die-later", campaign="c", repeats=3)
    (outcome,) = run_sweep([spec], results=tmp_path)
    assert outcome.status == "failed"
    assert outcome.error is not None
    record = load_record(tmp_path / "c" / "tp1-auto")
    assert record.status == "failed"
    assert record.server is not None
    requests = load_requests(tmp_path / "c" / "tp1-auto")
    assert [r.error is None for r in requests][:3] == [True, True, True]
    assert "connect" in (requests[-1].error or "")


def test_a_killed_kernel_is_a_failed_run(make_spec: MakeSpec, tmp_path: Path, started: Started) -> None:
    """papermill would call every cell of it completed."""
    names = [*make_spec().to_parameters(), "server_url", "results_dir"]
    source = notebook(
        tmp_path,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        parameters="\n".join(f"{name}: int = 0  # x" for name in names),
    )
    spec = make_spec(campaign="c")
    (outcome,) = run_sweep([spec], results=tmp_path, notebook=source)
    assert outcome.status == "failed"
    assert "kernel failed: DeadKernelError" in (outcome.error or "")
    assert load_record(tmp_path / "c" / "tp1-auto").server is not None
    assert not started()


def test_what_changes_during_a_run_fails_it_and_keeps_its_requests(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep plans with one engine, the kernel finds another: as when code is edited meanwhile."""
    monkeypatch.setattr("benchlib.environment._engine_digest", lambda: "another")
    spec = make_spec(campaign="c", prompts=["fib"], repeats=1)
    (outcome,) = run_sweep([spec], results=tmp_path)
    assert outcome.status == "failed"
    assert "changed between the sweep's plan and its notebook" in (outcome.error or "")
    assert len(load_requests(tmp_path / "c" / "tp1-auto")) == 2
    assert load_record(tmp_path / "c" / "tp1-auto").cells


def test_a_notebook_without_a_record_is_a_failed_run(make_spec: MakeSpec, tmp_path: Path) -> None:
    names = [*make_spec().to_parameters(), "server_url", "results_dir"]
    table = "\n".join(f"{name}: int = 0  # x" for name in names)
    spec = make_spec(campaign="c")
    (outcome,) = run_sweep([spec], results=tmp_path, notebook=notebook(tmp_path, parameters=table))
    assert "did not finish" in (outcome.error or "")


def test_unknown_parameters_are_refused_before_anything_starts(make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no parameter .*'tree_budget'"):
        run_sweep([make_spec()], results=tmp_path / "r", notebook=notebook(tmp_path))
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


def test_a_notebook_runs_in_this_interpreter(tmp_path: Path) -> None:
    source = notebook(tmp_path, "import sys; print(sys.executable, x)")
    assert execute_notebook(source, tmp_path / "out.ipynb", {"x": 5}) is None
    output = json.loads((tmp_path / "out.ipynb").read_text())["cells"][-1]["outputs"][0]
    assert "".join(output["text"]) == f"{sys.executable} 5\n"
    assert json.loads(source.read_text())["cells"][1]["outputs"] == []


def test_a_failing_notebook_says_why_and_stays(tmp_path: Path) -> None:
    source = notebook(tmp_path, "1 / 0", "never = 1")
    error = execute_notebook(source, tmp_path / "out.ipynb", {})
    assert error == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in (tmp_path / "out.ipynb").read_text()


SWEEPER = """
import sys
from pathlib import Path
from benchlib.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_nothing_running(
    make_spec: MakeSpec, tmp_path: Path, number: signal.Signals, started: Started
) -> None:
    spec = make_spec()
    arguments = json.dumps([*spec.server_args, "--pause", "0.2"])
    file = tmp_path / "s.toml"
    file.write_text(
        f'name = "c"\nmethods = ["auto"]\n[workload]\nprompt_set = "random-ids"\n'
        f'[engines.reference]\nserver_python = "{spec.server_python}"\nserver_args = {arguments}\n'
    )
    command = [sys.executable, "-c", SWEEPER, "sweep", str(file), "--results", str(tmp_path)]
    sweep = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with sweep:
        deadline = time.monotonic() + 30
        while len(started()) < 4 and time.monotonic() < deadline:  # sweep, supervisor, server, kernel
            time.sleep(0.1)
        time.sleep(0.5)
        before = started()
        os.kill(sweep.pid, number)
        code = sweep.wait(20)
        errors = sweep.stderr.read() if sweep.stderr else ""
    assert len(before) >= 4
    deadline = time.monotonic() + 10
    while started() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not started()
    assert not (tmp_path / "c" / "tp1-auto" / "record.json").exists()
    if number != signal.SIGKILL:
        assert code == 130
        assert "interrupted" in errors
        assert "Traceback" not in errors
