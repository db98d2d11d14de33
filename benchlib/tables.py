"""Results to tables: main result, speedup and step time by prompt, accept length, scaling, cited figures.

A cell without a number says why in a word, and a note below the table spells it out. Bold marks the fastest of a group
only where every other method of that group is slower by the comparison's own test: with one start nothing is bold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from benchlib.compare import BASELINE, ONE_START, compare
from benchlib.errors import ComparisonError
from benchlib.frames import ALL, rows_of
from benchlib.headline import group_heading, group_of, span
from benchlib.metrics import METRICS
from benchlib.typeset import Cell, Column, Table, redact

__all__ = ["build_tables", "frame_table"]

Row = Mapping[str, Any]
_SHORT = {
    BASELINE: "baseline",
    "random weights": "random",
    "simulated acceptance": "simulated",
    "all requests failed": "failed",
    "no baseline": "no auto",
    "1 round: no interval": "1 round",
    "failed": "failed",
    "unreadable": "unreadable",
}
_MEANING = {
    "baseline": "baseline: autoregressive decoding at the same TP, which the others are divided into",
    "random": "random: random weights give speeds of shapes, never a speedup",
    "simulated": "simulated: acceptance was a setting, so no speedup follows",
    "no auto": "no auto: this TP has no measured autoregressive run to compare with",
    "1 round": "1 round: two rounds are needed for an interval, and no speedup is given without one",
    "differs": "differs: the runs differ in more than the method",
}
# Figures of an earlier campaign on another machine; quoted as published, with what they are comparable to here.
_CITED = (
    ("TP 1, autoregressive", "about 26 tok/s", (1, "auto", None, "decode_tok_s")),
    (
        "TP 4, autoregressive, fib / qsort / arith",
        "37.5 ± 0.9 / 38.0 ± 0.3 / 37.5 ± 0.6 tok/s",
        (4, "auto", None, "decode_tok_s"),
    ),
    ("the same with NCCL variables set", "37.8 ± 0.2 / 38.1 ± 0.3 / 37.5 ± 0.2 tok/s", None),
    ("TP 1 to TP 4, autoregressive", "about 1.45 × of 4", None),
    ("TP 1, DDTree b15 over autoregressive, 256 tokens", "4.7 ×", (1, "ddtree", 15, "speedup")),
    ("TP 1, DDTree b15 over autoregressive, 1024 tokens", "6.5 × (about 173 tok/s)", None),
    ("TP 1, DDTree b15 over DFlash linear", "1.63 ×", None),
    ("TP 4, DDTree b15, 8 requests at once", "1270.8 tok/s in all", None),
)


def build_tables(results: pd.DataFrame, scaling: pd.DataFrame, source: str) -> dict[str, Table]:
    """Every result table by name; `source` (device, engine, commit) is noted below each."""
    rows = rows_of(results)
    notes = (*_interval_notes(rows), source)
    tables = [
        _main_table(rows, notes),
        _prompt_table("speedup", "Speedup over autoregressive decoding, by prompt", "speedup", rows, notes),
        _prompt_table("steps", "Milliseconds a verify step, by prompt", "step_ms", rows, (source,)),
        _accept_table(rows, source),
        _scaling_table(rows_of(scaling), notes),
        _cited_table(rows),
    ]
    return {table.name: table for table in tables}


def frame_table(name: str, caption: str, frame: pd.DataFrame, empty: str) -> Table:
    """A DataFrame of texts as a table, addresses and paths taken out; `empty` is what an empty one says."""
    columns = tuple(Column(str(c).capitalize(), kind="text") for c in frame.columns)
    rows = [tuple(Cell(text=redact(str(v if v is not None else "—"))) for v in r.values()) for r in rows_of(frame)]
    return Table(name, caption, columns or (Column("Item", kind="text"),), tuple(rows) or (empty,), wrap=True)


def _main_table(rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    prompts = _prompts(rows)
    columns = (
        Column("Method", kind="text"),
        Column("Verify", "tokens", decimals=0),
        *_pooled_columns(),
        *(Column(p, "tok/s", "Decode rate by prompt") for p in prompts),
    )

    def line(cells: Mapping[str, Row], best: Mapping[str, bool]) -> tuple[Cell, ...]:
        row = cells.get(ALL, {})
        return (
            _number(row, "verify_tokens", "—" if row.get("status") == "ok" else ""),
            _rate(row, best.get(ALL, False)),
            _ratio(row, "speedup", best.get(ALL, False)),
            _number(row, "accept_length", "—"),
            _number(row, "step_ms", "—"),
            *(_rate(cells.get(p, {}), best.get(p, False)) for p in prompts),
        )

    caption = "Decode rate, speedup, accept length and time per step; pooled over all prompts, and by prompt"
    return _table("main", caption, columns, rows, line, (*notes, *_reasons(rows)))


def _pooled_columns() -> tuple[Column, ...]:
    head = "All prompts pooled"
    return (
        Column("Decode", "tok/s", head),
        Column("Speedup", "×", head),
        Column("Accept", "tok/step", head, decimals=2),
        Column("Step", "ms", head, decimals=2),
    )


def _prompt_table(name: str, caption: str, key: str, rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    shown = (*_prompts(rows), ALL)
    unit, decimals = METRICS[key].unit, None if key == "speedup" else 2
    columns = (Column("Method", kind="text"), *(Column(p, unit, decimals=decimals) for p in shown))

    def line(cells: Mapping[str, Row], best: Mapping[str, bool]) -> tuple[Cell, ...]:
        if key == "speedup":
            return tuple(_ratio(cells.get(p, {}), key, best.get(p, False)) for p in shown)
        return tuple(_number(cells.get(p, {}), key, "—") for p in shown)

    return _table(name, caption, columns, rows, line, (*notes, *_reasons(rows)))


def _accept_table(rows: Sequence[Row], source: str) -> Table:
    shown = (*_prompts(rows), ALL)
    columns = [Column("Method", kind="text"), Column("Verify", "tokens", decimals=0)]
    for prompt in shown:
        columns += [Column("Accept", "tok/step", prompt, decimals=2), Column("Full", "%", prompt, decimals=1)]

    def line(cells: Mapping[str, Row], _: Mapping[str, bool]) -> tuple[Cell, ...]:
        pairs = [
            cell
            for p in shown
            for cell in (
                _number(cells.get(p, {}), "accept_length", "—"),
                _percent(cells.get(p, {}), "full_block_share"),
            )
        ]
        return (_number(cells.get(ALL, {}), "verify_tokens", "—"), *pairs)

    note = "Accept: 1 + accepted drafts / verify steps, pooled. Full: share of steps that accept the whole block."
    speculative = [r for r in rows if r["method"] != "auto"]
    return _table(
        "accept",
        "Accept length and share of whole blocks, by prompt and budget",
        tuple(columns),
        speculative,
        line,
        (note, source, *_reasons(speculative)),
    )


def _scaling_table(rows: Sequence[Row], notes: tuple[str, ...]) -> Table:
    columns = (
        Column("Method", kind="text"),
        Column("Sizes", kind="text"),
        Column("Scaling", "×"),
        Column("Of ideal", "%", decimals=0),
        Column("Verdict", kind="text"),
    )
    body: list[str | tuple[Cell, ...]] = []
    pooled = [r for r in rows if r["prompt"] == ALL]
    for group in _grouped(pooled, group_of):
        body.append(group_heading(group[0], campaign=len({r["campaign"] for r in rows}) > 1))
        body += [
            (
                Cell(text=r["label"]),
                Cell(text=f"TP {r['tp_base']} to {r['tp_size']}"),
                _ratio(r, "scaling", False, note="scaling_note"),
                _percent(r, "efficiency"),
                Cell(text=_brief(r["scaling_note"])),
            )
            for r in group
        ]
    empty = "No method was measured at two TP sizes under one set-up."
    return Table(
        "scaling", "Scaling over tensor-parallel size, all prompts pooled", columns, tuple(body) or (empty,), notes
    )


def _cited_table(rows: Sequence[Row]) -> Table:
    columns = tuple(Column(head, kind="text") for head in ("Case", "Cited", "Measured here"))
    body = tuple((Cell(text=case), Cell(text=figure), Cell(text=_ours(rows, where))) for case, figure, where in _CITED)
    note = (
        "Cited, not ours: published figures of a Qwen3.6-27B campaign on 8 RTX PRO 6000 GPUs over PCIe. "
        "Another machine and another model: side by side for orientation, not compared."
    )
    return Table("cited", "Cited figures of an earlier campaign, beside this one's", columns, body, (note,))


def _ours(rows: Sequence[Row], where: tuple[int, str, int | None, str] | None) -> str:
    if where is None:
        return "—"
    *axes, key = where
    found = [
        r
        for r in rows
        if [r["tp_size"], r["method"], r["tree_budget"]] == axes and r["prompt"] == ALL and r[key] is not None
    ]
    return f"{found[0][key]:.1f} {METRICS[key].unit}" if found else "—"


def _table(
    name: str, caption: str, columns: tuple[Column, ...], rows: Sequence[Row], line: Any, notes: Iterable[str]
) -> Table:
    """Rows grouped by what they share, one line a run of each group."""
    several = len({r["campaign"] for r in rows}) > 1
    body: list[str | tuple[Cell, ...]] = []
    for group in _grouped(rows, group_of):
        body.append(group_heading(group[0], campaign=several))
        best = _best(group)
        for run in _grouped(group, lambda r: (r["label"], r["run"] if r["status"] == "ok" else "")):
            cells = {r["prompt"]: r for r in run}
            marks = {prompt: name == run[0]["run"] for prompt, name in best.items()}
            body.append((Cell(text=_row_label(run)), *line(cells, marks)))
    return Table(name, caption, columns, tuple(body) or ("No run to show.",), tuple(dict.fromkeys(notes)))


def _row_label(run: Sequence[Row]) -> str:
    """The method; for failed starts also their names, which the notes below the table explain."""
    if run[0]["status"] == "ok":
        return str(run[0]["label"])
    first, *others = dict.fromkeys(r["run"] for r in run)
    return f"{run[0]['label']} ({first}{f' and {len(others)} more' if others else ''})"


def _grouped(rows: Iterable[Row], key: Any) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _best(group: Sequence[Row]) -> dict[str, str]:
    """By prompt, the run that beats every other of the group significantly; prompts without such a run are absent."""
    found = {}
    for cells in _grouped((r for r in group if r["tpot_starts"]), lambda r: r["prompt"]):
        first, *others = sorted(cells, key=lambda r: float(r["tpot_s"]))
        if others and all(_beats(first, other) for other in others):
            found[first["prompt"]] = first["run"]
    return found


def _beats(first: Row, other: Row) -> bool:
    try:
        return compare(other, first).verdict == "faster"
    except ComparisonError:
        return False


def _prompts(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r["prompt"] for r in rows if r["prompt"] != ALL))


def _brief(note: str | None) -> str:
    return "—" if not note else _SHORT.get(note, note if len(note) < 30 else "differs")


def _reason(row: Row, note: str = "note") -> str:
    if row and row["status"] != "ok":
        return _SHORT[row["note"]]
    return _brief(row.get(note))


def _number(row: Row, key: str, missing: str) -> Cell:
    if row.get(key) is not None:
        return Cell(float(row[key]))
    return Cell(text=missing if row.get("status") == "ok" and row["tpot_starts"] else _reason(row) if row else "—")


def _percent(row: Row, key: str) -> Cell:
    cell = _number(row, key, "—")
    return cell if cell.value is None else Cell(100 * cell.value)


def _rate(row: Row, bold: bool) -> Cell:
    return _ratio(row, "decode_tok_s", bold)


def _ratio(row: Row, key: str, bold: bool, note: str = "note") -> Cell:
    if row.get(key) is None:
        return Cell(text=_reason(row, note))
    low, value, high = row[f"{key}_low"], float(row[key]), row[f"{key}_high"]
    return Cell(value, None if low is None else max(high - value, value - low), bold=bold)


def _interval_notes(rows: Sequence[Row]) -> tuple[str, ...]:
    measured = [r for r in rows if r.get("level")]
    if not measured:
        return ("No cell was measured.",)
    starts, rounds = (span(r[k] for r in measured if r["prompt"] == ALL) for k in ("n_starts", "n_rounds"))
    wide = "± is the wider half of a 95% interval (Student's t on logarithms; ratios: Welch's t)"
    what = f"n = {rounds} timed rounds of all prompts in {_count(starts, 'server start')}"
    if all(r["level"] == "round" for r in measured):
        return (f"{wide} over the rounds inside one server start; {ONE_START}. {what}. Nothing is bold: no verdict.",)
    return (f"{wide} over server starts; {what}. Bold: significantly faster than every other method of its group.",)


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Notes that spell out the words standing in cells without a number."""
    words = [_brief(r["note"]) for r in rows if r.get("speedup") is None]
    notes = [_MEANING[w] for w in dict.fromkeys(words) if w in _MEANING]
    errors: dict[str, list[str]] = {}
    for row in rows:
        if row["error"]:
            name = row["run"] if row["status"] != "ok" else f"{row['run']} {row['prompt']}"
            errors.setdefault(row["error"], []).append(name)
    notes += [f"{', '.join(dict.fromkeys(names))}: {error}" for error, names in errors.items()]
    return [redact(text) for text in notes]


def _count(number: str, noun: str) -> str:
    return f"{number} {noun}{'' if number == '1' else 's'}"
