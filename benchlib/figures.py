"""Results to figures: which rows each one shows, in which panels, and what it says of them in words.

Bars and points carry their 95 % interval; what has no number is absent from the figure and named in the tables. Where
a figure would have too many panels it shows the lowest concurrency and the first length alone, and says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchlib import panels
from benchlib.compare import BASELINE
from benchlib.drawing import WIDTHS_IN, Drawing, draw_sentence, method_style, save_figure
from benchlib.errors import ReportError
from benchlib.frames import ALL, Row, grouped, method_label, rows_of
from benchlib.optimum import ENOUGH, find_optimum
from benchlib.panels import condition_order
from benchlib.tables import group_of
from benchlib.verdicts import level_of, log_interval, observations

__all__ = ["WIDTHS_IN", "Drawing", "build_figures", "method_style", "save_figure"]

MAX_PANELS = 4
MAX_BARS = 48  # of one panel: more would be thinner than their intervals
MAX_CURVES = 8  # of the concurrency figure's panels
MAX_LINES = 24  # of the A/B figure
MAX_ITEMS = 30  # of an alt text


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one figure is made: the metric its rows must have, the function that fills a panel, an alt text's item.

    `height_in` is a panel's, `line_in` what each of its rows adds; `empty` is what a figure without rows says.
    """

    name: str
    caption: str
    key: str
    draw: Callable[[Axes, Sequence[Row]], panels.Later | None]
    item: str
    empty: str
    pooled: bool = True
    height_in: float = 2.4
    line_in: float = 0.0
    panel: str = "TP {tp_size}"
    across: int = 3
    max_panels: int = MAX_PANELS
    workload: tuple[str, ...] = ("max_new_tokens", "concurrency")
    least_in: float = 1.55  # a panel's width
    conditions: int = 0  # so many at most, times the prompts where these are not pooled; 0: any number
    legend: Literal["", "bars", "points", "bar settings", "point settings"] = "points"
    share: Literal["x", "y", ""] = "y"


@dataclass(frozen=True, slots=True)
class _Choice:
    """The rows of a figure, what had to be left out, and the titles of its panels."""

    rows: list[Row]
    titles: list[str]
    note: str = ""


def build_figures(
    results: pd.DataFrame, scaling: pd.DataFrame, ab: pd.DataFrame, folder: Path, *, only: Collection[str] = ()
) -> dict[str, Drawing]:
    """Draw and save every figure: `<name>.pdf` (two columns), `<name>-1col.pdf` and both as `.png`; by name.

    A figure for which there is no data is one line high and says why, so that documents can always include it.
    `only` names those to draw; ReportError for a name that is none.
    """
    if unknown := set(only) - {plan.name for plan in _PLANS}:
        there = ", ".join(plan.name for plan in _PLANS)
        raise ReportError(f"no figure is named {', '.join(sorted(unknown))}: name some of {there}")
    everything = rows_of(results)
    cells = [r for r in everything if r["status"] == "ok" and r.get("tpot_s") is not None]
    sources = {"scaling": rows_of(scaling), "ab": rows_of(ab)}
    names = _name_extras(cells)
    marked = _mark_optima([{**row, **_intervals(row)} for row in _mark_extras(cells, names)])
    why = "; ".join(dict.fromkeys(r["note"] for r in everything if r["prompt"] == ALL and r["note"] != BASELINE))
    drawn = {}
    for plan in (plan for plan in _PLANS if not only or plan.name in only):
        rows = _mark_extras(sources[plan.name], names) if plan.name in sources else marked
        if plan.name == "ab":
            rows = [{**row, "sides": panels.format_sides(row)} for row in rows]
        drawn[plan.name] = _save(plan, _choose(plan, rows), folder, why or "nothing but the baseline was measured")
    return drawn


def _extra(row: Row) -> str:
    """What sets a condition apart beside its method: `NCCL pcie, no-custom-ar`."""
    return str(row["label"]).removeprefix(method_label(row["method"], row["tree_budget"])).removeprefix(", ")


def _name_extras(cells: Iterable[Row]) -> dict[str, tuple[int, str]]:
    """Of each further setting its place among the patterns, the most used one plain, and its name in a legend."""
    counts = Counter(_extra(r) for r in cells)
    order = sorted(counts, key=lambda name: (-counts[name], name != ""))
    alone, together = ({_extra(r) for r in cells if (r["tp_size"] == 1) is one} for one in (True, False))
    if alone == {""} and together and "" not in together:
        # One GPU has no collective: its rows are the plain ones of any profile.
        first = next(name for name in order if name)
        order = [first, *(name for name in order if name not in ("", first))]
        return {"": (0, f"{first} (TP 1: none)")} | {
            n: (i, n if i else f"{n} (TP 1: none)") for i, n in enumerate(order)
        }
    return {name: (i, name) for i, name in enumerate(order)}


