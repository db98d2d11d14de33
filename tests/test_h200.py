"""What a real H200 gave: the machine's own description, and a campaign of step costs, kept as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchlib import compare, frames
from benchlib.links import load_links
from benchlib.losslessness import validate_campaign
from benchlib.placement import place_gpus
from benchlib.record import load_record, load_requests
from benchlib.topology import load_topology, topology_json

MACHINE = Path(__file__).parent / "data" / "h200"
RESULTS = Path(__file__).parents[1] / "results"
CAMPAIGN = RESULTS / "h200-step-cost"


def test_the_machine_is_read_and_placed_as_it_was() -> None:
    topology = load_topology(MACHINE / "topology.json")
    assert topology_json(topology) == json.loads((MACHINE / "topology.json").read_text())
    as_text = load_topology(MACHINE / "topology.txt")
    assert (
        [(g.numa_node, g.cpus) for g in as_text.gpus] == [(g.numa_node, g.cpus) for g in topology.gpus] == [(0, "0-15")]
    )
    placement, kept = place_gpus(topology, 1), json.loads((MACHINE / "place.json").read_text())
    assert (list(placement.gpus), placement.cross_numa, placement.reason) == (
        kept["gpus"], kept["cross_numa"], kept["reason"],
    )  # fmt: skip


def test_the_doctor_found_nothing_wrong() -> None:
    found = json.loads((MACHINE / "doctor.json").read_text())
    assert found["ok"]
    names = {check["name"] for check in found["checks"]}
    assert {"device nodes", "cuInit", "GPUs free", "GPUs idle", "model files", "GPU memory"} <= names
    assert {check["status"] for check in found["checks"]} == {"ok"}


def test_every_run_is_whole_placed_and_verified() -> None:
    runs = sorted(path.parent for path in CAMPAIGN.glob("*/record.json"))
    assert len(runs) == 7
    for folder in runs:
        record = load_record(folder)
        assert (record.status, record.spec.weights) == ("ok", "random")
        assert record.server is not None
        assert record.server.placement is not None
        assert (record.server.placement.gpus, record.server.devices) == ((0,), "verified by its processes")
        assert all(request.error is None for request in load_requests(folder))


def test_step_costs_ceiling_and_energy() -> None:
    campaign = frames.load_campaign(CAMPAIGN)
    rows = {
        (r["run"], r["concurrency"]): r
        for r in frames.rows_of(compare.build_results([campaign]))
        if r["prompt"] == frames.ALL
    }
    auto = rows["tp1-auto", 1]
    assert (auto["n_starts"], auto["level"]) == (3, "start")
    assert auto["decode_tok_s"] == pytest.approx(69.76, rel=1e-3)
    assert auto["floor_share"] == pytest.approx(0.849, abs=0.002)
    assert auto["energy_per_token_j"] == pytest.approx(7.1, rel=0.05)
    chain = rows["tp1-linear-block16", 1]
    assert chain["break_even"] == pytest.approx(1.386, abs=0.002)
    assert chain["break_even_low"] < chain["break_even"] < chain["break_even_high"]
    assert rows["tp1-linear-block16", 8]["throttled_share"] > 0.05
    forced = rows["tp1-linear-forced4", 1]
    assert (forced["accept_length"], forced["simulated"]) == (4.0, True)
    # What a step costs does not depend on what it accepts.
    assert forced["step_ms"] == pytest.approx(chain["step_ms"], rel=0.005)
    assert all(row["speedup"] is None for row in rows.values())


def pooled(campaign: frames.Campaign) -> dict[tuple[str, int], dict[str, Any]]:
    found = frames.rows_of(compare.build_results([campaign]))
    return {(r["run"], r["concurrency"]): r for r in found if r["prompt"] == frames.ALL}


def test_two_gpus_scale_and_custom_all_reduce_counts() -> None:
    campaign = frames.load_campaign(RESULTS / "h200-tp")
    rows = pooled(campaign)
    assert {name for name, _ in rows} == {
        "tp1-auto", "tp2-auto", "tp2-auto-no-custom-ar", "tp2-auto-pcie-no-custom-ar", "tp2-linear-block16",
    }  # fmt: skip
    assert rows["tp2-auto", 1]["decode_tok_s"] / rows["tp1-auto", 1]["decode_tok_s"] == pytest.approx(1.643, abs=0.001)
    without = rows["tp2-auto-no-custom-ar", 1]["decode_tok_s"]
    assert without / rows["tp2-auto", 1]["decode_tok_s"] == pytest.approx(1 - 0.131, abs=0.001)
    # A shorter step leaves less to hide a verification behind: it breaks even later than on one GPU.
    assert rows["tp2-linear-block16", 1]["break_even"] == pytest.approx(1.55, abs=0.005)
    assert all(row["speedup"] is None for row in rows.values())


def test_nccl_did_as_it_was_told_on_two_gpus() -> None:
    """Read back from the servers' own logs: what carried decode's sums, and the variables in force."""
    carried, told = {}, {}
    for path in (RESULTS / "h200-tp").glob("tp2-*/record.json"):
        record = load_record(path.parent)
        assert record.nccl is not None
        assert record.server is not None
        assert record.server.devices == "verified by its processes"
        expected = record.nccl.decode_all_reduce == "custom"
        assert record.server.custom_all_reduce_expected is expected
        assert set(record.nccl.transports.values()) == {"P2P/IPC"}
        assert record.nccl.variables["NCCL_NVLS_ENABLE"] == "0"
        carried[path.parent.name] = record.nccl.decode_all_reduce
        told[path.parent.name] = record.nccl.variables.get("NCCL_PROTO")
    assert {name for name, how in carried.items() if how == "nccl"} == {n for n in carried if "no-custom-ar" in n}
    assert {name for name, protocol in told.items() if protocol == "LL"} == {n for n in told if "-pcie-" in n}


def test_measured_links_fit_their_machine() -> None:
    links = load_links(RESULTS / "h200-tp" / "links.json")
    assert links.device == "cuda"
    assert links.all_reduce_us[0][1] == pytest.approx(7.5, abs=0.1)
    assert min(links.bandwidth_gb_s[0][1] or 0, links.bandwidth_gb_s[1][0] or 0) > 350


def test_the_pair_on_sglang_is_sped_up_and_its_near_ties_are_no_fault() -> None:
    """The chain took third choices where five tokens tie: two logprobs a token cannot tell that from a fault."""
    rows = pooled(frames.load_campaign(RESULTS / "h200-mini"))
    chain = rows["tp1-linear", 1]
    assert chain["speedup_low"] > 1.5
    assert chain["n_starts"] == 2
    (check,) = validate_campaign(RESULTS / "h200-mini").methods
    assert (check.verdict, check.outputs, check.identical) == ("cannot tell", 48, 30)
    assert {(d.prompt, d.position, d.beyond) for d in check.divergences} == {("fib", 226, True), ("qsort", 69, True)}
