"""Figures of the machine and of the moment: GPUs and links, a run's time line, a request's ticks, one draft tree.

Those of `figures` pool; these show one thing as it was. Lightness carries the meaning and colour repeats it, so that
each can be read in grey and by the colour-blind. What is unknown is drawn as unknown, and what is left out is counted.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path as Curve

from benchlib.draft_tree import DraftTree
from benchlib.drawing import Drawing, draw_sentence, method_style, save_figure
from benchlib.errors import PlacementError
from benchlib.frames import Campaign, LoadedRun, condition_label, condition_of, load_run
from benchlib.metrics import ttft_s
from benchlib.placement import format_devices
from benchlib.record import RequestRecord
from benchlib.telemetry import SLOWING_REASONS, Sample
from benchlib.topology import Gpu, Topology

__all__ = ["draw_moments", "draw_ticks", "draw_timeline", "draw_topology", "draw_tree", "format_run"]

NARROW_IN = 5.0  # below this a figure is one column wide
INK, GREY, PALE, ORANGE, BLUE = "#222222", "#6E6E6E", "#EDEDED", "#F2B134", "#0072B2"
# (kind, colour, line width), best first: thicker and darker is better.
KINDS = (
    ("NV", "#08306B", 4.0), ("PIX", "#1F63A6", 3.2), ("PXB", "#3F83BD", 2.6), ("PHB", "#5F9CCB", 2.0),
    ("NODE", "#8FB8DA", 1.6), ("SYS", "#B4CADF", 1.2),
)  # fmt: skip
UNKNOWN = ("?", "#FFFFFF", 0.8)
MAX_ARCS = 4  # GPUs: with more, lines between all pairs cannot be told apart, and a matrix stands for them
# Okabe and Ito's, of falling darkness; with eight GPUs the line's pattern tells the rest.
GPU_COLOURS = (INK, BLUE, "#D55E00", "#009E73", "#56B4E9", "#E69F00")
PATTERNS: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
LIMIT: Any = {"color": "#D55E00", "ls": "--", "lw": 1.0}
TREE_ROWS, NARROW_TREE_ROWS = 18, 6


def draw_topology(topology: Topology, chosen: Collection[int] = (), *, folder: Path, name: str = "topology") -> Drawing:
    """GPUs by NUMA node with its cores, the links between them, and the `chosen` ones (indices) marked.

    Up to four GPUs are joined by lines; more get a matrix. PlacementError for a chosen GPU that is not there.
    """
    if strange := set(chosen) - {gpu.index for gpu in topology.gpus}:
        there = _named(gpu.index for gpu in topology.gpus)
        raise PlacementError(f"{_named(strange)} cannot be marked: {topology.source} has {there}. Name some of these")
    nodes = _by_node(topology)
    order = [gpu.index for gpus in nodes.values() for gpu in gpus]

    def draw(width: float) -> Figure:
        make = _draw_arcs if len(order) <= MAX_ARCS else _draw_boxes_and_matrix
        figure = make(width, topology, nodes, chosen)
        figure.suptitle(_machine_title(topology), x=0.01, ha="left", fontsize=9)
        if chosen:
            mark = Patch(facecolor=ORANGE, edgecolor=INK, linewidth=1.6, label="chosen")
            figure.legend(handles=[mark], loc="outside lower center")
        return figure

    caption = "GPUs, their NUMA nodes and links: the darker, the better" + "; the chosen GPUs are marked" * bool(chosen)
    return save_figure(name, caption, _say_topology(topology, nodes, chosen), draw, folder)


def draw_timeline(run: LoadedRun | Path | str, *, folder: Path, name: str = "timeline") -> Drawing:
    """A run's requests over time, and below them its GPUs' clocks and power where telemetry was kept.

    `run` is a loaded one or its folder. RecordError for a folder that holds none.
    """
    loaded = run if isinstance(run, LoadedRun) else load_run(run)
    spec = loaded.record.spec
    rows = _rows(loaded.requests)
    gpus, limits = _by_gpu(loaded), _limits(loaded)
    colour, _, _ = method_style(spec.method, spec.tree_budget)

    def draw(width: float) -> Figure:
        heights = [max(0.5, min(0.2, 3 / max(1, len(rows))) * len(rows)), *[0.9] * (2 if gpus else 0)]
        figure = Figure(figsize=(width, sum(heights) + 1.0), layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
        _draw_requests(axes[0, 0], rows, colour, width)
        if gpus:
            _draw_strip(list(axes[1:, 0]), gpus, limits)
        axes[-1, 0].set_xlabel("Seconds since the run began to measure")
        axes[-1, 0].set_xlim(0, 1.01 * max(axes[0, 0].get_xlim()[1] / 1.05, 1e-3))
        axes[0, 0].set_title(_wrap(format_run(loaded), width), loc="left")
        handles = _request_handles(loaded.requests, colour) + _gpu_handles(gpus, limits)
        if handles:
            per_row = 3 if width < NARROW_IN else 7
            figure.legend(handles=handles, loc="outside lower center", ncols=min(per_row, len(handles)))
        return figure

    caption = f"Time line of {loaded.name}: each request from sending to its last token"
    return save_figure(name, caption, _say_run(loaded, gpus, limits), draw, folder)


def draw_ticks(request: RequestRecord, *, folder: Path, name: str = "ticks", label: str = "") -> Drawing:
    """One request as it came: tokens so far against time, and the gap before each chunk; `label` names its run."""
    times = [at for at, _ in request.ticks]
    counts = [tokens for _, tokens in request.ticks]
    gaps = [1000 * (b - a) for a, b in pairwise(times)]
    which = f"{request.prompt}, {request.max_new_tokens} tokens asked for"

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 3.0), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
        upper.set_title(
            "\n".join(filter(None, (label, which, request.error and f"failed: {request.error}"))), loc="left"
        )
        upper.set_ylabel("Tokens so far")
        lower.set_ylabel("Gap (ms)")
        lower.set_xlabel("Seconds since the request was sent")
        if times:
            _draw_ticks(upper, lower, times, counts, gaps)
        else:
            upper.text(0.5, 0.5, "No token came", ha="center", va="center", color=GREY, transform=upper.transAxes)
        return figure

    return save_figure(name, "Tokens of one request as they came", _say_ticks(request, gaps), draw, folder)


def draw_tree(tree: DraftTree, *, folder: Path, name: str = "tree") -> Drawing:
    """One verify round's draft tree: token texts, the drafter's probabilities, the accepted path and the bonus token.

    A tree that is too large is drawn without its least probable nodes, and the figure says how many those are.
    """
    where = f"Draft tree of {_plain(tree.prompt)}, verify step {tree.step}"
    caption = f"{where}: accept length {tree.accept_length}, bonus included; numbers are the drafter's, dots are spaces"

    def draw(width: float) -> Figure:
        narrow = width < NARROW_IN
        kept = _kept_nodes(tree, NARROW_TREE_ROWS if narrow else TREE_ROWS)
        return _draw_tree(width, tree, kept, down=narrow)

    return save_figure(name, caption, _say_tree(tree), draw, folder)


def draw_moments(campaigns: Iterable[Campaign], folder: Path) -> dict[str, Drawing]:
    """For a report, `tree` and `timeline`: the first tree that a run kept, and a run of most GPUs, telemetry first.

    Where there is none, a figure that says so: documents can always include both.
    """
    runs = [run for campaign in campaigns for run in campaign.runs if run.ok]
    trees = [run.draft_tree for run in runs if run.draft_tree is not None and run.record.spec.method == "ddtree"]
    runs.sort(key=lambda run: (run.telemetry is not None, run.record.spec.tp_size), reverse=True)
    tree, timeline = "One round's draft tree", "Time line of a run"
    no_tree = "No run kept a draft tree: its engine does not tell"
    return {
        "tree": draw_tree(trees[0], folder=folder) if trees else _draw_nothing("tree", tree, no_tree, folder),
        "timeline": draw_timeline(runs[0], folder=folder)
        if runs
        else _draw_nothing("timeline", timeline, "No run was finished", folder),
    }


def _draw_nothing(name: str, caption: str, why: str, folder: Path) -> Drawing:
    return save_figure(name, caption, why, lambda width: draw_sentence(width, why), folder)


# --- the machine


def _by_node(topology: Topology) -> dict[int | None, list[Gpu]]:
    """GPUs of each NUMA node, unknown ones last."""
    nodes: dict[int | None, list[Gpu]] = {}
    for gpu in sorted(topology.gpus, key=lambda g: (g.numa_node is None, g.numa_node or 0, g.index)):
        nodes.setdefault(gpu.numa_node, []).append(gpu)
    return nodes


def _kind(label: str | None) -> tuple[str, str, float]:
    return next((kind for kind in KINDS if label and label.startswith(kind[0])), UNKNOWN)


def _pairs(topology: Topology) -> dict[tuple[int, int], str | None]:
    return {(a.index, b.index): topology.links[a.index][b.index] for a, b in combinations(topology.gpus, 2)}


def _machine_title(topology: Topology) -> str:
    names = Counter(gpu.name for gpu in topology.gpus)
    return ", ".join(f"{n} × {name}" if name else f"{n} GPUs of unknown model" for name, n in names.items())


def _node_label(node: int | None, gpus: Sequence[Gpu], chars: int) -> str:
    cores = {gpu.cpus for gpu in gpus}
    where = "NUMA node unknown" if node is None else f"NUMA node {node}"
    # Where GPUs of one node name different cores, none of them is the node's.
    known = f"CPUs {cores.pop() or 'unknown'}" if len(cores) == 1 else "CPUs differ by GPU"
    return "\n".join([where, *textwrap.wrap(known.replace(",", ", "), chars)])


def _box(axis: Axes, x: float, y: float, gpu: Gpu, chosen: Collection[int]) -> None:
    marked = gpu.index in chosen
    style: Any = {"facecolor": ORANGE if marked else "white", "edgecolor": INK, "linewidth": 1.8 if marked else 0.7}
    axis.add_patch(
        FancyBboxPatch((x - 0.36, y - 0.24), 0.72, 0.48, boxstyle="round,pad=0,rounding_size=0.08", zorder=3, **style)
    )
    axis.text(x, y, f"GPU {gpu.index}" + "\nMIG" * gpu.mig, ha="center", va="center", fontsize=7, zorder=4)


def _node(axis: Axes, x: tuple[float, float], y: tuple[float, float], text: str) -> None:
    axis.add_patch(Rectangle((x[0], y[0]), x[1] - x[0], y[1] - y[0], facecolor=PALE, edgecolor="none", zorder=0))
    axis.text(sum(x) / 2, y[0] + 0.06, text, ha="center", va="bottom", fontsize=6.5, linespacing=1.1, zorder=1)


def _draw_arcs(
    width: float, topology: Topology, nodes: Mapping[int | None, Sequence[Gpu]], chosen: Collection[int]
) -> Figure:
    """Boxes in a row, an arc between each pair: the farther apart, the higher."""
    places: dict[int, float] = {}
    span = max(MAX_ARCS, len(topology.gpus))
    texts = {node: _node_label(node, gpus, int(len(gpus) * width / span / 0.064)) for node, gpus in nodes.items()}
    bottom = -0.4 - 0.27 * max(text.count("\n") + 1 for text in texts.values())
    top = 0.55 + 0.72 * (len(topology.gpus) - 1)
    figure = Figure(figsize=(width, 0.45 * (top - bottom) + 0.6), layout="constrained")
    axis = figure.subplots()
    for node, gpus in nodes.items():
        left = len(places) - 0.45
        places |= {gpu.index: float(len(places) + i) for i, gpu in enumerate(gpus)}
        _node(axis, (left, len(places) - 0.55), (bottom, 0.36), texts[node])
    for gpu in topology.gpus:
        _box(axis, places[gpu.index], 0, gpu, chosen)
    for (a, b), label in _pairs(topology).items():
        start, end = sorted((places[a], places[b]))
        _arc(axis, start, end, label)
    middle = (len(places) - 1) / 2
    axis.set_xlim(middle - span / 2, middle + span / 2)
    axis.set_ylim(bottom, top)
    axis.set_axis_off()
    return figure


def _arc(axis: Axes, start: float, end: float, label: str | None) -> None:
    peak = 0.24 + 0.95 * (end - start)
    curve = Curve([(start, 0.24), (start, peak), (end, peak), (end, 0.24)], [1, 4, 4, 4])
    _, colour, thick = _kind(label)
    style: Any = {"edgecolor": colour, "lw": thick} if label else {"edgecolor": GREY, "lw": 0.8, "ls": ":"}
    axis.add_patch(PathPatch(curve, facecolor="none", zorder=2 + 0.01 * thick, **style))
    text: Any = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 5}
    at = (start + end) / 2, 0.06 + 0.75 * peak
    axis.text(*at, label or "unknown", bbox={"fc": "white", "ec": "none", "pad": 0.8}, **text)


def _draw_boxes_and_matrix(
    width: float, topology: Topology, nodes: Mapping[int | None, Sequence[Gpu]], chosen: Collection[int]
) -> Figure:
    """The boxes by node, four in a row, and beside or below them a cell for each pair."""
    bands = [0.66 * -(-len(gpus) // 4) for gpus in nodes.values()]
    tall = sum(bands) + 0.6 * len(bands)
    narrow = width < NARROW_IN
    unit = (width if narrow else width / 2) / 4.3  # inches
    high = unit * tall + 3.3 if narrow else max(3.1, unit * tall)
    figure = Figure(figsize=(width, high + 0.6), layout="constrained")
    ratios: Any = {"height_ratios": [unit * tall, 3.2]} if narrow else {}
    boxes, matrix = figure.subplots(*((2, 1) if narrow else (1, 2)), gridspec_kw=ratios)
    top = 0.0
    for (node, gpus), band in zip(nodes.items(), bands, strict=True):
        _node(boxes, (-0.5, 3.5), (top - band - 0.46, top), _node_label(node, gpus, int(4 * unit / 0.064)))
        for i, gpu in enumerate(gpus):
            _box(boxes, i % 4, top - 0.36 - 0.66 * (i // 4), gpu, chosen)
        top -= band + 0.6
    boxes.set_xlim(-0.55, 3.55)
    boxes.set_ylim(top + 0.1, 0.05)
    boxes.set_aspect("equal")
    boxes.set_axis_off()
    _draw_matrix(matrix, topology, [gpu.index for gpus in nodes.values() for gpu in gpus], chosen)
    return figure


def _draw_matrix(axis: Axes, topology: Topology, order: Sequence[int], chosen: Collection[int]) -> None:
    for row, a in enumerate(order):
        for column, b in enumerate(order):
            label = topology.links[a][b]
            colour = "white" if a == b else _kind(label)[1]
            both = a != b and a in chosen and b in chosen
            edge: Any = {"ec": ORANGE if both else "white", "lw": 1.8 if both else 0.8, "zorder": 2 + both}
            axis.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, facecolor=colour, **edge))
            text, ink = ("–", GREY) if a == b else (label or "?", _text_on(colour))
            size = 7 if len(order) <= 8 else 5
            axis.text(column, row, text, ha="center", va="center", fontsize=size, color=ink, zorder=4)
    axis.xaxis.tick_top()
    axis.set_xticks(range(len(order)), list(map(str, order)))
    axis.set_yticks(range(len(order)), [f"GPU {index}" for index in order])
    axis.tick_params(length=0)
    for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        for tick, index in zip(ticks, order, strict=True):
            tick.set_backgroundcolor(ORANGE if index in chosen else "none")
    axis.set_xlim(-0.55, len(order) - 0.45)
    axis.set_ylim(len(order) - 0.45, -0.55)
    axis.set_aspect("equal")
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


def _say_topology(topology: Topology, nodes: Mapping[int | None, Sequence[Gpu]], chosen: Collection[int]) -> str:
    parts = [_machine_title(topology)]
    for node, gpus in nodes.items():
        parts.append(f"{_named(g.index for g in gpus)} on {', '.join(_node_label(node, gpus, 99).splitlines())}")
    counts = Counter(_pairs(topology).values())
    parts += [f"{label or 'unknown link'} in {n} of {counts.total()} pairs" for label, n in counts.most_common()]
    return "; ".join([*parts, *[f"chosen: {_named(chosen)}"] * bool(chosen)])


def _named(gpus: Iterable[int]) -> str:
    numbers = sorted(gpus)
    return f"GPU{'s' * (len(numbers) > 1)} {format_devices(numbers)}"


# --- a run


def _rows(requests: Sequence[RequestRecord]) -> dict[tuple[int, int], list[RequestRecord]]:
    """Requests of each (concurrency, stream)."""
    rows: dict[tuple[int, int], list[RequestRecord]] = {}
    for request in sorted(requests, key=lambda r: (r.concurrency, r.stream)):
        rows.setdefault((request.concurrency, request.stream), []).append(request)
    return rows


def _by_gpu(run: LoadedRun) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in run.telemetry.samples if run.telemetry else ():
        found.setdefault(sample.gpu, []).append(sample)
    return dict(sorted(found.items()))


def _limits(run: LoadedRun) -> list[float]:
    """The different power limits of its GPUs, W; empty where none was recorded."""
    known = run.telemetry.power_limits_w.values() if run.telemetry else ()
    return sorted({limit for limit in known if limit is not None})


def format_run(run: LoadedRun) -> str:
    """The run and what it was; what makes its times no result stands beside it."""
    spec = run.record.spec
    notes = ["random weights"] * (spec.weights == "random")
    notes += ["simulated acceptance"] * condition_of(run)["simulated"] + ["failed run"] * (not run.ok)
    return f"{run.name}: {condition_label(spec)}, TP {spec.tp_size}" + f" ({', '.join(notes)})" * bool(notes)


def _stop_s(request: RequestRecord) -> float | None:
    """Seconds after sending when its last token came, or else its stream ended."""
    return request.ticks[-1][0] if request.ticks else request.end_s


def _draw_requests(
    axis: Axes, rows: Mapping[tuple[int, int], Sequence[RequestRecord]], colour: str, width: float
) -> None:
    last = max((r.sent_s + (_stop_s(r) or 0.0) for row in rows.values() for r in row), default=1.0)
    inch = (width - 0.7) / last if last else 1.0
    for at, row in enumerate(rows.values()):
        for request in row:
            _draw_request(axis, at, request, colour, inch)
    groups = [concurrency for concurrency, _ in rows]
    for border in (i for i, (a, b) in enumerate(pairwise(groups), 1) if a != b):
        axis.axhline(border - 0.5, color=GREY, linewidth=0.5)
    middles = {c: groups.index(c) + (groups.count(c) - 1) / 2 for c in dict.fromkeys(groups)}
    axis.set_yticks(list(middles.values()), [f"{c} at once" for c in middles])
    axis.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    if not rows:
        axis.text(0.5, 0.5, "No request was sent", ha="center", va="center", color=GREY, transform=axis.transAxes)


def _draw_request(axis: Axes, at: int, request: RequestRecord, colour: str, inch: float) -> None:
    first, stop = ttft_s(request.ticks), _stop_s(request)
    faint: Any = {"alpha": 0.45 if request.warmup else 1.0, "height": 0.76, "zorder": 2}
    prefill = first if first is not None else stop
    if prefill is not None:
        axis.barh(at, prefill, left=request.sent_s, color="white", edgecolor=GREY, hatch="//////", lw=0.4, **faint)
    if first is not None and stop is not None:
        axis.barh(at, stop - first, left=request.sent_s + first, color=colour, edgecolor="white", lw=0.3, **faint)
        if inch * (stop - first) > 0.05 * len(request.prompt) + 0.05:
            ink = INK if request.warmup else _text_on(colour)
            place: Any = {"ha": "center", "va": "center", "fontsize": 6, "zorder": 3, "color": ink, "clip_on": True}
            axis.text(request.sent_s + (first + stop) / 2, at, _plain(request.prompt), parse_math=False, **place)
    if request.error:
        axis.plot(request.sent_s + (stop or 0.0), at, marker="X", color="#D55E00", mec=INK, mew=0.5, ms=6, zorder=4)


def _draw_strip(axes: Sequence[Axes], gpus: Mapping[int, Sequence[Sample]], limits: Collection[float]) -> None:
    for axis, column, label in zip(axes, ("sm_clock_mhz", "power_w"), ("SM clock\n(MHz)", "Power (W)"), strict=True):
        for (_, samples), style in zip(gpus.items(), _gpu_styles(), strict=False):
            points = [(s.time_s, getattr(s, column)) for s in samples if getattr(s, column) is not None]
            axis.plot([t for t, _ in points], [v for _, v in points], **style)
        for start, end in _slowed(gpus):
            axis.axvspan(start, end, facecolor="#D55E0030", edgecolor="#D55E00", hatch="....", lw=0, zorder=0)
        for limit in limits if column == "power_w" else ():
            axis.axhline(limit, **LIMIT)
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.1 * (axis.get_ylim()[1] or 1))


def _gpu_styles() -> Iterable[dict[str, Any]]:
    pairs = zip(cycle(GPU_COLOURS), cycle(PATTERNS), strict=False)
    return ({"color": colour, "ls": pattern, "lw": 1.1} for colour, pattern in pairs)


def _slowed(gpus: Mapping[int, Sequence[Sample]]) -> list[tuple[float, float]]:
    """Spans in which a GPU was held down: a sample's reasons hold until its next."""
    return [
        (a.time_s, b.time_s)
        for samples in gpus.values()
        for a, b in pairwise(samples)
        if (a.clock_event_reasons or 0) & SLOWING_REASONS
    ]