def _mark_extras(rows: Iterable[Row], names: dict[str, tuple[int, str]]) -> list[Row]:
    found = []
    for row in rows:
        extra, setting = names[_extra(row)]
        drafts = ", ".join([method_label(row["method"], row["tree_budget"]), *[row["variant"]] * bool(row["variant"])])
        found.append({**row, "extra": extra, "setting": setting, "drafts": drafts})
    return [row for row in found if row["extra"] < panels.MAX_EXTRAS]


def _intervals(row: Row) -> Row:
    """Intervals of a step's time and of accept length, over starts or rounds as those of the decode rate."""
    level = level_of(row["tpot_starts"])
    ends: Row = {}
    rounds = zip(row["tpot_starts"], row["step_starts"], strict=False)
    lengths = [[(t[1], s[1]) for t, s in zip(*start, strict=False)] for start in rounds]
    for key, starts in (("step_ms", row["step_starts"]), ("accept_length", lengths)):
        if row[key] is not None and starts:
            centre, low, high = log_interval(observations(starts, level))
            if low is not None and high is not None:
                ends |= {f"{key}_low": row[key] * low / centre, f"{key}_high": row[key] * high / centre}
    return ends


def _mark_optima(rows: Iterable[Row]) -> list[Row]:
    """Trees of ENOUGH budgets beside a baseline get their `optimum`; the fastest measured one is `best`, an oracle."""
    marked = []
    for group in grouped(rows, lambda r: (*group_of(r), r["extra"], r["prompt"])):
        if group[0]["prompt"] == ALL and (optimum := find_optimum(group)):
            found, best = optimum
            measured = [r for r in group if r["method"] == "ddtree" and r["speedup"] is not None]
            told = {
                "optimum": found,
                "predicted": f"b{found.budget}, {found.speedup:.2f} ×",
                "oracle": f"b{best['tree_budget']}, {best['speedup']:.2f} ×",
            }
            group = [{**r, **told, "best": r is best} if r in measured else r for r in group]
        marked += group
    return marked


def _choose(plan: _Plan, rows: Iterable[Row]) -> _Choice:
    """The rows that a figure has room for: of too many panels the first workload's, of too many bars the plainest."""
    known = [r for r in rows if (r["prompt"] == ALL) == plan.pooled and r.get(plan.key) is not None]
    title = _titler(plan, known)
    if plan.name == "concurrency":
        known = [r for part in grouped(known, lambda r: (title(r), condition_order(r))) if len(part) > 1 for r in part]
    kept, notes = known, []
    for key, text in (("concurrency", "{} at once"), ("max_new_tokens", "{} new tokens")):
        if key in plan.workload and len({title(r) for r in kept}) > plan.max_panels:
            least = {part[0]["campaign"]: min(int(r[key]) for r in part) for part in grouped(kept, ("campaign",))}
            fewer = [r for r in kept if r[key] == least[r["campaign"]]]
            notes += [text.format(" or ".join(map(str, sorted(set(least.values())))))] * (len(fewer) < len(kept))
            kept = fewer
    note = f". Shown: {', '.join(reversed(notes))}; the tables have the rest" if notes else ""
    if plan.conditions and kept:
        most = plan.conditions // (1 if plan.pooled else len({r["prompt"] for r in kept}))
        fit = [_plainest(part, max(1, most)) for part in grouped(kept, title)]
        left = len({r["label"] for r in kept} - {r["label"] for part in fit for r in part})
        kept = [r for part in fit for r in part]
        note += f". Left out for want of room: {left} conditions, which the tables have" if left else ""
    if plan.name == "ab" and len(kept) > MAX_LINES:
        note += f". The first {MAX_LINES} of {len(kept)} comparisons"
        kept = kept[:MAX_LINES]
    if plan.panel == "{drafts}":  # a panel a condition: also where the first budget's run failed, smaller budgets first
        kept = [r for part in grouped(kept, ("campaign",)) for r in sorted(part, key=condition_order)]
    return _Choice(kept, [title(r) for r in kept], note)


def _plainest(rows: Sequence[Row], most: int) -> list[Row]:
    """The rows of at most so many conditions: those of the commonest settings, of each further setting all or none."""
    parts = grouped(sorted(rows, key=lambda r: (r["extra"], *condition_order(r))), ("label",))
    extras = [part[0]["extra"] for part in parts]
    fit = most if len(parts) <= most else extras.index(extras[most]) or most
    kept = {part[0]["label"] for part in parts[:fit]}
    return [r for r in rows if r["label"] in kept]


