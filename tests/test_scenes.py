"""Figures of machine and moment: what is drawn, marked, left out and said, on real topologies, runs and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchlib import frames, scenes
from benchlib.draft_tree import DraftTree, save_draft_tree
from benchlib.drawing import Drawing
from benchlib.errors import PlacementError, RecordError
from benchlib.frames import LoadedRun
from benchlib.record import RequestRecord
from benchlib.spec import RunSpec
from benchlib.telemetry import Sample, TelemetryRecord
from benchlib.topology import Topology, load_topology
from tests import synthetic

DATA = Path(__file__).parent / "data" / "topology"
WHOLE = sorted(path for path in DATA.glob("*.txt") if "broken" not in path.name and "p2p" not in path.name)
IDLE, CAP = 0x1, 0x4
TREE: dict[str, Any] = {
    "prompt": "fib",
    "step": 4,
    "accept_length": 3,
    # Token, parent, probability, accepted: the target takes the second choice after "def", then " fib".
    "nodes": [
        {"token_id": i, "text": text, "parent": parent, "probability": probability, "accepted": accepted}
        for i, (text, parent, probability, accepted) in enumerate(
            [
                (" def", -1, 1.0, True),
                (" f", 0, 0.6, False),
                (" g", 0, 0.3, True),
                (" x", 1, 0.25, False),
                (" fib", 2, 0.2, True),
                ("\n", 4, 0.1, False),
            ]
        )
    ],
    "bonus": {"token_id": 9, "text": "$(\u4e2d"},
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Figure]]:
    """Figures by name as they were made, wide one first; nothing but the files is left out."""
    made: dict[str, list[Figure]] = {}

    def save(name: str, caption: str, shows: str, draw: Callable[[float], Figure], folder: Path) -> Drawing:
        made[name] = [draw(6.9), draw(3.4)]
        return Drawing(name, caption, f"{caption}: {shows}.", *(folder / f"{name}{i}" for i in range(3)))

    monkeypatch.setattr(scenes, "save_figure", save)
    return made


def texts(figure: Figure) -> list[str]:
    """Every text of a figure that is not empty, tick labels and legends included."""
    found = [text.get_text() for text in figure.texts]
    for axis in figure.axes:
        labels = [*axis.get_xticklabels(), *axis.get_yticklabels(), axis.xaxis.label, axis.yaxis.label]
        found += [text.get_text() for text in (*axis.texts, *labels)] + [axis.get_title("left")]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return [text for text in found if text]


def tree(**changes: Any) -> DraftTree:
    return DraftTree.model_validate({**TREE, **changes})


def run_of(*, telemetry: TelemetryRecord | None = None, **changes: Any) -> LoadedRun:
    work = synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,), concurrency=(1, 2), repeats=2)
    spec = RunSpec(method="ddtree", tree_budget=16, workload=work, **changes)
    return LoadedRun("c", "tp1-b16", *synthetic.build_run(spec), telemetry)


def telemetry_of(
    *, reasons: int, limits: dict[int, float | None] | None = None, power: float = 300.0
) -> TelemetryRecord:
    samples = tuple(
        Sample(0.2 * i + 0.01 * gpu, gpu, 1900 + gpu, 3201, power, 40, reasons if i == 2 else IDLE, 1, 9, 0, 0, 0, 0.0)
        for i in range(6)
        for gpu in (0, 1)
    )
    uuids = {0: "GPU-a", 1: "GPU-b"}
    return TelemetryRecord(hz=5, uuids=uuids, power_limits_w=limits or {}, reason=None, missed=0, samples=samples)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_every_gpu_link_and_node_of_a_machine_is_named(path: Path, drawn: dict[str, list[Figure]]) -> None:
    topology = load_topology(path)
    drawing = scenes.draw_topology(topology, folder=path)
    n = len(topology.gpus)
    for figure in drawn["topology"]:
        found = texts(figure)
        for gpu in topology.gpus:
            assert f"GPU {gpu.index}" in found
            assert any(f"NUMA node {gpu.numa_node}" in text for text in found)
            assert any((gpu.cpus or "").split(",")[0] in text for text in found)
        labels = [topology.links[a][b] for a in range(n) for b in range(n) if (a != b if n > 4 else a < b)]
        assert sorted(text for text in found if text in set(labels)) == sorted(str(label) for label in labels)
    assert f"of {n * (n - 1) // 2} pairs" in drawing.alt or n == 1


def test_chosen_gpus_are_marked_in_figure_and_words(drawn: dict[str, list[Figure]]) -> None:
    topology = load_topology(DATA / "quad_pxb_pix_no_gpu_numa_id.txt")
    drawing = scenes.draw_topology(topology, (2, 3), folder=DATA)
    for figure in drawn["topology"]:
        assert "chosen" in texts(figure)
        boxes = [patch for patch in figure.axes[0].patches if type(patch).__name__ == "FancyBboxPatch"]
        # In grey, too: by the outline.
        assert [box.get_linewidth() > 1 for box in boxes] == [False, False, True, True]
    assert drawing.alt.endswith("PXB in 1 of 6 pairs; PIX in 1 of 6 pairs; chosen: GPUs 2-3.")
    assert "GPUs 0-1 on NUMA node 0, CPUs 0-27, 56-83" in drawing.alt


def test_a_gpu_that_is_not_there_cannot_be_marked(tmp_path: Path) -> None:
    topology = load_topology(DATA / "pair_pix_header_without_leading_tab.txt")
    with pytest.raises(PlacementError, match=r"GPU 5 cannot be marked: .* has GPUs 0-1\. Name some of these"):
        scenes.draw_topology(topology, (1, 5), folder=tmp_path)


def test_unknown_links_nodes_and_cores_are_drawn_as_unknown(drawn: dict[str, list[Figure]]) -> None:
    known = load_topology(DATA / "pair_pix_header_without_leading_tab.txt")
    gpus = tuple(type(gpu)(gpu.index) for gpu in known.gpus)
    drawing = scenes.draw_topology(Topology(gpus, (("X", None), (None, "X")), "x"), folder=DATA)
    assert {"unknown", "NUMA node unknown\nCPUs unknown"} <= set(texts(drawn["topology"][0]))
    assert "unknown link in 1 of 1 pairs" in drawing.alt


def test_better_links_are_thicker_and_darker() -> None:
    widths = [width for _, _, width in scenes.KINDS]
    assert widths == sorted(widths, reverse=True)
    reds = [int(colour[1:3], 16) for _, colour, _ in scenes.KINDS]
    assert reds == sorted(reds)


def test_figures_are_saved_in_both_widths(tmp_path: Path) -> None:
    drawing = scenes.draw_tree(tree(), folder=tmp_path)
    assert drawing.png.read_bytes().startswith(b"\x89PNG")
    assert drawing.narrow_png.is_file()
    assert drawing.pdf.read_bytes().startswith(b"%PDF")


def test_a_time_line_has_a_row_for_each_stream_and_its_requests_in_it(drawn: dict[str, list[Figure]]) -> None:
    run = run_of()
    drawing = scenes.draw_timeline(run, folder=Path())
    (axis,) = drawn["timeline"][0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1 at once", "2 at once"]
    # Two bars a request, until its first token and from there on.
    first = run.requests[0]
    starts = sorted((bar.get_x(), bar.get_width()) for bar in axis.patches)
    assert len(starts) == 2 * len(run.requests)
    assert starts[0] == pytest.approx((first.sent_s, first.ticks[0][0]))
    assert starts[1] == pytest.approx((first.sent_s + first.ticks[0][0], first.ticks[-1][0] - first.ticks[0][0]))
    faint = sum(bar.get_alpha() < 1 for bar in axis.patches)
    assert faint == 2 * sum(r.warmup for r in run.requests)
    assert f"{len(run.requests)} requests, {faint // 2} of them warm-ups, 0 failed" in drawing.alt


def test_failed_requests_are_marked_where_they_broke_off(drawn: dict[str, list[Figure]]) -> None:
    run = run_of()
    broken, never = (run.requests[i].model_copy(update={"error": "cut", "end_s": None}) for i in (3, 4))
    never = never.model_copy(update={"ticks": ()})
    requests = [*run.requests[:3], broken, never, *run.requests[5:]]
    drawing = scenes.draw_timeline(LoadedRun("c", "r", run.record, requests), folder=Path())
    (axis,) = drawn["timeline"][0].axes
    marks = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "X"]
    assert sorted(marks) == pytest.approx(sorted([broken.sent_s + broken.ticks[-1][0], never.sent_s]))
    assert "2 failed" in drawing.alt


def test_telemetry_lies_below_on_the_same_axis_with_limit_and_slowed_spans(drawn: dict[str, list[Figure]]) -> None:
    telemetry = telemetry_of(reasons=CAP, limits={0: 700.0, 1: None})
    drawing = scenes.draw_timeline(run_of(telemetry=telemetry), folder=Path())
    upper, clock, power = drawn["timeline"][0].axes
    assert upper.get_shared_x_axes().joined(upper, power)
    assert [list(line.get_ydata()) for line in clock.lines] == [[1900] * 6, [1901] * 6]
    assert [line.get_ydata()[0] for line in power.lines] == [300, 300, 700]
    spans = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in power.patches)
    assert spans == [pytest.approx((0.4, 0.6)), pytest.approx((0.41, 0.61))]
    assert {"GPU 0", "GPU 1", "power limit", "slowed by a cap or heat"} <= set(texts(drawn["timeline"][0]))
    assert "power limit 700 W; a GPU was slowed down" in drawing.alt


def test_idle_is_no_slowing_and_an_unknown_limit_is_no_line(drawn: dict[str, list[Figure]]) -> None:
    drawing = scenes.draw_timeline(run_of(telemetry=telemetry_of(reasons=IDLE)), folder=Path())
    assert not drawn["timeline"][0].axes[2].patches
    assert "power limit" not in texts(drawn["timeline"][0])
    assert drawing.alt.endswith("no GPU was slowed down.")


def test_telemetry_without_samples_says_why(drawn: dict[str, list[Figure]]) -> None:
    silent = telemetry_of(reasons=IDLE).model_copy(update={"samples": (), "reason": "NVML says: no"})
    assert "no telemetry: NVML says: no" in scenes.draw_timeline(run_of(telemetry=silent), folder=Path()).alt
    assert len(drawn["timeline"][0].axes) == 1


def test_what_is_no_result_is_in_a_time_lines_title(drawn: dict[str, list[Figure]]) -> None:
    scenes.draw_timeline(run_of(weights="random", server_env={"SGLANG_SIMULATE_ACC_LEN": "4"}), folder=Path())
    (title,) = [text for text in texts(drawn["timeline"][0]) if text.startswith("tp1-b16")]
    assert "(random weights, simulated acceptance)" in title.replace("\n", " ")


def test_a_failed_run_without_requests_has_a_time_line_too(tmp_path: Path, drawn: dict[str, list[Figure]]) -> None:
    campaign = synthetic.save_campaign(tmp_path, changes={"tp1-auto": synthetic.fail_run})
    drawing = scenes.draw_timeline(campaign / "tp1-auto", folder=tmp_path)
    assert "No request was sent" in texts(drawn["timeline"][0])
    assert "(failed run)" in drawing.alt
    with pytest.raises(RecordError, match="is not a folder"):
        scenes.draw_timeline(campaign / "nothing", folder=tmp_path)


def request(**changes: Any) -> RequestRecord:
    return run_of().requests[-1].model_copy(update={"ticks": ((0.1, 1), (0.15, 6), (0.3, 8)), **changes})


def test_ticks_are_a_staircase_over_the_gaps(drawn: dict[str, list[Figure]]) -> None:
    drawing = scenes.draw_ticks(request(), folder=Path(), label="tp1-b16")
    upper, lower = drawn["ticks"][0].axes
    stairs = upper.lines[0]
    assert (stairs.get_drawstyle(), list(stairs.get_xdata())) == ("steps-post", [0, 0.1, 0.15, 0.3])
    assert list(stairs.get_ydata()) == [0, 1, 6, 8]
    assert list(lower.lines[0].get_ydata()) == pytest.approx([50, 150])
    assert {"first token after 100 ms", "median 100.0 ms"} <= set(texts(drawn["ticks"][0]))
    assert (
        "8 tokens in 3 chunks over 0.30 s; first token after 100 ms; median gap 100.0 ms, longest 150.0 ms"
        in drawing.alt
    )


def test_one_chunk_has_no_gap_and_no_chunk_is_said(drawn: dict[str, list[Figure]]) -> None:
    assert "gap" not in scenes.draw_ticks(request(ticks=((0.1, 8),)), folder=Path()).alt
    drawing = scenes.draw_ticks(request(ticks=(), error="refused: 503"), folder=Path())
    assert "No token came" in texts(drawn["ticks"][0])
    assert drawing.alt.endswith("no token came; failed: refused: 503.")


def test_the_accepted_path_runs_straight_into_the_bonus_token(drawn: dict[str, list[Figure]]) -> None:
    drawing = scenes.draw_tree(tree(), folder=Path())
    wide, narrow = (figure.axes[0] for figure in drawn["tree"])
    at = {text.get_text(): text.get_position() for text in wide.texts}
    straight = ["·def\nroot", "·g\n0.30", "·fib\n0.20", "$(\\u4e2d\nbonus"]
    assert [at[text] for text in straight] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    # A draft below the last accepted one has to make room for the bonus, a rejected branch for both.
    assert (at["\\n\n0.10"], at["·f\n0.60"], at["·x\n0.25"]) == ((3, -1), (1, -2), (2, -2))
    assert {text.get_position() for text in narrow.texts} == {(-y, -x) for x, y in at.values()}
    assert "2 of 5 drafted nodes accepted: ' g' 0.30, ' fib' 0.20; then the bonus token '$(\\u4e2d'" in drawing.alt


def test_a_large_tree_loses_its_least_probable_nodes_and_counts_them(drawn: dict[str, list[Figure]]) -> None:
    leaves = [
        {"token_id": i, "text": f"t{i}", "parent": 0, "probability": 0.9 / i, "accepted": i == 64} for i in range(1, 65)
    ]
    scenes.draw_tree(tree(nodes=[TREE["nodes"][0], *leaves]), folder=Path())
    wide, narrow = drawn["tree"]
    shown = [text.get_text().split("\n")[0] for text in wide.axes[0].texts]
    # The accepted leaf shares the bonus token's row, and is as improbable as can be.
    assert sorted(shown) == sorted(["·def", "t64", "$(\\u4e2d", *(f"t{i}" for i in range(1, scenes.TREE_ROWS))])
    assert f"left out: {64 - scenes.TREE_ROWS} of 64 drafted nodes" in wide.axes[0].get_title("left")
    assert len(narrow.axes[0].texts) == scenes.NARROW_TREE_ROWS + 2


def test_a_step_that_accepts_nothing_hangs_the_bonus_on_the_root(drawn: dict[str, list[Figure]]) -> None:
    nodes = [{**node, "accepted": False} for node in TREE["nodes"]]
    drawing = scenes.draw_tree(tree(nodes=nodes, accept_length=1), folder=Path())
    at = {text.get_text(): text.get_position() for text in drawn["tree"][0].axes[0].texts}
    assert (at["$(\\u4e2d\nbonus"], at["·f\n0.60"]) == ((1, 0), (1, -1))
    assert "0 of 5 drafted nodes accepted: none" in drawing.alt


def test_a_runs_folder_is_read_with_its_telemetry(drawn: dict[str, list[Figure]]) -> None:
    folder = Path(__file__).parents[1] / "results" / "h200-tp" / "tp2-auto"
    drawing = scenes.draw_timeline(folder, folder=Path())
    assert [len(figure.axes) for figure in drawn["timeline"]] == [3, 3]
    assert "72 requests, 18 of them warm-ups, 0 failed" in drawing.alt
    assert "random weights" in drawing.alt


def test_a_reports_moments_are_of_what_there_is(tmp_path: Path) -> None:
    """A tree where a run kept one, else a sentence; the run of most GPUs, one with telemetry before all others."""
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tree_budgets=(16,)))
    plain = scenes.draw_moments(frames.load_campaigns([path]), tmp_path / "plain")
    assert plain["tree"].alt.endswith("No run kept a draft tree: its engine does not tell.")
    assert plain["timeline"].caption.startswith("Time line of tp2-")
    save_draft_tree(path / "tp1-b16", DraftTree.model_validate(TREE))
    with_tree = scenes.draw_moments(frames.load_campaigns([path]), tmp_path / "tree")["tree"]
    assert with_tree.caption.startswith(f"Draft tree of {TREE['prompt']}, verify step {TREE['step']}")
    (path / "tp1-b16" / "draft_tree.json").write_text("{")
    assert "No run kept" in scenes.draw_moments(frames.load_campaigns([path]), tmp_path / "broken")["tree"].alt
    nothing = scenes.draw_moments([frames.Campaign("c", ())], tmp_path / "nothing")
    assert nothing["timeline"].alt.endswith("No run was finished.")
