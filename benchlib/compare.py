"""Ratios to be believed: speedup and scaling, each with interval, n and verdict, or the reason why there is none.

An observation is a server start's pooled time per output token; with one start on a side, a timed round's. One start
says nothing about the next one, so its interval is of that start alone and the verdict says so. The tests are those of
`verdicts`; verdicts of one table hold together (Holm).

Speedup = baseline TPOT / method TPOT, the baseline being `auto` at the same tp_size, prompt, length and concurrency.
`auto` itself has speedup None: it is what the others are measured against, and a 1 without a spread would be no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchlib import frames
from benchlib.ceilings import floor_tok_s, step_bytes
from benchlib.errors import ComparisonError, UnavailableError
from benchlib.frames import ALL, CELL_FIELDS, CONDITION_FIELDS, METHOD_FIELDS, Campaign, LoadedRun, grouped, rows_of
from benchlib.verdicts import (
    ALPHA,
    FEW_STARTS,
    Drift,
    Verdict,
    adjust,
    between_sd,
    build_drift,
    judge,
    level_of,
    log_interval,
    log_ratio,
    observations,
)
from benchlib.warnings import format_warning

__all__ = [
    *("AB_AXES", "BASELINE", "MATCHED_FIELDS", "SUMMARY_KEYS", "build_ab"),
    *("build_results", "build_scaling", "build_summary", "build_warnings", "compare", "find_drifts"),
    *("format_pair", "start_spreads"),
]

BASELINE = "baseline"

# Must be equal on both sides of every comparison, less the fields of the one axis that a study varies.
MATCHED_FIELDS = (*CONDITION_FIELDS, *CELL_FIELDS, "prompt_sha256")
# What an A/B study varies: its field, what else that changes by itself, and the side that others are held against.
AB_AXES = {
    "nccl_profile": (("nccl",), "none"),
    "numa_policy": ((), "pack"),
    "variant": (("server_args", "server_env", "serving"), ""),
}
SUMMARY_KEYS = (
    *("run", "status", "engine", "weights", "tp_size", "method", "tree_budget", "verify_tokens"),
    *("nccl_profile", "numa_policy", "variant"),
    *("prompt", "max_new_tokens", "concurrency", "n_starts", "n_requests"),
    *("decode_tok_s", "decode_tok_s_low", "decode_tok_s_high", "output_throughput_tok_s"),
    *("ttft_s", "tpot_s", "accept_length", "forecast_length", "full_block_share", "step_ms"),
    *("break_even", "break_even_low", "break_even_high", "floor_tok_s", "floor_share"),
    *("energy_per_token_j", "power_w", "throttled_share"),
    *("speedup", "speedup_low", "speedup_high"),
    *("error", "note"),
)

Row = Mapping[str, Any]
WARNING_COLUMNS = ("run", "cells", "warning")


def compare(baseline: Row, other: Row, *, vary: Iterable[str] = METHOD_FIELDS) -> Verdict:
    """How many times as fast `other` decodes; ComparisonError names fields outside `vary` that differ, or says n.

    Starts are the observations when both sides have two, else the rounds inside the starts there are.
    """
    if unequal := _unequal(baseline, other, vary):
        what = "; ".join(f"{f}: {baseline[f]!r} against {other[f]!r}" for f in unequal)
        raise ComparisonError(
            f"{baseline['run']} and {other['run']} may not be compared, they differ in {what}. "
            f"Only {', '.join(sorted(vary))} may differ: measure both under one set-up"
        )
    # Only a sweep's own starts were interleaved: those of two campaigns share no block.
    blocks = (baseline["start_numbers"], other["start_numbers"])
    together = baseline["campaign"] == other["campaign"]
    return judge(baseline["tpot_starts"], other["tpot_starts"], blocks=blocks if together else None)


def format_pair(rows: Iterable[Row], labels: Sequence[str]) -> str:
    """`B over A: 1.19 (1.05 to 1.36); note` of the cells with these two labels, or why they are not compared."""
    named = {row["label"]: row for row in rows if row["tpot_starts"]}
    if missing := [label for label in labels if label not in named]:
        return f"There is no {' and no '.join(missing)} here: name two of {', '.join(named)}."
    first, second = (named[label] for label in labels)
    if any(row["weights"] == "random" or row["simulated"] for row in (first, second)):
        return "No ratio of methods follows from random weights or simulated acceptance."
    try:
        found = compare(first, second)
    except ComparisonError as error:
        return str(error)
    return f"{labels[1]} over {labels[0]}: {found.ratio:.2f} ({found.low:.2f} to {found.high:.2f}); {found.note}"


def build_results(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Cells with estimates, speedups and the reason where there is none; failed and broken runs keep their rows."""
    loaded = list(campaigns)
    requests = frames.build_requests(loaded)
    rounds = frames.build_rounds(requests) if len(requests) else requests
    cells = rows_of(frames.build_cells(rounds)) if len(rounds) else []
    rows: list[dict[str, Any]] = [
        {**cell, "status": "ok", **_figures(cell, cells, loaded), **_break_even(cell, cells), **_floor(cell, loaded)}
        for cell in cells
    ]
    _adjust(rows, _tell_speedup)
    for row in rows:
        campaign = next(c for c in loaded if c.name == row["campaign"])
        order = [run.name for run in sorted(campaign.runs, key=lambda run: run.record.started_at)]
        row["start_places"] = tuple(order.index(name) for name in row["start_runs"])
    for campaign in loaded:
        rows += [row for run in campaign.runs for row in (_capped(run) if run.ok else _failed(run))]
        shared = {"campaign": campaign.name, "status": "failed", "tpot_starts": (), "note": "unreadable"}
        rows += [
            {**shared, "run": name, "label": name, "prompt": ALL, "error": error}
            for name, error in campaign.broken.items()
        ]
    places = [campaign.name for campaign in loaded]
    rows.sort(key=lambda row: (places.index(row["campaign"]), *_order(row)))
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=list(dict.fromkeys([*frame.columns, *SUMMARY_KEYS]))).convert_dtypes()


