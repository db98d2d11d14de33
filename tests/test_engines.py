"""Command lines of both engines, what they cannot do, and what a server reports about itself."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchlib import engines
from benchlib.engines import (
    build_launch,
    check_server_info,
    engine_version,
    flag_value,
    needs_gpus,
    server_python,
    verify_tokens,
)
from benchlib.errors import ServerError, SpecError, UnavailableError
from benchlib.placement import Placement, place_gpus
from benchlib.spec import RunSpec
from benchlib.topology import load_topology

DATA = Path(__file__).parent / "data"
STOCK_FLAGS = (
    "--model-path --host --port --tp-size --random-seed --max-running-requests --enable-metrics --disable-radix-cache "
    "--disable-flashinfer-autotune --min-free-slots-delay --speculative-algorithm --speculative-draft-model-path "
    "--speculative-num-draft-tokens --device --page-size --mamba-ssm-dtype --cuda-graph-bs-decode --nnodes"
)
SEED_MACHINE = load_topology(DATA / "topology" / "seed_8x_pcie_two_sockets.txt")


def launch(**parameters: Any) -> list[str]:
    return list(build_launch(RunSpec.from_parameters(parameters), host="127.0.0.1", port=9).argv)


def sglang(**parameters: Any) -> RunSpec:
    return RunSpec.from_parameters({"engine": "sglang", "model_path": "m", "server_python": "python", **parameters})


def env(spec: RunSpec, placement: Placement | None = None) -> dict[str, str]:
    return build_launch(spec, host="127.0.0.1", port=9, placement=placement, probe=False).env


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[str]:
    """An interpreter whose `sglang.launch_server --help` lists the stock flags, counting how often it is asked."""
    script = tmp_path / "stock-python"
    answer = f'if [ "$1" = "-c" ]; then echo 0.5.23; else echo x >> "{tmp_path}/asked"; echo "{STOCK_FLAGS}"; fi'
    script.write_text(f"#!/bin/sh\n{answer}\n")
    script.chmod(0o755)
    known = engines._known_flags  # a test may put something else in its place
    yield str(script)
    known.cache_clear()
    engine_version.cache_clear()


def test_reference_command_line() -> None:
    argv = launch(tp_size=2, method="ddtree", tree_budget=32, seed=5)
    assert argv[:3] == [sys.executable, "-m", "benchlib.reference_engine.server"]
    assert value(argv, "--tp-size") == "2"
    assert value(argv, "--random-seed") == "5"
    assert value(argv, "--max-running-requests") == "8"
    assert value(argv, "--speculative-algorithm") == "DDTREE"
    assert value(argv, "--speculative-num-draft-tokens") == "16"
    assert value(argv, "--speculative-ddtree-budget") == "32"
    assert "--model-path" not in argv
    # Nothing that the embedded engine does not know.
    assert {a for a in argv if a.startswith("--")} <= engines.REFERENCE_FLAGS


def test_declared_flags_are_those_of_the_embedded_engine() -> None:
    # Read, not imported: it would load torch.
    source = Path(engines.__file__).parent / "reference_engine" / "server.py"
    known = set(re.findall(r'"(--[a-z-]+)"', source.read_text()))
    assert known >= engines.REFERENCE_FLAGS


def test_methods_differ_by_their_own_flags_alone() -> None:
    auto, linear = launch(), launch(method="linear")
    assert not [a for a in auto if "speculative" in a]
    assert linear[: len(auto)] == auto
    assert linear[len(auto) :] == [
        "--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "16",
    ]  # fmt: skip


def test_the_users_flags_come_last_and_win() -> None:
    argv = launch(server_args=["--threads", "2", "--random-seed", "9"])
    assert argv[-4:] == ["--threads", "2", "--random-seed", "9"]
    assert argv.count("--random-seed") == 1


def test_the_users_variables_are_passed() -> None:
    spec = RunSpec(server_env={"A": "1"})
    assert build_launch(spec, host="h", port=1).env == {"A": "1"}


def test_sglang_gets_matched_conditions(stock: str) -> None:
    argv = launch(engine="sglang", server_python=stock, model_path="m", tp_size=4)
    assert argv[:3] == [stock, "-m", "sglang.launch_server"]
    for flag in ("--disable-radix-cache", "--disable-flashinfer-autotune", "--enable-metrics"):
        assert flag in argv
    assert value(argv, "--min-free-slots-delay") == "1"
    assert value(argv, "--model-path") == "m"


def test_stock_sglang_has_no_ddtree_and_is_asked_once(stock: str, tmp_path: Path) -> None:
    for budget in (15, 16):
        with pytest.raises(UnavailableError, match=r"ddtree is unavailable in sglang 0\.5\.23"):
            launch(
                engine="sglang",
                server_python=stock,
                model_path="m",
                method="ddtree",
                tree_budget=budget,
            )
    assert (tmp_path / "asked").read_text() == "x\n"


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cpu"]])
def test_dflash_is_unavailable_on_a_cpu(stock: str, device: list[str]) -> None:
    with pytest.raises(UnavailableError, match=r"linear is unavailable in sglang .* on device cpu"):
        launch(
            engine="sglang", server_python=stock, model_path="m", draft_model_path="d",
            method="linear", server_args=device,
        )  # fmt: skip


def test_sglang_needs_its_models_named(stock: str) -> None:
    with pytest.raises(SpecError, match="no default model"):
        launch(engine="sglang", server_python=stock)
    with pytest.raises(SpecError, match="needs draft_model_path"):
        launch(engine="sglang", server_python=stock, model_path="m", method="linear")
    argv = launch(engine="sglang", server_python=stock, model_path="m", draft_model_path="d", method="linear")
    assert value(argv, "--speculative-draft-model-path") == "d"


def test_a_flag_that_the_run_is_about_is_never_dropped(stock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_known_flags", lambda *_: frozenset({"--model-path", "--host", "--port"}))
    with pytest.raises(UnavailableError, match="no --tp-size, which tp1-auto needs"):
        launch(engine="sglang", server_python=stock, model_path="m")


def test_an_interpreter_without_sglang_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="No module named") as caught:
        launch(engine="sglang", server_python=sys.executable, model_path="m")
    assert "BENCHLIB_SGLANG_PYTHON" in str(caught.value)
    with pytest.raises(UnavailableError, match="cannot ask"):
        launch(engine="sglang", server_python=str(tmp_path / "none"), model_path="m")


def test_which_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHLIB_SGLANG_PYTHON", "/opt/python")
    assert server_python(RunSpec()) == sys.executable
    assert server_python(RunSpec(engine="sglang")) == "/opt/python"
    assert server_python(RunSpec(engine="sglang", server_python="mine")) == "mine"
    monkeypatch.delenv("BENCHLIB_SGLANG_PYTHON")
    assert server_python(RunSpec(engine="sglang")) == sys.executable


def test_versions() -> None:
    assert engine_version("reference", sys.executable)
    assert engine_version("reference", os.devnull) is None


def test_verify_tokens_count_the_root() -> None:
    assert verify_tokens({}) is None
    assert verify_tokens({"speculative_algorithm": None, "speculative_num_draft_tokens": 16}) is None
    assert verify_tokens(json.loads((DATA / "sglang_dflash_info.json").read_text())) == 8
    tree = {"speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": 16}
    assert verify_tokens(tree | {"speculative_ddtree_budget": 64}) == 65


def test_server_info_is_held_to_the_plan() -> None:
    info = json.loads((DATA / "sglang_dflash_info.json").read_text())
    fits = RunSpec(method="linear", block_size=8)
    check_server_info(fits, info)
    check_server_info(fits, {})  # a server that reports nothing cannot be refused
    with pytest.raises(ServerError, match="planned 16"):
        check_server_info(RunSpec(method="linear"), info)
    with pytest.raises(ServerError, match="model_path is"):
        check_server_info(RunSpec(method="linear", block_size=8, model_path="other"), info)
    with pytest.raises(ServerError, match="speculative_ddtree_budget is not reported, planned 4"):
        check_server_info(RunSpec(method="ddtree", tree_budget=4), {"speculative_algorithm": "DDTREE"})


def test_a_placed_server_sees_its_gpus_by_number() -> None:
    """UUIDs would switch off SGLang's custom all-reduce."""
    placement = place_gpus(SEED_MACHINE, 4, busy={0: "named busy"})
    assert env(sglang(tp_size=4), placement) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "NCCL_DEBUG": "INFO",
    }  # fmt: skip