def _request_handles(requests: Sequence[RequestRecord], colour: str) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor=GREY, hatch="//////", label="until the first token"),
        Patch(facecolor=colour, label="decode"),
    ]
    if any(r.warmup for r in requests):
        handles.append(Patch(facecolor=colour, alpha=0.45, label="warm-up"))
    if any(r.error for r in requests):
        mark: Any = {"marker": "X", "color": "#D55E00", "mec": INK, "mew": 0.5, "ls": "", "ms": 6}
        handles.append(Line2D([], [], label="failed", **mark))
    return handles if requests else []


def _gpu_handles(gpus: Mapping[int, Sequence[Sample]], limits: Collection[float]) -> list[Any]:
    styles = islice(_gpu_styles(), len(gpus))
    handles: list[Any] = [Line2D([], [], label=f"GPU {g}", **s) for g, s in zip(gpus, styles, strict=True)]
    if gpus and limits:
        handles.append(Line2D([], [], label="power limit", **LIMIT))
    if _slowed(gpus):
        handles.append(
            Patch(facecolor="#D55E0030", edgecolor="#D55E00", hatch="....", lw=0, label="slowed by a cap or heat")
        )
    return handles


def _say_run(run: LoadedRun, gpus: Mapping[int, Sequence[Sample]], limits: Collection[float]) -> str:
    requests = run.requests
    end = max((r.sent_s + (_stop_s(r) or 0.0) for r in requests), default=0.0)
    counts = (len(requests), sum(r.warmup for r in requests), sum(r.error is not None for r in requests))
    parts = [format_run(run), "{} requests, {} of them warm-ups, {} failed".format(*counts), f"over {end:.1f} s"]
    for gpu, samples in gpus.items():
        for column, unit in (("sm_clock_mhz", "MHz"), ("power_w", "W")):
            values = [value for s in samples if (value := getattr(s, column)) is not None]
            parts += [f"GPU {gpu} {min(values):.0f} to {max(values):.0f} {unit}"] * bool(values)
    parts += [f"power limit {' and '.join(f'{limit:.0f} W' for limit in limits)}"] * bool(limits)
    if gpus:
        parts.append("a GPU was slowed down" if _slowed(gpus) else "no GPU was slowed down")
    elif run.telemetry:
        parts.append(f"no telemetry: {run.telemetry.reason or 'no sample'}")
    return "; ".join(parts)


