"""Results to figures, as PDF with embedded fonts and PNG, each with a text that says what it shows.

A method has one colour and marker in every figure. Colours can be told apart by the colour-blind; tree budgets darken
from yellow to brown, so that their order survives in grey, and the linear chain is hatched. Bars and points carry their
95 % interval; what has no number is absent from the figure and named in the tables.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchlib.frames import ALL, rows_of
from benchlib.metrics import METRICS

__all__ = ["Drawing", "build_figures", "method_style"]

Row = Mapping[str, Any]
Width = Literal["one", "two"]
WIDTHS_IN: dict[Width, float] = {"one": 3.4, "two": 6.9}
DPI = 200
_BUDGETS = LinearSegmentedColormap.from_list("budget", ["#FBE0A0", "#F2B134", "#D55E00", "#7A2E00", "#2E1200"])
_AUTO, _LINEAR = "#6E6E6E", "#0072B2"
_RC: dict[str, Any] = {
    # One weight of one font: embedding a subset of each costs more than drawing the figure.
    **{"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "font.family": "DejaVu Sans"},
    **{"font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 7},
    **{"xtick.labelsize": 7, "ytick.labelsize": 7, "hatch.linewidth": 0.7, "axes.linewidth": 0.7},
    **{"grid.linewidth": 0.5, "grid.color": "#DDDDDD", "lines.linewidth": 1.3, "lines.markersize": 4.5},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "axes.axisbelow": True},
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A saved figure; shown in a notebook and in HTML it carries its picture with it."""

    name: str
    caption: str
    alt: str
    png: Path
    narrow_png: Path
    pdf: Path

    def to_html(self) -> str:
        """`figure` with the PNG as a data URI (the one-column one for small screens), its alt text and caption."""
        wide, narrow = (base64.b64encode(p.read_bytes()).decode() for p in (self.png, self.narrow_png))
        alt, caption = html.escape(self.alt, quote=True), html.escape(self.caption)
        return (
            f'<figure class="plot" id="fig-{self.name}"><picture>'
            f'<source media="(max-width:40rem)" srcset="data:image/png;base64,{narrow}">'
            f'<img alt="{alt}" src="data:image/png;base64,{wide}"></picture>'
            f"<figcaption>{caption}</figcaption></figure>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one figure is made: rows it uses, panels it splits them into, and the function that fills a panel."""

    name: str
    caption: str
    draw: Callable[[Axes, Sequence[Row]], None]
    alt: Callable[[Sequence[Row]], str]
    keep: Callable[[Row], bool]
    height_in: float = 2.4
    panel: Callable[[Row], str] = lambda row: f"TP {row['tp_size']}"
    across: int = 2
    legend: bool = True
    first_workload: bool = False


def method_style(method: str, tree_budget: int | None) -> tuple[str, str, str]:
    """(colour, marker, hatch) of a method, the same in every figure; budgets from 8 to 128 run light to dark."""
    if method != "ddtree" or tree_budget is None:
        return (_AUTO, "o", "") if method == "auto" else (_LINEAR, "s", "////")
    depth = (math.log2(max(8, min(128, tree_budget))) - 3) / 4
    # 15 and 16 are two methods in one place: the odd one gets the lighter shade and its own marker.
    odd = tree_budget % 2
    return to_hex(_BUDGETS(max(0.0, depth - 0.13 * odd))), "^" if odd else "D", ""


def build_figures(results: pd.DataFrame, scaling: pd.DataFrame, folder: Path) -> dict[str, Drawing]:
    """Draw and save every figure: `<name>.pdf` (two columns), `<name>-1col.pdf` and both as `.png`; by name.

    A figure for which there is no data says so in place of its axes, so that documents can always include it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"scaling": rows_of(scaling)}
    cells = [r for r in rows_of(results) if r["status"] == "ok" and r.get("tpot_s") is not None]
    return {plan.name: _save(plan, sources.get(plan.name, cells), folder) for plan in _PLANS}


def _save(plan: _Plan, rows: Sequence[Row], folder: Path) -> Drawing:
    kept = [row for row in rows if plan.keep(row)]
    kept = _first_workload(kept) if plan.first_workload else kept
    alt = plan.alt(kept) if kept else f"{plan.caption}: no data in these records."
    stems: dict[Width, Path] = {"two": folder / plan.name, "one": folder / f"{plan.name}-1col"}
    theme: Any = {**sns.axes_style("whitegrid"), **_RC}
    with mpl.rc_context(theme):
        for width, stem in stems.items():
            figure = _draw(plan, kept, width)
            figure.savefig(f"{stem}.pdf", metadata={"CreationDate": None, "Title": plan.caption})
            figure.set_layout_engine("none")  # laid out already
            figure.savefig(f"{stem}.png", dpi=DPI, metadata={"Software": None})
    files = (
        Path(f"{stem}{end}") for stem, end in ((stems["two"], ".png"), (stems["one"], ".png"), (stems["two"], ".pdf"))
    )
    return Drawing(plan.name, plan.caption, alt, *files)


def _draw(plan: _Plan, rows: Sequence[Row], width: Width) -> Figure:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_panel_title(plan, row, rows), []).append(row)
    across = min(max(1, plan.across // 2) if width == "one" else plan.across, len(panels) or 1)
    down = math.ceil((len(panels) or 1) / across)
    figure = Figure(figsize=(WIDTHS_IN[width], plan.height_in * down + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for index, (axis, (title, part)) in enumerate(zip(axes, panels.items(), strict=False)):
        plan.draw(axis, part)
        axis.set_title(title, loc="left")
        if index % across:
            axis.set_ylabel("")
        if index + across < len(panels):
            axis.set_xlabel("")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if not panels:
        figure.text(0.5, 0.5, "No data in these records", ha="center", va="center", color=_AUTO)
    elif plan.legend:
        _legend(figure, rows, columns=3 if width == "one" else 6)
    return figure


def _panel_title(plan: _Plan, row: Row, rows: Sequence[Row]) -> str:
    """The panel's own axis, and every other one on which the rows differ."""
    parts = [plan.panel(row)]
    for key, text in (("max_new_tokens", "{} tokens"), ("concurrency", "{} at once")):
        parts += [text.format(row[key])] * (len({r[key] for r in rows}) > 1)
    labels = [row["campaign"]] * (len({r["campaign"] for r in rows}) > 1)
    labels += ["random weights"] * (row["weights"] == "random")
    labels += ["simulated acceptance"] * bool(row["simulated"])
    return ", ".join(parts) + (f"\n{', '.join(labels)}" if labels else "")


def _first_workload(rows: Sequence[Row]) -> list[Row]:
    """Rows of the first campaign's first length and concurrency: a panel for each of more would be unreadable."""
    keys = ("campaign", "max_new_tokens", "concurrency")
    return [row for row in rows if all(row[key] == rows[0][key] for key in keys)]


def _legend(figure: Figure, rows: Iterable[Row], columns: int) -> None:
    seen = {}
    for row in sorted(rows, key=_method_order):
        colour, marker, _ = _style(row)
        seen[row["label"]] = Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5, label=row["label"])
    figure.legend(handles=list(seen.values()), loc="outside lower center", ncols=min(columns, len(seen)))


