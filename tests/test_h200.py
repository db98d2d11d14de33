"""What a real H200 gave: the machine's own description, and a campaign of step costs, kept as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchlib import compare, frames
from benchlib.placement import place_gpus
from benchlib.record import load_record, load_requests
from benchlib.topology import load_topology, topology_json

MACHINE = Path(__file__).parent / "data" / "h200"
CAMPAIGN = Path(__file__).parents[1] / "results" / "h200-step-cost"


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