def _titler(plan: _Plan, rows: Sequence[Row]) -> Callable[[Row], str]:
    """Names a row's panel: by the panel's own axis, and every other one on which `rows` differ."""
    differ = {key for key in (*plan.workload, "campaign") if len({r[key] for r in rows}) > 1}

    def title(row: Row) -> str:
        parts = [plan.panel.format(**row)]
        parts += [f"{row['max_new_tokens']} tokens"] * ("max_new_tokens" in differ)
        parts += [f"{row['concurrency']} at once"] * ("concurrency" in differ)
        labels = [row["campaign"]] * ("campaign" in differ)
        labels += ["random weights"] * (row["weights"] == "random")
        labels += ["simulated acceptance"] * bool(row["simulated"])
        return "\n".join([", ".join(parts), *labels])

    return title


def _save(plan: _Plan, choice: _Choice, folder: Path, why: str) -> Drawing:
    caption, empty = plan.caption + choice.note, plan.empty.format(why=why)
    alt = _alt(plan, choice) if choice.rows else empty
    return save_figure(plan.name, caption, alt, lambda width: _draw(plan, choice, width, empty), folder)


def _alt(plan: _Plan, choice: _Choice) -> str:
    """Every value in words by panel; of more than MAX_ITEMS the lowest and the highest."""
    items = [plan.item.format(**{**row, "words": _words(row, plan.key)}) for row in choice.rows]
    told = list(zip((title.replace("\n", ", ") for title in choice.titles), items, strict=True))
    if len(set(told)) > MAX_ITEMS:
        places = range(len(told))
        ends = (pick(places, key=lambda i: float(choice.rows[i][plan.key])) for pick in (min, max))
        lowest, highest = (f"{title}, {item}" for title, item in (told[i] for i in ends))
        return f"{len(told)} values. Lowest: {lowest}. Highest: {highest}"
    panel = {title: ", ".join(dict.fromkeys(item for t, item in told if t == title)) for title, _ in told}
    return "; ".join(f"{title}: {items}" for title, items in panel.items())


def _words(row: Row, key: str) -> str:
    """A figure with its interval: `2.69 (2.38 to 3.03)`, a difference in percent."""
    known = row[key]
    if not isinstance(known, float | int):
        return ""
    decimals = next((d for d, least in ((0, 100), (1, 30)) if known >= least), 2)
    text = "{:+.1%}" if key == "difference" else f"{{:.{decimals}f}}"
    ends = (row.get(f"{key}{end}") for end in ("", "_low", "_high"))
    value, *interval = (text.format(end) for end in ends if end is not None)
    return f"{value} ({' to '.join(interval)})" if interval else value


def _draw(plan: _Plan, choice: _Choice, width: float, empty: str) -> Figure:
    if not choice.rows:
        return draw_sentence(width, empty)
    narrow = width < WIDTHS_IN[""]
    titles = list(dict.fromkeys(choice.titles))
    parts = [[r for r, t in zip(choice.rows, choice.titles, strict=True) if t == title] for title in titles]
    across = _across(plan, titles, parts, width)
    # Lines of the narrow A/B figure have their texts above and below them.
    line_in = plan.line_in * (2 if narrow and plan.name == "ab" else 1)
    heights = [plan.height_in + line_in * max(map(len, parts[i : i + across])) for i in range(0, len(parts), across)]
    figure = Figure(figsize=(width, sum(heights) + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    share: Any = {f"share{axis}": plan.share == axis for axis in "xy"}
    axes = list(figure.subplots(len(heights), across, squeeze=False, height_ratios=heights, **share).flat)
    later = [plan.draw(axis, part) for axis, part in zip(axes, parts, strict=False)]
    for index, (axis, title) in enumerate(zip(axes, titles, strict=False)):
        axis.set_title(title, loc="left")
        if index % across:
            axis.set_ylabel("")
        if index + across < len(parts):
            axis.set_xlabel("")
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    _legend(figure, plan, choice.rows, width, axes[len(parts) :])
    for place in filter(None, later):
        layout: Any = figure.get_layout_engine()
        layout.execute(figure)
        place()
    return figure


def _across(plan: _Plan, titles: Sequence[str], parts: Sequence[Sequence[Row]], width: float) -> int:
    """Panels in a row: as many as their titles and bars have room for, the last row not much emptier than the first."""
    longest = max(len(line) for title in titles for line in title.splitlines())
    least_in = max(plan.least_in, 0.075 * longest + 0.3)
    if plan.legend.startswith("bar") and plan.panel.startswith("TP"):
        least_in = max(least_in, 0.5 + 0.085 * max(map(len, parts)))
    across = max(1, min(plan.across, len(parts), int(width / least_in)))
    return math.ceil(len(parts) / math.ceil(len(parts) / across))


def _legend(figure: Figure, plan: _Plan, rows: Sequence[Row], width: float, free: Sequence[Axes]) -> None:
    """Methods by colour, further settings by pattern in grey, and what marks an optimum; in a `free` panel's place."""
    bars, handles = plan.legend.startswith("bar"), []
    if plan.legend in ("bars", "points"):
        for row in {r["method"] + str(r["tree_budget"]): r for r in sorted(rows, key=condition_order)}.values():
            handles.append(_handle(method_label(row["method"], row["tree_budget"]), {**row, "extra": 0}, bars))
    for extra, name in sorted({(row["extra"], row["setting"]) for row in rows}) if plan.legend else ():
        handles += [_handle(name, {"method": "auto", "tree_budget": None, "extra": extra}, bars)] * bool(name)
    if plan.name in ("accept", "step", "optimum") and any(row.get("optimum") for row in rows):
        handles.append(Line2D([], [], **panels.CURVE, label="fitted curve"))
        handles.append(Line2D([], [], **panels.PREDICTED, label="predicted best"))
        handles.append(Line2D([], [], **panels.MEASURED, label="measured best (oracle)"))
    if handles and free:
        free[0].legend(handles=handles, loc="center")
    elif handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), int((width - 0.1) / (0.056 * longest + 0.4))))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _handle(label: str, row: Row, bars: bool) -> Any:
    if bars:
        return Patch(**panels.bar_style(row), label=label)
    return Line2D([], [], ls="", label=label, **panels.marker_style(row))


