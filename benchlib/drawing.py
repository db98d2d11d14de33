"""How a figure looks and is saved: PDF with embedded fonts and PNG, at two widths, with a text that says what it shows.

A method has one colour and marker in every figure. Colours can be told apart by the colour-blind; tree budgets darken
from yellow to brown, so that their order survives in grey, and the linear chain is hatched.
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import seaborn as sns
from fontTools import subset, ttLib  # type: ignore[import-untyped]
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from benchlib.record import write_atomic

__all__ = ["AUTO", "INK", "WIDTHS_IN", "Drawing", "draw_sentence", "method_style", "save_figure"]

WIDTHS_IN = {"": 6.9, "-1col": 3.4}  # by the file name's ending: two columns, one column
DPI = 200
AUTO, INK = "#6E6E6E", "#222222"
_LINEAR = "#0072B2"
_BUDGETS = sns.blend_palette(["#FBE0A0", "#F2B134", "#D55E00", "#7A2E00", "#2E1200"], as_cmap=True)
_RC: Any = {
    **sns.plotting_context("paper", font_scale=0.83),  # 8 points
    **sns.axes_style("whitegrid", {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#DDDDDD"}),
    # One weight of one font: embedding a subset of each costs more than drawing the figure.
    **{"pdf.fonttype": 42, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False},
    **{"hatch.linewidth": 0.7, "grid.linewidth": 0.5, "axes.linewidth": 0.7},
    "axes.titley": 1.0,  # a title whose place is given is not searched for
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
        return (AUTO, "o", "") if method == "auto" else (_LINEAR, "s", "////")
    depth = (math.log2(max(8, min(128, tree_budget))) - 3) / 4
    # 15 and 16 are two methods in one place: the odd one gets the lighter shade and its own marker.
    odd = tree_budget % 2
    return to_hex(_BUDGETS(max(0.0, depth - 0.13 * odd))), "^" if odd else "D", ""


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


def draw_sentence(width_in: float, text: str) -> Figure:
    """A low figure that says why there is none."""
    figure = Figure(figsize=(width_in, 0.4), layout="constrained")
    axis = figure.subplots()
    axis.set_axis_off()
    axis.text(0.5, 0.5, textwrap.fill(text, int(17 * width_in)), ha="center", va="center", color=AUTO)
    return figure
