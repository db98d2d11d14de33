"""Which tree budget is best, and how fast is it there: two curves, held against every measured budget.

Speedup at a budget of b nodes = accept_length(b) * autoregressive step / speculative step(verify tokens).

- Accept length: 1 + b / (slant + b / gain). No tree, one token a step; nodes come in order of falling probability, so
  each adds less than the one before; no path is longer than the block. The hyperbola is the simplest curve with all
  three, and as a line in 1 / b it is fitted without iteration.
- Step: fixed + slope * verify tokens. Weights and caches are read once a step, the rest is work a token. Kernels that
  cost by tiles of tokens show as prediction error: each budget is predicted from the others too (`left_out`). Joining
  the measured points instead would repeat their noise and leave nothing to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchlib.errors import ComparisonError

__all__ = [
    "ENOUGH",
    "BudgetPoint",
    "Curves",
    "Optimum",
    "Prediction",
    "budget_points",
    "find_optimum",
    "fit_curves",
    "predict_optimum",
]

ENOUGH = 3


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """What was measured at one budget; `verify_tokens` counts the root, `accept_length` the bonus token."""

    budget: int
    verify_tokens: int
    accept_length: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Curves:
    """accept_length(b) = 1 + b / (slant + b / gain); step_ms(v) = fixed + slope v. `root`: verify tokens less b."""

    gain: float
    slant: float
    fixed_ms: float
    slope_ms: float
    root: float

    def accept_length(self, budget: float) -> float:
        return 1 + budget / (self.slant + budget / self.gain)

    def step_ms(self, budget: float) -> float:
        return self.fixed_ms + self.slope_ms * (budget + self.root)

    def speedup(self, budget: float, auto_ms: float) -> float:
        return self.accept_length(budget) * auto_ms / self.step_ms(budget)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speedup at a measured budget: as measured, on the curves, and on curves through the other budgets alone.

    `error` is left_out / measured - 1; both are None where too few budgets are left.
    """

    budget: int
    measured: float
    fitted: float
    left_out: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best of all whole budgets between the measured; `at_edge`: it may lie outside. `error`: largest, either way.

    It is predicted, so no oracle; but the curves were fitted on the prompts that it is predicted for.
    """

    budget: int
    speedup: float
    at_edge: bool
    error: float | None
    curves: Curves
    predictions: tuple[Prediction, ...]


def budget_points(rows: Iterable[Mapping[str, Any]]) -> tuple[list[BudgetPoint], float | None]:
    """(DDTree's points, auto's ms a token) of the summary rows of one place; a row that lacks a figure gives none."""
    keys = ("tree_budget", "verify_tokens", "accept_length", "step_ms")
    found = list(rows)
    values = [[row.get(key) for key in keys] for row in found if row["method"] == "ddtree"]
    points = sorted((BudgetPoint(*v) for v in values if None not in v), key=lambda p: p.budget)  # type: ignore[arg-type]
    return points, next((row["step_ms"] for row in found if row["method"] == "auto" and row["step_ms"]), None)


def find_optimum(rows: Iterable[Mapping[str, Any]]) -> tuple[Optimum, Mapping[str, Any]] | None:
    """(predicted, the fastest measured row: an oracle) of one place; None below ENOUGH budgets or without auto."""
    found = list(rows)
    points, auto_ms = budget_points(found)
    measured = [row for row in found if row["method"] == "ddtree" and row["speedup"] is not None]
    if not measured or auto_ms is None or len({point.budget for point in points}) < ENOUGH:
        return None
    best = max(measured, key=lambda row: float(row["speedup"]))
    return predict_optimum(points, auto_ms, block_size=measured[0]["block_size"]), best


def fit_curves(points: Sequence[BudgetPoint], block_size: int) -> Curves:
    """Both curves by least squares; noise that bends one the wrong way (falling accept length) makes it flat."""
    # 1 / (accept length - 1) is a line in 1 / b; the weights make its errors those of the accept length.
    gains = [(p.budget, max(p.accept_length - 1, 1e-6)) for p in points]
    inverse, slant = _line([(1 / b, 1 / gain, gain**4) for b, gain in gains], floor=1 / (block_size - 1))
    fixed, slope = _line([(p.verify_tokens, p.step_ms, 1.0) for p in points])
    root = sum(p.verify_tokens - p.budget for p in points) / len(points)
    return Curves(1 / inverse, slant, fixed, slope, root)


def predict_optimum(points: Sequence[BudgetPoint], auto_ms: float, *, block_size: int = 16) -> Optimum:
    """Fit, find the best budget, and predict each one from the others; ComparisonError below ENOUGH budgets."""
    if len({p.budget for p in points}) < ENOUGH:
        raise ComparisonError(
            f"the best budget cannot be predicted from {len(points)} budgets: two curves need {ENOUGH}; measure more"
        )
    curves = fit_curves(points, block_size)
    low, high = min(p.budget for p in points), max(p.budget for p in points)
    best = max(range(low, high + 1), key=lambda b: curves.speedup(b, auto_ms))
    found = []
    for point in points:
        others = [p for p in points if p.budget != point.budget]
        left = fit_curves(others, block_size).speedup(point.budget, auto_ms) if len(others) >= ENOUGH else None
        seen = point.accept_length * auto_ms / point.step_ms
        fitted = curves.speedup(point.budget, auto_ms)
        found.append(Prediction(point.budget, seen, fitted, left, None if left is None else left / seen - 1))
    error = max((abs(p.error) for p in found if p.error is not None), default=None)
    return Optimum(best, curves.speedup(best, auto_ms), best in (low, high), error, curves, tuple(found))


def _line(points: Sequence[tuple[float, float, float]], floor: float = 0.0) -> tuple[float, float]:
    """(intercept, slope) by weighted least squares over (x, y, weight); slope from 0, intercept from `floor` up."""
    weight = sum(w for *_, w in points)
    x0, y0 = sum(w * x for x, _, w in points) / weight, sum(w * y for _, y, w in points) / weight
    xx = sum(w * (x - x0) ** 2 for x, _, w in points)
    slope = max(0.0, sum(w * (x - x0) * (y - y0) for x, y, w in points) / xx) if xx else 0.0
    if y0 - slope * x0 < floor:
        slope = max(0.0, sum(w * x * (y - floor) for x, y, w in points) / sum(w * x * x for x, _, w in points))
        return floor, slope
    return y0 - slope * x0, slope