# --- a request


def _draw_ticks(upper: Axes, lower: Axes, times: Sequence[float], counts: Sequence[int], gaps: Sequence[float]) -> None:
    upper.step([0.0, *times], [0, *counts], where="post", color=BLUE)
    upper.plot(times, counts, ls="", marker="o", ms=2.5 if len(times) < 60 else 1.2, color=BLUE)
    upper.axvline(times[0], color=INK, ls="--", lw=0.8)
    right = times[0] < 0.6 * times[-1]
    place: Any = {"xytext": (3 if right else -3, -2), "textcoords": "offset points", "va": "top", "fontsize": 7}
    top = ("data", "axes fraction")
    text = f"first token after {1000 * times[0]:.0f} ms"
    upper.annotate(text, (times[0], 1.0), xycoords=top, ha="left" if right else "right", **place)
    lower.vlines(times[1:], 0, gaps, color=GREY, lw=1.0)
    lower.plot(times[1:], gaps, ls="", marker="o", ms=2.5 if len(times) < 60 else 1.2, color=INK)
    if gaps:
        lower.axhline(median(gaps), color=BLUE, lw=0.8, ls="--")
        beside: Any = {"ha": "right", "va": "top", "fontsize": 6.5, "color": BLUE}
        lower.text(1, 1.02, f"median {median(gaps):.1f} ms", transform=lower.transAxes, **beside)
        lower.set_ylim(0, 1.3 * max(gaps))
    upper.set_ylim(0, 1.12 * counts[-1])
    upper.set_xlim(0, 1.02 * times[-1])


