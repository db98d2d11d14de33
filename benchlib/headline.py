"""The main result in words, and every number that the text of the report quotes, as LaTeX macros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchlib.compare import BASELINE, ONE_START
from benchlib.frames import ALL, rows_of
from benchlib.typeset import escape_tex, redact

__all__ = ["build_headline", "build_macros", "group_heading", "group_of", "save_macros", "source_note", "span"]

Row = Mapping[str, Any]
GROUP_FIELDS = ("campaign", "engine", "weights", "simulated", "tp_size", "max_new_tokens", "concurrency")


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


def source_note(provenance: pd.DataFrame) -> str:
    """`Device: ...; engine: ...; commit: ...` from `frames.build_provenance`, every distinct value named."""
    items: dict[str, list[str]] = {}
    for row in rows_of(provenance):
        items.setdefault(row["item"], []).append(row["value"])
    wanted = ("device", "driver", "engine", "model", "weights", "commit")
    note = "; ".join(f"{k}: {', '.join(items[k])}" for k in wanted if k in items)
    return redact(f"{note[:1].upper()}{note[1:]}.", 600)


def build_headline(results: pd.DataFrame) -> str:
    """The main result in one or two sentences: the largest pooled speedup, with interval, n and verdict."""
    row = _best_row(rows_of(results))
    if row is None:
        reasons = sorted({str(r["note"]) for r in rows_of(results) if r["note"] and r["note"] != BASELINE})
        return redact(f"No speedup can be stated: {'; '.join(reasons) or 'no method was measured beside auto'}.")
    place, *workload = group_heading(row).split(" · ")
    interval = f"95% interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
    n = f"n = {row['speedup_n_baseline']} + {row['speedup_n']} {_unit(row)}"
    return (
        f"{row['label']} decodes {row['speedup']:.2f} times as fast as autoregressive decoding at {place} "
        f"({interval}; {n}; {row['note']}; {', '.join(workload)}).{_oracle(row, rows_of(results))}"
    )


def _oracle(row: Row, rows: Sequence[Row]) -> str:
    """What is to be said of a budget that is the best of several on the very prompts it is reported for."""
    budgets = {r["tree_budget"] for r in rows if r["method"] == "ddtree" and group_of(r) == group_of(row)}
    if row["method"] != "ddtree" or len(budgets) < 2:
        return ""
    return f" It is the best of {len(budgets)} tree budgets, chosen on these same prompts."


def build_macros(results: pd.DataFrame, scaling: pd.DataFrame, provenance: pd.DataFrame) -> dict[str, str]:
    """Macro name (without `\\bench`) to the text it stands for: every number that main.tex quotes."""
    rows = rows_of(results)
    best = _best_row(rows) or {}
    same = [r for r in rows if best and group_of(r) == group_of(best) and r["prompt"] == ALL and r["status"] == "ok"]
    linear: Row = next((r for r in same if r["method"] == "linear"), {})
    auto: Row = next((r for r in same if r["method"] == "auto"), {})
    wide: Row = next((r for r in rows_of(scaling) if r["method"] == "auto" and r["prompt"] == ALL), {})
    runs = {(r["campaign"], r["run"]): r["status"] for r in rows}
    return {
        "Headline": build_headline(results),
        "Source": source_note(provenance),
        "Conditions": str(len(runs)),
        "ConditionsFailed": str(sum(status != "ok" for status in runs.values())),
        "Prompts": str(len({r["prompt"] for r in rows} - {ALL})),
        "Starts": span(r["n_starts"] for r in rows if r["status"] == "ok"),
        "Rounds": span(r["n_rounds"] for r in rows if r["status"] == "ok" and r["prompt"] == ALL),
        "BestMethod": str(best.get("label", "none")),
        "BestGroup": group_heading(best) if best else "none",
        **_numbers("Best", best),
        **_numbers("Linear", linear),
        **_numbers("Auto", auto),
        "ScalingAuto": _text(wide.get("scaling"), 2),
        "ScalingAutoLow": _text(wide.get("scaling_low"), 2),
        "ScalingAutoHigh": _text(wide.get("scaling_high"), 2),
        "ScalingIdeal": _text(wide.get("ideal"), 0),
    }


def save_macros(macros: Mapping[str, str], folder: Path) -> Path:
    """Write `macros.tex` with one `\\newcommand` a macro, values escaped; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "macros.tex"
    lines = [rf"\newcommand{{\bench{name}}}{{{escape_tex(value)}}}" for name, value in macros.items()]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def span(values: Iterable[int | None]) -> str:
    """`3`, or `2 to 3` where values differ, or `0` where there is none."""
    known = sorted({v for v in values if v is not None})
    if not known:
        return "0"
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _best_row(rows: Sequence[Row]) -> Row | None:
    pooled = [r for r in rows if r["prompt"] == ALL and r.get("speedup") is not None]
    return max(pooled, key=lambda r: float(r["speedup"]), default=None)


def _unit(row: Row) -> str:
    return "server starts" if ONE_START not in row["note"] else "rounds inside 1 server start"


def _text(value: float | None, decimals: int) -> str:
    return "—" if value is None else f"{value:.{decimals}f}"


def _numbers(prefix: str, row: Row) -> dict[str, str]:
    decimals = {"decode_tok_s": 1, "speedup": 2, "speedup_low": 2, "speedup_high": 2, "accept_length": 2, "step_ms": 2}
    names = {key: "".join(part.capitalize() for part in key.split("_")) for key in decimals}
    return {f"{prefix}{names[key]}": _text(row.get(key), digits) for key, digits in decimals.items()}