def _style(row: Row) -> tuple[str, str, str]:
    return method_style(row["method"], row["tree_budget"])


def _method_order(row: Row) -> tuple[int, int]:
    return ("auto", "linear", "ddtree").index(row["method"]), row["tree_budget"] or 0


def _bars(axis: Axes, rows: Sequence[Row], key: str, positions: Sequence[float], width: float) -> None:
    for at, row in zip(positions, rows, strict=True):
        colour, _, hatch = _style(row)
        value, low, high = row[key], row.get(f"{key}_low"), row.get(f"{key}_high")
        error = None if low is None else [[value - low], [high - value]]
        axis.bar(
            at, value, width, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5,
            yerr=error, error_kw={"elinewidth": 0.8, "capsize": 1.8, "ecolor": "#222222"},
        )  # fmt: skip


def _draw_speedup(axis: Axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=_method_order)
    _bars(axis, rows, "speedup", range(len(rows)), 0.72)
    for at, row in enumerate(rows):
        top = row["speedup_high"]
        axis.annotate(f"{row['speedup']:.2f}", (at, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axis.axhline(1, color="#222222", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(rows)), [_short(row) for row in rows])
    axis.set_ylabel(METRICS["speedup"].axis)
    axis.grid(axis="x", visible=False)
    _from_zero(axis, [row["speedup_high"] for row in rows])


def _from_zero(axis: Axes, values: Iterable[float], bottom: float = 0.0) -> None:
    """Axis from `bottom` to some room above the highest value of this panel and those that share its axis."""
    axis.set_ylim(bottom, max(axis.get_ylim()[1], 1.12 * max(values)))


def _draw_prompts(axis: Axes, rows: Sequence[Row]) -> None:
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    methods = sorted({_method_order(row) for row in rows})
    width = 0.84 / len(methods)
    for row in rows:
        offset = (methods.index(_method_order(row)) - (len(methods) - 1) / 2) * width
        _bars(axis, [row], "decode_tok_s", [prompts.index(row["prompt"]) + offset], width)
    axis.set_xticks(range(len(prompts)), prompts)
    axis.set_ylabel(METRICS["decode_tok_s"].axis)
    _from_zero(axis, [row["decode_tok_s_high"] or row["decode_tok_s"] for row in rows])
    axis.grid(axis="x", visible=False)


def _draw_by_verify(key: str, bottom: float) -> Callable[[Axes, Sequence[Row]], None]:
    def draw(axis: Axes, rows: Sequence[Row]) -> None:
        points = sorted((r for r in rows if r["verify_tokens"]), key=lambda r: (r["verify_tokens"], _method_order(r)))
        tree = [(r["verify_tokens"], r[key]) for r in points if r["method"] == "ddtree"]
        axis.plot([x for x, _ in tree], [y for _, y in tree], color="#BBBBBB", zorder=1)
        for row in rows:
            colour, marker, _ = _style(row)
            if row["verify_tokens"] is None:
                axis.axhline(row[key], color=colour, linestyle="--", linewidth=1)
                continue
            size = 9 if row["method"] == "linear" else 6  # seen behind b15, which verifies as many tokens
            axis.plot(
                row["verify_tokens"],
                row[key],
                color=colour,
                marker=marker,
                linestyle="",
                markersize=size,
                markeredgecolor="white",
            )
        axis.set_xscale("log", base=2)
        ticks = sorted({r["verify_tokens"] for r in points})
        # Ticks closer than a fifth of a doubling would print over one another: the larger one goes.
        ticks = [t for i, t in enumerate(ticks) if not i or t / ticks[i - 1] > 1.15]
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("Tokens per verify step (1 + nodes)")
        axis.set_ylabel(METRICS[key].axis)
        axis.margins(x=0.12)
        _from_zero(axis, [row[key] for row in rows], bottom)

    return draw


def _draw_histogram(axis: Axes, rows: Sequence[Row]) -> None:
    row = min(rows, key=lambda r: int(r["tp_size"]))  # acceptance does not depend on TP
    counts = row["drafts_histogram"]
    shares = [100 * n / sum(counts) for n in counts]
    colour, _, hatch = _style(row)
    axis.bar(range(len(counts)), shares, 0.86, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
    axis.set_xlabel("Accepted drafts")
    axis.set_ylabel("Verify steps (%)")
    axis.set_xticks(range(0, len(counts), 5))
    axis.grid(axis="x", visible=False)
    _from_zero(axis, shares)


def _draw_scaling(axis: Axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=_method_order, reverse=True)
    ideal = rows[0]["ideal"]
    for at, row in enumerate(rows):
        colour, marker, _ = _style(row)
        error = [[row["scaling"] - row["scaling_low"]], [row["scaling_high"] - row["scaling"]]]
        axis.hlines(at, 1, row["scaling"], color=colour, linewidth=2.2)
        axis.errorbar(
            row["scaling"],
            at,
            xerr=error,
            color=colour,
            marker=marker,
            markersize=6,
            capsize=2.5,
            ecolor="#222222",
            elinewidth=0.8,
        )
    axis.axvline(ideal, color="#222222", linestyle="--", linewidth=1)
    axis.annotate(
        "ideal", (ideal, len(rows) - 0.5), (-3, 0), textcoords="offset points", ha="right", va="top", fontsize=7
    )
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlim(
        min(1.0, *(row["scaling_low"] for row in rows)) - 0.02,
        1.04 * max(ideal, *(row["scaling_high"] for row in rows)),
    )
    axis.set_xlabel(f"Decode rate over TP {rows[0]['tp_base']} (×)")
    axis.grid(axis="y", visible=False)


def _short(row: Row) -> str:
    return {"auto": "auto", "linear": "linear"}.get(row["method"], f"b{row['tree_budget']}")


def _pooled(key: str) -> Callable[[Row], bool]:
    return lambda row: row["prompt"] == ALL and row.get(key) is not None


def _placed(key: str) -> Callable[[Row], bool]:
    return lambda row: _pooled(key)(row) and (row["method"] == "auto" or row["verify_tokens"] is not None)


def _listing(title: str, key: str, decimals: int) -> Callable[[Sequence[Row]], str]:
    """An alt text that lists every value."""

    def alt(rows: Sequence[Row]) -> str:
        items = [
            f"TP {r['tp_size']} {r['label']}{'' if r['prompt'] == ALL else ' ' + r['prompt']} {r[key]:.{decimals}f}"
            for r in rows
        ]
        return f"{title}: {'; '.join(items)}."

    return alt


def _decode_alt(rows: Sequence[Row]) -> str:
    best: dict[tuple[int, str], Row] = {}
    for row in sorted(rows, key=lambda r: float(r["decode_tok_s"])):
        best[row["tp_size"], row["prompt"]] = row
    items = [f"TP {tp} {p}: {r['label']}, {r['decode_tok_s']:.0f} tok/s" for (tp, p), r in best.items()]
    return f"Bars of decode rate by prompt and method. Fastest: {'; '.join(items)}."


def _histogram_alt(rows: Sequence[Row]) -> str:
    items = [f"{r['label']}: {100 * r['full_block_share']:.1f}%" for r in rows]
    return f"Accepted drafts a verify step. Share accepting the whole block: {'; '.join(dict.fromkeys(items))}."


_PLANS = (
    _Plan(
        "speedup",
        "Speedup over autoregressive decoding, all prompts pooled, with 95% interval; the dashed line is no gain",
        _draw_speedup,
        _listing("Bars of speedup over autoregressive decoding", "speedup", 2),
        _pooled("speedup"),
        legend=False,
    ),
    _Plan(
        "decode",
        "Decode rate by prompt and method, with 95% interval",
        _draw_prompts,
        _decode_alt,
        lambda row: row["prompt"] != ALL,
    ),
    _Plan(
        "accept",
        "Accept length (bonus included) against tokens per verify step, all prompts pooled",
        _draw_by_verify("accept_length", 1.0),
        _listing("Accept length against verify tokens", "accept_length", 2),
        _placed("accept_length"),
    ),
    _Plan(
        "step",
        "Milliseconds a step against tokens per verify step, all prompts pooled; dashed: autoregressive",
        _draw_by_verify("step_ms", 0.0),
        _listing("Milliseconds a step against verify tokens", "step_ms", 2),
        _placed("step_ms"),
    ),
    _Plan(
        "histogram",
        "Accepted drafts in a verify step, all prompts pooled; the last bar is the whole block",
        _draw_histogram,
        _histogram_alt,
        _pooled("drafts_histogram"),
        height_in=1.7,
        panel=lambda row: row["label"],
        across=5,
        legend=False,
        first_workload=True,
    ),
    _Plan(
        "scaling",
        "Scaling over tensor-parallel size against ideal, all prompts pooled, with 95% interval",
        _draw_scaling,
        _listing("Decode rate relative to the smallest tensor-parallel size", "scaling", 2),
        _pooled("scaling"),
        height_in=1.9,
        panel=lambda row: f"TP {row['tp_base']} to TP {row['tp_size']}",
        legend=False,
    ),
)
