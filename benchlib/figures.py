"""Results to figures, as PDF with embedded fonts and PNG, each with a text that says what it shows.

A method has one colour and marker in every figure. Colours can be told apart by the colour-blind; tree budgets darken
from yellow to brown, so that their order survives in grey, and the linear chain is hatched. Bars and points carry their
95 % interval; what has no number is absent from the figure and named in the tables.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import pandas as pd
from fontTools import subset, ttLib  # type: ignore[import-untyped]
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchlib.frames import ALL, Row, grouped, rows_of
from benchlib.metrics import METRICS
from benchlib.record import write_atomic

__all__ = ["WIDTHS_IN", "Drawing", "build_figures", "method_style", "save_figure"]

WIDTHS_IN = {"": 6.9, "-1col": 3.4}  # by the file name's ending: two columns, one column
DPI = 200
_BUDGETS = LinearSegmentedColormap.from_list("budget", ["#FBE0A0", "#F2B134", "#D55E00", "#7A2E00", "#2E1200"])
_AUTO, _LINEAR, _INK = "#6E6E6E", "#0072B2", "#222222"
_RC: Any = {
    # One weight of one font: embedding a subset of each costs more than drawing the figure.
    **{"pdf.fonttype": 42, "font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8},
    **{"legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7, "hatch.linewidth": 0.7},
    **{"axes.linewidth": 0.7, "axes.edgecolor": "#CCCCCC", "axes.spines.top": False, "axes.spines.right": False},
    **{"xtick.bottom": False, "ytick.left": False, "legend.frameon": False, "lines.linewidth": 1.3},
    **{"lines.markersize": 4.5, "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.5},
    **{key: "#262626" for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")},
    **{"grid.color": "#DDDDDD", "axes.titley": 1.0},  # a title whose place is given is not searched for
}


_CAPTIONS = {
    "speedup": "Speedup over autoregressive decoding, all prompts pooled, with 95% interval; dashed: no gain",
    "decode": "Decode rate by prompt and method in tokens a second, with 95% interval",
    "accept": "Accept length (bonus included) against tokens per verify step, all prompts pooled",
    "step": "Milliseconds a step against tokens per verify step, all prompts pooled; dashed: autoregressive",
    "histogram": "Accepted drafts in a verify step, all prompts pooled; the last bar is the whole block",
    "scaling": "Scaling over tensor-parallel size against ideal, all prompts pooled, with 95% interval",
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
        return (
            f'<figure class="plot" id="fig-{self.name}"><picture>'
            f'<source media="(max-width:40rem)" srcset="data:image/png;base64,{narrow}">'
            f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{wide}"></picture>'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>"
        )

    _repr_html_ = to_html


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one figure is made: the metric its rows must have, the function that fills a panel, an alt text's item."""

    name: str
    key: str
    draw: Callable[[Axes, Sequence[Row]], None]
    item: str
    pooled: bool = True
    height_in: float = 2.4
    panel: str = "TP {tp_size}"
    across: int = 2
    legend: bool = True
    first_workload: bool = False

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Those to draw. Of several lengths and concurrencies the first alone where a panel for each is too many."""
        kept = [row for row in rows if (row["prompt"] == ALL) == self.pooled and row.get(self.key) is not None]
        if not self.first_workload:
            return kept
        first = next(iter(grouped(kept, ("campaign", "max_new_tokens", "concurrency"))), [])
        return sorted(first, key=_method_order)


@cache
def _font() -> str:
    """A family cut from matplotlib's own, kept in its cache: embedding from the whole one takes a third of the time."""
    path = Path(mpl.get_cachedir()) / f"benchlib-{mpl.__version__}.ttf"
    if not path.is_file():
        font, data = ttLib.TTFont(font_manager.findfont("DejaVu Sans")), io.BytesIO()
        cutter = subset.Subsetter(subset.Options(drop_tables=["FFTM", "GDEF", "GPOS", "GSUB"]))
        cutter.populate(unicodes=[*range(0x20, 0x250), *range(0x2010, 0x2030), 0x2212])
        cutter.subset(font)
        for record in font["name"].names:
            record.string = record.toUnicode().replace("DejaVu", "Benchlib")
        font.save(data)
        write_atomic(path, data.getvalue())
    font_manager.fontManager.addfont(path)
    return "Benchlib Sans"


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
    cells = [r for r in rows_of(results) if r["status"] == "ok" and r.get("tpot_s") is not None]
    sources = {"scaling": rows_of(scaling)}
    return {plan.name: _save(plan, plan.rows(sources.get(plan.name, cells)), folder) for plan in _PLANS}


def _save(plan: _Plan, rows: Sequence[Row], folder: Path) -> Drawing:
    items = "; ".join(dict.fromkeys(plan.item.format(**row) for row in rows))
    alt = items or "no data in these records"
    return save_figure(plan.name, _CAPTIONS[plan.name], alt, lambda width: _draw(plan, rows, width), folder)


