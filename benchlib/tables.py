"""Results to tables: main result, speedup and step time by prompt, accept length, scaling, cited figures.

A cell without a number says why in a word, and a note below the table spells it out. Bold marks the fastest of a group
only where every other method of that group is slower by the comparison's own test: with one start nothing is bold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from benchlib.compare import AB_AXES, BASELINE, ONE_ROUND, WRONG_OUTPUT, compare, find_drifts
from benchlib.errors import ComparisonError
from benchlib.frames import ALL, Row, grouped, method_label, rows_of
from benchlib.metrics import METRICS
from benchlib.optimum import ENOUGH, find_optimum
from benchlib.telemetry import MAX_THROTTLED_SHARE
from benchlib.typeset import Cell, Column, Table, redact
from benchlib.verdicts import ONE_START

__all__ = ["build_tables", "frame_table", "group_heading", "group_of", "span"]

GROUP_FIELDS = ("campaign", "engine", "weights", "simulated", "tp_size", "max_new_tokens", "concurrency")
# A note of `compare`: the word that stands in its cell, and what a note below the table says of it.
_WORDS = {
    BASELINE: ("baseline", "autoregressive decoding at the same TP, which the others are divided into"),
    "random weights": ("random", "random weights give speeds of shapes, never a speedup"),
    "simulated acceptance": ("simulated", "acceptance was a setting, so no speedup follows"),
    "no complete round": ("failed", ""),
    "1 chunk: no rate": ("1 chunk", "all tokens came in one chunk, which has no duration"),
    "no baseline": ("no auto", "this TP has no measured autoregressive run to compare with"),
    ONE_ROUND: ("1 round", "two rounds are needed for an interval, and no speedup is given without one"),
    "failed": ("failed", ""),
    "capped": ("capped", ""),
    WRONG_OUTPUT: ("wrong output", "a fast wrong answer is no speedup"),
    "unreadable": ("unreadable", ""),
}
_DIFFERS = ("differs", "the runs differ in more than the method")
# Figures of an earlier campaign on another machine; quoted as published, with what they are comparable to here.
_CITED = (
    ("TP 1, autoregressive", "about 26 tok/s", (1, "auto", None, "decode_tok_s")),
    (
        *("TP 4, autoregressive, fib / qsort / arith", "37.5 ± 0.9 / 38.0 ± 0.3 / 37.5 ± 0.6 tok/s"),
        (4, "auto", None, "decode_tok_s"),
    ),
    ("the same with NCCL variables set", "37.8 ± 0.2 / 38.1 ± 0.3 / 37.5 ± 0.2 tok/s", None),
    ("TP 1 to TP 4, autoregressive", "about 1.45 × of 4", None),
    ("TP 1, DDTree b15 over autoregressive, 256 tokens", "4.7 ×", (1, "ddtree", 15, "speedup")),
    ("TP 1, DDTree b15 over autoregressive, 1024 tokens", "6.5 × (about 173 tok/s)", None),
    ("TP 1, DDTree b15 over DFlash linear", "1.63 ×", None),
    ("TP 4, DDTree b15, 8 requests at once", "1270.8 tok/s in all", None),
)
CITED_MODEL = "qwen3.6-27b"
_CITED_CAPTION = "Cited figures of an earlier campaign, beside this one's"
_CITED_NOTE = (
    "Cited, not ours: published figures of a Qwen3.6-27B campaign on 8 RTX PRO 6000 GPUs over PCIe. "
    "Another machine: for orientation, not compared. Ours stand beside them only for that model, its real weights and "
    "256 tokens."
)
_AXES = {"nccl_profile": "NCCL", "numa_policy": "NUMA", "variant": "variant"}
_AB_NOTE = (
    "Decode's all-reduce, read from the servers' logs: where it is custom it goes past NCCL, and an NCCL profile "
    "compares nothing."
)
_COSTS = ("step_ms", "break_even", "floor_tok_s", "floor_share", "energy_per_token_j", "power_w", "throttled_share")
_COSTS_CAPTION = "What a step costs, all prompts pooled: time, ceiling, energy"
_COSTS_NOTE = (
    "Break-even: the step's time in autoregressive steps, so the accept length from which it pays; a property of the "
    "shapes, as valid with random weights or forced acceptance. Ceiling: the rate if a step took no longer than moving "
    "its weights, state and cache at the copy bandwidth measured on this GPU. Energy: of all GPUs over whole rounds "
    "with prefill. Slowed: share of the time under a power cap or thermal limit; above 5% the method's name is marked."
)
_OPTIMUM_NOTE = (
    "Predicted: accept length as a saturating curve of the budget, step time as a line in verify tokens. Largest "
    "error: of each budget's speedup predicted from the others alone. Measured best: picked on the very prompts that "
    "it is reported for, so an oracle. Edge: the best may lie beyond the budgets measured."
)
_ACCEPT_CAPTION = "Accept length and share of whole blocks, by prompt and budget"
_ACCEPT_NOTE = (
    "Accept: 1 + accepted drafts / verify steps, pooled. Forecast: 1 + the sum of the drafted nodes' probabilities, by "
    "the drafter's own account; what lies between the two is its miscalibration, and what the last step drafts beyond "
    "the tokens asked for. Full: share of steps that accept the whole block."
)


def build_tables(results: pd.DataFrame, scaling: pd.DataFrame, ab: pd.DataFrame, source: str) -> dict[str, Table]:
    """Every result table by name; `source` (device, engine, commit) is noted below each."""
    rows = rows_of(results)
    notes = (_interval_note(rows), source)
    prompts = tuple(dict.fromkeys(r["prompt"] for r in rows if r["prompt"] != ALL))
    pooled, each = "All prompts pooled", (*prompts, ALL)
    verify = ("", "", "verify_tokens", ALL)
    main = [verify, *((pooled, "", key, ALL) for key in ("decode_tok_s", "speedup", "accept_length", "step_ms"))]
    main += [("Decode rate by prompt", p, "decode_tok_s", p) for p in prompts]
    speedup, steps = ([("", p, key, p) for p in each] for key in ("speedup", "step_ms"))
    told = any(r.get("forecast_length") is not None for r in rows)
    gains = ("accept_length", *["forecast_length"] * told, "full_block_share")
    accept = [verify, *((p, "", key, p) for p in each for key in gains)]
    caption = "Decode rate, speedup, accept length and time per step; pooled over all prompts, and by prompt"
    costs = [key for key in _COSTS if key in _COSTS[:2] or any(r.get(key) is not None for r in rows)]
    drafted = [r for r in rows if r["method"] != "auto"]
    cited = tuple(_text_row(case, figure, _ours(rows, where)) for case, figure, where in _CITED)
    tables = [
        _table("main", caption, main, rows, notes),
        _table("speedup", "Speedup over autoregressive decoding, by prompt", speedup, rows, notes),
        _table("steps", "Milliseconds a verify step, by prompt", steps, rows, (source,)),
        _table("accept", _ACCEPT_CAPTION, accept, drafted, (_ACCEPT_NOTE, source)),
        _table("costs", _COSTS_CAPTION, [("", "", key, ALL) for key in costs], rows, (*notes[:1], _COSTS_NOTE, source)),
        _optimum_table(rows, source),
        _scaling_table(rows_of(scaling), notes),
        _ab_table(rows_of(ab), notes),
        _drift_table(rows, source),
        Table("cited", _CITED_CAPTION, _texts("Case", "Cited", "Measured here"), cited, (_CITED_NOTE,)),
    ]
    return {table.name: table for table in tables}


def frame_table(name: str, caption: str, frame: pd.DataFrame, empty: str, *, full: bool = False) -> Table:
    """A DataFrame of texts as a table, addresses and paths taken out unless `full`; `empty`: what an empty one says."""
    shown = str if full else redact
    rows = tuple(_text_row(*(shown(str(value or "—")) for value in row.values())) for row in rows_of(frame))
    columns = _texts(*(str(c).capitalize() for c in frame.columns))
    return Table(name, caption, columns, rows or (empty,), wrap=True)


def group_of(row: Row) -> tuple[Any, ...]:
    """What rows of one group share; a table compares methods inside a group only."""
    # A failed run never got as far as saying whether its acceptance was simulated: it joins the real ones.
    return tuple(bool(row.get(f)) if f == "simulated" else row.get(f) for f in GROUP_FIELDS)


def group_heading(row: Row, *, campaign: bool = False) -> str:
    """What a group of rows shares: `TP 1 · 256 new tokens · 1 request at once`, labelled where weights are not real."""
    many = row.get("concurrency") or 1
    parts = [f"TP {row['tp_size']}"] if row.get("tp_size") else ["unreadable records"]
    if row.get("max_new_tokens"):
        parts += [f"{row['max_new_tokens']} new tokens", f"{many} request{'s' * (many > 1)} at once"]
    parts += ["random weights"] * (row.get("weights") == "random")
    parts += ["simulated acceptance"] * bool(row.get("simulated"))
    return " · ".join([row["campaign"]] * campaign + parts)


def span(values: Iterable[int | None]) -> str:
    """`3`, or `2 to 3` where values differ, or `0` where there is none."""
    known = sorted({v for v in values if v is not None}) or [0]
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])


def _table(
    name: str, caption: str, spec: Sequence[tuple[str, str, str, str]], rows: Sequence[Row], notes: Iterable[str]
) -> Table:
    """One line a run below the heading of its group; `spec` has (heading, head, metric, prompt) of each column."""
    columns = [_column(key, group, head) for group, head, key, _ in spec]
    several = len({r["campaign"] for r in rows}) > 1
    body: list[str | tuple[Cell, ...]] = []
    for group in grouped(rows, group_of):
        body.append(group_heading(group[0], campaign=several))
        best = _best(group)
        for run in grouped(group, lambda r: (r["label"], r["run"] if r["status"] == "ok" else "")):
            cells = {r["prompt"]: r for r in run}
            line = (_cell(cells.get(p), key, best.get(p) == run[0]["run"]) for _, _, key, p in spec)
            body.append((Cell(text=_row_label(run)), *line))
    shown = {cell.text for line in body if not isinstance(line, str) for cell in line}
    notes = tuple(dict.fromkeys((*notes, *_reasons(rows, shown))))
    return Table(name, caption, (*_texts("Method"), *columns), tuple(body) or ("No run to show.",), notes)


def _scaling_table(rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    columns = (*_texts("Method", "Sizes"), _column("scaling"), _column("efficiency"), *_texts("Verdict"))
    several = len({r["campaign"] for r in rows}) > 1
    body: list[str | tuple[Cell, ...]] = []
    for group in grouped((r for r in rows if r["prompt"] == ALL), group_of):
        body.append(group_heading(group[0], campaign=several))
        for r in group:
            label, sizes, verdict = _text_row(r["label"], f"TP {r['tp_base']} to {r['tp_size']}", r["scaling_note"])
            body.append((label, sizes, _cell(r, "scaling"), _cell(r, "efficiency"), verdict))
    empty = "No method was measured at two TP sizes under one set-up."
    caption = "Scaling over tensor-parallel size, all prompts pooled"
    return Table("scaling", caption, columns, tuple(body) or (empty,), notes)


def _optimum_table(rows: Sequence[Row], source: str) -> Table:
    columns = _texts("TP and workload", "Predicted best", "Speedup there", "Largest error", "Measured best", "Speedup")
    body: list[str | tuple[Cell, ...]] = []
    pooled = (r for r in rows if r["prompt"] == ALL and r["status"] == "ok")
    for group in grouped(pooled, lambda r: (*group_of(r), *(r[axis] for axis in AB_AXES))):
        if (optimum := find_optimum(group)) is None:
            continue
        found, best = optimum
        error = "not known" if found.error is None else f"{100 * found.error:.1f}%"
        edge = " (edge)" if found.at_edge else ""
        oracle = (f"b{best['tree_budget']} (oracle)", f"{best['speedup']:.2f} ×")
        cells = (f"b{found.budget}{edge}", f"{found.speedup:.2f} ×", error, *oracle)
        settings = [str(group[0][axis]) for axis, (_, default) in AB_AXES.items() if group[0][axis] != default]
        body.append(_text_row(" · ".join([group_heading(group[0]), *settings]), *cells))
    caption = "The best tree budget, as two curves predict it and as it was measured"
    empty = f"Three budgets and autoregressive decoding on real weights are needed: fewer than {ENOUGH} were measured."
    return Table("optimum", caption, columns, tuple(body) or (empty,), (_OPTIMUM_NOTE, source))


def _ab_table(rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    columns = (*_texts("Held against", "Method"), _column("difference"), *_texts("Verdict", "Decode's all-reduce"))
    several = len({r["campaign"] for r in rows}) > 1
    body: list[str | tuple[Cell, ...]] = []
    for group in grouped((r for r in rows if r["prompt"] == ALL), group_of):
        body.append(group_heading(group[0], campaign=several))
        for r in group:
            sides = f"{_AXES[r['axis']]} {r['b'] or 'without'} against {r['a'] or 'without'}"
            # What both sides share beside the method tells the rows of a study of several axes apart.
            shared = [r[axis] for axis, (_, default) in AB_AXES.items() if axis != r["axis"] and r[axis] != default]
            left = _text_row(sides, ", ".join([method_label(r["method"], r["tree_budget"]), *shared]))
            body.append((*left, _cell(r, "difference"), *_text_row(r["difference_note"], r["all_reduce"])))
    empty = "No two conditions differ in an NCCL profile, a NUMA policy or a variant alone."
    caption = "Differences in decode rate between conditions that vary in one setting, all prompts pooled"
    return Table("ab", caption, columns, tuple(body) or (empty,), (*notes, _AB_NOTE))


def _drift_table(rows: Sequence[Row], source: str) -> Table:
    """Whether a campaign's machine changed under it, told from conditions with two starts and more."""
    unknown = "cannot be told: too few starts of one condition"
    body = [_text_row(name, workload, str(drift or unknown)) for name, workload, drift in find_drifts(rows)]
    caption = "Drift over the campaign: a condition's time from its first start to its last"
    return Table(
        "drift", caption, _texts("Campaign", "Workload", "Drift"), tuple(body) or ("No run.",), (source,), True
    )