def build_scaling(results: pd.DataFrame) -> pd.DataFrame:
    """TPOT at the smallest tp_size / TPOT at each larger one, with interval: `scaling`, `scaling_low`, `scaling_high`.

    `efficiency` divides by the ideal, the ratio of sizes. Only pairs that match in every other field appear.
    """
    vary = ("tp_size",)
    cells = [r for r in rows_of(results) if r["status"] == "ok" and r["tpot_starts"]]
    rows = []
    for cell in cells:
        smaller = [c for c in cells if c["tp_size"] < cell["tp_size"] and not _unequal(c, cell, vary)]
        if not smaller:
            continue
        base = min(smaller, key=lambda c: int(c["tp_size"]))
        ideal = cell["tp_size"] / base["tp_size"]
        row = {**cell, "tp_base": base["tp_size"], "ideal": ideal}
        try:
            row["found"] = compare(base, cell, vary=vary)
        except ComparisonError:
            row |= {"scaling": None, "efficiency": None, "scaling_note": ONE_ROUND}
        rows.append(row)
    _adjust(rows, _tell_scaling)
    return pd.DataFrame(rows).convert_dtypes()


def _tell_scaling(row: dict[str, Any], found: Verdict) -> dict[str, Any]:
    told = {"scaling": found.ratio, "scaling_low": found.low, "scaling_high": found.high}
    return {**told, "efficiency": found.ratio / row["ideal"], "scaling_note": found.note}


def find_drifts(rows: Iterable[dict[str, Any]]) -> list[tuple[str, str, Drift | None]]:
    """(campaign, workload, drift) of all prompts pooled; None where no condition has starts enough to tell."""
    pooled = [r for r in rows if r["prompt"] == ALL and r["status"] == "ok" and r["tpot_starts"]]
    found = []
    for group in grouped(pooled, ("campaign", "max_new_tokens", "concurrency")):
        times = [observations(r["tpot_starts"], "start") for r in group]
        drift = build_drift([[*zip(r["start_places"], t, strict=True)] for r, t in zip(group, times, strict=True)])
        found.append((str(group[0]["campaign"]), _workload(group[0]), drift))
    return found


