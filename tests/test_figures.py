"""Figures: files, fonts, alt texts, constant colours, and what is drawn when there is nothing to draw."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from benchlib import compare, figures, frames
from tests import synthetic

NAMES = ("speedup", "decode", "accept", "step", "histogram", "scaling")


def results_of(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    results = compare.build_results([frames.load_campaign(path)])
    return results, compare.build_scaling(results)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, figures.Drawing]:
    folder = tmp_path_factory.mktemp("figures")
    work = synthetic.Workload(prompts=("qsort", "json"), max_new_tokens=(96,))
    path = synthetic.save_campaign(folder, synthetic.build_sweep(tree_budgets=(16,), workload=work))
    return figures.build_figures(*results_of(path), folder / "out")


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
    assert "TP 1 DDTree b16 2." in drawn["speedup"].alt
    assert "TP 2 json DDTree b16" in drawn["decode"].alt
    assert "TP 1 autoregressive 1." in drawn["step"].alt
    assert "DFlash linear accepts it in 6.2% of steps" in drawn["histogram"].alt
    assert "TP 1 to 2 autoregressive 1.6" in drawn["scaling"].alt


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


def test_no_data_is_said_in_place_of_axes(tmp_path: Path) -> None:
    plan = next(p for p in figures._PLANS if p.name == "scaling")
    drawing = figures._save(plan, [], tmp_path)
    assert "no data in these records" in drawing.alt
    assert drawing.pdf.read_bytes().startswith(b"%PDF")


def test_random_weights_and_several_workloads_are_in_the_titles(tmp_path: Path) -> None:
    work = synthetic.Workload(prompts=("fib",), max_new_tokens=(32,), concurrency=(1, 2), repeats=2)
    sweep = synthetic.build_sweep(
        tp_size=(1,), tree_budgets=(16,), workload=work, engines={"reference": {"weights": "random"}}
    )
    results, _ = results_of(synthetic.save_campaign(tmp_path, sweep))
    rows = [r for r in frames.rows_of(results) if r["prompt"] == "all"]
    plan = next(p for p in figures._PLANS if p.name == "accept")
    titles = {figures._panel_title(plan, row, rows) for row in rows}
    assert titles == {"TP 1, 1 at once\nrandom weights", "TP 1, 2 at once\nrandom weights"}
    histogram = next(p for p in figures._PLANS if p.name == "histogram")
    assert {r["concurrency"] for r in histogram.rows(rows)} == {1}
    # By budget, also where the smaller one's first run failed.
    assert [r["run"] for r in histogram.rows(reversed(rows))] == ["tp1-linear", "tp1-b16"]