def _ours(rows: Sequence[Row], where: tuple[int, str, int | None, str] | None) -> str:
    *axes, key = where or (None, "")
    for r in rows:
        same = [r["tp_size"], r["method"], r["tree_budget"]] == axes and r["prompt"] == ALL and r.get(key) is not None
        if same and r["weights"] == "real" and r["max_new_tokens"] == 256 and CITED_MODEL in str(r["model"]).lower():
            return f"{r[key]:.1f} {METRICS[key].unit}"
    return "—"


def _column(key: str, group: str = "", head: str = "") -> Column:
    metric = METRICS[key]
    return Column(head or metric.short, metric.unit, group, decimals=metric.decimals)


def _texts(*heads: str) -> tuple[Column, ...]:
    return tuple(Column(head, kind="text") for head in heads)


def _text_row(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text=text) for text in texts)


def _cell(row: Row | None, key: str, bold: bool = False) -> Cell:
    """The figure with the wider half of its interval, or the word that says why there is none."""
    if row is None or row.get(key) is None:
        return Cell(text=_word(row, key))
    low, value, high = row.get(f"{key}_low"), row[key], row.get(f"{key}_high")
    scale = 100 if METRICS[key].unit == "%" else 1
    half = None if low is None else scale * max(high - value, value - low)
    return Cell(scale * float(value), half, bold=bold and low is not None)


