"""Ratios to be believed: speedup and scaling, each with interval, n and verdict, or the reason why there is none.

An observation is a server start's pooled time per output token; with one start on a side, a timed round's. All
arithmetic is on logarithms: means are geometric, intervals 95 % by Student's t, ratios by Welch's t. One start says
nothing about the next one, so its interval is of that start alone and the verdict says so.

Speedup = baseline TPOT / method TPOT, the baseline being `auto` at the same tp_size, prompt, length and concurrency.
`auto` itself has speedup None: it is what the others are measured against, and a 1 without a spread would be no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from scipy import stats

from benchlib.errors import ComparisonError
from benchlib.frames import (
    ALL,
    CELL_FIELDS,
    CONDITION_FIELDS,
    METHOD_FIELDS,
    BrokenRun,
    Campaign,
    LoadedRun,
    build_cells,
    build_requests,
    build_rounds,
    load_campaign,
    method_label,
    rows_of,
)

__all__ = [
    "MATCHED_FIELDS",
    "SUMMARY_KEYS",
    "Comparison",
    "Estimate",
    "build_results",
    "build_scaling",
    "build_summary",
    "check_comparable",
    "compare",
    "estimate_tpot",
    "log_interval",
    "log_ratio",
]

CONFIDENCE = 0.95
# Below this many starts a side an interval may exclude 1 by luck of a small spread: it must clear 1 by MARGIN too.
FEW_STARTS = 5
MARGIN = 0.01
ONE_START = "1 start: no verdict"
BASELINE = "baseline"

# Must be equal on both sides of every comparison, less the fields of the one axis that a study varies.
MATCHED_FIELDS = (*CONDITION_FIELDS, *CELL_FIELDS, "prompt_sha256")
SUMMARY_KEYS = (
    *("run", "status", "engine", "weights", "tp_size", "method", "tree_budget", "verify_tokens"),
    *("prompt", "max_new_tokens", "concurrency", "n_starts", "n_requests"),
    *("decode_tok_s", "decode_tok_s_low", "decode_tok_s_high", "output_throughput_tok_s"),
    *("ttft_s", "tpot_s", "accept_length", "full_block_share", "step_ms"),
    *("speedup", "speedup_low", "speedup_high"),
    *("error", "note"),
)

Level = Literal["start", "round"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A geometric mean with its 95 % interval over `n` starts or rounds; ends None when n < 2."""

    value: float
    low: float | None
    high: float | None
    n: int
    level: Level


@dataclass(frozen=True, slots=True)
class Comparison:
    """baseline TPOT / other TPOT: above 1 the other is faster."""

    ratio: float
    low: float
    high: float
    p_value: float
    n_baseline: int
    n_other: int
    level: Level
    verdict: str


def log_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(geometric mean, low, high) of positive values: 95 % by Student's t on logs; ends None below two values."""
    logs = [math.log(v) for v in values]
    centre = math.fsum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(centre), None, None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * math.sqrt(_variance(logs) / len(logs))
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def log_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float]:
    """(ratio of geometric means a/b, low, high, p) by Welch's t on logs; ComparisonError below two values a side."""
    if min(len(a), len(b)) < 2:
        raise ComparisonError(
            f"{len(a)} against {len(b)} observations: an interval needs two a side; raise repeats or starts"
        )
    x, y = ([math.log(v) for v in side] for side in (a, b))
    difference = math.fsum(x) / len(x) - math.fsum(y) / len(y)
    vx, vy = _variance(x) / len(x), _variance(y) / len(y)
    error = math.sqrt(vx + vy)
    if error == 0:
        return (math.exp(difference), math.exp(difference), math.exp(difference), float(difference == 0))
    df = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, df)) * error
    p_value = 2 * float(stats.t.sf(abs(difference) / error, df))
    return math.exp(difference), math.exp(difference - half), math.exp(difference + half), p_value


def estimate_tpot(cell: Row) -> Estimate | None:
    """Seconds per output token of a cell with interval; None when no round was measured."""
    level = _level(cell)
    values = _observations(cell, level)
    if not values:
        return None
    return Estimate(*log_interval(values), n=len(values), level=level)


