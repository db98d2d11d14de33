"""The main result in words, and every number that the text of the report quotes, as LaTeX macros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchlib.compare import BASELINE
from benchlib.frames import ALL, Row, rows_of
from benchlib.tables import group_heading, group_of, span
from benchlib.typeset import escape_tex, redact
from benchlib.verdicts import ONE_START

__all__ = ["build_headline", "build_macros", "save_macros", "source_note"]

_QUOTED = {"decode_tok_s": 1, "speedup": 2, "speedup_low": 2, "speedup_high": 2, "accept_length": 2, "step_ms": 2}


def source_note(provenance: pd.DataFrame) -> str:
    """`Device: ...; engine: ...; commit: ...` from `frames.build_provenance`, every distinct value named."""
    values = provenance.groupby("item")["value"].agg(", ".join)
    wanted = ("device", "driver", "engine", "model", "weights", "commit")
    note = "; ".join(f"{item}: {values[item]}" for item in wanted if item in values)
    return redact(f"{note[:1].upper()}{note[1:]}.", 600)


def build_headline(results: pd.DataFrame) -> str:
    """The main result in one or two sentences: the fastest method's pooled speedup, with interval, n and verdict."""
    rows = rows_of(results)
    row = _best_row(rows)
    if not row:
        reasons = sorted({str(r["note"]) for r in rows if r["note"] and r["note"] != BASELINE})
        return redact(f"No speedup can be stated: {'; '.join(reasons) or 'no method was measured beside auto'}.")
    place, *workload = group_heading(row).split(" · ")
    unit = "rounds inside 1 server start" if ONE_START in row["note"] else "server starts"
    text = (
        f"{row['label']} decodes {row['speedup']:.2f} times as fast as autoregressive decoding at {place} "
        f"(95% interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f}; n = {row['speedup_n_baseline']} + "
        f"{row['speedup_n']} {unit}; {row['note']}; {', '.join(workload)})."
    )
    budgets = {r["tree_budget"] for r in rows if r["method"] == "ddtree" and group_of(r) == group_of(row)}
    # The best of several budgets on the very prompts it is reported for is an oracle, and is called one.
    oracle = row["method"] == "ddtree" and len(budgets) > 1
    return f"{text} It is the best of {len(budgets)} tree budgets, chosen on these same prompts." if oracle else text


def build_macros(results: pd.DataFrame, scaling: pd.DataFrame, provenance: pd.DataFrame) -> dict[str, str]:
    """Macro name (without `\\bench`) to the text it stands for: every number that main.tex quotes."""
    rows = rows_of(results)
    best = _best_row(rows)
    ok = [r for r in rows if r["status"] == "ok"]
    pooled = [r for r in ok if r["prompt"] == ALL]
    beside = {r["method"]: r for r in reversed(pooled) if best and group_of(r) == group_of(best)}
    wide = next((r for r in rows_of(scaling) if r["method"] == "auto" and r["prompt"] == ALL), {})
    runs = {(r["campaign"], r["run"]): r["status"] for r in rows}
    macros = {
        "Headline": build_headline(results),
        "Source": source_note(provenance),
        "Conditions": str(len(runs)),
        "ConditionsFailed": str(sum(status != "ok" for status in runs.values())),
        "Prompts": str(len({r["prompt"] for r in rows} - {ALL})),
        "Starts": span(r["n_starts"] for r in ok),
        "Rounds": span(r["n_rounds"] for r in pooled),
        "BestMethod": str(best.get("label", "none")),
        "BestGroup": group_heading(best) if best else "none",
    }
    for prefix, row in (("Best", best), ("Linear", beside.get("linear", {})), ("Auto", beside.get("auto", {}))):
        for key, decimals in _QUOTED.items():
            macros[prefix + key.title().replace("_", "")] = _text(row.get(key), decimals)
    for key in ("scaling", "scaling_low", "scaling_high"):
        macros[f"ScalingAuto{key[8:].title()}"] = _text(wide.get(key), 2)
    return {**macros, "ScalingIdeal": _text(wide.get("ideal"), 0)}


def save_macros(macros: Mapping[str, str], folder: Path) -> Path:
    """Write `macros.tex` with one `\\newcommand` a macro, values escaped; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "macros.tex"
    lines = [rf"\newcommand{{\bench{name}}}{{{escape_tex(value)}}}" for name, value in macros.items()]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _best_row(rows: Sequence[Row]) -> Row:
    """The fastest row with a speedup. The largest speedup may be over a slow baseline, and so be no gain at all."""
    pooled = [r for r in rows if r["prompt"] == ALL and r.get("speedup") is not None]
    return max(pooled, key=lambda r: float(r["decode_tok_s"]), default={})


def _text(value: float | None, decimals: int) -> str:
    return "—" if value is None else f"{value:.{decimals}f}"