def test_nccl_variables_are_set_where_there_are_ranks() -> None:
    one = place_gpus(SEED_MACHINE, 1)
    assert env(sglang(), one) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    profile = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "NCCL_MIN_NCHANNELS": "8"}
    assert env(sglang(tp_size=2, nccl_profile="production")) == {"NCCL_DEBUG": "INFO", **profile}
    assert env(RunSpec(tp_size=2)) == {}


def test_the_users_variables_win_over_derived_ones() -> None:
    given = {"NCCL_DEBUG": "WARN", "NCCL_MIN_NCHANNELS": "2", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    spec = sglang(tp_size=2, nccl_profile="production", server_env=given)
    found = env(spec, place_gpus(SEED_MACHINE, 2))
    assert {name: found[name] for name in given} == given
    assert (found["NCCL_P2P_LEVEL"], found["CUDA_VISIBLE_DEVICES"]) == ("5", "0,1")


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(8, ["1", "2", "4", "8"]), (6, ["1", "2", "4", "6"]), (1, ["1"]), (17, ["1", "2", "4", "8", "16", "17"])],
)
def test_gpu_conditions_are_matched(stock: str, limit: int, sizes: list[str]) -> None:
    """Speculative and plain servers capture other CUDA graphs by default."""
    argv = launch(engine="sglang", server_python=stock, model_path="m", max_running_requests=limit, concurrency=[1])
    assert (value(argv, "--page-size"), value(argv, "--mamba-ssm-dtype")) == ("1", "float32")
    at = argv.index("--cuda-graph-bs-decode") + 1
    assert argv[at : at + len(sizes)] == sizes
    assert argv[at + len(sizes)].startswith("--")