def _say_ticks(request: RequestRecord, gaps: Sequence[float]) -> str:
    parts = [request.prompt]
    if request.ticks:
        end, tokens = request.ticks[-1]
        parts.append(f"{tokens} tokens in {len(request.ticks)} chunks over {end:.2f} s")
        parts.append(f"first token after {1000 * request.ticks[0][0]:.0f} ms")
    else:
        parts.append("no token came")
    parts += [f"median gap {median(gaps):.1f} ms, longest {max(gaps):.1f} ms"] if gaps else []
    return "; ".join([*parts, *[f"failed: {request.error}"] * bool(request.error)])


# --- a draft tree


def _children(tree: DraftTree, kept: Collection[int]) -> dict[int, list[int]]:
    """Kept nodes below each node: the accepted one first, then by falling probability."""
    below: dict[int, list[int]] = {}
    for index in sorted(kept, key=lambda i: (not tree.nodes[i].accepted, -tree.nodes[i].probability, i)):
        if (parent := tree.nodes[index].parent) >= 0:
            below.setdefault(parent, []).append(index)
    return below


def _kept_nodes(tree: DraftTree, rows: int) -> set[int]:
    """The accepted path, and as many of the most probable nodes as leave `rows` leaves or fewer.

    Whole up to its root either way: no node is less probable than the nodes below it.
    """
    path = {i for i, node in enumerate(tree.nodes) if node.accepted or node.parent < 0}
    likely = sorted(range(len(tree.nodes)), key=lambda i: (-tree.nodes[i].probability, i))
    for count in range(len(likely), 0, -1):
        kept = path | set(likely[:count])
        if len(_places(_children(tree, kept), 0, 0, _last_accepted(tree))[1]) <= rows:
            return kept
    return path


