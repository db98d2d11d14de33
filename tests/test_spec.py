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
    assert RunSpec().hash == RunSpec(seed=0).hash == "24e137a884bf21d7"  # another one: every run is measured again
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


# Fields that count: `true` is no 1, as it would be in Python.
WHOLE = ("block_size", "max_repeats", "max_running_requests", "repeats", "seed", "start", "tp_size", "warmups")


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
        *(({name: True}, rf"{name}: Input should be a valid integer \(got True\)") for name in WHOLE),
        *(
            ({name: [True]}, rf"{name}\.0: Input should be a valid integer")
            for name in ("max_new_tokens", "concurrency")
        ),
        ({"method": "ddtree", "tree_budget": True}, "tree_budget: Input should be a valid integer"),
        ({"repeats": 3.0}, "repeats: Input should be a valid integer"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s"),
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
        ('name = "x"\nnccl_profiles = []\n', "nccl_profiles"),
        ('name = "x"\nnuma_policies = ["far"]\n', "numa_policies"),
        ('name = "x"\n[variants.v]\nmethods = []\n', "v needs at least one of methods or tree_budgets"),
        ('name = "x"\n[variants."a b"]\n', "variants"),
        ('name = "x"\n[variants.v]\ncolour = 1\n', "variants.v.colour"),
        ('name = "x"\nvariants = 3\n', "variants"),
        ('name = "x"\nstarts = true\n', "starts"),
        ('name = "x"\norder_seed = true\n', "order_seed: Input should be a valid integer"),
        ('name = "x"\ntree_budgets = [true]\n', "tree_budgets.0: Input should be a valid integer"),
        ('name = "x"\ntp_size = [true]\n', "tp_size.0: Input should be a valid integer"),
        ('name = "x"\n[variants.v]\nblock_size = true\n', "variants.v.block_size: Input should be a valid integer"),
        ('name = "x"\n[variants.v]\n', "variant v changes nothing"),
        ('name = "x"\n[variants.v]\nstarts = 3\n', "variant v changes nothing"),
        ('name = "x"\n[assumed]\nstart_s = 1\n', "assumed.decode_tok_s"),
        ('name = "x"\ntree_budget = [16]\n', "tree_budget: is no key here; did you mean tree_budgets\\?"),
        ('name = "x"\nprompts = ["fib"]\n', "prompts: is no key here; did you mean workload.prompts\\?"),
        ('name = "x"\ntree_budgets = 16\n', r"tree_budgets: should be a list, such as \[16\] \(got 16\)"),
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


@pytest.mark.parametrize("field", ["nccl_profile", "numa_policy"])
@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({}, "engine reference has no GPU"),
        ({"tp_size": 4}, "engine reference has no GPU"),
        ({"engine": "sglang"}, "one rank has no collective"),
        ({"engine": "sglang", "tp_size": 4, "attach": "http://h:1"}, "an attached server is started and placed by"),
    ],
)
def test_what_would_change_nothing_is_refused(field: str, parameters: dict[str, Any], why: str) -> None:
    """A run under another name, measured just the same, would read as an A/B."""
    value = {"nccl_profile": "production", "numa_policy": "spread"}[field]
    with pytest.raises(SpecError, match=f'{field} "{value}" would change nothing, {why}'):
        RunSpec.from_parameters({**parameters, field: value})


def test_policies_that_only_allow_are_never_refused() -> None:
    assert RunSpec(numa_policy="allow-cross").condition_name == "tp1-auto-allow-cross"


def test_names_tell_every_axis() -> None:
    spec = RunSpec(engine="sglang", tp_size=4, nccl_profile="pcie", numa_policy="spread", variant="no-overlap", start=2)
    assert spec.condition_name == "tp4-auto-pcie-spread-no-overlap"
    assert spec.run_name == "tp4-auto-pcie-spread-no-overlap.2"


def test_placement_is_not_overridden_by_a_variable() -> None:
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES in server_env: placement chooses the GPUs"):
        RunSpec.from_parameters({"server_env": {"CUDA_VISIBLE_DEVICES": "3"}})


def test_nccl_and_numa_are_crossed_where_there_are_ranks() -> None:
    sweep = Sweep(
        name="x", engine="sglang", tp_size=(1, 4), methods=("auto",),
        nccl_profiles=("none", "pcie"), numa_policies=("pack", "spread"), starts=2,
    )  # fmt: skip
    names = [run.run_name for run in sweep.runs()]
    first = {"tp1-auto", "tp4-auto", "tp4-auto-pcie", "tp4-auto-spread", "tp4-auto-pcie-spread"}
    assert set(names[:5]) == first  # one rank is measured once
    assert set(names[5:]) == {f"{name}.2" for name in first}


