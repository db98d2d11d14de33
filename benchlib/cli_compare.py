"""The command `compare`: two campaigns, before and after, and a gate that fails on a slow-down it is sure of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchlib.cli_machine import GATE_FAILED, RESULTS, JsonOption, find_campaign
from benchlib.errors import ComparisonError, SpecError
from benchlib.verdicts import ALPHA, adjust, judge, level_of, log_interval, observations

if TYPE_CHECKING:
    from benchlib.frames import Campaign

__all__ = ["MAY_DIFFER", "app", "compare_campaigns"]

app = typer.Typer()

# What a campaign made after a change differs in on purpose. The rest must match.
MAY_DIFFER = ("campaign", "engine_version", "engine_digest", "packages", "commit")
# A round's seconds and what shares them (None: nothing); a start's figure is the quotient of its rounds' sums.
SUMS = {
    "decode_tok_s": ("decode_s", "decode_tokens"), "tpot_s": ("decode_s", "decode_tokens"), "ttft_s": ("ttft_s", None),
    "step_ms": ("decode_s", "decode_steps"), "output_throughput_tok_s": ("window_s", "completion_tokens"),
}  # fmt: skip
CELL = ("tp_size", "method", "tree_budget", "prompt", "max_new_tokens", "concurrency")
PLACE = (*CELL, "nccl_profile", "numa_policy", "variant")
NUMBERS = ("ratio", "low", "high", "p_value", "p_adjusted", "level", "verdict", "note", "detectable")
ABSENT, ONE_ROUND = "not measured in B", "1 round: no interval"
Row = dict[str, Any]
Pair = tuple[Row, Row]


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="campaign from before a change: its folder, or its name under --results")],
    b: Annotated[str, typer.Argument(help="campaign from after it")],
    metric: Annotated[str, typer.Option(help=f"one of {', '.join(SUMS)}")] = "decode_tok_s",
    threshold: Annotated[str, typer.Option(help="how much worse B may be: 2% or 0.02")] = "2%",
    results: Annotated[Path, typer.Option("--results", help="folder of the campaigns")] = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Compare two campaigns cell by cell.

    Exit 3 where B is surely worse than A by more than the threshold, or failed in or lacks what A had measured.
    """
    folders = [find_campaign(name, results) for name in (a, b)]
    found = compare_campaigns(*folders, metric=metric, threshold=_share(threshold))
    typer.echo(json.dumps(found, indent=1) if as_json else _format(found))
    lost = any(row["lost"] for row in found["not_comparable"])
    raise typer.Exit(GATE_FAILED if lost or any(row["worse"] for row in found["comparisons"]) else 0)


def compare_campaigns(a: Path, b: Path, *, metric: str = "decode_tok_s", threshold: float = 0.02) -> Row:
    """Every matching condition and cell of two campaign folders; `ratio` is B's speed over A's: above 1 B is faster.

    `not_comparable` has the rest with the reason; `lost`: A had measured it, and B cannot say how it is now.

    By Welch's t, since the two were not interleaved; cells of all prompts are one family for Holm, those of single
    prompts another. `worse`: the interval is wholly beyond the threshold, also after Holm. SpecError for an unknown
    metric, ComparisonError when nothing can be compared.
    """
    from benchlib.frames import ALL, build_failures, load_campaign

    if metric not in SUMS:
        raise SpecError(f"metric {metric!r} cannot be compared: give one of {', '.join(SUMS)}")
    before, after = load_campaign(a), load_campaign(b)
    pairs, refused = _match(_cells(before, metric), _cells(after, metric))
    had = {run.record.spec.condition_name for run in before.runs if run.ok}
    for side, campaign in {"A": before, "B": after}.items():
        for row in build_failures([campaign]).to_dict("records"):
            lost = side == "B" and _condition(row["run"]) in had
            refused.append({"run": row["run"], "reason": f"failed in {side}: {row['reason']}", "lost": lost})
    if not pairs:
        reasons = "; ".join(dict.fromkeys(row["reason"] for row in refused))
        raise ComparisonError(f"no cell of {a} and {b} can be compared in {metric}: {reasons or 'neither has one'}")
    families = [[pair for pair in pairs if (pair[0]["prompt"] == ALL) is pooled] for pooled in (True, False)]
    differs = {
        field: [sorted({str(cell[field]) for cell in side}) for side in zip(*pairs, strict=True)]
        for field in MAY_DIFFER
        if any(x[field] != y[field] for x, y in pairs)
    }
    return {
        **{"a": str(a), "b": str(b), "metric": metric, "threshold": threshold},
        **{"may_differ": list(MAY_DIFFER), "differs": differs},
        "comparisons": [row for family in families for row in _judged(family, metric, threshold)],
        "not_comparable": refused,
    }