def _last_accepted(tree: DraftTree) -> int:
    return max((i for i, node in enumerate(tree.nodes) if node.accepted), default=0)


def _places(
    below: Mapping[int, Sequence[int]], node: int, depth: int, end: int, row: int = 0
) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """(depth, row) of each node from `node` down, and the rows in use: a first child stays in its parent's row.

    The bonus token continues the accepted path, so what hangs below its `end` begins one row lower.
    """
    places, rows = {node: (depth, row)}, [row]
    for position, child in enumerate(below.get(node, ())):
        fresh = position > 0 or node == end
        deeper, used = _places(below, child, depth + 1, end, rows[-1] + 1 if fresh else rows[-1])
        places |= deeper
        rows += [r for r in used if r > rows[-1]]
    return places, rows


def _draw_tree(width: float, tree: DraftTree, kept: Collection[int], *, down: bool) -> Figure:
    """From left to right, or with `down` from the top to the bottom."""
    end = _last_accepted(tree)
    places, rows = _places(_children(tree, kept), 0, 0, end)
    bonus = (places[end][0] + 1, places[end][1])
    columns = 1 + max(bonus[0], *(depth for depth, _ in places.values()))
    across, high = (len(rows), columns) if down else (columns, len(rows))
    figure = Figure(figsize=(width, (0.36 if down else 0.3) * high + 0.75), layout="constrained")
    axis = figure.subplots()
    pitch = (width - 0.15) / across
    chars = max(4, int(pitch / 0.062) - 1)

    def at(depth: int, row: int) -> tuple[float, float]:
        return (row, -depth) if down else (depth, -row)

    for index in sorted(kept)[1:]:
        node = tree.nodes[index]
        _edge(axis, at(*places[node.parent]), at(*places[index]), node.accepted, down)
    _edge(axis, at(*places[end]), at(*bonus), True, down)
    for index in kept:
        node = tree.nodes[index]
        kind = "root" if node.parent < 0 else "accepted" if node.accepted else "rejected"
        text = f"{_token(node.text, chars)}\n" + ("root" if kind == "root" else _share(node.probability))
        _leaf(axis, at(*places[index]), text, kind)
    _leaf(axis, at(*bonus), f"{_token(tree.bonus.text, chars)}\nbonus", "bonus")
    axis.set_xlim(-0.55, across - 0.45)
    axis.set_ylim(0.55 - high, 0.55)
    axis.set_axis_off()
    left = len(tree.nodes) - len(kept)
    note = f"; left out: {left} of {len(tree.nodes) - 1} drafted nodes, the least probable" * bool(left)
    title = f"{_plain(tree.prompt)}, verify step {tree.step}{note}"
    axis.set_title(_wrap(title, width), loc="left", parse_math=False)
    figure.legend(handles=_tree_handles(), loc="outside lower center", ncols=2 if down else 4)
    return figure


