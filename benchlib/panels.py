"""What fills a panel: bars, points and curves of result rows, each with its 95 % interval.

A method has its colour and marker; what else sets conditions apart (variant, NCCL profile, NUMA policy) has a hatch, a
half-filled marker and a dash pattern, told by a row's `extra`, and stands beside its neighbours, never over them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator, NullLocator

from benchlib.compare import AB_AXES
from benchlib.drawing import AUTO, INK, method_style
from benchlib.frames import Row, grouped, method_label
from benchlib.metrics import METRICS
from benchlib.optimum import Optimum

__all__ = [
    *("MAX_EXTRAS", "Later", "bar_style", "condition_order", "draw_ab", "draw_by_verify", "draw_concurrency"),
    *("draw_histogram", "draw_optimum", "draw_prompts", "draw_scaling", "draw_speedup", "format_sides"),
    *("marker_style", "panel_points", "slots"),
]

Later = Callable[[], None]  # what can be placed only when the figure is laid out
PATTERNS = ("", ".....", "xxxxx", "---", "ooo", "+++++")
FILLS: Any = ("full", "left", "right", "top", "bottom", "none")
DASHES: Any = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 3)))
MAX_EXTRAS = len(PATTERNS)
PREDICTED: Any = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1}
MEASURED: Any = {"marker": "o", "ms": 12, "mfc": "none", "mec": INK, "mew": 0.9, "ls": ""}
CURVE: Any = {"color": "#999999", "linewidth": 1.1, "zorder": 1}
_ERRORS: Any = {"ecolor": INK, "elinewidth": 0.8, "capsize": 1.8}
_AXES = {"nccl_profile": "NCCL", "numa_policy": "NUMA", "variant": "variant"}
_AROUND = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))  # where a label may stand
_LABEL_PT = 6.5


def method_order(row: Row) -> tuple[int, int]:
    """Autoregressive first, then the chain, then the trees by their budget."""
    return ("auto", "linear", "ddtree").index(row["method"]), row["tree_budget"] or 0


def condition_order(row: Row) -> tuple[Any, ...]:
    """By method, then by what else sets it apart."""
    return (*method_order(row), row["extra"], row["run"])


def bar_style(row: Row) -> dict[str, Any]:
    """Colour by method; hatched by `extra`, in ink on light bars and in white on dark ones."""
    colour, _, hatch = method_style(row["method"], row["tree_budget"])
    light = sum(w * c for w, c in zip((0.3, 0.59, 0.11), to_rgb(colour), strict=True)) > 0.45
    edge = INK if light and row["extra"] else "white"
    return {"facecolor": colour, "hatch": PATTERNS[row["extra"]] or hatch, "edgecolor": edge, "linewidth": 0.5}


def marker_style(row: Row) -> dict[str, Any]:
    """Colour and marker by method, filled by `extra`."""
    colour, marker, _ = method_style(row["method"], row["tree_budget"])
    fill = {"fillstyle": FILLS[row["extra"]], "markerfacecoloralt": "white"}
    return {"color": colour, "marker": marker, "mec": INK, "mew": 0.5, "ms": 6, **fill}


def is_narrow(axis: Axes) -> bool:
    return bool(axis.figure.get_figwidth() < 5)  # type: ignore[union-attr]


def panel_points(axis: Axes) -> float:
    """About how many points wide a panel's axes are going to be."""
    place = axis.get_subplotspec()
    across = place.get_gridspec().ncols if place else 1
    return float(72 * axis.figure.get_figwidth() / across - 34)  # type: ignore[union-attr]


def slots(groups: Sequence[Sequence[Row]], width: float = 0.84) -> Iterator[tuple[float, float, Row]]:
    """(place, width, row): the rows of each group side by side around 0, 1, 2 ..., none over another."""
    each = width / max(map(len, groups))
    for at, part in enumerate(groups):
        for i, row in enumerate(part):
            yield at + (i - (len(part) - 1) / 2) * each, each, row


def _errors(rows: Sequence[Row], key: str) -> list[list[float]]:
    """Lengths down and up of each row's interval, nan where it has none: nothing is drawn."""
    ends = [(r[key], r.get(f"{key}_low"), r.get(f"{key}_high")) for r in rows]
    return [
        [math.nan if low is None else max(0.0, value - low) for value, low, _ in ends],
        [math.nan if high is None else max(0.0, high - value) for value, _, high in ends],
    ]


def _top(row: Row, key: str) -> float:
    return float(row.get(f"{key}_high") or row[key])


def _bars(axis: Axes, groups: Sequence[Sequence[Row]], key: str) -> None:
    # One call a condition: a call costs more than its bars. A bar clears its neighbours, which may have its colour.
    for part in grouped(({**row, "at": at, "wide": 0.94 * wide} for at, wide, row in slots(groups)), condition_order):
        bars = {"x": [r["at"] for r in part], "height": [r[key] for r in part], "width": part[0]["wide"]}
        axis.bar(**bars, yerr=_errors(part, key), error_kw=_ERRORS, **bar_style(part[0]))