def _workload(row: Row) -> str:
    return f"{row['max_new_tokens']} new tokens, {row['concurrency']} at once"


def build_warnings(campaigns: Iterable[Campaign], results: pd.DataFrame) -> pd.DataFrame:
    """Those that only a campaign as a whole shows, then the runs' own: columns `run`, `cells`, `warning`."""
    rows = rows_of(results)
    found = []
    for name, workload, drift in find_drifts(rows):
        if drift and drift.p_value < ALPHA:
            found.append((f"all of {name}", workload, format_warning("drift", what=drift)))
    measured = [r for r in rows if r["status"] == "ok" and r["prompt"] == ALL]
    for group in grouped(measured, ("campaign",)):
        whole = f"all of {group[0]['campaign']}", "whole campaign"
        starts = {r["run"]: int(r["n_starts"]) for r in group}
        few = [n for n in starts.values() if n < FEW_STARTS]
        if few and len(starts) > 1:
            what = f"{len(few)} of {len(starts)} conditions have {' to '.join(map(str, sorted({min(few), max(few)})))}"
            found.append((*whole, format_warning("few-starts", what=what, least=FEW_STARTS)))
        if len(devices := sorted({str(r["devices"]) for r in group})) > 1:
            found.append((*whole, format_warning("mixed-devices", what=" and on ".join(devices))))
    own = frames.rows_of(frames.build_warnings(campaigns))
    rows = [*(dict(zip(WARNING_COLUMNS, one, strict=True)) for one in found), *own]
    return pd.DataFrame(rows, columns=list(WARNING_COLUMNS))


def build_ab(results: pd.DataFrame) -> pd.DataFrame:
    """One row for each condition that differs from another in one field of AB_AXES alone: `axis`, `a`, `b`.

    `difference` is the decode rate of `b` over that of `a`, less 1, with `difference_low`, `difference_high` and
    `difference_note`. `a` is the axis's own default where that was measured, else the first in the table. Speeds of
    random weights may be compared so: both sides decode one token a step of the same shapes, or the same forced length.
    """
    cells = [r for r in rows_of(results) if r["status"] == "ok" and r["tpot_starts"]]
    rows = []
    for axis, (others, default) in AB_AXES.items():
        vary = (axis, *others)
        for group in grouped(cells, [f for f in MATCHED_FIELDS if f not in vary]):
            first, *rest = sorted(group, key=lambda r: r[axis] != default)
            for cell in (other for other in rest if other[axis] != first[axis]):
                row = {**cell, "axis": axis, "a": first[axis], "b": cell[axis], "rate_a": first["decode_tok_s"]}
                row["all_reduce"] = " / ".join(dict.fromkeys(c["all_reduce"] or "not known" for c in (first, cell)))
                try:
                    row["found"] = compare(first, cell, vary=vary)
                except ComparisonError:
                    row |= {"difference": None, "difference_note": ONE_ROUND}
                rows.append(row)
    _adjust(rows, _tell_difference)
    return pd.DataFrame(rows).convert_dtypes()


def _tell_difference(row: dict[str, Any], found: Verdict) -> dict[str, Any]:
    ends = {"difference": found.ratio, "difference_low": found.low, "difference_high": found.high}
    return {**{key: value - 1 for key, value in ends.items()}, "difference_note": found.note}


def start_spreads(path: Path) -> dict[str, tuple[float, int]]:
    """(sd of log TPOT between starts, degrees of freedom) of each workload that has two starts of a condition."""
    cells = [r for r in rows_of(build_results([frames.load_campaign(path)])) if r["prompt"] == ALL and r["tpot_starts"]]
    found = {}
    for group in grouped(cells, ("max_new_tokens", "concurrency")):
        spread = between_sd(observations(r["tpot_starts"], "start") for r in group)
        if spread is not None:
            found[_workload(group[0])] = spread
    return found