NODE_STYLES: dict[str, dict[str, Any]] = {
    "root": {"fc": GREY, "ec": INK, "lw": 0.7, "ls": "-"},
    "accepted": {"fc": BLUE, "ec": INK, "lw": 1.2, "ls": "-"},
    "rejected": {"fc": "white", "ec": "#AAAAAA", "lw": 0.7, "ls": "-"},
    "bonus": {"fc": ORANGE, "ec": INK, "lw": 1.2, "ls": "--"},
}
NODE_LABELS = {
    "root": "root, already decided", "accepted": "accepted draft", "rejected": "draft not taken",
    "bonus": "bonus, the target's own",
}  # fmt: skip


def _leaf(axis: Axes, place: tuple[float, float], text: str, kind: str) -> None:
    style = NODE_STYLES[kind]
    box = {"boxstyle": "round,pad=0.22", **style}
    ink = _text_on(style["fc"])
    axis.text(
        *place,
        text,
        ha="center",
        va="center",
        fontsize=6,
        linespacing=1.05,
        color=ink,
        bbox=box,
        parse_math=False,
        zorder=3,
    )


def _edge(axis: Axes, start: tuple[float, float], end: tuple[float, float], accepted: bool, down: bool) -> None:
    """Along the tree's direction, then across: right angles, so that rows stay rows."""
    (x, y), (to_x, to_y) = start, end
    bend = [(x, y - 0.5), (to_x, y - 0.5)] if down else [(x + 0.5, y), (x + 0.5, to_y)]
    xs, ys = zip(start, *bend, end, strict=True)
    axis.plot(xs, ys, color=BLUE if accepted else "#AAAAAA", lw=2.0 if accepted else 0.7, zorder=2 if accepted else 1)