def test_the_users_own_graph_sizes_replace_the_matched_ones(stock: str) -> None:
    own = ["--cuda-graph-bs-decode", "3", "--page-size=64"]
    argv = launch(engine="sglang", server_python=stock, model_path="m", server_args=own)
    assert argv[-3:] == own
    assert argv.count("--cuda-graph-bs-decode") == 1
    assert "--page-size" not in argv


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cpu"]])
def test_a_server_on_the_cpu_has_nothing_of_a_gpu(stock: str, device: list[str]) -> None:
    spec = sglang(server_python=stock, tp_size=2, server_args=device)
    found = build_launch(spec, host="h", port=1)
    assert (needs_gpus(spec), found.env) == (0, {})
    assert not {"--page-size", "--mamba-ssm-dtype", "--cuda-graph-bs-decode"} & set(found.argv)
    assert "--disable-radix-cache" in found.argv


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        (RunSpec(tp_size=2), 0),
        (sglang(tp_size=8), 8),
        (sglang(tp_size=8, attach="http://h:1"), 0),
        (sglang(tp_size=8, server_args=["--nnodes", "2", "--node-rank", "0"]), 4),
        (sglang(tp_size=8, server_args=["--nnodes=2", "--pp-size=2"]), 8),
        (sglang(tp_size=1, server_args=["--nnodes", "2"]), 1),
        (sglang(tp_size=2, server_args=["--nnodes", "4", "--nnodes", "1"]), 2),
    ],
)
def test_gpus_of_this_host(spec: RunSpec, gpus: int) -> None:
    assert needs_gpus(spec) == gpus


@pytest.mark.parametrize("flags", [["--nnodes", "x"], ["--nnodes=0"], ["--pp-size", "-2"], ["--pp-size=1.5"]])
def test_a_count_that_is_none_is_refused(flags: list[str]) -> None:
    with pytest.raises(SpecError, match=r"in server_args is no count: give a number from 1"):
        needs_gpus(sglang(server_args=flags))


def test_flag_values() -> None:
    spec = sglang(server_args=["--a", "1", "--b=x=y", "--c", "--a=2", "--d"])
    assert [flag_value(spec, f"--{name}") for name in "abde"] == ["2", "x=y", "", ""]


def test_probes_get_the_servers_variables(tmp_path: Path) -> None:
    """They may say where the engine lies."""
    script = tmp_path / "python"
    answer = f'if [ "$1" = "-c" ]; then echo "$ENGINE_AT"; elif [ "$ENGINE_AT" ]; then echo "{STOCK_FLAGS}"; fi'
    script.write_text(f"#!/bin/sh\n{answer}\n")
    script.chmod(0o755)
    with pytest.raises(UnavailableError, match="engine sglang is unavailable"):
        build_launch(sglang(server_python=str(script)), host="h", port=1)
    there = sglang(server_python=str(script), server_env={"ENGINE_AT": "9.9"}, method="ddtree", tree_budget=4)
    with pytest.raises(UnavailableError, match=r"unavailable in sglang 9\.9:"):
        build_launch(there, host="h", port=1)


def test_a_plan_for_another_machine_needs_no_sglang() -> None:
    spec = sglang(server_python="/nowhere/python", method="ddtree", tree_budget=64, draft_model_path="d")
    argv = list(build_launch(spec, host="127.0.0.1", port=9, probe=False).argv)
    assert argv[:3] == ["/nowhere/python", "-m", "sglang.launch_server"]
    assert value(argv, "--speculative-ddtree-budget") == "64"
    assert value(argv, "--cuda-graph-bs-decode") == "1"
    with pytest.raises(UnavailableError, match="cannot ask"):
        build_launch(spec, host="127.0.0.1", port=9)
    with pytest.raises(SpecError, match="no default model"):
        build_launch(RunSpec(engine="sglang"), host="h", port=1, probe=False)


def test_prompts_that_do_not_exist_stop_a_launch_before_its_server() -> None:
    with pytest.raises(SpecError, match=r"prompt set openings has no \['fibb'\]; it has \['arith'"):
        build_launch(RunSpec.from_parameters({"prompts": ["fibb"]}), host="127.0.0.1", port=1)
    build_launch(RunSpec.from_parameters({"prompts": ["x"], "prompt_set": "random-ids"}), host="127.0.0.1", port=1)