def build_summary(path: Path) -> list[dict[str, Any]]:
    """One object a condition and cell, prompt `all` included, keys as in SUMMARY_KEYS; null where there is none.

    `note` says why a speedup is null or what its interval leaves open. RecordError when the folder holds no run.
    """
    rows = rows_of(build_results([frames.load_campaign(path)]))
    return [{key: row.get(key) for key in SUMMARY_KEYS} for row in rows]


def _unequal(a: Row, b: Row, vary: Iterable[str]) -> list[str]:
    return [f for f in MATCHED_FIELDS if f not in vary and a[f] != b[f]]


def _adjust(rows: Sequence[dict[str, Any]], write: Callable[[dict[str, Any], Verdict], dict[str, Any]]) -> None:
    """Write into each row what its `found` says among its family: all pooled cells are one, single prompts another."""
    for pooled in (True, False):
        family = [row for row in rows if isinstance(row.get("found"), Verdict) and (row["prompt"] == ALL) is pooled]
        for row, verdict in zip(family, adjust([row["found"] for row in family]), strict=True):
            row |= write(row, verdict)
    for row in rows:
        row.pop("found", None)


def _figures(cell: Row, cells: Sequence[Row], campaigns: Sequence[Campaign]) -> dict[str, Any]:
    """Rate with interval and speedup of a cell: what is None has its reason in `note`."""
    row: dict[str, Any] = dict.fromkeys(("tpot_s", "decode_tok_s", "decode_tok_s_low", "decode_tok_s_high"))
    if cell["tpot_starts"]:
        level = level_of(cell["tpot_starts"])
        value, low, high = log_interval(observations(cell["tpot_starts"], level))
        row |= {"level": level, "tpot_s": value, "decode_tok_s": 1 / value}
        row |= {"decode_tok_s_low": high and 1 / high, "decode_tok_s_high": low and 1 / low}
    wrong = next(c.not_lossless.get(cell["run"]) for c in campaigns if c.name == cell["campaign"])
    if wrong and cell["method"] != "auto":
        return {**row, "speedup": None, "note": WRONG_OUTPUT, "error": f"not lossless: {wrong}"}
    found = _speedup(cell, cells)
    return {**row, "speedup": None, "note": found} if isinstance(found, str) else {**row, "found": found}


def _tell_speedup(row: dict[str, Any], found: Verdict) -> dict[str, Any]:
    told = {"speedup": found.ratio, "speedup_low": found.low, "speedup_high": found.high, "note": found.note}
    return {**told, "speedup_p": found.p_adjusted, "speedup_n": found.n_other, "speedup_n_baseline": found.n_baseline}


def _break_even(cell: Row, cells: Sequence[Row]) -> dict[str, Any]:
    """The accept length from which a speculative step is worth its time: its duration in autoregressive steps."""
    keys = ("break_even", "break_even_low", "break_even_high")
    if cell["method"] == "auto":
        return dict.fromkeys(keys)
    base = [
        c for c in cells if c["method"] == "auto" and not _unequal(c, cell, (*METHOD_FIELDS, "simulated", "server_env"))
    ]
    both = [cell, *base[:1]]
    level = level_of(*(c["step_starts"] for c in both))
    sides = [observations(c["step_starts"], level) for c in both]
    if not base or min(map(len, sides)) < 2:
        return dict.fromkeys(keys)
    return dict(zip(keys, log_ratio(*sides)[:3], strict=True))


