"""The model of the best budget: exact on its own curves, honest about noise, and tried on a measured campaign."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchlib.compare import build_summary
from benchlib.errors import ComparisonError
from benchlib.optimum import BudgetPoint, budget_points, fit_curves, predict_optimum

SAMPLE = Path(__file__).parents[1] / "results" / "laptop-sample"
AUTO_MS = 10.0


def points_on_curves(*budgets: int, noise: float = 0.0, slope: float = 0.4) -> list[BudgetPoint]:
    """Accept length 1 + b / (2 + b / 8), step 20 ms + slope a token verified."""
    rng = random.Random(1)
    return [
        BudgetPoint(b, b + 1, 1 + b / (2 + b / 8), (20 + slope * (b + 1)) * (1 + rng.gauss(0, noise))) for b in budgets
    ]


def test_curves_of_the_models_own_form_are_found_again() -> None:
    curves = fit_curves(points_on_curves(4, 15, 32, 64), block_size=16)
    assert (curves.gain, curves.slant, curves.root) == pytest.approx((8.0, 2.0, 1.0))
    assert (curves.fixed_ms, curves.slope_ms) == pytest.approx((20.0, 0.4))
    assert curves.accept_length(0) == 1
    assert curves.speedup(16, AUTO_MS) == pytest.approx((1 + 16 / 4) * 10 / 26.8)


def test_the_best_budget_is_that_of_a_search_over_all() -> None:
    found = predict_optimum(points_on_curves(4, 15, 32, 64), AUTO_MS)
    rates = {b: (1 + b / (2 + b / 8)) / (20 + 0.4 * (b + 1)) for b in range(4, 65)}
    best = max(rates, key=lambda b: rates[b])
    assert (found.budget, found.at_edge) == (best, False)
    assert found.speedup == pytest.approx(rates[best] * AUTO_MS)
    assert [(p.measured, p.left_out) for p in found.predictions] == [
        (pytest.approx(p.fitted),) * 2 for p in found.predictions
    ]
    assert found.error == pytest.approx(0, abs=1e-9)


def test_an_optimum_outside_the_measured_budgets_is_marked() -> None:
    cheap = predict_optimum(points_on_curves(4, 15, 32, 64, slope=0.0), AUTO_MS)
    assert (cheap.budget, cheap.at_edge) == (64, True)
    dear = predict_optimum(points_on_curves(15, 32, 64, slope=4.0), AUTO_MS)
    assert (dear.budget, dear.at_edge) == (15, True)


def test_noise_shows_as_error_of_the_budgets_left_out() -> None:
    quiet, loud = (predict_optimum(points_on_curves(4, 8, 15, 32, 64, noise=n), AUTO_MS).error for n in (0.002, 0.05))
    assert quiet is not None
    assert loud is not None
    assert quiet < 0.01 < loud
    worst = predict_optimum(points_on_curves(4, 8, 15, 32, 64, noise=0.05), AUTO_MS)
    assert worst.error == max(abs(p.left_out / p.measured - 1) for p in worst.predictions if p.left_out)


def test_three_budgets_predict_but_leave_none_out_and_two_do_not() -> None:
    found = predict_optimum(points_on_curves(8, 16, 32), AUTO_MS)
    assert (found.error, {p.left_out for p in found.predictions}) == (None, {None})
    with pytest.raises(ComparisonError, match="from 2 budgets"):
        predict_optimum(points_on_curves(8, 16), AUTO_MS)


def test_curves_that_noise_bends_the_wrong_way_become_flat() -> None:
    falling = [BudgetPoint(b, b + 1, 6 - b / 100, 30 - b / 100) for b in (16, 32, 64)]
    curves = fit_curves(falling, block_size=16)
    assert (curves.slant, curves.slope_ms) == (0.0, 0.0)
    assert curves.accept_length(20) == pytest.approx(curves.accept_length(60))
    # Growth without an end in sight: the block bounds it, at 15 drafts and the bonus token.
    growing = [BudgetPoint(b, b + 1, 1 + b / 8, 20.0) for b in (16, 32, 64)]
    assert fit_curves(growing, block_size=16).accept_length(1e9) == pytest.approx(16)


def test_points_come_from_a_summary_and_what_lacks_a_figure_gives_none() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "auto", "tree_budget": None, "verify_tokens": None, "accept_length": None, "step_ms": 9.0},
        {"method": "linear", "tree_budget": None, "verify_tokens": 16, "accept_length": 4.0, "step_ms": 20.0},
        {"method": "ddtree", "tree_budget": 32, "verify_tokens": 33, "accept_length": 6.0, "step_ms": 30.0},
        {"method": "ddtree", "tree_budget": 16, "verify_tokens": 17, "accept_length": 5.0, "step_ms": 25.0},
        {"method": "ddtree", "tree_budget": 64, "verify_tokens": 65, "accept_length": None, "step_ms": None},
    ]
    assert budget_points(rows) == ([BudgetPoint(16, 17, 5.0, 25.0), BudgetPoint(32, 33, 6.0, 30.0)], 9.0)
    assert budget_points(rows[2:])[1] is None


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_measured_sample_is_predicted(tp_size: int) -> None:
    rows = [r for r in build_summary(SAMPLE) if r["tp_size"] == tp_size and r["prompt"] == "all"]
    points, auto_ms = budget_points(rows)
    assert auto_ms is not None
    found = predict_optimum(points, auto_ms)
    assert 15 <= found.budget <= 20
    measured = {r["tree_budget"]: r["speedup"] for r in rows}
    for p in found.predictions:
        # On a noisy CPU steps are not quite a line in verify tokens. Left out, the largest budget is extrapolated to.
        assert p.fitted == pytest.approx(p.measured, rel=0.12)
        # Sums over sums here, geometric means of rounds there.
        assert p.measured == pytest.approx(measured[p.budget], rel=0.02)