def _point(axis: Axes, x: float, row: Row, key: str, **more: Any) -> None:
    axis.errorbar(x, row[key], _errors([row], key), ls="", **{**_ERRORS, **marker_style(row), **more})
    if row.get("best"):
        axis.plot(x, row[key], **MEASURED)


def _finish(axis: Axes, key: str, values: Iterable[float], *, label: str = "", room: float = 1.12) -> None:
    """Label, and an axis from 0 to some room above the highest value of the panels that share it."""
    axis.set_ylabel(label or METRICS[key].axis)
    axis.set_ylim(0, max(axis.get_ylim()[1], room * max(values)))


def _name_bars(axis: Axes, names: Sequence[str]) -> None:
    """Ticks of a panel of bars, with room for three: one alone does not fill it. Names that would touch are turned."""
    axis.set_xticks(range(len(names)), names)
    centre, half = (len(names) - 1) / 2, max(len(names), 3) / 2
    axis.set_xlim(centre - half, centre + half)
    if panel_points(axis) / (2 * half) < 4.4 * max(map(len, names)) + 3:
        axis.tick_params(axis="x", labelrotation=45)
    axis.grid(axis="x", visible=False)


def draw_speedup(axis: Axes, rows: Sequence[Row]) -> None:
    """Bars by method, those of one method side by side, each with its value."""
    groups = grouped(sorted(rows, key=condition_order), method_order)
    turned = panel_points(axis) / max(len(groups), 3) * 0.84 / max(map(len, groups)) < 17
    place: Any = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
    _bars(axis, groups, "speedup")
    for at, _, row in slots(groups):
        text = f"{row['speedup']:.2f}"
        axis.annotate(text, (at, row["speedup_high"]), rotation=90 * turned, va="bottom", **place)
    axis.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    names = ["linear" if part[0]["method"] == "linear" else f"b{part[0]['tree_budget']}" for part in groups]
    _name_bars(axis, names)
    _finish(axis, "speedup", [row["speedup_high"] for row in rows], room=1.3 if turned else 1.12)


def draw_prompts(axis: Axes, rows: Sequence[Row]) -> None:
    """Bars by prompt, all conditions of a prompt side by side."""
    groups = [sorted(part, key=condition_order) for part in grouped(rows, ("prompt",))]
    _bars(axis, groups, "decode_tok_s")
    _name_bars(axis, [part[0]["prompt"] for part in groups])
    _finish(axis, "decode_tok_s", [_top(row, "decode_tok_s") for row in rows])


def draw_by_verify(key: str) -> Callable[[Axes, Sequence[Row]], None]:
    """`key` against tokens a step: points with the fitted curve and both optima; autoregressive rows as lines."""

    def draw(axis: Axes, rows: Sequence[Row]) -> None:
        drafted = [r for r in rows if r["method"] != "auto" and r["verify_tokens"]]
        for part in grouped(drafted, ("extra",)):
            _trend(axis, sorted((r for r in part if r["method"] == "ddtree"), key=method_order), key)
        for same in grouped(sorted(drafted, key=condition_order), ("verify_tokens",)):
            for at, _, row in slots([same], 0.1 * len(same)):
                _point(axis, row["verify_tokens"] * 2**at, row, key)
        for i, row in enumerate(sorted((r for r in rows if r["method"] == "auto"), key=condition_order)):
            axis.axhline(row[key], color=AUTO, linestyle=DASHES[row["extra"] + 1], linewidth=1)
            _point(axis, 0.05 + 0.07 * i, row, key, transform=axis.get_yaxis_transform())
        _name_steps(axis, sorted({r["verify_tokens"] for r in drafted}))
        _finish(axis, key, [_top(row, key) for row in rows])

    return draw