def check_comparable(baseline: Row, other: Row, *, vary: Iterable[str] = METHOD_FIELDS) -> None:
    """ComparisonError naming each field outside `vary` in which two cells differ, with both values."""
    allowed = set(vary)
    unequal = [f for f in MATCHED_FIELDS if f not in allowed and baseline[f] != other[f]]
    if unequal:
        what = "; ".join(f"{f}: {baseline[f]!r} against {other[f]!r}" for f in unequal)
        raise ComparisonError(
            f"{baseline['run']} and {other['run']} may not be compared, they differ in {what}. "
            f"Only {', '.join(sorted(allowed))} may differ: measure both under one set-up"
        )


def compare(baseline: Row, other: Row, *, vary: Iterable[str] = METHOD_FIELDS) -> Comparison:
    """How many times as fast `other` decodes; ComparisonError when fields differ or n is too small.

    Starts are the observations when both sides have two, else the rounds inside the starts there are.
    """
    check_comparable(baseline, other, vary=vary)
    level: Level = "start" if _level(baseline) == _level(other) == "start" else "round"
    a, b = _observations(baseline, level), _observations(other, level)
    ratio, low, high, p_value = log_ratio(a, b)
    verdict = ONE_START if level == "round" else _verdict(low, high, min(len(a), len(b)))
    return Comparison(ratio, low, high, p_value, len(a), len(b), level, verdict)


