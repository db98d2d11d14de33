"""The command: what it prints, its exit codes, and that every error is one message without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchlib import cli, engines
from benchlib.client import get_json
from benchlib.environment import collect_environment
from benchlib.record import RunRecord, ServerRecord, run_identity, save_run
from benchlib.spec import RunSpec
from benchlib.sweep import Outcome

ROOT = Path(__file__).parents[1]
MakeSpec = Callable[..., RunSpec]
SWEEP = """
name = "c"
tree_budgets = [16]
[workload]
prompts = ["fib"]
prompt_set = "random-ids"
repeats = 1
max_new_tokens = [8]
"""


@pytest.fixture
def sweep_file(tmp_path: Path, fake_python: str) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(f'{SWEEP}[engines.reference]\nserver_python = "{fake_python}"\n')
    return path


def test_plan_as_json(run: Any, sweep_file: Path, tmp_path: Path) -> None:
    code, out, _ = run("plan", sweep_file, "--json", "--results", tmp_path)
    rows = json.loads(out)
    assert code == 0
    assert {row["run"] for row in rows} == {"tp1-auto", "tp1-linear", "tp1-b16"}
    assert {row["state"] for row in rows} == {"new"}
    assert len({row["hash"] for row in rows}) == 3
    assert not (tmp_path / "c").exists()


def test_plan_as_a_table(run: Any, sweep_file: Path, tmp_path: Path) -> None:
    code, out, _ = run("plan", sweep_file, "--only", "tp1-b16", "--results", tmp_path)
    assert code == 0
    assert "tp1-b16" in out
    assert out.startswith("1 runs, 1 to do\n")


def test_plan_estimates_from_earlier_records(run: Any, sweep_file: Path, tmp_path: Path) -> None:
    """One run measured, one found stale, one new: 0 s, its own time and the mean of both."""
    known = {spec.run_name: spec for spec in cli._load(sweep_file, None).runs()}
    for name, seconds, identity in (("tp1-auto", 10.0, None), ("tp1-linear", 20.0, "another")):
        spec = known[name]
        record = RunRecord(
            status="ok", spec=spec, identity=identity or run_identity(spec, collect_environment(spec)),
            started_at="2030-01-01T00:00:00+00:00", duration_s=seconds, environment={},
            server=ServerRecord(url="x", startup_s=2.0),
        )  # fmt: skip
        save_run(tmp_path / "c" / name, record, [])
    _, out, _ = run("plan", sweep_file, "--json", "--results", tmp_path)
    assert {row["run"]: (row["state"], row["estimate_s"]) for row in json.loads(out)} == {
        "tp1-auto": ("finished", 0.0), "tp1-linear": ("stale", 22.0), "tp1-b16": ("new", 17.0),
    }  # fmt: skip
    _, out, _ = run("plan", sweep_file, "--results", tmp_path)
    assert out.startswith("3 runs, 2 to do, about 39 s")
    assert "assumed" not in out


SEED = [ROOT / "notebooks/sweeps/seed_campaign.toml", "--results", "/nowhere"]
ELSEWHERE = ["--topology", ROOT / "tests/data/topology/seed_8x_pcie_two_sockets.txt"]


def rows_of(out: str) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in json.loads(out)}


def test_plan_for_a_pretend_machine_of_eight(run: Any) -> None:
    """Neither GPUs nor SGLang are needed to see which GPUs each run would take, and for how long."""
    code, out, err = run("plan", *SEED, *ELSEWHERE)
    assert (code, err) == (0, "")
    # Each prompt and concurrency: a warm-up and 3 rounds of both lengths, 3904 tokens at 26 tok/s; 90 s for the start.
    hours = 90 * (90 + 16 * 3904 / 26) / 3600
    assert out.splitlines()[0].startswith(f"90 runs, 90 to do, about {hours:.1f} h, state new, engine sglang")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip().startswith("tp")}
    assert lines["tp1-auto"] == ["0", "False", "none"]
    assert lines["tp4-b16-pcie"] == ["0-3", "False", "NODE", "pcie"]
    assert " ".join(lines["tp8-auto-production"]) == "0-7 True SYS production crosses NUMA nodes 0, 1"
    assert "reckoned from the sweep's `assumed`: 26 tok/s, nobody's measurement" in out
    assert "cannot start" not in out


def test_plan_places_around_busy_gpus_and_says_what_cannot_start(run: Any) -> None:
    code, out, _ = run("plan", *SEED, *ELSEWHERE, "--busy", "0", "--json")
    rows = rows_of(out)
    assert code == 0
    assert {(r["tp_size"], r["gpus"]) for r in rows.values()} == {(1, "1"), (4, "4-7"), (8, None)}
    eight = rows["tp8-auto-pcie"]
    assert (eight["note"], eight["argv"]) == ("cannot start", None)
    assert "tp_size=8 needs as many free GPUs" in eight["problem"]
    assert "7 free; busy: GPU 0 (named busy)" in eight["problem"]
    _, out, _ = run("plan", *SEED, *ELSEWHERE, "--busy", "0", "--only", "tp8-auto-pcie")
    assert "cannot start tp8-auto-pcie, tp8-auto-pcie.2, tp8-auto-pcie.3: tp_size=8 needs" in out


def test_plan_as_json_has_what_would_be_started(run: Any) -> None:
    rows = rows_of(run("plan", *SEED, *ELSEWHERE, "--json")[1])
    assert {(r["tp_size"], r["gpus"], r["cross_numa"], r["worst_link"]) for r in rows.values()} == {
        (1, "0", False, None), (4, "0-3", False, "NODE"), (8, "0-7", True, "SYS"),
    }  # fmt: skip
    tree, one = rows["tp4-b16-pcie.2"], rows["tp1-auto"]
    assert (tree["env"]["CUDA_VISIBLE_DEVICES"], tree["env"]["NCCL_PROTO"]) == ("0,1,2,3", "LL")
    assert one["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    at = tree["argv"].index("--speculative-ddtree-budget")
    assert tree["argv"][at : at + 2] == ["--speculative-ddtree-budget", "16"]
    assert tree["command"].startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1,2,3 NCCL_DEBUG=INFO ")
    assert (tree["nccl_profile"], tree["start"], tree["numa_policy"], tree["variant"]) == ("pcie", 2, "pack", "")
    assert one["estimate_s"] == pytest.approx(90 + 16 * 3904 / 26)


def test_plan_with_commands_can_be_pasted(run: Any) -> None:
    _, out, _ = run("plan", *SEED, *ELSEWHERE, "--commands", "--only", "tp4-auto-pcie.3")
    *_, name, command = out.strip().splitlines()
    assert name == "# tp4-auto-pcie.3"
    assert " -m sglang.launch_server " in command
    assert " --mem-fraction-static 0.75" in command


def test_plan_tells_where_a_profile_would_compare_nothing(run: Any) -> None:
    two = ["--set", "tp_size=[2]", "--set", "starts=1", "--json"]
    rows = rows_of(run("plan", ROOT / "notebooks/sweeps/nccl_ab.toml", *ELSEWHERE, *two)[1])
    told = {name for name, row in rows.items() if row["note"]}
    assert told == {"tp2-auto-production", "tp2-auto-pcie"}
    assert "the profile would compare nothing" in rows["tp2-auto-pcie"]["note"]


def test_plan_on_the_machine_itself_leaves_out_what_is_busy(
    run: Any, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(gpus={1: {"processes": ((4242, "python", 2**30),)}})
    monkeypatch.setattr(engines, "_known_flags", lambda *_: engines.SGLANG_FLAGS)
    one = ["plan", *SEED, "--json", "--only", "tp4-auto-pcie", "--set", "starts=1"]
    rows = rows_of(run(*one)[1])
    assert {name: row["gpus"] for name, row in rows.items()} == {"tp4-auto-pcie": "4-7"}
    rows = rows_of(run(*one, "--busy", "7")[1])
    assert "GPU 1 (PID 4242 python holds 1.0 GiB), GPU 7 (named busy)" in rows["tp4-auto-pcie"]["problem"]


def test_plan_without_a_gpu_says_so(run: Any, pretend: Any) -> None:
    pretend("no_gpu")
    code, out, err = run("plan", *SEED, "--only", "tp4-auto-pcie")
    assert (code, err) == (0, "")
    assert "cannot start tp4-auto-pcie, tp4-auto-pcie.2, tp4-auto-pcie.3: no NVIDIA GPU here" in out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["starts=2"], 6),
        (["tp_size=[1, 2]", "tree_budgets=[]"], 4),
        (["name=other", "workload.repeats=2", "engine=sglang"], 3),
    ],
)
def test_settings(run: Any, sweep_file: Path, settings: list[str], expected: int) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    code, out, err = run("plan", sweep_file, "--json", *flags)
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == expected


def test_settings_reach_nested_keys_as_toml(sweep_file: Path) -> None:
    sweep = cli._load(sweep_file, ["workload.repeats=9", "workload.prompts=['qsort']", "name=x-1"])
    assert (sweep.workload.repeats, sweep.workload.prompts, sweep.name) == (9, ("qsort",), "x-1")
    assert sweep.workload.max_new_tokens == (8,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "none.toml"], "cannot read the sweep file"),
        (["plan", "FILE", "--set", "starts"], "is not key=value"),
        (["plan", "FILE", "--set", "colour=red"], "colour"),
        (["plan", "FILE", "--set", "seed=1", "--set", "seed=2"], "--set cannot be read"),
        (["plan", "FILE", "--only", "tp9"], "has no run"),
        (["plan", "FILE", "--busy", "0,x"], "--busy '0,x' holds 'x'"),
        (["plan", "FILE", "--set", "nccl_profiles=['fast']", "--set", "tp_size=[2]"], "nccl_profile"),
        (["summary", "nowhere"], "no campaign 'nowhere'"),
        (["serve", "--method", "magic"], "magic"),
        (["plan", "FILE", "--nonsense"], "No such option"),
    ],
)
def test_usage_errors_are_one_message_and_code_2(
    run: Any, sweep_file: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = run(*(str(sweep_file) if a == "FILE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


def test_a_sweep_with_a_failed_run_exits_1(
    run: Any, sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*_: Any, watch: Callable[[], bool]) -> None:
        while not watch():
            time.sleep(0.05)

    monkeypatch.setattr("benchlib.sweep.execute_notebook", execute)
    dies = 'server_args = ["--mode", "die"]'
    sweep_file.write_text(sweep_file.read_text() + dies)
    code, out, err = run("sweep", sweep_file, "--results", tmp_path, "--only", "tp1-auto")
    assert code == 1
    assert "[1/1] tp1-auto failed" in out
    assert "failed: tp1-auto: the server exited with code 7" in err
    assert f"0 of 1 runs ok in {tmp_path / 'c'}" in out


def test_a_sweeps_exit_code_is_its_runs_though_nobody_reads(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `| head -1`; and where standard output was closed from the start, `>&-`."""
    command = [sys.executable, "-c", "from benchlib.cli import main; main()", "sweep", str(sweep_file)]
    command += ["--results", str(tmp_path), "--only", "tp1-auto", "--force"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for how in ('exec "$@" | head -n 1', 'exec "$@" >&-'):
        shell = ["bash", "-c", f"set -o pipefail; {how}", "bash", *command]
        done = subprocess.run(shell, cwd=ROOT, env=buffered, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\n") == ("head" in how)


@pytest.mark.parametrize("errors", [False, True])
def test_an_end_that_nobody_can_hear_changes_no_exit_code(
    run: Any, sweep_file: Path, monkeypatch: pytest.MonkeyPatch, errors: bool
) -> None:
    def ended(runs: list[RunSpec], **_: Any) -> list[Outcome]:
        if errors:
            raise KeyboardInterrupt
        return [Outcome(spec, "ok", 1.0) for spec in runs]

    def unheard(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("benchlib.sweep.run_sweep", ended)
    monkeypatch.setattr("typer.echo", unheard)
    assert run("sweep", sweep_file)[0] == (130 if errors else 0)


def test_what_cannot_be_read_or_written_is_one_message_and_code_1(run: Any, sweep_file: Path, tmp_path: Path) -> None:
    results, campaign = tmp_path / "r", tmp_path / "r" / "c"
    (campaign / "tp1-b16").parent.mkdir(parents=True)
    (campaign / "tp1-b16").write_text("a file\n")
    (tmp_path / "l" / "c" / ".lock").mkdir(parents=True)
    one = ["--only", "tp1-b16"]
    for arguments, name, why in (
        (["sweep", sweep_file, "--results", "/proc/x"], "/proc/x", "No such file or directory"),
        (["sweep", sweep_file, "--results", sweep_file], sweep_file / "c", "Not a directory"),
        (["sweep", sweep_file, "--results", tmp_path / "l"], tmp_path / "l" / "c" / ".lock", "Is a directory"),
        (["sweep", sweep_file, "--results", results, *one], campaign / "tp1-b16", "Not a directory"),
        (["report", results / "c", "--out", "/proc/x"], "/proc/x", "No such file or directory"),
    ):
        code, _, err = run(*arguments)
        assert (code, err) == (1, f"error: cannot read or write {name}: {why}\n")
    assert (campaign / "tp1-b16").read_text() == "a file\n"
    code, out, err = run("plan", sweep_file, "--results", results, *one)
    assert (code, err) == (0, "")
    assert "tp1-b16" in out


def test_an_interrupted_sweep_says_so(run: Any, sweep_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> list[Outcome]:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchlib.sweep.run_sweep", interrupted)
    code, _, err = run("sweep", sweep_file)
    assert code == 130
    assert "interrupted" in err


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_summary(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"run": name, "engine": "reference", "decode_tok_s": rate, "speedup": None, "note": note}
        for name, rate, note in (
            ("tp1-auto", 123.456, None),
            ("tp1-b16", 234.567, "1 start: no verdict"),
        )
    ]
    asked: list[Path] = []

    def build_summary(path: Path) -> list[dict[str, Any]]:
        asked.append(path)
        return rows

    stand_in(monkeypatch, "benchlib.compare", build_summary=build_summary)
    (tmp_path / "c").mkdir()
    code, out, _ = run("summary", "c", "--results", tmp_path, "--json")
    assert (code, json.loads(out), asked) == (0, rows, [tmp_path / "c"])
    code, out, _ = run("summary", tmp_path / "c")
    assert code == 0
    assert "123.5" in out
    assert "engine reference" in out.splitlines()[0]
    assert "speedup" not in out  # nothing in the column
    assert "tp1-b16: 1 start: no verdict" in out


def test_report(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_report(paths: list[Path], out: Path, full_provenance: bool) -> Any:
        assert not full_provenance
        return types.SimpleNamespace(
            html=out / "report.html",
            tables=[out / "a.tex"],
            figures=[],
            pdf=None,
            pdf_reason="no latexmk",
        )

    stand_in(monkeypatch, "benchlib.report", build_report=build_report)
    code, out, _ = run("report", tmp_path, "--out", tmp_path / "o")
    assert code == 0
    assert out.splitlines()[-4:] == [
        f"HTML:    {tmp_path / 'o' / 'report.html'}",
        f"tables:  {tmp_path / 'o' / 'tables'} (1 files)",
        f"figures: {tmp_path / 'o' / 'figures'} (0 files)",
        "PDF:     none: no latexmk",
    ]


def test_serve_until_interrupted(fake_python: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['benchlib', 'serve', '--method', 'ddtree', '--tree-budget', '4', '--tp-size', '2',"
        f" '--log', {str(tmp_path)!r}]; import benchlib.engines as e; e.server_python = lambda _: {fake_python!r};"
        " from benchlib.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        info = get_json(f"{url}/server_info")
        process.terminate()
        assert process.wait(20) == 0
    assert (info["tp_size"], info["speculative_ddtree_budget"]) == (2, 4)
