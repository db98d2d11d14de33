"""Specs: every problem at once, names, hashes, order, and paths beside the sweep file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchlib.errors import SpecError
from benchlib.spec import RunSpec, Sweep, Workload, content_hash, load_sweep


def write(folder: Path, text: str) -> Path:
    path = folder / "s.toml"
    path.write_text(text)
    return path


def test_names() -> None:
    assert RunSpec().run_name == "tp1-auto"
    assert RunSpec(tp_size=4, method="linear", start=2).run_name == "tp4-linear.2"
    tree = RunSpec(tp_size=8, method="ddtree", tree_budget=15, start=3)
    assert (tree.condition_name, tree.run_name) == ("tp8-b15", "tp8-b15.3")


def test_hash_is_of_the_content() -> None:
    assert RunSpec().hash == RunSpec(seed=0).hash
    assert RunSpec().hash != RunSpec(seed=1).hash
    assert RunSpec().hash != RunSpec(workload=Workload(repeats=4)).hash
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_parameters_are_flat_and_come_back() -> None:
    spec = RunSpec(method="ddtree", tree_budget=32, workload=Workload(prompts=("fib",), repeats=9))
    flat = spec.to_parameters()
    assert (flat["repeats"], flat["prompts"]) == (9, ["fib"])
    assert "workload" not in flat
    assert tuple(flat) == RunSpec.parameter_names()
    assert RunSpec.from_parameters(flat) == spec


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"method": "ddtree"}, "needs tree_budget"),
        ({"tree_budget": 16}, "means nothing for method"),
        ({"concurrency": [9]}, "exceeds max_running_requests=8"),
        ({"prompts": ["fib", "fib"]}, "names a value twice"),
        ({"tp_sizes": 2}, "tp_sizes"),
        ({"repeats": 0, "engine": "vllm", "seed": "x"}, "3 problem"),
        ({"campaign": "../up"}, "campaign"),
    ],
)
def test_what_cannot_run_is_refused(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        RunSpec.from_parameters(parameters)


def test_a_sweep_crosses_and_interleaves() -> None:
    sweep = Sweep(name="x", tp_size=(1, 2), tree_budgets=(16,), starts=2, order_seed=1)
    names = [run.run_name for run in sweep.runs()]
    first = {"tp1-auto", "tp1-linear", "tp1-b16", "tp2-auto", "tp2-linear", "tp2-b16"}
    assert set(names[:6]) == first
    assert set(names[6:]) == {f"{name}.2" for name in first}
    assert [n.removesuffix(".2") for n in names[6:]] != names[:6]
    assert [run.run_name for run in sweep.runs()] == names
    other = sweep.model_copy(update={"order_seed": 2})
    assert [run.run_name for run in other.runs()] != names


def test_an_engines_table_applies_when_it_is_selected(tmp_path: Path) -> None:
    text = """
        name = "x"
        [workload]
        prompt_set = "openings"
        [engines.sglang]
        model_path = "../m"
        draft_model_path = "org/name"
        server_python = "./py"
        prompt_set = "random-ids"
        weights = "random"
        server_args = ["--log", "./l", "plain"]
        server_env = { P = "../p", Q = "1" }
        """
    path = write(tmp_path, text)
    assert load_sweep(path).runs()[0].model_path == ""
    run = load_sweep(path, engine="sglang").runs()[0]
    assert run.model_path == str(tmp_path.parent / "m")
    assert run.draft_model_path == "org/name"
    assert run.server_python == str(tmp_path / "py")
    assert run.server_args == ("--log", str(tmp_path / "l"), "plain")
    assert run.server_env == {"P": str(tmp_path.parent / "p"), "Q": "1"}
    assert (run.workload.prompt_set, run.weights) == ("random-ids", "random")


def test_overrides_merge_into_tables(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "x"\n[workload]\nrepeats = 3\nwarmups = 2\n')
    sweep = load_sweep(path, workload={"repeats": 7}, starts=2)
    assert (sweep.workload.repeats, sweep.workload.warmups, sweep.starts) == (7, 2, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "x"\nmethods = []\n', "at least one of methods or tree_budgets"),
        ('name = "x"\ntp_size = [1, 1]\n', "names a value twice"),
        ('name = "x"\ncolour = "red"\ntp_size = [0]\n', "2 problem"),
        ("name = \n", "not valid TOML"),
        ('name = "x"\n[workload]\nrepeat = 3\n', "workload.repeat"),
    ],
)
def test_a_bad_sweep_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        load_sweep(write(tmp_path, text))


def test_a_missing_sweep_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the sweep file"):
        load_sweep(tmp_path / "none.toml")


def test_the_laptop_sweep() -> None:
    path = Path(__file__).parents[1] / "notebooks" / "sweeps" / "laptop.toml"
    runs = load_sweep(path).runs()
    assert sorted(run.run_name for run in runs) == sorted(
        f"tp{tp}-{m}" for tp in (1, 2) for m in ("auto", "linear", "b15", "b16", "b32", "b64")
    )
    stock = load_sweep(path, engine="sglang").runs()[0]
    assert (Path(stock.model_path) / "config.json").is_file()
    assert (Path(stock.server_env["PYTHONPATH"]) / "sgl_kernel").is_dir()


@pytest.mark.parametrize("field", [{"nccl_profile": "production"}, {"numa_policy": "spread"}])
def test_what_would_change_nothing_is_refused(field: dict[str, str]) -> None:
    """A run under another name, measured just the same, would read as an A/B."""
    with pytest.raises(SpecError, match=next(iter(field))):
        RunSpec.from_parameters(dict(field))
