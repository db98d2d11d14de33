"""False alarms and power of the verdicts, by simulation: `python -m tests.simulate` prints the report's tables.

The truth is known here: starts differ by a normal spread of their logarithm, blocks shift both sides alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from benchlib.verdicts import Starts, Verdict, adjust, build_drift, enough, find_outliers, judge, log_interval
from benchlib.verdicts import starts_needed as needed

SIZES = (3, 5, 8)
SPREADS = (0.0005, 0.03)  # between server starts: of one stream, of eight at once
# Design: spread of a block in spreads of a start, and whether the verdict is told the blocks.
DESIGNS = {
    "independent sides": (0.0, False),
    "interleaved, no block effect": (0.0, True),
    "interleaved, blocks twice as wide": (2.0, True),
    "the same, blocks not told": (2.0, False),
}
WANTED = ((0.0005, 0.0005), (0.0005, 0.001), (0.0005, 0.02), (0.03, 0.03), (0.03, 0.05), (0.03, 0.10))


def one_start_each(values: Sequence[float]) -> Starts:
    """Starts of one round of one second."""
    return [[(value, 1.0)] for value in values]


def pair(rng: random.Random, n: int, sd: float, design: str, effect: float = 0.0) -> Verdict:
    """Two sides of n starts, the other faster by `effect`."""
    width, told = DESIGNS[design]
    shared = [rng.gauss(0, sd * width) for _ in range(n)]
    a = [math.exp(block + rng.gauss(0, sd)) for block in shared]
    b = [math.exp(block + rng.gauss(0, sd)) / (1 + effect) for block in shared]
    blocks = (list(range(1, n + 1)),) * 2 if told else None
    return judge(one_start_each(a), one_start_each(b), blocks=blocks)


def rate(trials: int, hit: Callable[[random.Random], bool], seed: int = 0) -> float:
    """Share of trials that hit."""
    rng = random.Random(seed)
    return sum(hit(rng) for _ in range(trials)) / trials


def alarms(n: int, sd: float, design: str, trials: int = 1000, seed: int = 0) -> float:
    """Share of A/A comparisons that are called faster or slower."""
    return rate(trials, lambda rng: pair(rng, n, sd, design).verdict in ("faster", "slower"), seed)


def power(n: int, sd: float, effect: float, design: str, trials: int = 1000, seed: int = 0) -> float:
    """Share of comparisons of sides that differ by `effect` that find it."""
    return rate(trials, lambda rng: pair(rng, n, sd, design, effect).verdict == "faster", seed)


def family_alarms(members: int, n: int, trials: int = 300, *, holm: bool = True) -> float:
    """Share of families of A/A comparisons in which at least one is called."""

    def any_called(rng: random.Random) -> bool:
        family = [pair(rng, n, 0.03, "independent sides") for _ in range(members)]
        return any(v.verdict in ("faster", "slower") for v in (adjust(family) if holm else family))

    return rate(trials, any_called)


def bootstrap_alarms(n: int, trials: int = 1000, resamples: int = 1000) -> float:
    """Share of A/A comparisons whose percentile bootstrap interval of the ratio excludes 1."""
    import numpy as np

    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 0.03, (trials, n)) for _ in range(2))
    picks = rng.integers(0, n, (2, resamples, n))
    means = [side[:, pick].mean(axis=2) for side, pick in zip((a, b), picks, strict=True)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975], axis=1)
    return float(((low > 0) | (high < 0)).mean())


def stopped(rng: random.Random, sd: float, target: float = 0.01, cap: int = 30, every: bool = False) -> list[float]:
    """Rounds until `enough` says stop, or (every) until the interval is first narrow enough."""
    values: list[float] = []
    while True:
        values.append(math.exp(rng.gauss(0, sd)))
        if every and len(values) > 2:
            centre, _, high = log_interval(values)
            if (high or math.inf) / centre - 1 <= target or len(values) == cap:
                return values
        elif not every and enough(values, target, cap):
            return values


def coverage(sd: float, trials: int = 1000, *, every: bool = False, seed: int = 0) -> tuple[float, float]:
    """(share of stopped intervals that cover the truth, mean rounds)."""
    rng = random.Random(seed)
    runs = [stopped(rng, sd, every=every) for _ in range(trials)]
    ends = [log_interval(values) for values in runs]
    covered = sum((low or 0) <= 1 <= (high or 0) for _, low, high in ends)
    return covered / trials, sum(map(len, runs)) / trials


def drift_alarms(conditions: int, n: int, change: float, trials: int = 1000) -> float:
    """Share of campaigns of unequal conditions, interleaved at random, in which a drift is found."""

    def found(rng: random.Random) -> bool:
        order = [c for _ in range(n) for c in rng.sample(range(conditions), conditions)]
        values = [(i, math.exp(c + rng.gauss(0, 0.03) + change * i / (len(order) - 1))) for i, c in enumerate(order)]
        drift = build_drift([[v for v, of in zip(values, order, strict=True) if of == c] for c in range(conditions)])
        return drift is not None and drift.p_value < 0.05

    return rate(trials, found)


def outlier_marks(n: int, trials: int = 1000, shift: float = 0.0) -> float:
    """Share of samples in which a value is marked; `shift` moves the first by so many spreads."""

    def marked(rng: random.Random) -> bool:
        values = [math.exp(rng.gauss(0, 0.03) + (0.03 * shift if i == 0 else 0)) for i in range(n)]
        return bool(find_outliers(values))

    return rate(trials, marked)


def main(trials: int = 4000) -> None:
    """Every table, with enough trials that a share is known to half a per cent or so."""
    show = print
    show(f"A/A comparisons called faster or slower, %, {trials} each\n")
    show(f"| {'design':34} | sd between starts | " + " | ".join(f"n = {n}" for n in SIZES) + " |")
    show("|---|---|" + "---|" * len(SIZES))
    for design in DESIGNS:
        for sd in SPREADS:
            cells = (f"{100 * alarms(n, sd, design, trials):5.1f}" for n in SIZES)
            show(f"| {design:34} | {100 * sd:5.2f}% | " + " | ".join(cells) + " |")
    cells = (f"{100 * bootstrap_alarms(n, trials // 2):5.1f}" for n in SIZES)
    show(f"| {'(percentile bootstrap, not used)':34} | any | " + " | ".join(cells) + " |")
    for holm in (False, True):
        cells = (f"{100 * family_alarms(12, n, trials // 8, holm=holm):5.1f}" for n in SIZES)
        show(f"| {('any of 12, ' + ('Holm' if holm else 'unadjusted')):34} |  3.00% | " + " | ".join(cells) + " |")
    show("\nPower at the n that starts_needed proposes, %\n")
    show("| sd between starts | wanted difference | n a side | " + " | ".join(DESIGNS) + " |")
    show("|---|---|---|" + "---|" * len(DESIGNS))
    for sd, effect in WANTED:
        n = needed(sd, effect)
        cells = (f"{100 * power(n, sd, effect, design, trials // 2):.1f}" for design in DESIGNS)
        show(f"| {100 * sd:.2f}% | {100 * effect:g}% | {n} | " + " | ".join(cells) + " |")
    show("\nWithin a start: coverage of the stopped 95% interval, % (mean rounds), target 1%, cap 30\n")
    show("| sd of a round | this rule | a look after every round from the third |\n|---|---|---|")
    for sd in (0.0001, 0.003, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03):
        ours, naive = (coverage(sd, trials, every=every) for every in (False, True))
        show(f"| {100 * sd:g}% | " + " | ".join(f"{100 * c:.1f} ({n:.1f})" for c, n in (ours, naive)) + " |")
    show("\nDrift found, %, 6 conditions, sd 3%\n\n| starts | none there | 3% | 10% |\n|---|---|---|---|")
    for n in (2, *SIZES):
        cells = (f"{100 * drift_alarms(6, n, change, trials // 4):.1f}" for change in (0, 0.03, 0.1))
        show(f"| {n} | " + " | ".join(cells) + " |")
    show("\nA value marked, %\n\n| values | clean | one 10 spreads off |\n|---|---|---|")
    for n in (3, 5, 8, 20):
        show(f"| {n} | {100 * outlier_marks(n, trials):.1f} | {100 * outlier_marks(n, trials, 10):.1f} |")


if __name__ == "__main__":
    main()