def _name_steps(axis: Axes, steps: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    # Ticks closer than a fifth of a doubling would print over one another: the larger one goes.
    ticks = [t for i, t in enumerate(steps) if not i or t / steps[i - 1] > 1.15]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("Tokens per verify step (1 + nodes)" if panel_points(axis) > 170 else "Verify tokens")
    if steps:  # room at the left for the autoregressive markers
        axis.set_xlim(steps[0] / 2**0.7, steps[-1] * 2**0.4)


def _trend(axis: Axes, tree: Sequence[Row], key: str) -> None:
    """The fitted curve with its optimum; where there is none, lines from point to point."""
    found: Optimum | None = tree[0].get("optimum") if tree else None
    if found is None:
        axis.plot([r["verify_tokens"] for r in tree], [r[key] for r in tree], **{**CURVE, "color": "#CCCCCC"})
        return
    value: Callable[[float], float] = getattr(found.curves, key)
    xs = _between(tree)
    axis.plot([x + found.curves.root for x in xs], [*map(value, xs)], ls=DASHES[tree[0]["extra"]], **CURVE)
    axis.axvline(found.budget + found.curves.root, **PREDICTED)


def _between(tree: Sequence[Row]) -> list[float]:
    low, high = tree[0]["tree_budget"], tree[-1]["tree_budget"]
    return [low * (high / low) ** (i / 60) for i in range(61)]


def draw_optimum(axis: Axes, rows: Sequence[Row]) -> None:
    """Predicted speedup over the budget as a curve, measured ones as points; both best budgets marked and named."""
    told = []
    for part in grouped(sorted(rows, key=condition_order), ("extra",)):
        found: Optimum = part[0]["optimum"]
        scale = found.speedup / found.curves.speedup(found.budget, 1.0)
        xs = _between(part)
        axis.plot(xs, [scale * found.curves.speedup(x, 1.0) for x in xs], ls=DASHES[part[0]["extra"]], **CURVE)
        axis.axvline(found.budget, **PREDICTED)
        told.append(f"predicted best {part[0]['predicted']}\nmeasured best {part[0]['oracle']}, oracle")
    for same in grouped(rows, ("tree_budget",)):
        for at, _, row in slots([sorted(same, key=condition_order)], 0.1 * len(same)):
            _point(axis, row["tree_budget"] * 2**at, row, "speedup")
    budgets = sorted({row["tree_budget"] for row in rows})
    _name_steps(axis, budgets)
    axis.set_xlim(budgets[0] / 2**0.3, budgets[-1] * 2**0.3)
    axis.set_xlabel("Tree budget (nodes)")
    axis.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    if len(told) == 1:  # speedups start at 0, so there is room below one curve, and for one setting's words
        back: Any = {"fc": "white", "ec": "none", "pad": 1}
        axis.text(0.03, 0.03, told[0], transform=axis.transAxes, fontsize=_LABEL_PT, linespacing=1.3, bbox=back)
    _finish(axis, "speedup", [row["speedup_high"] for row in rows])


def draw_histogram(axis: Axes, rows: Sequence[Row]) -> None:
    """Share of steps by accepted drafts; the whole block's bar is outlined and carries its share."""
    row = min(rows, key=lambda r: int(r["tp_size"]))  # acceptance does not depend on TP
    last = max(row["block_size"], len(row["drafts_histogram"])) - 1
    counts = [*row["drafts_histogram"], *[0] * (last + 1 - len(row["drafts_histogram"]))]
    shares = [100 * n / sum(counts) for n in counts]
    style = {**bar_style({**row, "extra": 0}), "linewidth": 0.3}
    axis.bar(range(last), shares[:-1], 0.86, **style)
    axis.bar(last, shares[-1], 0.86, **{**style, "facecolor": INK, "hatch": ""})
    place: Any = {"xytext": (2, 2), "textcoords": "offset points", "ha": "right", "fontsize": _LABEL_PT}
    axis.annotate(f"{shares[-1]:.0f}%", (last + 0.5, shares[-1]), **place)
    step = next((s for s, most in ((1, 5), (2, 10), (5, 25)) if last <= most), 10)
    axis.set_xticks([*(t for t in range(0, last, step) if t < last - 0.6 * step), last])
    axis.set_xlim(-0.8, last + 0.8)
    axis.set_xlabel("Accepted drafts")
    axis.grid(axis="x", visible=False)
    _finish(axis, "", shares, label="Verify steps (%)")


def draw_scaling(axis: Axes, rows: Sequence[Row]) -> None:
    """A line from 1 to each condition's scaling, by method, and the ideal."""
    groups = grouped(sorted(rows, key=condition_order, reverse=True), method_order)
    ideal = rows[0]["ideal"]
    for at, _, row in slots(groups, 0.8):
        style = marker_style(row)
        axis.hlines(at, 1, row["scaling"], color=style["color"], linewidth=2, linestyle=DASHES[row["extra"]])
        axis.errorbar(row["scaling"], at, xerr=_errors([row], "scaling"), **{**_ERRORS, **style})
    axis.axvline(ideal, color=INK, linestyle="--", linewidth=1)
    place: Any = {"xytext": (-3, -1), "textcoords": "offset points", "ha": "right", "va": "top", "fontsize": _LABEL_PT}
    axis.annotate("ideal", (ideal, len(groups) + 0.1), **place)
    axis.set_yticks(range(len(groups)), [method_label(p[0]["method"], p[0]["tree_budget"]) for p in groups])
    axis.set_ylim(-0.6, len(groups) + 0.1)
    lows, highs = ([row[f"scaling_{end}"] for row in rows] for end in ("low", "high"))
    axis.set_xlim(min(1.0, *lows) - 0.02, 1.04 * max(ideal, *highs))
    axis.set_xlabel(f"Decode rate over TP {rows[0]['tp_base']} (×)")
    axis.grid(axis="y", visible=False)


def draw_concurrency(axis: Axes, rows: Sequence[Row]) -> Later:
    """Throughput of all requests against the rate of each, a line a condition, points named by their concurrency."""
    x, y = "decode_tok_s", "output_throughput_tok_s"
    lines = [
        sorted(part, key=lambda r: int(r["concurrency"]))
        for part in grouped(sorted(rows, key=condition_order), condition_order)
    ]
    for part in lines:
        style = {**_ERRORS, **marker_style(part[0]), "ls": DASHES[part[0]["extra"]], "linewidth": 1}
        errors = _errors(part, x)
        axis.errorbar([r[x] for r in part], [r[y] for r in part], xerr=errors, **style)
    axis.margins(x=0.1)
    axis.set_xlabel("Decode rate of a request (tok/s)")
    _finish(axis, y, [r[y] for r in rows], label="Throughput (tok/s)")
    return lambda: _label_points(axis, lines, x, y)


def _label_points(axis: Axes, lines: Sequence[Sequence[Row]], x: str, y: str) -> None:
    """Write each concurrency where around its point it meets no point, line or other label; if nowhere, not at all."""
    scale = 72 / axis.figure.dpi
    paths = [[scale * axis.transData.transform((r[x], r[y])) for r in line] for line in lines]
    taken = [(px - 3.5, py - 3.5, px + 3.5, py + 3.5) for path in paths for px, py in path]
    for row in (r for line in lines for r in line if r.get(f"{x}_low") is not None):
        low, high = (scale * axis.transData.transform((row[f"{x}_{end}"], row[y])) for end in ("low", "high"))
        taken.append((low[0], low[1] - 2, high[0], high[1] + 2))
    for a, b in (ends for path in paths for ends in pairwise(path)):
        steps = max(2, int(abs(b - a).sum()) // 3)
        along = (a + (b - a) * i / steps for i in range(1, steps))
        taken += [(px - 0.5, py - 0.5, px + 0.5, py + 0.5) for px, py in along]
    for row, (px, py) in (
        (r, p) for line, path in zip(lines, paths, strict=True) for r, p in zip(line, path, strict=True)
    ):
        text = str(row["concurrency"])
        wide, tall = 0.62 * _LABEL_PT * len(text), _LABEL_PT
        for dx, dy in ((i * (4.5 + wide / 2), j * (4.5 + tall / 2)) for i, j in _AROUND):
            box = (px + dx - wide / 2, py + dy - tall / 2, px + dx + wide / 2, py + dy + tall / 2)
            if not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                taken.append(box)
                place: Any = {"xytext": (dx, dy), "textcoords": "offset points", "ha": "center", "va": "center"}
                axis.annotate(text, (row[x], row[y]), fontsize=_LABEL_PT, **place).set_in_layout(False)
                break


def draw_ab(axis: Axes, rows: Sequence[Row]) -> None:
    """A line a comparison: its difference with interval, a line at none, what was compared and the verdict as text."""
    rows, narrow = rows[::-1], is_narrow(axis)
    for at, row in enumerate(rows):
        value, low, high = (100 * row[f"difference{end}"] for end in ("", "_low", "_high"))
        axis.errorbar(value, at, xerr=[[value - low], [high - value]], **{**_ERRORS, **marker_style(row)})
        side: Any = {"transform": axis.get_yaxis_transform(), "fontsize": _LABEL_PT}
        verdict = f"{row['difference_note']}; all-reduce: {row['all_reduce']}"
        if row["all_reduce"] == "not known":
            verdict = row["difference_note"]
        if narrow:
            back: Any = {"bbox": {"fc": "white", "ec": "none", "pad": 0.8}, "zorder": 1.5, "ha": "left"}
            axis.text(0, at + 0.3, textwrap.shorten(row["sides"], 62), va="center", **side, **back)
            axis.text(0, at - 0.3, textwrap.shorten(verdict, 62), va="center", color=AUTO, **side, **back)
        else:
            axis.text(1.02, at, verdict.replace("; ", "\n"), va="center", **side)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(rows)), ["" if narrow else row["sides"].replace(": ", "\n") for row in rows])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.margins(x=0.08)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.set_xlabel("Difference in decode rate (%)")
    axis.grid(axis="y", visible=False)


def format_sides(row: Row) -> str:
    """What an A/B row holds against what, and what both sides share."""
    shared = [row[axis] for axis, (_, default) in AB_AXES.items() if axis != row["axis"] and row[axis] != default]
    what = ", ".join([method_label(row["method"], row["tree_budget"]), *shared])
    return f"{_AXES[row['axis']]} {row['b'] or 'without'} against {row['a'] or 'without'}: {what}"
