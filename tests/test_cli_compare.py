"""`compare`: two campaigns cell by cell, what may differ, what may not, and when the gate fails."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchlib.cli_compare import app, compare_campaigns
from benchlib.errors import ComparisonError, RecordError, SpecError
from benchlib.record import RequestRecord, RunRecord
from benchlib.verdicts import log_ratio
from tests import synthetic

RUNS = ("tp1-auto", "tp1-linear", "tp1-b16")


def build(folder: Path, *, starts: int = 5, pace: float = 1.0, changes: Any = None, **sweep: Any) -> Path:
    """A campaign whose clock runs `pace` times as slow, each of its starts 0.3 % off at random."""
    rng = random.Random(str(folder.name))

    def slow(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        k = pace * (1 + rng.gauss(0, 0.003))
        slowed = [
            r.model_copy(update={"ticks": tuple((t * k, n) for t, n in r.ticks), "end_s": r.end_s and r.end_s * k})
            for r in requests
        ]
        record, slowed = changes(record, slowed) if changes else (record, slowed)
        return record, slowed

    options = {"tp_size": (1,), "tree_budgets": (16,), "starts": starts, **sweep}
    plan = synthetic.build_sweep(workload=synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,)), **options)
    return synthetic.save_campaign(folder, plan, changes={s.run_name: slow for s in plan.runs()}, noise=0.001)


def rebuilt(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
    """Another version of the engine, of another commit."""
    identity = {**record.environment["identity"], "engine_digest": "0000"}
    git = {"commit": "f" * 40, "dirty": False}
    environment = {**record.environment, "identity": identity, "git": git}
    assert record.server is not None
    server = record.server.model_copy(update={"version": "0.2.0"})
    return record.model_copy(update={"environment": environment, "server": server}), requests


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("slower"), pace=1.06, changes=rebuilt)


def invoke(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_slower_campaign_fails_the_gate(before: Path, slower: Path) -> None:
    code, out = invoke(before, slower, "--json")
    found = json.loads(out)
    assert code == 3
    rows = found["comparisons"]
    assert {(r["run"], r["prompt"]) for r in rows} == {(run, p) for run in RUNS for p in ("all", "fib", "json")}
    assert all(r["worse"] and r["verdict"] == "slower" for r in rows)
    assert all(0.93 < r["low"] < r["ratio"] < r["high"] < 0.98 for r in rows)
    assert all(r["after"] / r["before"] == pytest.approx(r["ratio"]) for r in rows)
    assert all((r["n_before"], r["n_after"], r["level"]) == (5, 5, "start") for r in rows)
    assert all(r["p_value"] <= r["p_adjusted"] < 0.05 for r in rows)
    assert found["not_comparable"] == []


def test_what_differs_on_purpose_is_named(before: Path, slower: Path) -> None:
    found = compare_campaigns(before, slower)
    assert found["differs"] == {
        "engine_version": [["0.1.0"], ["0.2.0"]],
        "engine_digest": [["feedfacefeedface"], ["0000"]],
        "commit": [["0123456789ab"], ["f" * 12]],
    }
    assert "engine_version" in found["may_differ"]
    _, out = invoke(before, slower)
    assert "differs: engine_version: 0.1.0 -> 0.2.0\n" in out
    assert "tp1-b16 all 48 x1: " in out
    assert out.endswith("9 of 9 worse than 2%\n")


def test_within_the_threshold_is_slower_and_passes(before: Path, slower: Path) -> None:
    code, out = invoke(before, slower, "--threshold", "0.1")
    assert (code, out.count(": slower\n")) == (0, 9)
    assert out.endswith("0 of 9 worse than 10%\n")


def test_a_faster_or_equal_campaign_passes(before: Path, slower: Path, tmp_path: Path) -> None:
    assert {r["verdict"] for r in compare_campaigns(slower, before)["comparisons"]} == {"faster"}
    assert invoke(slower, before)[0] == 0
    code, out = invoke(before, build(tmp_path / "again"))
    assert code == 0
    assert out.count(" would show)\n") == 9


@pytest.mark.parametrize("metric", ["tpot_s", "ttft_s", "step_ms", "output_throughput_tok_s"])
def test_every_metric_says_slower_for_a_slower_clock(before: Path, slower: Path, metric: str) -> None:
    rows = compare_campaigns(before, slower, metric=metric)["comparisons"]
    assert all(
        r["verdict"] == "slower" and r["worse"] and r["ratio"] == pytest.approx(1 / 1.06, abs=0.01) for r in rows
    )
    grew = [r["after"] / r["before"] for r in rows]
    assert all((g > 1) == (metric != "output_throughput_tok_s") for g in grew)


def test_figures_are_those_of_the_summary(before: Path) -> None:
    from benchlib.compare import build_summary

    summary = {(r["run"], r["prompt"]): r for r in build_summary(before)}
    for metric, scale in {"decode_tok_s": 1, "tpot_s": 1}.items():
        for row in compare_campaigns(before, before, metric=metric)["comparisons"]:
            assert row["before"] == pytest.approx(scale * summary[row["run"], row["prompt"]][metric])
    rows = compare_campaigns(before, before, metric="step_ms")["comparisons"]
    assert all(r["before"] == pytest.approx(summary[r["run"], r["prompt"]]["step_ms"], rel=0.001) for r in rows)


def test_the_gate_is_fewer_than_all_when_one_cell_alone_is_worse(before: Path, tmp_path: Path) -> None:
    def one(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        if record.spec.method != "ddtree":
            return record, requests
        stretch = [r.model_copy(update={"ticks": tuple((t * 1.1, n) for t, n in r.ticks)}) for r in requests]
        return record, [s if r.prompt == "fib" else r for s, r in zip(stretch, requests, strict=True)]

    code, out = invoke(before, build(tmp_path, changes=one), "--json")
    worse = {(r["run"], r["prompt"]) for r in json.loads(out)["comparisons"] if r["worse"]}
    assert code == 3
    assert worse == {("tp1-b16", "fib"), ("tp1-b16", "all")}


def test_sides_are_independent_though_their_starts_have_equal_numbers(before: Path, slower: Path) -> None:
    row = next(r for r in compare_campaigns(before, slower)["comparisons"] if r["prompt"] == "all")
    from benchlib import frames

    sides = []
    for path in (before, slower):
        rounds = frames.rows_of(frames.build_rounds(frames.build_requests([frames.load_campaign(path)])))
        cell = [r for r in rounds if r["prompt"] == "all" and r["method"] == row["method"]]
        starts = frames.grouped(cell, ("run",))
        sides.append([sum(r["decode_s"] for r in s) / sum(r["decode_tokens"] for r in s) for s in starts])
    assert (row["ratio"], row["low"], row["high"], row["p_value"]) == pytest.approx(log_ratio(*sides))


def test_one_start_or_few_never_fail_the_gate_by_luck(before: Path, tmp_path: Path) -> None:
    single = build(tmp_path / "one", starts=1, pace=1.3)
    code, out = invoke(before, single)
    assert (code, out.count("1 start: no verdict\n")) == (0, 9)
    three = build(tmp_path / "three", starts=3, pace=1.005)
    code, out = invoke(before, three, "--threshold", "0%")
    assert (code, out.count("cannot decide (3 starts)\n")) == (0, 9)


def test_what_does_not_match_is_listed_with_the_reason(before: Path, tmp_path: Path) -> None:
    def other(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        if record.spec.run_name == "tp1-linear":
            return synthetic.fail_run(record, requests)
        if record.spec.method != "auto":
            return record, requests
        identity = {**record.environment["identity"], "variables": {"OMP_NUM_THREADS": "1"}}
        return record.model_copy(update={"environment": {**record.environment, "identity": identity}}), requests

    found = compare_campaigns(before, build(tmp_path, starts=2, tree_budgets=(16, 32), changes=other), metric="tpot_s")
    assert {r["run"] for r in found["comparisons"]} == {"tp1-linear", "tp1-b16"}
    assert {(r["n_before"], r["n_after"], r["level"]) for r in found["comparisons"] if r["run"] == "tp1-b16"} == {
        (5, 2, "start")
    }
    reasons = {(r["run"], r.get("prompt")): r["reason"] for r in found["not_comparable"]}
    assert reasons["tp1-auto", "fib"] == "variables: '' against 'OMP_NUM_THREADS=1'"
    assert reasons["tp1-b32", "all"] == "not measured in A"
    assert reasons["tp1-linear", None].startswith("failed in B: sglang exited with code 1")
    assert len(reasons) == 3 + 3 + 1


def test_what_failed_or_vanished_fails_the_gate(before: Path, tmp_path: Path) -> None:
    """A condition that no longer runs is no improvement; one that is new is."""

    def broken(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        return synthetic.fail_run(record, requests) if record.spec.method == "linear" else (record, requests)

    assert invoke(before, build(tmp_path / "broken", changes=broken))[0] == 3
    assert invoke(before, build(tmp_path / "gone", methods=("auto",)))[0] == 3
    assert invoke(before, build(tmp_path / "new", tree_budgets=(16, 32)))[0] == 0


def test_what_a_had_not_measured_fails_no_gate(before: Path, tmp_path: Path) -> None:
    """A run that failed in A as well, and one that is new and fails."""

    def broken(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        whole = record.spec.method == "auto" or record.spec.tree_budget == 16
        return (record, requests) if whole else synthetic.fail_run(record, requests)

    a = build(tmp_path / "a", changes=broken)
    assert invoke(a, build(tmp_path / "b", changes=broken))[0] == 0
    assert invoke(a, build(tmp_path / "new", changes=broken, tree_budgets=(16, 32)))[0] == 0
    assert invoke(before, build(tmp_path / "worse", changes=broken))[0] == 3


def test_rounds_that_were_lost_fail_the_gate(before: Path, tmp_path: Path) -> None:
    """One start with one round left is no measurement beside three of it."""

    def cut(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        keep = record.spec.method != "linear"
        return record, [r for r in requests if keep or r.warmup or r.round == 0]

    a, b = (build(tmp_path / name, starts=1, changes=change) for name, change in (("a", None), ("b", cut)))
    code, text = invoke(a, b)
    assert (code, "1 round: no interval" in text) == (3, True)


def test_campaigns_are_found_by_name(before: Path, slower: Path) -> None:
    (before.parent / "after").symlink_to(slower)
    assert invoke(before.name, "after", "--results", before.parent)[0] == 3


def test_one_round_has_no_interval_and_is_listed(before: Path, tmp_path: Path) -> None:
    work = synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,), repeats=1)
    single = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), workload=work))
    with pytest.raises(ComparisonError, match=r"no cell of .* can be compared in decode_tok_s: 1 round: no interval$"):
        compare_campaigns(before, single)


def test_nothing_in_common_is_an_error_and_not_a_pass(before: Path, tmp_path: Path) -> None:
    other = build(tmp_path, starts=1, tp_size=(2,))
    with pytest.raises(ComparisonError, match=r"not measured in B; not measured in A$"):
        compare_campaigns(before, other)
    gone = build(tmp_path / "gone", starts=1, changes=synthetic.fail_run)
    with pytest.raises(ComparisonError, match="failed in B: sglang exited"):
        compare_campaigns(before, gone)


def test_mistakes_are_named(before: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'goodput' cannot be compared: give one of decode_tok_s, tpot_s"):
        compare_campaigns(before, before, metric="goodput")
    for text in ("two", "-1%", "100%", "nan"):
        with pytest.raises(SpecError, match="is no share: give one from 0 to below 1"):
            invoke(before, before, "--threshold", text)
    with pytest.raises(RecordError, match="not a folder"):
        compare_campaigns(before, tmp_path / "none")
