"""Ratios, intervals, verdicts and refusals."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchlib import compare, frames, verdicts
from benchlib.errors import ComparisonError, RecordError
from benchlib.record import RequestRecord, RunRecord
from tests import synthetic

Summary = dict[tuple[str, str], dict[str, Any]]


@cache
def summary_of(path: Path) -> Summary:
    return {(r["run"], r["prompt"]): r for r in compare.build_summary(path)}


@cache
def cells_of(path: Path) -> dict[tuple[str, str], frames.Row]:
    rounds = frames.build_rounds(frames.build_requests([frames.load_campaign(path)]))
    return {(c["run"], c["prompt"]): c for c in frames.rows_of(frames.build_cells(rounds))}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.save_campaign(tmp_path_factory.mktemp("compare"))


def test_one_start_gives_an_interval_and_no_verdict(campaign: Path) -> None:
    rows, cells = summary_of(campaign), cells_of(campaign)
    row = rows["tp1-b16", "all"]
    auto, tree = ([s / n for s, n in cells[run, "all"]["tpot_starts"][0]] for run in ("tp1-auto", "tp1-b16"))
    expected = verdicts.log_ratio(auto, tree)
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(expected[:3])
    assert row["speedup"] == pytest.approx(rows["tp1-auto", "all"]["tpot_s"] / row["tpot_s"])
    assert row["note"] == "1 start: no verdict"
    assert row["n_starts"] == 1


def test_summary_has_every_key_and_is_json(campaign: Path) -> None:
    rows = compare.build_summary(campaign)
    assert len(rows) == 12 * 5
    assert {tuple(r) for r in rows} == {compare.SUMMARY_KEYS}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    tree = next(r for r in rows if r["run"] == "tp2-b64" and r["prompt"] == "all")
    assert (tree["tp_size"], tree["tree_budget"], tree["verify_tokens"]) == (2, 64, 65)
    assert isinstance(tree["tree_budget"], int)
    assert tree["decode_tok_s_low"] < tree["decode_tok_s"] < tree["decode_tok_s_high"]


def test_auto_is_the_baseline_and_has_no_speedup(campaign: Path) -> None:
    row = summary_of(campaign)["tp2-auto", "json"]
    assert (row["speedup"], row["accept_length"], row["note"]) == (None, None, "baseline")


def test_several_starts_are_the_observations(tmp_path: Path) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), starts=3)
    path = synthetic.save_campaign(tmp_path, sweep)
    rows, cells = summary_of(path), cells_of(path)
    row = rows["tp1-b16", "all"]
    assert (row["n_starts"], row["n_requests"], row["note"]) == (3, 36, "faster")
    assert not any(run.endswith((".2", ".3")) for run, _ in rows)
    means = {
        run: [sum(s for s, _ in start) / sum(n for _, n in start) for start in cells[run, "all"]["tpot_starts"]]
        for run in ("tp1-auto", "tp1-b16")
    }
    expected = verdicts.log_ratio(means["tp1-auto"], means["tp1-b16"])
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(expected[:3])


def test_starts_on_one_side_only_give_no_verdict(tmp_path: Path) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(), starts=2)
    path = synthetic.save_campaign(tmp_path, sweep, skip=("tp1-linear.2",))
    assert summary_of(path)["tp1-linear", "all"]["note"] == "1 start: no verdict"


def test_one_round_has_no_interval_and_so_no_speedup(tmp_path: Path) -> None:
    work = synthetic.Workload(max_new_tokens=(48,), repeats=1)
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(), workload=work)
    row = summary_of(synthetic.save_campaign(tmp_path, sweep))["tp1-linear", "all"]
    assert row["decode_tok_s"] is not None
    assert (row["speedup"], row["decode_tok_s_low"], row["note"]) == (None, None, "1 round: no interval")


def test_missing_auto_leaves_rates_without_speedup(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,)), skip=("tp1-auto",))
    row = summary_of(path)["tp1-b16", "fib"]
    assert (row["speedup"], row["note"]) == (None, "no baseline")
    assert row["decode_tok_s"] > 0


@pytest.mark.parametrize(
    ("options", "note"),
    [({"weights": "random"}, "random weights"), ({"server_env": {"SIMULATE_ACC_LEN": "4"}}, "simulated acceptance")],
)
def test_what_is_not_real_never_becomes_a_speedup(tmp_path: Path, options: dict[str, Any], note: str) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), engines={"reference": options})
    rows = summary_of(synthetic.save_campaign(tmp_path, sweep))
    speculative = [r for (run, _), r in rows.items() if run != "tp1-auto"]
    assert {r["note"] for r in speculative} == {note}
    assert all(r["speedup"] is None and r["decode_tok_s"] for r in speculative)


def test_requests_without_a_rate_or_a_whole_round_say_so(tmp_path: Path) -> None:
    def cut(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        return record, [r.model_copy(update={"ticks": r.ticks[:1]}) for r in requests]

    def fail(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        return record, [r.model_copy(update={"error": "HTTP 500"}) for r in requests]

    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,))
    rows = summary_of(synthetic.save_campaign(tmp_path, sweep, changes={"tp1-b16": cut, "tp1-auto": fail}))
    assert rows["tp1-b16", "fib"]["note"] == "1 chunk: no rate"
    assert rows["tp1-auto", "fib"]["note"] == "no complete round"
    assert rows["tp1-linear", "fib"]["note"] == "no baseline"


def test_failed_run_keeps_its_rows_with_nulls_and_reason(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, changes={"tp1-b15": synthetic.fail_run})
    rows = summary_of(path)
    assert len(rows) == 60
    row = rows["tp1-b15", "all"]
    assert (row["status"], row["decode_tok_s"], row["speedup"], row["n_requests"]) == ("failed", None, None, 0)
    assert "exited with code 1" in row["error"]
    assert rows["tp1-b16", "all"]["speedup"] > 1


def test_unreadable_run_is_one_failed_row(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,)))
    (path / "tp1-b15" / "record.json").unlink()
    row = summary_of(path)["tp1-b15", "all"]
    assert (row["status"], row["tp_size"]) == ("failed", None)
    assert "did not finish" in row["error"]


def test_campaign_of_failures_alone_can_be_summed_up(tmp_path: Path) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), methods=("auto",), tree_budgets=())
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto": synthetic.fail_run})
    assert {r["status"] for r in compare.build_summary(path)} == {"failed"}
    with pytest.raises(RecordError, match="not a folder"):
        compare.build_summary(tmp_path / "none")


def test_runs_of_another_build_are_refused_by_name(tmp_path: Path) -> None:
    def rebuild(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        environment = {**record.environment, "identity": {"engine_digest": "0000"}}
        return record.model_copy(update={"environment": environment}), requests

    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,)), changes={"tp1-b16": rebuild})
    row = summary_of(path)["tp1-b16", "all"]
    assert row["speedup"] is None
    assert "engine_digest: 'feedfacefeedface' against '0000'" in row["note"]
    cells = cells_of(path)
    with pytest.raises(ComparisonError, match="engine_digest"):
        compare.compare(cells["tp1-auto", "all"], cells["tp1-b16", "all"])


@pytest.mark.parametrize(
    "field", ["tp_size", "prompt", "max_new_tokens", "concurrency", "server_args", "devices", "prompt_sha256"]
)
def test_comparison_refuses_a_difference_outside_the_method(campaign: Path, field: str) -> None:
    cells = cells_of(campaign)
    other = {**cells["tp1-b16", "fib"], field: "else"}
    with pytest.raises(ComparisonError, match=f"{field}: .* against 'else'"):
        compare.compare(cells["tp1-auto", "fib"], other)


def test_starts_made_unlike_are_not_pooled(tmp_path: Path) -> None:
    def rebuild(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        assert record.server is not None
        return record.model_copy(update={"server": record.server.model_copy(update={"version": "9"})}), requests

    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(), starts=2)
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto.2": rebuild})
    rows = summary_of(path)
    assert rows["tp1-auto", "all"]["n_starts"] == rows["tp1-auto.2", "all"]["n_starts"] == 1


def test_a_pair_is_put_in_words_or_the_reason_is(campaign: Path) -> None:
    rows = [row for (run, prompt), row in cells_of(campaign).items() if prompt == "all" and run.startswith("tp1")]
    text = compare.format_pair(rows, ["autoregressive", "DDTree b16"])
    found = compare.compare(*(row for row in rows if row["label"] in ("autoregressive", "DDTree b16")))
    assert text == (
        f"DDTree b16 over autoregressive: {found.ratio:.2f} ({found.low:.2f} to {found.high:.2f}); 1 start: no verdict"
    )
    assert "There is no b17 here: name two of autoregressive, " in compare.format_pair(rows, ["DDTree b16", "b17"])
    other = [{**row, "seed": 7} if row["label"] == "DDTree b16" else row for row in rows]
    assert "they differ in seed: 0 against 7" in compare.format_pair(other, ["autoregressive", "DDTree b16"])
    for unreal in ({"weights": "random"}, {"simulated": True}):
        changed = [{**row, **unreal} for row in rows]
        assert compare.format_pair(changed, ["autoregressive", "DDTree b16"]).startswith("No ratio of methods")


def test_scaling_is_tpot_at_one_over_tpot_at_two(campaign: Path) -> None:
    results = compare.build_results([frames.load_campaign(campaign)])
    rows = frames.rows_of(compare.build_scaling(results))
    assert len(rows) == 6 * 5
    auto = next(r for r in rows if r["run"] == "tp2-auto" and r["prompt"] == "all")
    # The synthetic TP 2 takes 0.62 of the time: 1.61 of 2.
    assert auto["scaling"] == pytest.approx(1 / 0.62, rel=0.05)
    assert auto["scaling_low"] < auto["scaling"] < auto["scaling_high"]
    assert auto["efficiency"] == pytest.approx(auto["scaling"] / 2)
    assert auto["scaling_note"] == "1 start: no verdict"


def test_scaling_needs_two_sizes(tmp_path: Path) -> None:
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(2,), tree_budgets=()))
    results = compare.build_results([frames.load_campaign(path)])
    assert len(compare.build_scaling(results)) == 0


def test_concurrent_requests_raise_throughput_over_a_streams_rate(tmp_path: Path) -> None:
    work = synthetic.Workload(max_new_tokens=(48,), concurrency=(1, 8))
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), workload=work)
    rows = compare.build_summary(synthetic.save_campaign(tmp_path, sweep))
    many = next(r for r in rows if (r["run"], r["prompt"], r["concurrency"]) == ("tp1-b16", "all", 8))
    assert many["n_requests"] == 3 * 4 * 8
    assert many["output_throughput_tok_s"] > 3 * many["decode_tok_s"]
    assert many["speedup"] == pytest.approx(
        next(r for r in rows if (r["run"], r["prompt"], r["concurrency"]) == ("tp1-auto", "all", 8))["tpot_s"]
        / many["tpot_s"]
    )


def ab_of(path: Path, prompt: str = "all") -> list[frames.Row]:
    rows = frames.rows_of(compare.build_ab(compare.build_results([frames.load_campaign(path)])))
    return [row for row in rows if row["prompt"] == prompt]


def found_in(rows: list[frames.Row], axis: str) -> dict[tuple[str, str, str], str]:
    return {(r["label"], r["a"], r["b"]): r["difference_note"] for r in rows if r["axis"] == axis}


def test_nccl_profiles_are_held_against_none(tmp_path: Path) -> None:
    sweep = synthetic.build_ab_sweep(nccl_profiles=("pcie", "none", "production"), starts=3)
    rows = {r["b"]: r for r in ab_of(synthetic.save_campaign(tmp_path, sweep))}
    assert set(rows) == {"pcie", "production"}
    assert {(r["axis"], r["a"], r["all_reduce"]) for r in rows.values()} == {("nccl_profile", "none", "custom")}
    pcie, production = rows["pcie"], rows["production"]
    # A step takes 0.9 of the time: 11% more tokens a second.
    assert pcie["difference"] == pytest.approx(1 / 0.9 - 1, abs=0.02)
    assert pcie["difference"] == pytest.approx(pcie["decode_tok_s"] / pcie["rate_a"] - 1)
    assert 0.01 < pcie["difference_low"] < pcie["difference"] < pcie["difference_high"]
    assert pcie["difference_note"] == "faster"
    assert production["difference_low"] < 0 < production["difference_high"]
    assert production["difference_note"] == "cannot decide (3 starts)"


def test_no_difference_takes_five_starts(tmp_path: Path) -> None:
    sweep = synthetic.build_ab_sweep(nccl_profiles=("none", "production"), starts=5)
    (row,) = ab_of(synthetic.save_campaign(tmp_path, sweep))
    assert row["difference_note"].startswith("no difference found (")
    assert row["difference_low"] < 0 < row["difference_high"] < 0.05


def test_each_axis_is_compared_with_the_others_equal(tmp_path: Path) -> None:
    sweep = synthetic.build_ab_sweep(
        nccl_profiles=("none", "pcie"), starts=3, numa_policies=("pack", "spread"),
        variants={"slow": {"server_args": ("--disable-custom-all-reduce",), "numa_policies": ("pack",)}},
    )  # fmt: skip
    rows = ab_of(synthetic.save_campaign(tmp_path, sweep, noise=0.002))
    auto = "autoregressive"
    assert found_in(rows, "nccl_profile") == {
        (f"{auto}, NCCL pcie", "none", "pcie"): "faster",
        (f"{auto}, NCCL pcie, spread", "none", "pcie"): "faster",
        (f"{auto}, NCCL pcie, slow", "none", "pcie"): "faster",
    }
    assert found_in(rows, "numa_policy") == {
        (f"{auto}, spread", "pack", "spread"): "slower", (f"{auto}, NCCL pcie, spread", "pack", "spread"): "slower",
    }  # fmt: skip
    assert found_in(rows, "variant") == {
        (f"{auto}, slow", "", "slow"): "slower", (f"{auto}, NCCL pcie, slow", "", "slow"): "slower",
    }  # fmt: skip
    by_way = {r["all_reduce"] for r in rows if r["axis"] == "variant"}
    assert by_way == {"custom / nccl"}


def test_a_profile_that_changed_under_its_name_is_not_compared_with_itself(tmp_path: Path) -> None:
    def edit(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        identity = {**record.environment["identity"], "nccl": "another"}
        return record.model_copy(update={"environment": {**record.environment, "identity": identity}}), requests

    sweep = synthetic.build_ab_sweep(nccl_profiles=("pcie",), starts=2)
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp4-auto-pcie.2": edit})
    assert len(cells_of(path)) == 4  # not pooled
    assert ab_of(path) == []


def test_one_start_or_round_gives_no_verdict_on_a_difference(tmp_path: Path) -> None:
    profiles = {"nccl_profiles": ("none", "pcie")}
    (row,) = ab_of(synthetic.save_campaign(tmp_path / "a", synthetic.build_ab_sweep(**profiles)))
    assert (row["difference_note"], row["difference"] > 0) == ("1 start: no verdict", True)
    work = synthetic.Workload(prompts=("fib",), max_new_tokens=(48,), repeats=1)
    (row,) = ab_of(synthetic.save_campaign(tmp_path / "b", synthetic.build_ab_sweep(**profiles, workload=work)))
    assert (row["difference_note"], row["difference"]) == ("1 round: no interval", None)


def test_nothing_to_compare_is_no_row(campaign: Path) -> None:
    assert ab_of(campaign) == []


def test_a_method_is_compared_with_the_baseline_of_its_own_profile(tmp_path: Path) -> None:
    sweep = synthetic.build_ab_sweep(tree_budgets=(16,), nccl_profiles=("none", "pcie"))
    rows = summary_of(synthetic.save_campaign(tmp_path, sweep))
    for profile in ("", "-pcie"):
        tree, auto = rows[f"tp4-b16{profile}", "all"], rows[f"tp4-auto{profile}", "all"]
        assert tree["speedup"] == pytest.approx(auto["tpot_s"] / tree["tpot_s"])
    assert rows["tp4-b16-pcie", "all"]["nccl_profile"] == "pcie"


def test_cells_without_room_keep_their_rows(tmp_path: Path) -> None:
    work = synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,), concurrency=(1, 8))
    sweep = synthetic.build_ab_sweep(tree_budgets=(64,), workload=work)
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp4-b64": synthetic.cap})
    rows = {(r["run"], r["prompt"], r["concurrency"]): r for r in compare.build_summary(path)}
    assert len(rows) == 2 * 3 * 2
    for prompt in ("fib", "json", "all"):
        row = rows["tp4-b64", prompt, 8]
        assert (row["status"], row["decode_tok_s"], row["note"]) == ("failed", None, "capped")
        assert row["error"].startswith("requests-capped: not measured: the server runs 1 requests at once")
        assert rows["tp4-b64", prompt, 1]["speedup"] is not None


# --- what only a campaign shows


def campaign_warnings(path: Path) -> list[tuple[str, str]]:
    loaded = [frames.load_campaign(path)]
    found = frames.rows_of(compare.build_warnings(loaded, compare.build_results(loaded)))
    return [(r["cells"], r["warning"]) for r in found]


def test_too_few_starts_are_warned_of(campaign: Path, tmp_path: Path) -> None:
    ((place, text),) = campaign_warnings(campaign)
    assert place == "whole campaign"
    assert text.startswith("few-starts: 12 of 12 conditions have 1: fewer than 5 server starts a side")
    assert text.endswith("`benchlib plan` says to how many, once a condition has two.")  # before that it cannot
    enough = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), starts=5)
    assert campaign_warnings(synthetic.save_campaign(tmp_path / "enough", enough)) == []
    # Where there is nothing to compare, no start is missing.
    alone = synthetic.build_sweep(tp_size=(1,), methods=("auto",), tree_budgets=())
    assert campaign_warnings(synthetic.save_campaign(tmp_path / "alone", alone)) == []


def test_a_drift_is_warned_of(tmp_path: Path) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), starts=5)

    def slower(at: int) -> synthetic.Change:
        def change(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
            late = [
                r.model_copy(update={"ticks": tuple((t * (1 + 0.03 * at), n) for t, n in r.ticks)}) for r in requests
            ]
            return record.model_copy(update={"started_at": f"2026-11-29T12:{at:02}:00+00:00"}), late

        return change

    changes = {run.run_name: slower(at) for at, run in enumerate(sweep.runs())}
    ((place, text),) = campaign_warnings(synthetic.save_campaign(tmp_path, sweep, changes=changes))
    assert place == "96 new tokens, 1 at once"
    assert text.startswith("drift: Drift: from first to last start the same condition became")
    assert "slower" in text


def test_mixed_devices_are_warned_of(tmp_path: Path) -> None:
    def elsewhere(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        return record.model_copy(update={"environment": {**record.environment, "cpu_model": "Other CPU"}}), requests

    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), starts=5)
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto.2": elsewhere})
    texts = [text for _, text in campaign_warnings(path)]
    assert "mixed-devices: its runs were made on Example CPU 9000 and on Other CPU. Compare only" in "".join(texts)


def test_the_forecast_is_pooled_over_steps(tmp_path: Path) -> None:
    """(2.0 x 30 steps + 5.0 x 10) / 40 = 2.75; where one request does not tell, there is none."""
    spec = synthetic.build_sweep(tp_size=(1,), methods=("linear",), tree_budgets=()).runs()[0]
    record, requests = synthetic.build_run(spec)
    short = [r.model_copy(update={"verify_ct": 30 if r.prompt == "fib" else 10}) for r in requests]
    told = [r.model_copy(update={"forecast_length": 2.0 if r.prompt == "fib" else 5.0}) for r in short]

    def pooled(*prompts: str, silent: str = "") -> Any:
        kept = [r.model_copy(update={"forecast_length": None}) if r.prompt == silent else r for r in told]
        kept = [r for r in kept if r.prompt in prompts]
        work = record.spec.workload.model_copy(update={"prompts": prompts})
        cells = tuple(c for c in record.cells if c.prompt in prompts)
        own = record.model_copy(update={"spec": record.spec.model_copy(update={"workload": work}), "cells": cells})
        loaded = frames.Campaign("c", (frames.LoadedRun("c", "tp1-linear", own, kept),))
        rows = frames.rows_of(frames.build_cells(frames.build_rounds(frames.build_requests([loaded]))))
        return next(r["forecast_length"] for r in rows if r["prompt"] == frames.ALL)

    assert pooled("fib", "qsort") == pytest.approx(2.75)
    assert pooled("fib", "qsort", silent="qsort") is None