def save_figure(name: str, caption: str, shows: str, draw: Callable[[float], Figure], folder: Path) -> Drawing:
    """Save what `draw(width_in)` makes at both widths, as PDF and PNG; `shows` ends the alt text.

    `draw` is called with benchlib's fonts and colours set, and lays its figure out as `constrained`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / name
    with mpl.rc_context({**_RC, "font.family": _font()}):
        for ending, width in WIDTHS_IN.items():
            figure: Any = draw(width)
            pdf, png = cast(Any, FigureCanvasPdf(figure)), cast(Any, FigureCanvasAgg(figure))
            # Laid out once, printed by the backends: `savefig` would lay out and draw everything twice for each file.
            figure.get_layout_engine().execute(figure)
            figure.set_layout_engine("none")
            pdf.print_pdf(f"{stem}{ending}.pdf", metadata={"CreationDate": None, "Title": caption})
            figure.set_dpi(DPI)
            png.print_png(f"{stem}{ending}.png", metadata={"Software": None})
    alt = f"{caption}: {shows}."
    return Drawing(name, caption, alt, *(Path(f"{stem}{end}") for end in (".png", "-1col.png", ".pdf")))


def _draw(plan: _Plan, rows: Sequence[Row], width: float) -> Any:
    panels = grouped(rows, lambda row: _panel_title(plan, row, rows))
    narrow = width < WIDTHS_IN[""]
    across = min(max(1, plan.across // 2) if narrow else plan.across, len(panels) or 1)
    down = math.ceil((len(panels) or 1) / across)
    figure = Figure(figsize=(width, plan.height_in * down + 0.35), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for index, (axis, part) in enumerate(zip(axes, panels, strict=False)):
        plan.draw(axis, part)
        axis.set_title(_panel_title(plan, part[0], rows), loc="left")
        if index % across:
            axis.set_ylabel("")
        if index + across < len(panels):
            axis.set_xlabel("")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if not panels:
        figure.text(0.5, 0.5, "No data in these records", ha="center", va="center", color=_AUTO)
    elif plan.legend:
        labels = {row["label"]: _style(row) for row in sorted(rows, key=_method_order)}
        handles = [
            Line2D([], [], color=c, marker=m, ls="", ms=5, mec=_INK, mew=0.4, label=label)
            for label, (c, m, _) in labels.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3 if narrow else 6, len(handles)))
    return figure


def _panel_title(plan: _Plan, row: Row, rows: Sequence[Row]) -> str:
    """The panel's own axis, and every other one on which the rows differ."""
    parts = [plan.panel.format(**row)]
    for key, text in (("max_new_tokens", "{} tokens"), ("concurrency", "{} at once")):
        parts += [text.format(row[key])] * (len({r[key] for r in rows}) > 1)
    labels = [row["campaign"]] * (len({r["campaign"] for r in rows}) > 1)
    labels += ["random weights"] * (row["weights"] == "random")
    labels += ["simulated acceptance"] * bool(row["simulated"])
    return "\n".join([", ".join(parts), *labels])


def _style(row: Row) -> tuple[str, str, str]:
    return method_style(row["method"], row["tree_budget"])


def _method_order(row: Row) -> tuple[int, int]:
    return ("auto", "linear", "ddtree").index(row["method"]), row["tree_budget"] or 0


def _bar(axis: Axes, at: float, row: Row, key: str, width: float) -> None:
    colour, _, hatch = _style(row)
    value, low, high = row[key], row.get(f"{key}_low"), row.get(f"{key}_high")
    error = None if low is None else [[value - low], [high - value]]
    ends = {"elinewidth": 0.8, "capsize": 1.8, "ecolor": _INK}
    axis.bar(at, value, width, color=colour, hatch=hatch, edgecolor="white", lw=0.5, yerr=error, error_kw=ends)


def _finish(axis: Axes, key: str, values: Iterable[float], bottom: float = 0.0, label: str = "") -> None:
    """Label, and an axis from `bottom` to some room above the highest value of the panels that share it."""
    axis.set_ylabel(label or METRICS[key].axis)
    axis.set_ylim(bottom, max(axis.get_ylim()[1], 1.12 * max(values)))


def _name_bars(axis: Axes, names: Sequence[str]) -> None:
    """Ticks of a panel of bars, with room for four: a single bar does not fill it."""
    axis.set_xticks(range(len(names)), names)
    centre, half = (len(names) - 1) / 2, max(len(names), 4) / 2
    axis.set_xlim(centre - half, centre + half)
    axis.grid(axis="x", visible=False)


def _draw_speedup(axis: Axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=_method_order)
    for at, row in enumerate(rows):
        _bar(axis, at, row, "speedup", 0.72)
        place: Any = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        axis.annotate(f"{row['speedup']:.2f}", (at, row["speedup_high"]), **place)
    axis.axhline(1, color=_INK, linewidth=0.8, linestyle="--")
    _name_bars(axis, ["linear" if row["method"] == "linear" else f"b{row['tree_budget']}" for row in rows])
    _finish(axis, "speedup", [row["speedup_high"] for row in rows])