def _word(row: Row | None, key: str) -> str:
    if row is None or (row["status"] == "ok" and row["tpot_starts"] and key != "speedup"):
        return "—"
    return _explained(row["note"])[0]


def _explained(note: str) -> tuple[str, str]:
    return _WORDS.get(note, _DIFFERS)


def _row_label(run: Sequence[Row]) -> str:
    """The method; for failed starts also their names, which the notes below the table explain."""
    label, (first, *others) = str(run[0]["label"]), dict.fromkeys(r["run"] for r in run)
    if any((r.get("throttled_share") or 0) > MAX_THROTTLED_SHARE for r in run):
        label += " (slowed)"
    if run[0]["status"] == "ok" or label == first:
        return label
    return f"{label} ({first}{f' and {len(others)} more' if others else ''})"


def _best(group: Sequence[Row]) -> dict[str, str]:
    """By prompt, the run that beats every other of the group significantly; prompts without such a run are absent."""
    found = {}
    for cells in grouped((r for r in group if r["tpot_starts"]), ("prompt",)):
        first, *others = sorted(cells, key=lambda r: float(r["tpot_s"]))
        if others and all(_beats(first, other) for other in others):
            found[first["prompt"]] = first["run"]
    return found


def _beats(first: Row, other: Row) -> bool:
    try:
        return compare(other, first).verdict == "faster"
    except ComparisonError:
        return False