def _cells(campaign: Campaign, metric: str) -> list[Row]:
    """One row a condition and cell; `starts` holds each start's rounds as (seconds, units)."""
    from benchlib import frames

    seconds, units = SUMS[metric]
    requests = frames.build_requests([campaign])
    rounds = frames.rows_of(frames.build_rounds(requests)) if len(requests) else []
    good = [r for r in rounds if r["complete"] and r[seconds] is not None and (units is None or r[units])]
    commits = {str((run.record.environment.get("git") or {}).get("commit", "none"))[:12] for run in campaign.runs}
    return [
        {**group[0], "commit": " ".join(sorted(commits))}
        | {"starts": [[(r[seconds], r[units] if units else 1) for r in s] for s in frames.grouped(group, ("run",))]}
        for group in frames.grouped(good, (*frames.CONDITION_FIELDS, *frames.CELL_FIELDS))
    ]


def _match(before: Sequence[Row], after: Sequence[Row]) -> tuple[list[Pair], list[Row]]:
    """The pairs that may be compared, and every other cell with the reason."""
    pairs, refused = [], []
    for cell in before:
        there = [other for other in after if _place(other) == _place(cell)]
        reasons = [_hindrance(cell, other) for other in there]
        if "" in reasons:
            pairs.append((cell, there[reasons.index("")]))
        else:
            reason = min(reasons, key=len, default=ABSENT)
            lost = reason == ABSENT or (reason == ONE_ROUND and sum(map(len, cell["starts"])) > 1)
            refused.append(_named(cell) | {"reason": reason, "lost": lost})
    known = {_place(cell) for cell in before}
    new = [_named(c) | {"reason": "not measured in A", "lost": False} for c in after if _place(c) not in known]
    return pairs, refused + new


def _condition(run: str) -> str:
    """`tp1-b16` of `tp1-b16.2`."""
    name, _, start = run.rpartition(".")
    return name if name and start.isdecimal() else run


def _hindrance(cell: Row, other: Row) -> str:
    from benchlib.compare import MATCHED_FIELDS

    unequal = [f for f in MATCHED_FIELDS if f not in MAY_DIFFER and cell[f] != other[f]]
    if unequal:
        return "; ".join(f"{f}: {cell[f]!r} against {other[f]!r}" for f in unequal)
    sides = cell["starts"], other["starts"]
    few = level_of(*sides) == "round" and min(sum(map(len, side)) for side in sides) < 2
    return ONE_ROUND * few


def _place(cell: Row) -> tuple[Any, ...]:
    return tuple(cell[field] for field in PLACE)


def _judged(family: Sequence[Pair], metric: str, threshold: float) -> list[Row]:
    from benchlib.metrics import METRICS

    rate = METRICS[metric].better == "higher"
    limit = 1 - threshold if rate else 1 / (1 + threshold)
    verdicts = adjust([judge(x["starts"], y["starts"]) for x, y in family])
    # The same question about a baseline that is as slow as is tolerated.
    slowed = [[[(seconds / limit, units) for seconds, units in start] for start in x["starts"]] for x, _ in family]
    gates = adjust([judge(starts, y["starts"]) for starts, (_, y) in zip(slowed, family, strict=True)])
    rows = []
    for pair, found, gate in zip(family, verdicts, gates, strict=True):
        times = [log_interval(observations(c["starts"], level_of(c["starts"])))[0] for c in pair]
        values = [1 / t if rate else 1000 * t if METRICS[metric].unit == "ms" else t for t in times]
        beyond = gate.high < 1 and gate.p_adjusted is not None and gate.p_adjusted < ALPHA
        row = _named(pair[0]) | dict(zip(("before", "after"), values, strict=True))
        row |= {"n_before": found.n_baseline, "n_after": found.n_other, **{k: getattr(found, k) for k in NUMBERS}}
        rows.append(row | {"worse": beyond and found.verdict == "slower"})
    return rows


def _named(cell: Row) -> Row:
    return {key: cell[key] for key in ("run", *CELL)}


def _format(found: Row) -> str:
    limit = f"worse than {100 * found['threshold']:g}%"
    lines = [f"{found['metric']}: {found['a']} -> {found['b']}; ratio above 1: faster; 95% intervals; p by Holm"]
    lines += [f"differs: {field}: {' -> '.join(map(', '.join, ends))}" for field, ends in found["differs"].items()]
    for row in found["comparisons"]:
        p = "" if row["p_adjusted"] is None else f", p {row['p_adjusted']:.2g}"
        lines.append(
            f"{_where(row)}: {row['before']:.4g} -> {row['after']:.4g}, {row['ratio']:.4f} ({row['low']:.4f} to "
            f"{row['high']:.4f}), n {row['n_before']} + {row['n_after']}{p}: {row['note']}{f', {limit}' * row['worse']}"
        )
    lines += [f"not compared: {_where(row)}: {row['reason']}" for row in found["not_comparable"]]
    rows = found["comparisons"]
    return "\n".join([*lines, f"{sum(row['worse'] for row in rows)} of {len(rows)} {limit}"])


def _where(row: Row) -> str:
    return "{run} {prompt} {max_new_tokens} x{concurrency}".format(**row) if "prompt" in row else str(row["run"])


def _share(text: str) -> float:
    """`2%` or `0.02`; SpecError for anything but a share from 0 to below 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise SpecError(f"--threshold {text!r} is no share: give one from 0 to below 1, such as 2% or 0.02")
    return share