def _draw_prompts(axis: Axes, rows: Sequence[Row]) -> None:
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    methods = sorted({_method_order(row) for row in rows})
    width = 0.84 / len(methods)
    for row in rows:
        offset = (methods.index(_method_order(row)) - (len(methods) - 1) / 2) * width
        _bar(axis, prompts.index(row["prompt"]) + offset, row, "decode_tok_s", width)
    _name_bars(axis, prompts)
    _finish(axis, "decode_tok_s", [row["decode_tok_s_high"] or row["decode_tok_s"] for row in rows])


def _draw_by_verify(key: str, bottom: float) -> Callable[[Axes, Sequence[Row]], None]:
    def draw(axis: Axes, rows: Sequence[Row]) -> None:
        points = sorted((r for r in rows if r["verify_tokens"]), key=lambda r: (r["verify_tokens"], _method_order(r)))
        tree = [(r["verify_tokens"], r[key]) for r in points if r["method"] == "ddtree"]
        axis.plot([x for x, _ in tree], [y for _, y in tree], color="#BBBBBB", zorder=1)
        for row in rows:
            colour, marker, _ = _style(row)
            if row["method"] == "auto":
                axis.axhline(row[key], color=colour, linestyle="--", linewidth=1)
            elif row["verify_tokens"]:
                size = 9 if row["method"] == "linear" else 6  # seen behind b15, which verifies as many tokens
                axis.plot(row["verify_tokens"], row[key], color=colour, marker=marker, ms=size, mec=_INK, mew=0.4)
        axis.set_xscale("log", base=2)
        ticks = sorted({r["verify_tokens"] for r in points})
        # Ticks closer than a fifth of a doubling would print over one another: the larger one goes.
        ticks = [t for i, t in enumerate(ticks) if not i or t / ticks[i - 1] > 1.15]
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("Tokens per verify step (1 + nodes)")
        axis.margins(x=0.12)
        _finish(axis, key, [row[key] for row in rows], bottom)

    return draw


def _draw_histogram(axis: Axes, rows: Sequence[Row]) -> None:
    row = min(rows, key=lambda r: int(r["tp_size"]))  # acceptance does not depend on TP
    counts = row["drafts_histogram"]
    shares = [100 * n / sum(counts) for n in counts]
    colour, _, hatch = _style(row)
    axis.bar(range(len(counts)), shares, 0.86, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
    axis.set_xlabel("Accepted drafts")
    axis.set_xticks(range(0, len(counts), 5))
    axis.grid(axis="x", visible=False)
    _finish(axis, "", shares, label="Verify steps (%)")


def _draw_scaling(axis: Axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=_method_order, reverse=True)
    ideal = rows[0]["ideal"]
    for at, row in enumerate(rows):
        colour, marker, _ = _style(row)
        error = [[row["scaling"] - row["scaling_low"]], [row["scaling_high"] - row["scaling"]]]
        axis.hlines(at, 1, row["scaling"], color=colour, linewidth=2.2)
        ends: Any = {"capsize": 2.5, "ecolor": _INK, "elinewidth": 0.8}
        axis.errorbar(row["scaling"], at, xerr=error, color=colour, marker=marker, markersize=6, **ends)
    place: Any = {"xytext": (-3, 0), "textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 7}
    axis.axvline(ideal, color=_INK, linestyle="--", linewidth=1)
    axis.annotate("ideal", (ideal, len(rows) - 0.5), **place)
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    lows, highs = ([row[f"scaling_{end}"] for row in rows] for end in ("low", "high"))
    axis.set_xlim(min(1.0, *lows) - 0.02, 1.04 * max(ideal, *highs))
    axis.set_xlabel(f"Decode rate over TP {rows[0]['tp_base']} (×)")
    axis.grid(axis="y", visible=False)


_PLANS = (
    _Plan("speedup", "speedup", _draw_speedup, "TP {tp_size} {label} {speedup:.2f}", legend=False),
    _Plan("decode", "decode_tok_s", _draw_prompts, "TP {tp_size} {prompt} {label} {decode_tok_s:.0f}", pooled=False),
    _Plan("accept", "accept_length", _draw_by_verify("accept_length", 1.0), "TP {tp_size} {label} {accept_length:.2f}"),
    _Plan("step", "step_ms", _draw_by_verify("step_ms", 0.0), "TP {tp_size} {label} {step_ms:.2f}"),
    _Plan("histogram", "drafts_histogram", _draw_histogram, "{label} accepts it in {full_block_share:.1%} of steps",
          height_in=1.7, panel="{label}", across=5, legend=False, first_workload=True),
    _Plan("scaling", "scaling", _draw_scaling, "TP {tp_base} to {tp_size} {label} {scaling:.2f}",
          height_in=1.9, panel="TP {tp_base} to TP {tp_size}", legend=False),
)  # fmt: skip
