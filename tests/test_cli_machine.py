"""The commands about the machine: what they print, as text and as JSON, their exit codes, and no traceback."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchlib import links
from benchlib.errors import PlacementError
from benchlib.links import Links, load_links, save_links
from benchlib.record import RunRecord, save_run
from benchlib.spec import load_sweep

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
SEED = DATA / "topology" / "seed_8x_pcie_two_sockets.txt"
HELD: dict[str, Any] = {"processes": ((4242, "python", 48 * 2**30),)}


def measured(uuids: tuple[str, ...], fast: tuple[int, int]) -> Links:
    """Every pair takes 40 us but one, which takes 10."""
    time = {pair: 10.0 if pair == fast else 40.0 for pair in combinations(range(len(uuids)), 2)}
    size = range(len(uuids))
    rows = tuple(tuple(None if i == j else time[min(i, j), max(i, j)] for j in size) for i in size)
    return Links(uuids, rows, rows, rows, "cuda", "2026-01-01T00:00:00+00:00", 5)


# ---- topology


def test_topology_of_a_saved_machine(run: Any) -> None:
    code, out, err = run("topology", "--from", SEED)
    assert (code, err) == (0, "")
    header, first, *_ = out.splitlines()
    assert header.split() == [*(f"GPU{i}" for i in range(8)), "CPU", "Affinity", "NUMA", "Affinity"]
    assert first.split() == ["GPU0", "X", *["NODE"] * 3, *["SYS"] * 4, "0-31", "0"]
    data = json.loads(run("topology", "--from", SEED, "--json")[1])
    assert (data["gpus"][5]["numa_node"], data["links"][0][:2], data["source"]) == (1, ["X", "NODE"], str(SEED))


def test_topology_of_this_machine(run: Any, pretend: Any) -> None:
    states = pretend()
    out = run("topology")[1]
    assert f"GPU 7: {states[7].name}, {states[7].uuid}" in out.splitlines()
    pretend("no_gpu")
    assert run("topology") == (1, "", "error: no NVIDIA GPU here\n")


def test_topology_measures_and_stores(run: Any, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tuple(str(s.uuid) for s in pretend()), (1, 5))
    asked: list[str] = []
    monkeypatch.setattr(links, "measure_links", lambda python: asked.append(python) or found)
    out = tmp_path / "new" / "links.json"
    code, text, _ = run("topology", "--measure", "--python", "/opt/python", "--out", out)
    assert (code, asked, load_links(out)) == (0, ["/opt/python"], found)
    assert f"stored in {out}" in text
    assert "warning: GPUs 1 and 5 (SYS) all-reduce in 10.0 us, faster than" in text
    code, text, _ = run("topology", "--measure", "--out", out, "--json")
    assert json.loads(text)["all_reduce_us"][1][5] == 10.0


def test_a_failed_probe_is_one_message(run: Any, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()

    def fail(python: str) -> Links:
        raise PlacementError("the link probe failed: no torch")

    monkeypatch.setattr(links, "measure_links", fail)
    assert run("topology", "--measure", "--out", tmp_path / "l.json") == (
        1, "", "error: the link probe failed: no torch\n",
    )  # fmt: skip
    assert not (tmp_path / "l.json").exists()


# ---- place


def test_place_says_which_and_why(run: Any) -> None:
    assert run("place", 4, "--from", SEED) == (
        0, "GPUs 0-3 (worst link NODE, NUMA node 0); the runner-up 4-7 is equal and has higher indices.\n", "",
    )  # fmt: skip
    data = json.loads(run("place", 4, "--from", SEED, "--busy", "0, 2", "--json")[1])
    assert (data["gpus"], data["numa_nodes"], data["worst_link"]) == ([4, 5, 6, 7], [1], "NODE")


def test_a_worse_set_must_be_allowed(run: Any) -> None:
    code, out, err = run("place", 4, "--from", SEED, "--busy", "0,4")
    assert (code, out) == (1, "")
    assert err.startswith("error: tp_size=4: the whole machine would give GPUs 0-3")
    code, out, _ = run("place", 4, "--from", SEED, "--busy", "0,4", "--numa-policy", "allow-cross")
    assert code == 0
    assert "Worse than need be" in out
    assert run("place", 4, "--from", SEED, "--numa-policy", "spread")[1].startswith("GPUs 0-1,4-5 ")


def test_place_on_this_machine(run: Any, pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(gpus={1: HELD})
    assert run("place", 4)[1].startswith("GPUs 4-7 ")
    # A saved machine is another's: nothing is busy there.
    assert run("place", 4, "--from", SEED)[1].startswith("GPUs 0-3 ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    code, _, err = run("place", 4)
    assert code == 1
    assert "GPU 1 (PID 4242 python holds 48.0 GiB)" in err
    assert "GPUs 4-7 (outside CUDA_VISIBLE_DEVICES=0,1,2,3 of this process)" in err


def test_place_by_measured_links(run: Any, pretend: Any, tmp_path: Path) -> None:
    save_links(measured(tuple(str(s.uuid) for s in pretend()), (3, 6)), tmp_path / "l.json")
    out = run("place", 2, "--links", tmp_path / "l.json")[1]
    assert out.startswith("GPUs 3,6 (worst link SYS, by measurement 10.0 us an all-reduce, NUMA nodes 0-1)")


# ---- nccl


def test_profiles_as_shell_lines(run: Any) -> None:
    code, out, _ = run("nccl", "production")
    assert code == 0
    exports = [line for line in out.splitlines() if line.startswith("export ")]
    assert exports == ["export NCCL_IB_DISABLE=1", "export NCCL_P2P_LEVEL=5", "export NCCL_MIN_NCHANNELS=8"]
    assert out.count("Risk: ") == 3
    every = run("nccl")[1]
    assert {"# none", "# production", "# pcie"} <= {line.partition(":")[0] for line in every.splitlines()}
    assert json.loads(run("nccl", "none", "--json")[1]) == {"none": {}}


def test_own_profiles(run: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[profiles.mine]\nNCCL_ALGO = 'Ring'\n")
    assert "export NCCL_ALGO=Ring" in run("nccl", "mine", "--profiles", own)[1]
    assert set(json.loads(run("nccl", "--profiles", own, "--json")[1])) == {"none", "production", "pcie", "mine"}


def test_what_nccl_did_is_read_back_from_a_log(run: Any) -> None:
    log = DATA / "nccl" / "tp2_nccl_pcie.log"
    out = run("nccl", "--log", log)[1]
    assert out.startswith("decode all-reduce        nccl (")
    assert "NCCL_PROTO               LL" in out.splitlines()
    assert json.loads(run("nccl", "--log", log, "--json")[1])["nranks"] == 2


def test_a_log_that_was_compressed_to_be_kept_reads_the_same(run: Any, tmp_path: Path) -> None:
    log, packed = DATA / "nccl" / "tp2_nccl_pcie.log", tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert run("nccl", "--log", packed, "--json") == run("nccl", "--log", log, "--json")
    kept = ROOT / "results" / "h200-tp" / "tp2-auto" / "server.log.gz"
    assert json.loads(run("nccl", "--log", kept, "--json")[1])["decode_all_reduce"] == "custom"


# ---- doctor


def test_doctor_passes_a_healthy_machine(run: Any, pretend: Any) -> None:
    pretend()
    code, out, err = run("doctor", "--tp-size", 8)
    assert (code, err) == (0, "")
    assert "ok    GPUs: 8 x NVIDIA RTX PRO 6000" in out
    assert "FAIL" not in out


def test_doctor_without_a_gpu(run: Any, pretend: Any) -> None:
    pretend("no_gpu")
    code, out, err = run("doctor")
    assert (code, err) == (3, "")
    failed, why, do, *_ = out.splitlines()
    assert failed.startswith("FAIL  device nodes: no NVIDIA GPU is visible")
    assert why.startswith("      why: ")
    assert do.startswith('      do:  Run with engine "reference"')
    code, out, _ = run("doctor", "--engine", "reference")
    assert (code, "FAIL" in out) == (0, False)
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert (code, data["ok"]) == (3, False)
    assert {"name", "status", "saw", "why", "remedy"} == set(data["checks"][0])
    assert json.loads(run("doctor", "--engine", "reference", "--json")[1])["ok"] is True


def test_doctor_of_a_sweep_checks_its_models_sizes_and_boot(
    run: Any, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(gpus={1: HELD, 5: HELD})
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "s.toml"
    sweep.write_text(
        'name = "c"\nengine = "sglang"\ntp_size = [1, 4]\nmethods = ["auto"]\n[engines.sglang]\nmodel_path = "./none"\n'
    )
    code, out, _ = run("doctor", sweep)
    assert code == 3
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert [line.partition(":")[0] for line in failed] == ["FAIL  model files", "FAIL  placement"]
    assert "tp4-auto: tp_size=4: the whole machine would give GPUs 0-3" in failed[1]
    assert "boot" not in out  # nothing was measured yet
    (spec, *_) = load_sweep(sweep).runs()
    record = RunRecord(
        status="ok", spec=spec, identity="x", started_at="2030-01-01", duration_s=1, environment={"boot_id": "old"}
    )
    save_run(Path("results/c/tp1-auto"), record, [])
    assert "warn  boot: rebooted since the campaign began" in run("doctor", sweep)[1]
    pretend("no_gpu")
    code, out, _ = run("doctor", sweep, "--engine", "reference")
    assert (code, "device nodes" in out) == (0, False)


# ---- tune


def test_a_register_is_explained(run: Any) -> None:
    code, out, _ = run("tune", "--devctl", "0x2937", "--max-read-request", 4096, "--against", "0x5036")
    lines = [line.strip() for line in out.splitlines()]
    assert (code, lines[0]) == (0, "Device Control 0x2937")
    assert "max read request size (bits 14:12): 512 bytes" in lines
    at = lines.index("max read request 4096 bytes: 0x2937 -> 0x5937")
    assert lines[at + 1 :] == [
        "setpci -s <device> CAP_EXP+8.w=5000:7000",
        "Writing 0x5036 whole gives max read request 4096 bytes and would also change:",
        "correctable error reporting (bit 0): on -> off",
        "extended tags (bit 8): on -> off",
        "no snoop (bit 11): on -> off",
    ]


def test_the_hosts_tuning_is_shown_and_nothing_changed(run: Any) -> None:
    code, out, _ = run("tune")
    assert (code, out.splitlines()[-1].startswith("Nothing was changed.")) == (0, True)
    names = [row["name"] for row in json.loads(run("tune", "--json")[1])]
    assert names[:4] == ["kernel.numa_balancing", "kernel.nmi_watchdog", "cpu_governor", "transparent_hugepage"]


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["topology", "--from", "nowhere.txt"], 1, "cannot read the topology file nowhere.txt"),
        (["topology", "--from", ROOT / "README.md"], 1, "holds no topology"),
        (["topology", "--from", SEED, "--measure"], 2, "--measure times this machine's links: leave out --from"),
        (["place", "four"], 2, "Invalid value for"),
        (["place", 9, "--from", SEED], 1, "tp_size=9 needs as many GPUs"),
        (["place", 0, "--from", SEED], 2, "Invalid value for"),
        (["place", 4, "--from", SEED, "--busy", "1;2"], 2, "--busy '1;2' holds '1;2'"),
        (["place", 4, "--from", SEED, "--busy", "9"], 1, "busy names GPU 9"),
        (["place", 4, "--from", SEED, "--numa-policy", "near"], 2, "is none of pack, allow-cross, spread"),
        (["place", 4, "--from", SEED, "--links", "nowhere.json"], 1, "cannot read measured links"),
        (["nccl", "fast"], 2, "no NCCL profile 'fast'; there are none, pcie, production"),
        (["nccl", "--log", "nowhere.log"], 2, "cannot read the log nowhere.log"),
        (["nccl", "--profiles", "nowhere.toml"], 2, "cannot read the NCCL profiles"),
        (["doctor", "nowhere.toml"], 2, "cannot read the sweep file"),
        (["doctor", "--engine", "vllm"], 2, "engine"),
        (["doctor", "--tp-size", 0], 2, "tp_size"),
        (["tune", "--devctl", "red"], 2, "'red' is no register value"),
        (["tune", "--devctl", "0x12345"], 2, "is no register value of 16 bits"),
        (["tune", "--devctl", "0x2937", "--max-read-request", 100], 2, "100 bytes cannot be set"),
        (["tune", "--max-read-request", 512], 2, "need --devctl"),
        (["tune", "--against", "0x1"], 2, "need --devctl"),
        (["tune", "--devctl", "0x2937", "--json"], 2, "leave out --devctl"),
        (["nccl", "fast", "--log", ROOT / "README.md"], 2, "no NCCL profile 'fast'"),
    ],
)
def test_mistakes_are_one_message(run: Any, arguments: list[Any], code: int, expected: str) -> None:
    left, out, err = run(*arguments)
    assert (left, out) == (code, "")
    assert expected in err
    assert "Traceback" not in err


def test_json_of_a_topology_is_read_back(run: Any, pretend: Any, tmp_path: Path) -> None:
    pretend()
    saved = tmp_path / "t.json"
    saved.write_text(run("topology", "--json")[1])
    again = json.loads(run("topology", "--from", saved, "--json")[1])
    assert again == json.loads(saved.read_text())