def build_results(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Cells with estimates, speedups and the reason where there is none; failed and broken runs keep their rows."""
    loaded = list(campaigns)
    rounds = build_rounds(build_requests(loaded)) if any(c.runs for c in loaded) else pd.DataFrame()
    cells = rows_of(build_cells(rounds)) if len(rounds) else []
    rows: list[dict[str, Any]] = [{**cell, "status": "ok", **_figures(cell, cells)} for cell in cells]
    for campaign in loaded:
        rows += [row for run in campaign.runs if not run.ok for row in _failed(run)]
        rows += [_broken(run) for run in campaign.broken]
    places = {campaign.name: place for place, campaign in enumerate(loaded)}
    rows.sort(key=lambda row: (places[row["campaign"]], *_order(row)))
    return pd.DataFrame(rows).convert_dtypes()


def build_scaling(results: pd.DataFrame) -> pd.DataFrame:
    """TPOT at the smallest tp_size / TPOT at each larger one, with interval: `scaling`, `scaling_low`, `scaling_high`.

    `efficiency` divides by the ideal, the ratio of sizes. Only pairs that match in every other field appear.
    """
    cells = [r for r in rows_of(results) if r["status"] == "ok" and r["tpot_starts"]]
    vary = ("tp_size",)
    rows = []
    for cell in cells:
        smaller = [c for c in cells if c["tp_size"] < cell["tp_size"] and _comparable(c, cell, vary)]
        if not smaller:
            continue
        base = min(smaller, key=lambda c: int(c["tp_size"]))
        ideal = cell["tp_size"] / base["tp_size"]
        rows.append({**cell, "tp_base": base["tp_size"], **_scaling(base, cell, ideal, vary)})
    return pd.DataFrame(rows).convert_dtypes()


def build_summary(path: Path) -> list[dict[str, Any]]:
    """One object a condition and cell, prompt `all` included, keys as in SUMMARY_KEYS; null where there is none.

    `note` says why a speedup is null or what its interval leaves open. RecordError when the folder holds no run.
    """
    rows = rows_of(build_results([load_campaign(path)]))
    return [{key: row.get(key) for key in SUMMARY_KEYS} for row in rows]


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _level(cell: Row) -> Level:
    return "start" if len(cell["tpot_starts"]) > 1 else "round"


def _observations(cell: Row, level: Level) -> list[float]:
    starts = cell["tpot_starts"]
    if level == "round":
        return [seconds / tokens for start in starts for seconds, tokens in start]
    return [sum(s for s, _ in start) / sum(n for _, n in start) for start in starts]


def _verdict(low: float, high: float, n: int) -> str:
    margin = MARGIN if n < FEW_STARTS else 0.0
    if low > 1 + margin:
        return "faster"
    if high < 1 - margin:
        return "slower"
    return f"cannot decide ({n} starts)" if n < FEW_STARTS else "no difference found"


def _comparable(a: Row, b: Row, vary: Iterable[str]) -> bool:
    allowed = set(vary)
    return all(a[f] == b[f] for f in MATCHED_FIELDS if f not in allowed)


def _figures(cell: Row, cells: Sequence[Row]) -> dict[str, Any]:
    tpot = estimate_tpot(cell)
    rates: dict[str, Any] = dict.fromkeys(("tpot_s", "decode_tok_s", "decode_tok_s_low", "decode_tok_s_high"))
    if tpot is not None:
        rates |= {"tpot_s": tpot.value, "decode_tok_s": 1 / tpot.value}
        rates["decode_tok_s_low"] = None if tpot.high is None else 1 / tpot.high
        rates["decode_tok_s_high"] = None if tpot.low is None else 1 / tpot.low
    found = _speedup(cell, cells)
    ratio = found if isinstance(found, Comparison) else None
    return {
        **rates,
        "speedup": ratio and ratio.ratio,
        "speedup_low": ratio and ratio.low,
        "speedup_high": ratio and ratio.high,
        "speedup_p": None if ratio is None else ratio.p_value,
        "speedup_n": None if ratio is None else ratio.n_other,
        "speedup_n_baseline": None if ratio is None else ratio.n_baseline,
        "n_observations": tpot and tpot.n,
        "level": tpot and tpot.level,
        "note": ratio.verdict if ratio else found,
    }


def _speedup(cell: Row, cells: Sequence[Row]) -> Comparison | str:
    """The comparison with its baseline, or the short reason why there is none."""
    same = [c for c in cells if c["method"] == "auto" and all(c[f] == cell[f] for f in _PLACE)]
    for hindrance, applies in _HINDRANCES.items():
        if applies(cell, same):
            return hindrance
    base = next((c for c in same if _comparable(c, cell, METHOD_FIELDS)), same[0])
    try:
        return compare(base, cell)
    except ComparisonError as error:
        return str(error) if not _comparable(base, cell, METHOD_FIELDS) else "1 round: no interval"


# Where a baseline is looked for: the rest of MATCHED_FIELDS must then agree, or the note names what does not.
_PLACE = ("campaign", "tp_size", *CELL_FIELDS)
_HINDRANCES: dict[str, Callable[[Row, Sequence[Row]], bool]] = {
    BASELINE: lambda cell, _: cell["method"] == "auto",
    "random weights": lambda cell, _: cell["weights"] == "random",
    "simulated acceptance": lambda cell, _: bool(cell["simulated"]),
    "all requests failed": lambda cell, _: not cell["tpot_starts"],
    "no baseline": lambda _, same: not any(c["tpot_starts"] for c in same),
}


def _scaling(base: Row, cell: Row, ideal: float, vary: Iterable[str]) -> dict[str, Any]:
    try:
        found = asdict(compare(base, cell, vary=vary))
    except ComparisonError as error:
        return {"scaling_note": str(error)}
    names = {"ratio": "scaling", "low": "scaling_low", "high": "scaling_high", "verdict": "scaling_note"}
    return {"ideal": ideal, "efficiency": found["ratio"] / ideal} | {new: found[old] for old, new in names.items()}


def _failed(run: LoadedRun) -> list[dict[str, Any]]:
    spec, work = run.record.spec, run.record.spec.workload
    shared = {
        **spec.model_dump(include={"engine", "weights", "tp_size", "method", "tree_budget", "block_size"}),
        **{"campaign": run.campaign, "run": run.name, "status": "failed", "tpot_starts": ()},
        "label": method_label(spec.method, spec.tree_budget),
        **{"n_starts": 0, "n_requests": 0, "error": run.reason, "note": "failed"},
    }
    return [
        {**shared, "prompt": prompt, "max_new_tokens": tokens, "concurrency": streams}
        for prompt in (*work.prompts, ALL)
        for tokens in work.max_new_tokens
        for streams in work.concurrency
    ]


def _broken(run: BrokenRun) -> dict[str, Any]:
    shared = {"campaign": run.campaign, "run": run.name, "status": "failed", "tpot_starts": ()}
    shared["label"] = run.name
    return {**shared, "prompt": ALL, "error": run.reason, "note": "unreadable"}


def _order(row: Row) -> tuple[Any, ...]:
    """By size, method, budget, workload; unreadable runs last; prompts as measured (the sort is stable)."""
    method = {"auto": 0, "linear": 1, "ddtree": 2}.get(row.get("method") or "", 3)
    fields = ("tree_budget", "max_new_tokens", "concurrency")
    sizes = (row.get("tp_size") or math.inf, method, *(row.get(field) or 0 for field in fields))
    return (*sizes, row["run"], row["prompt"] == ALL)