def _interval_note(rows: Sequence[Row]) -> str:
    measured = [r for r in rows if r.get("level")]
    if not measured:
        return "No cell was measured."
    starts, rounds = (span(r[k] for r in measured if r["prompt"] == ALL) for k in ("n_starts", "n_rounds"))
    wide = "± is the wider half of a 95% interval (Student's t on logarithms; ratios: Welch's t)"
    what = f"n = {rounds} timed rounds of all prompts in {starts} server start{'s' * (starts != '1')}"
    if all(r["level"] == "round" for r in measured):
        return f"{wide} over the rounds inside one server start; {ONE_START}. {what}. Nothing is bold: no verdict."
    return f"{wide} over server starts; {what}. Bold: significantly faster than every other method of its group."


def _reasons(rows: Sequence[Row], shown: set[str]) -> list[str]:
    """Notes that spell out the words shown in place of a number, and every error."""
    words = dict(_explained(r["note"]) for r in rows if r["speedup"] is None)
    notes = [f"{word}: {meaning}" for word, meaning in words.items() if meaning and word in shown]
    for same in grouped((r for r in rows if r["error"]), ("error",)):
        names = dict.fromkeys(r["run"] if r["status"] != "ok" else f"{r['run']} {r['prompt']}" for r in same)
        notes.append(f"{', '.join(names)}: {same[0]['error']}")
    return [redact(text) for text in notes]