def _floor(cell: Row, campaigns: Sequence[Campaign]) -> dict[str, Any]:
    """The highest decode rate that the measured bandwidth allows an autoregressive request, and the share reached."""
    nothing = {"floor_tok_s": None, "floor_share": None}
    campaign = next(c for c in campaigns if c.name == cell["campaign"])
    config = next(r.record.environment.get("model_config") for r in campaign.runs if r.name == cell["run"])
    if cell["method"] != "auto" or not campaign.bandwidth or not config or not cell["n_requests"]:
        return nothing
    context = ((cell["prompt_tokens"] or 0) + (cell["completion_tokens"] or 0) / 2) / cell["n_requests"]
    try:
        moved = step_bytes(config, tp_size=cell["tp_size"], batch=cell["concurrency"], context_tokens=round(context))
    except UnavailableError:
        return nothing
    floor = floor_tok_s(moved, min(device.copy_gb_s for device in campaign.bandwidth))
    if not (starts := cell["tpot_starts"]):
        return {**nothing, "floor_tok_s": floor}
    tpot_s, _, _ = log_interval(observations(starts, level_of(starts)))
    return {"floor_tok_s": floor, "floor_share": 1 / tpot_s / floor}


def _speedup(cell: Row, cells: Sequence[Row]) -> Verdict | str:
    """The comparison with its baseline, or the short reason why there is none."""
    same = [c for c in cells if c["method"] == "auto" and all(c[f] == cell[f] for f in _PLACE)]
    for hindrance, applies in _HINDRANCES.items():
        if applies(cell, same):
            return hindrance
    base = next((c for c in same if not _unequal(c, cell, METHOD_FIELDS)), same[0])
    try:
        return compare(base, cell)
    except ComparisonError as error:
        return str(error) if _unequal(base, cell, METHOD_FIELDS) else ONE_ROUND


ONE_ROUND = "1 round: no interval"
WRONG_OUTPUT = "wrong output"
# Where a baseline is looked for: the rest of MATCHED_FIELDS must then agree, or the note names what does not.
_PLACE = ("campaign", "tp_size", *CELL_FIELDS)
_HINDRANCES: dict[str, Callable[[Row, Sequence[Row]], bool]] = {
    "no complete round": lambda cell, _: not cell["n_requests"],
    BASELINE: lambda cell, _: cell["method"] == "auto",
    "random weights": lambda cell, _: cell["weights"] == "random",
    "simulated acceptance": lambda cell, _: bool(cell["simulated"]),
    "1 chunk: no rate": lambda cell, _: not cell["tpot_starts"],
    "no baseline": lambda _, same: not any(c["tpot_starts"] for c in same),
}


def _failed(run: LoadedRun) -> list[dict[str, Any]]:
    spec, work = run.record.spec, run.record.spec.workload
    shared = {
        **spec.model_dump(include={"engine", "weights", "tp_size", "method", "tree_budget", "block_size", *AB_AXES}),
        **{"campaign": run.campaign, "run": run.name, "status": "failed", "tpot_starts": ()},
        "label": frames.condition_label(spec),
        **{"n_starts": 0, "n_requests": 0, "error": run.reason, "note": "failed"},
    }
    return [
        {**shared, "prompt": prompt, "max_new_tokens": tokens, "concurrency": streams}
        for prompt in (*work.prompts, ALL)
        for tokens in work.max_new_tokens
        for streams in work.concurrency
    ]


def _capped(run: LoadedRun) -> list[dict[str, Any]]:
    """Rows of the cells that the server had no room for, so that they are not missing in silence."""
    left = [cell for cell in run.record.cells if not cell.rounds]
    places = {(c.max_new_tokens, c.concurrency): c.warnings[0] for c in left if c.warnings}
    rows = [row for row in _failed(run) if (row["max_new_tokens"], row["concurrency"]) in places]
    return [{**r, "error": places[r["max_new_tokens"], r["concurrency"]], "note": "capped"} for r in rows]


def _order(row: Row) -> tuple[Any, ...]:
    """By size, method, budget, workload; unreadable runs last; prompts as measured (the sort is stable)."""
    method = {"auto": 0, "linear": 1, "ddtree": 2}.get(row.get("method") or "", 3)
    fields = ("tree_budget", "max_new_tokens", "concurrency")
    sizes = (row.get("tp_size") or math.inf, method, *(row.get(field) or 0 for field in fields))
    return (*sizes, row["run"], row["prompt"] == ALL)