_RATE = "{label} {words}"
_PLANS = (
    _Plan("speedup", "Speedup over autoregressive decoding, all prompts pooled, with 95% interval; dashed: no gain",
          "speedup", panels.draw_speedup, _RATE, "No speedup can be stated: {why}", legend="bar settings", across=2,
          least_in=2.2),
    _Plan("decode", "Decode rate by prompt and method in tokens a second, with 95% interval",
          "decode_tok_s", panels.draw_prompts, "{prompt} {label} {words}", "No run was measured",
          pooled=False, legend="bars", across=2, least_in=2.2, conditions=MAX_BARS),
    _Plan("accept", "Accept length (bonus included) against tokens per verify step, all prompts pooled, with 95% "
          "interval",
          "accept_length", panels.draw_by_verify("accept_length"), _RATE, "No speculative run was measured"),
    _Plan("step", "Milliseconds a step against tokens per verify step, all prompts pooled, with 95% interval; "
          "dashed: autoregressive", "step_ms", panels.draw_by_verify("step_ms"), _RATE, "No run was measured"),
    _Plan("optimum", "Speedup over the tree budget, all prompts pooled: predicted by the two fitted curves, and "
          "measured with 95% interval", "optimum", panels.draw_optimum,
          "predicted best {predicted}, measured best {oracle} (an oracle: chosen on the prompts it is shown for)",
          f"No optimum: that takes {ENOUGH} tree budgets and autoregressive decoding, on real weights", least_in=2.2),
    _Plan("histogram", "Accepted drafts in a verify step, all prompts pooled; the last, black bar is the whole block",
          "drafts_histogram", panels.draw_histogram,
          "the whole block in {full_block_share:.1%} of steps",
          "No speculative run was measured", height_in=1.7, panel="{drafts}", across=5, least_in=1.3,
          max_panels=0, legend=""),
    _Plan("concurrency", "Throughput of all requests against the decode rate of each (95% interval), all prompts "
          "pooled; numbers: requests at once", "output_throughput_tok_s", panels.draw_concurrency,
          "{label}, {concurrency} at once {output_throughput_tok_s:.0f} tok/s, {decode_tok_s:.0f} each",
          "No condition was measured at two concurrencies", workload=("max_new_tokens",),
          height_in=2.7, across=2, least_in=2.2, conditions=MAX_CURVES),
    _Plan("scaling", "Scaling over tensor-parallel size against ideal, all prompts pooled, with 95% interval",
          "scaling", panels.draw_scaling, _RATE,
          "No method was measured at two TP sizes under one set-up", height_in=0.9, line_in=0.15, across=2,
          panel="TP {tp_base} to TP {tp_size}", legend="point settings", share=""),
    _Plan("ab", "Difference in decode rate between conditions that vary in one setting, all prompts pooled, with 95% "
          "interval", "difference", panels.draw_ab, "{sides} {words}, {difference_note}",
          "No two conditions differ in an NCCL profile, a NUMA policy or a variant alone",
          height_in=0.55, line_in=0.27, across=1, max_panels=2, legend="", share="x"),
)  # fmt: skip
