"""Records to frames: what is pooled, what is left out, and what is kept though it failed."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from benchlib import frames
from benchlib.errors import RecordError
from benchlib.record import RequestRecord, RunRecord
from benchlib.spec import RunSpec, Workload
from tests import synthetic


def load(path: Path) -> list[frames.Campaign]:
    return frames.load_campaigns([path])


def cells_of(path: Path) -> list[frames.Row]:
    return frames.rows_of(frames.build_cells(frames.build_rounds(frames.build_requests(load(path)))))


def rounds_of(path: Path) -> list[frames.Row]:
    return frames.rows_of(frames.build_rounds(frames.build_requests(load(path))))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.save_campaign(tmp_path_factory.mktemp("frames"))


def test_every_request_is_a_row_and_warmups_stay_apart(campaign: Path) -> None:
    requests = frames.build_requests(load(campaign))
    assert len(requests) == 12 * 4 * (1 + 3)
    assert int(requests["warmup"].sum()) == 12 * 4
    # Only timed rounds, and the same rounds pooled over prompts: 12 runs x 3 rounds x (4 + all).
    assert len(frames.build_rounds(requests)) == 12 * 3 * 5


def test_pooled_row_divides_sums_by_sums(campaign: Path) -> None:
    cells = cells_of(campaign)
    mine = {c["prompt"]: c for c in cells if c["run"] == "tp1-b16"}
    seconds, tokens, accepted, steps = 0.0, 0, 0, 0
    for line in (campaign / "tp1-b16" / "requests.jsonl").read_text().splitlines():
        r = json.loads(line)
        if not r.get("warmup"):
            (first_t, first_n), (last_t, last_n) = r["ticks"][0], r["ticks"][-1]
            seconds, tokens = seconds + last_t - first_t, tokens + last_n - first_n
            accepted, steps = accepted + r["correct_drafts"], steps + r["verify_ct"]
    pooled = mine["all"]
    assert pooled["accept_length"] == pytest.approx(1 + accepted / steps)
    assert sum(s for s, _ in pooled["tpot_starts"][0]) == pytest.approx(seconds)
    assert sum(n for _, n in pooled["tpot_starts"][0]) == tokens
    assert pooled["n_requests"] == 12
    assert mine["fib"]["n_requests"] == 3
    assert pooled["budget_efficiency"] == pytest.approx(pooled["accept_length"] / 17)
    assert pooled["step_ms"] == pytest.approx(1000 * seconds / steps)
    assert pooled["accept_length_macro"] == pytest.approx(sum(mine[p]["accept_length"] for p in synthetic.PROMPTS) / 4)
    assert pooled["output_throughput_tok_s"] == pytest.approx(pooled["completion_tokens"] / pooled["window_s"])


def test_auto_has_no_acceptance_and_steps_of_one_token(campaign: Path) -> None:
    cells = cells_of(campaign)
    auto = next(c for c in cells if c["run"] == "tp1-auto" and c["prompt"] == "all")
    assert auto["accept_length"] is None
    assert auto["full_block_share"] is None
    assert auto["verify_tokens"] is None
    assert auto["step_ms"] == pytest.approx(synthetic.STEP_MS[1], rel=0.05)


def test_failed_request_takes_its_round_out_and_is_counted(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, changes={"tp1-b16": synthetic.fail_request})
    rounds = [r for r in rounds_of(path) if r["run"] == "tp1-b16"]
    assert [(r["n_failed"], r["complete"]) for r in rounds if r["prompt"] == "fib"] == [
        (1, False),
        (0, True),
        (0, True),
    ]
    # Round 0 lacks fib, so it cannot stand for all prompts.
    assert [r["round"] for r in rounds if r["prompt"] == "all"] == [1, 2]


def test_concurrent_round_without_one_stream_is_no_round(tmp_path: Path) -> None:
    work = Workload(prompts=("fib",), max_new_tokens=(32,), concurrency=(8,))
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(), workload=work)
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto": synthetic.fail_request})
    broken, *whole = [r for r in rounds_of(path) if r["run"] == "tp1-auto" and r["prompt"] == "fib"]
    assert (broken["n_requests"], broken["n_failed"], broken["complete"]) == (7, 1, False)
    assert [r["n_requests"] for r in whole] == [8, 8]
    assert [r["peak_concurrency"] for r in whole] == [8, 8]


def test_failed_and_unreadable_runs_are_listed_with_reasons(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, changes={"tp2-b64": synthetic.fail_run})
    (path / "tp1-b15" / "record.json").write_text("{")
    (path / "tp1-b32" / "requests.jsonl").write_text("")
    (path / "tp9-b99").mkdir()
    (path / "tp9-b99" / "server.log").write_text("killed")
    (path / "superseded").mkdir()
    loaded = load(path)
    reasons = dict(frames.build_failures(loaded).itertuples(index=False))
    assert set(reasons) == {"tp2-b64", "tp1-b15", "tp1-b32", "tp9-b99"}
    assert "exited with code 1" in reasons["tp2-b64"]
    assert "SHA-256" in reasons["tp1-b32"]
    assert len(loaded[0].runs) == 10


def test_empty_missing_and_doubled_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a folder"):
        frames.load_campaign(tmp_path / "nothing")
    with pytest.raises(RecordError, match="holds no run"):
        frames.load_campaign(tmp_path)
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,)))
    with pytest.raises(RecordError, match="one name"):
        frames.load_campaigns([path, path])


def test_relative_folders_are_found_below_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert frames.find_folder("benchlib/prompts").name == "prompts"
    assert frames.find_file("benchlib/prompts/openings.toml").is_absolute()
    with pytest.raises(RecordError, match="benchlib/prompts is not a file"):
        frames.find_file("benchlib/prompts")


def test_one_run_is_read_as_its_campaign_reads_it(campaign: Path) -> None:
    run = frames.load_run(campaign / "tp1-b16")
    assert (run.campaign, run.name, len(run.requests)) == ("synthetic", "tp1-b16", 16)
    assert run in frames.load_campaign(campaign).runs


def test_one_token_requests_have_no_decode_rate(tmp_path: Path) -> None:
    def cut(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        return record, [r.model_copy(update={"ticks": r.ticks[:1]}) for r in requests]

    sweep = synthetic.build_sweep(tp_size=(1,), methods=("auto",), tree_budgets=())
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto": cut})
    cells = cells_of(path)
    assert {c["tpot_starts"] for c in cells} == {()}
    assert all(c["ttft_s"] > 0 for c in cells)


def test_devices_are_named_by_the_record() -> None:
    record, _ = synthetic.build_run(RunSpec())
    assert frames.device_label(record) == "Example CPU 9000"
    assert record.server is not None
    on_gpu = record.server.model_copy(update={"info": {"device": "cuda"}})
    both = {"gpus": [{"name": "Example GPU", "driver": "1.2"}] * 2, "cpu_model": "Example 9000"}
    assert frames.device_label(record.model_copy(update={"environment": both, "server": on_gpu})) == "Example GPU"
    bare = record.model_copy(update={"environment": {}, "server": None})
    assert frames.device_label(bare) == "device not recorded"


def test_an_engine_on_the_cpu_is_never_labelled_as_a_gpu() -> None:
    record, _ = synthetic.build_run(RunSpec())
    both = {"gpus": [{"name": "Example GPU", "driver": "1.2"}], "cpu_model": "Example 9000"}
    on_cpu = record.model_copy(update={"environment": both})
    assert frames.device_label(on_cpu) == "Example 9000 (CPU)"
    run = frames.LoadedRun("c", "tp1-auto", on_cpu, [])
    assert "driver" not in set(frames.build_provenance([frames.Campaign("c", (run,))])["item"])
    # A server that died before it said what it runs on may have been on either.
    died = record.model_copy(update={"environment": both, "server": None, "status": "failed"})
    assert frames.device_label(died) == "device not recorded"


def test_simulated_acceptance_is_seen_in_flags_and_variables() -> None:
    for spec in (RunSpec(server_env={"SGLANG_SIMULATE_ACC_LEN": "4"}), RunSpec(server_args=("--simulate-acc-len",))):
        record, requests = synthetic.build_run(spec)
        run = frames.LoadedRun("c", spec.run_name, record, requests)
        assert frames.condition_of(run)["simulated"] is True


def test_provenance_counts_runs_and_shows_no_private_item(campaign: Path) -> None:
    table = frames.build_provenance(load(campaign))
    rows = {r["item"]: r for r in frames.rows_of(table)}
    assert rows["device"] == {"item": "device", "value": "Example CPU 9000", "runs": 12}
    assert rows["commit"]["value"] == "0123456789ab"
    assert "127.0.0.1" not in table.to_string()


def test_warnings_of_cells_and_run_are_joined() -> None:
    record, requests = synthetic.build_run(RunSpec())
    cells = tuple(c.model_copy(update={"warnings": ("high-spread: much",)}) for c in record.cells)
    record = record.model_copy(update={"cells": cells, "warnings": ("machine-busy: very",)})
    campaign = frames.Campaign("c", (frames.LoadedRun("c", "tp1-auto", record, requests),))
    rows = frames.rows_of(frames.build_warnings([campaign]))
    assert [r["warning"] for r in rows] == ["machine-busy: very", "high-spread: much"]
    assert rows[1]["cells"] == "fib 256 x1, qsort 256 x1, arith 256 x1, json 256 x1"


def test_warnings_are_condensed_to_one_row_a_kind() -> None:
    found = pd.DataFrame(
        [
            ("tp1-auto", "fib 96 x1", "high-spread: 9%. Raise repeats."),
            ("tp1-b16", "fib 96 x1", "high-spread: 8%. Raise repeats."),
            ("tp1-auto", "whole run", "attached: the server was started elsewhere."),
        ],
        columns=["run", "cells", "warning"],
    )
    assert frames.rows_of(frames.condense_warnings(found)) == [
        {"warning": "high-spread", "where": "2 runs", "text": "tp1-auto, fib 96 x1: 9%. Raise repeats."},
        {"warning": "attached", "where": "tp1-auto", "text": "the server was started elsewhere."},
    ]
    assert frames.condense_warnings(found.iloc[:0]).empty


def test_a_campaign_says_of_itself_whether_it_is_lossless(tmp_path: Path) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,))
    rows = frames.rows_of(frames.build_validation([frames.load_campaign(synthetic.save_campaign(tmp_path, sweep))]))
    # Synthetic requests have no tokens, so nothing can be said of them.
    assert [(r["condition"], r["verdict"], r["identical outputs"]) for r in rows] == [
        ("tp1-linear", "cannot tell", "0 of 0"), ("tp1-b16", "cannot tell", "0 of 0"),
    ]  # fmt: skip
    sample = Path(__file__).parents[1] / "results" / "laptop-sample"
    rows = frames.rows_of(frames.build_validation([frames.load_campaign(sample)]))
    assert {(r["verdict"], r["identical outputs"], r["why"]) for r in rows} == {
        ("lossless", "12 of 12", "all outputs are auto's own")
    }
    assert len(rows) == 10
