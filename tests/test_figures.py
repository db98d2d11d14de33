"""Figures: files, fonts, alt texts, constant colours, and what is drawn when there is nothing to draw."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from benchlib import compare, figures, frames, panels
from benchlib.errors import ReportError
from tests import synthetic

NAMES = ("speedup", "decode", "accept", "step", "optimum", "histogram", "concurrency", "scaling", "ab")


def frames_of(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    results = compare.build_results([frames.load_campaign(path)])
    return results, compare.build_scaling(results), compare.build_ab(results)


def plan_of(name: str) -> figures._Plan:
    return next(p for p in figures._PLANS if p.name == name)


def marked(results: pd.DataFrame) -> list[frames.Row]:
    rows = [r for r in frames.rows_of(results) if r["status"] == "ok"]
    return figures._mark_optima(figures._mark_extras(rows, figures._name_extras(rows)))


def drawn_of(name: str, results: pd.DataFrame, width: float = 6.9) -> Figure:
    plan = plan_of(name)
    return figures._draw(plan, figures._choose(plan, marked(results)), width, "")


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, figures.Drawing]:
    folder = tmp_path_factory.mktemp("figures")
    work = synthetic.Workload(prompts=("qsort", "json"), max_new_tokens=(96,))
    path = synthetic.save_campaign(folder, synthetic.build_sweep(tree_budgets=(16,), workload=work))
    return figures.build_figures(*frames_of(path), folder / "out")


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """TP 4 under two NCCL profiles and a variant, one and four requests at once, three budgets."""
    work = synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,), concurrency=(1, 4), repeats=2)
    sweep = synthetic.build_ab_sweep(
        methods=("auto",), tree_budgets=(16, 32, 64), nccl_profiles=("none", "pcie"), starts=2, workload=work,
        variants={"slow": {"server_args": ["--disable-overlap-schedule"]}},
    )  # fmt: skip
    return frames_of(synthetic.save_campaign(tmp_path_factory.mktemp("variants"), sweep))[0]


def test_named_figures_alone_are_drawn(variants: pd.DataFrame, tmp_path: Path) -> None:
    tables = variants, compare.build_scaling(variants), compare.build_ab(variants)
    assert list(figures.build_figures(*tables, tmp_path, only=["accept"])) == ["accept"]
    assert {path.stem for path in tmp_path.iterdir()} == {"accept", "accept-1col"}
    with pytest.raises(ReportError, match="no figure is named pie: name some of speedup, decode"):
        figures.build_figures(*tables, tmp_path, only=["accept", "pie"])


def test_every_figure_is_saved_in_both_widths(drawn: dict[str, figures.Drawing]) -> None:
    assert tuple(drawn) == NAMES
    for drawing in drawn.values():
        one_column = drawing.pdf.with_name(f"{drawing.name}-1col.pdf")
        assert drawing.png.read_bytes().startswith(b"\x89PNG")
        assert drawing.narrow_png.name == f"{drawing.name}-1col.png"
        assert one_column.read_bytes().startswith(b"%PDF")
        # TrueType as CIDFontType2 is what fonttype 42 embeds; Type 3 is what journals refuse.
        assert b"/CIDFontType2" in drawing.pdf.read_bytes()
        assert b"/Type3" not in drawing.pdf.read_bytes()


def test_alt_texts_hold_the_numbers(drawn: dict[str, figures.Drawing]) -> None:
    assert re.search(r"TP 1: DFlash linear [\d.]+ \([\d.]+ to [\d.]+\), DDTree b16 2\.\d+", drawn["speedup"].alt)
    assert "json DDTree b16 " in drawn["decode"].alt.split("TP 2: ")[1]
    assert "TP 1: autoregressive 1." in drawn["step"].alt
    assert "DFlash linear: the whole block in 6.2% of steps" in drawn["histogram"].alt
    assert "TP 1 to TP 2: autoregressive 1.6" in drawn["scaling"].alt


def test_html_carries_the_picture(drawn: dict[str, figures.Drawing]) -> None:
    page = drawn["speedup"].to_html()
    assert page == drawn["speedup"]._repr_html_()
    assert page.count("data:image/png;base64,") == 2
    assert f'alt="{drawn["speedup"].alt}"' in page
    assert "http" not in page.split("base64,")[0]


def test_colours_are_constant_and_ordered_in_grey() -> None:
    assert figures.method_style("ddtree", 16) == figures.method_style("ddtree", 16)
    budgets = (8, 15, 16, 32, 64, 128)
    greys = [
        sum(w * c for w, c in zip((0.3, 0.59, 0.11), to_rgb(figures.method_style("ddtree", b)[0]), strict=True))
        for b in budgets
    ]
    assert greys == sorted(greys, reverse=True)
    styles = [figures.method_style(m, None) for m in ("auto", "linear")]
    styles += [figures.method_style("ddtree", b) for b in budgets]
    assert len({colour for colour, _, _ in styles}) == len(styles)


def test_an_empty_figure_is_low_and_says_why(drawn: dict[str, figures.Drawing]) -> None:
    assert "No optimum: that takes 3 tree budgets" in drawn["optimum"].alt
    assert "No condition was measured at two concurrencies" in drawn["concurrency"].alt
    assert drawn["ab"].png.read_bytes()[16:24] == (1380).to_bytes(4, "big") + (80).to_bytes(4, "big")


def test_random_weights_have_no_speedup_and_no_optimum(tmp_path: Path) -> None:
    work = synthetic.Workload(prompts=("fib",), max_new_tokens=(32,), concurrency=(1, 2), repeats=2)
    sweep = synthetic.build_sweep(
        tp_size=(1,), tree_budgets=(16, 32, 64), workload=work, engines={"reference": {"weights": "random"}}
    )
    results, scaling, ab = frames_of(synthetic.save_campaign(tmp_path, sweep))
    drawn = figures.build_figures(results, scaling, ab, tmp_path / "out")
    assert "No speedup can be stated: random weights" in drawn["speedup"].alt
    assert "No optimum" in drawn["optimum"].alt
    accept = figures._choose(plan_of("accept"), marked(results))
    assert set(accept.titles) == {"TP 1, 1 at once\nrandom weights", "TP 1, 2 at once\nrandom weights"}
    # Of several workloads the histogram has room for the first; by budget, also where the smaller one's run failed.
    histogram = figures._choose(plan_of("histogram"), reversed(marked(results)))
    assert {r["concurrency"] for r in histogram.rows} == {1}
    assert "Shown: 1 at once" in histogram.note
    assert histogram.titles[0].startswith("DFlash linear")


def test_conditions_of_one_method_stand_side_by_side(variants: pd.DataFrame) -> None:
    rows = figures._choose(plan_of("decode"), marked(variants)).rows
    part = [r for r in rows if r["concurrency"] == 1]
    groups = [[r for r in part if r["prompt"] == prompt] for prompt in ("fib", "json")]
    spans = sorted((at - wide / 2, at + wide / 2) for at, wide, _ in panels.slots(groups))
    assert len(spans) == 2 * 4 * 4
    assert all(right <= left + 1e-9 for (_, right), (left, _) in pairwise(spans))
    looks = {r["label"]: (s := panels.bar_style(r))["hatch"] + str(s["facecolor"]) for r in part}
    assert len(set(looks.values())) == len(looks) == 16
    legend = drawn_of("decode", variants).legends[0]
    assert {"DDTree b16", "NCCL pcie", "slow"} <= {t.get_text() for t in legend.get_texts()}


def test_autoregressive_lines_are_told_apart(variants: pd.DataFrame) -> None:
    axis = drawn_of("step", variants).axes[0]
    named = [line for line in axis.lines if line.get_marker() == "o" and line.get_xdata()[0] < 1]
    assert {line.get_fillstyle() for line in named} == {"full", "left", "right", "top"}
    assert len({float(line.get_xdata()[0]) for line in named}) == 4


def test_budgets_get_a_curve_and_both_optima(variants: pd.DataFrame) -> None:
    plain = [r for r in marked(variants) if r.get("optimum") and r["extra"] == 0 and r["concurrency"] == 1]
    assert [r["tree_budget"] for r in plain if r["best"]] == [max(plain, key=lambda r: r["speedup"])["tree_budget"]]
    choice = figures._choose(plan_of("optimum"), plain)
    axis = figures._draw(plan_of("optimum"), choice, 6.9, "").axes[0]
    curve = max(axis.lines, key=lambda line: len(line.get_xdata()))
    # The curve's highest point is where the predicted optimum is marked.
    top = max(zip(curve.get_ydata(), curve.get_xdata(), strict=True))
    assert top[0] == pytest.approx(plain[0]["optimum"].speedup, rel=0.01)
    assert top[1] == pytest.approx(plain[0]["optimum"].budget, rel=0.1)
    assert "oracle" in axis.texts[0].get_text()


def test_points_are_named_by_concurrency_and_labels_never_overlap(variants: pd.DataFrame) -> None:
    for width in figures.WIDTHS_IN.values():
        figure = drawn_of("concurrency", variants, width)
        for axis in figure.axes:
            boxes = [text.get_window_extent() for text in axis.texts]
            assert {text.get_text() for text in axis.texts} == {"1", "4"}
            assert not [a for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_an_ab_line_states_its_verdict(variants: pd.DataFrame) -> None:
    rows = frames.rows_of(compare.build_ab(variants))
    row = next(r for r in rows if r["prompt"] == "all" and r["b"] == "pcie" and r["method"] == "auto")
    known = figures._mark_extras(rows, figures._name_extras(frames.rows_of(variants)))
    choice = figures._choose(plan_of("ab"), [{**r, "sides": panels.format_sides(r)} for r in known])
    told = f"NCCL pcie against none: autoregressive {row['difference']:+.1%}"
    assert told in figures._alt(plan_of("ab"), choice)
    texts = " ".join(text.get_text() for text in figures._draw(plan_of("ab"), choice, 3.4, "").axes[0].texts)
    assert row["difference_note"] in texts
    assert "NCCL pcie against none: autoregressive" in texts


def test_too_many_workloads_and_conditions_are_left_out_and_counted(variants: pd.DataFrame) -> None:
    rows = marked(variants)
    more = [{**r, "tp_size": size} for r in rows for size in (1, 2, 8)]
    choice = figures._choose(plan_of("accept"), more)
    assert len(set(choice.titles)) == 3
    assert choice.note == ". Shown: 1 at once; the tables have the rest"
    crowd = [{**r, "prompt": f"p{i}"} for r in rows for i in range(8) if r["prompt"] == "fib"]
    bars = figures._choose(plan_of("decode"), crowd)
    # Six fit, and there are four methods under each of four settings: those of the plain one, and no half of another.
    assert {r["extra"] for r in bars.rows} == {0}
    assert len({r["label"] for r in bars.rows}) == 4
    assert "Left out for want of room: 12 conditions" in bars.note


def test_histogram_ticks_are_whole_and_end_at_the_block(variants: pd.DataFrame) -> None:
    row = next(r for r in marked(variants) if r["method"] == "ddtree" and r["prompt"] == "all")
    for block, ticks in ((4, [0, 1, 2, 3]), (8, [0, 2, 4, 7]), (16, [0, 5, 10, 15])):
        axis = Figure().subplots()
        panels.draw_histogram(axis, [{**row, "block_size": block, "drafts_histogram": [3] * block}])
        assert list(axis.get_xticks()) == ticks


def test_one_gpu_is_plain_beside_profiles() -> None:
    row = {"method": "auto", "tree_budget": None, "label": "autoregressive", "tp_size": 1}
    others = [{**row, "label": f"autoregressive, NCCL {name}", "tp_size": 4} for name in ("pcie", "production")]
    names = figures._name_extras([row, *others])
    assert names == {
        "": (0, "NCCL pcie (TP 1: none)"),
        "NCCL pcie": (0, "NCCL pcie (TP 1: none)"),
        "NCCL production": (1, "NCCL production"),
    }
    # Where TP 1 was measured alone, a variant there is no profile.
    alone = [row, {**row, "label": "autoregressive, slow"}]
    assert figures._name_extras(alone) == {"": (0, ""), "slow": (1, "slow")}