VARIANTS = """
name = "x"
engine = "sglang"
tp_size = [2]
methods = ["auto"]
tree_budgets = [16]
nccl_profiles = ["none", "pcie"]
starts = 2
nccl_file = "./own.toml"
[engines.sglang]
model_path = "../m"
server_args = ["--a"]
server_env = { A = "1", B = "1" }
[variants.same]
server_args = ["--log", "./l"]
server_env = { B = "2" }
[variants.other]
tp_size = [1]
methods = ["linear"]
nccl_profiles = ["mine"]
block_size = 8
starts = 1
"""


def test_variants_inherit_and_override(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[profiles.mine]\nNCCL_PROTO = 'LL'\n")
    runs = {run.run_name: run for run in load_sweep(write(tmp_path, VARIANTS)).runs()}
    own = [f"tp2-{m}{p}" for m in ("auto", "b16") for p in ("", "-pcie")]
    expected = [f"{name}{v}{s}" for name in own for v in ("", "-same") for s in ("", ".2")]
    assert set(runs) == {*expected, "tp1-linear-other"}
    same, other = runs["tp2-b16-pcie-same.2"], runs["tp1-linear-other"]
    assert same.server_args == ("--a", "--log", str(tmp_path / "l"))
    assert (same.server_env, same.block_size, same.variant) == ({"A": "1", "B": "2"}, 16, "same")
    # Methods and budgets go together: the variant's linear brings no tree of the sweep along.
    assert (other.server_args, other.block_size, other.nccl_profile) == (("--a",), 8, "none")
    assert runs["tp2-auto"].server_env == {"A": "1", "B": "1"}


@pytest.mark.parametrize("changed", ["tp_size = [2]", "tree_budgets = [8]", "block_size = 8", 'server_args = ["--x"]'])
def test_one_change_makes_a_variant(tmp_path: Path, changed: str) -> None:
    runs = load_sweep(write(tmp_path, f'name = "x"\n[variants.v]\n{changed}\n')).runs()
    assert "v" in {run.variant for run in runs}


def test_own_profiles_are_read_beside_the_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[profiles.mine]\nNCCL_PROTO = 'LL'\n")
    text = 'name = "x"\nengine = "sglang"\ntp_size = [2]\nmethods = ["auto"]\nnccl_profiles = ["mine"]\n'
    path = write(tmp_path, f'{text}nccl_file = "./own.toml"\n')
    assert [run.run_name for run in load_sweep(path).runs()] == ["tp2-auto-mine"]
    with pytest.raises(SpecError, match=r"nccl_profile \"mine\" is unknown; there are \['none', 'pcie', 'production'"):
        load_sweep(write(tmp_path, text)).runs()
    (tmp_path / "own.toml").write_text("[profiles.mine]\nNCCL_PROTOS = 'LL'\n")
    with pytest.raises(SpecError, match="did you mean NCCL_PROTO"):
        load_sweep(write(tmp_path, f'{text}nccl_file = "./own.toml"\n')).runs()


def test_two_conditions_of_one_name_are_refused() -> None:
    """They would share a folder, and each would move the other's record aside."""
    variants = {"pcie": {"server_args": ("--x",)}}
    sweep = Sweep(
        name="x", engine="sglang", tp_size=(2,), methods=("auto",), nccl_profiles=("none", "pcie"), variants=variants
    )
    with pytest.raises(SpecError, match="gives two conditions one name, tp2-auto-pcie: rename the variant"):
        sweep.runs()


@pytest.mark.parametrize(
    ("name", "count", "some"),
    [
        ("seed_campaign", 90, {"tp1-b64", "tp4-linear-pcie.3", "tp8-b16-production.2"}),
        ("nccl_ab", 30, {"tp4-auto", "tp4-auto-pcie-no-custom-ar.5", "tp4-auto-no-custom-ar"}),
        ("numa_ab", 10, {"tp4-auto", "tp4-auto-spread.5"}),
    ],
)
def test_the_sweeps_for_gpus(name: str, count: int, some: set[str]) -> None:
    sweep = load_sweep(Path(__file__).parents[1] / "notebooks" / "sweeps" / f"{name}.toml")
    names = [run.run_name for run in sweep.runs()]
    assert len(names) == len(set(names)) == count
    assert some <= set(names)
    assert sweep.assumed is not None
    # What names a difference between starts needs as many as a verdict of "no difference" does.
    assert sweep.starts == (3 if name == "seed_campaign" else 5)