def _tree_handles() -> list[Any]:
    return [Patch(label=NODE_LABELS[kind], **style) for kind, style in NODE_STYLES.items()]


def _share(probability: float) -> str:
    return f"{probability:.2f}" if probability >= 0.005 else "<0.01"


def _say_tree(tree: DraftTree) -> str:
    path = [node for node in tree.nodes if node.accepted and node.parent >= 0]
    drafts = len(tree.nodes) - 1
    said = ", ".join(f"'{_plain(node.text)}' {_share(node.probability)}" for node in path) or "none"
    return f"{len(path)} of {drafts} drafted nodes accepted: {said}; then the bonus token '{_plain(tree.bonus.text)}'"


# --- shared


def _wrap(text: str, width: float) -> str:
    """A title in lines of `width` inches."""
    return "\n".join(textwrap.wrap(text, int(width / 0.078)))


def _plain(text: str) -> str:
    """With the characters that the figures' font lacks written as escapes, line breaks among them."""
    known = (range(0x20, 0x7F), range(0xA0, 0x250), range(0x2010, 0x2030))
    return "".join(c if any(ord(c) in part for part in known) else ascii(c)[1:-1] for c in text)


def _token(text: str, chars: int) -> str:
    """A token's text in so many characters, its spaces visible."""
    shown = _plain(text).replace(" ", "·")
    return shown if len(shown) <= chars else f"{shown[: chars - 1]}…"


def _text_on(colour: str) -> str:
    red, green, blue = to_rgb(colour)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK
