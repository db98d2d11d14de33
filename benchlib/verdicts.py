"""Which differences are real, and how often to repeat: statistics on plain lists of times, nothing read or drawn.

The unit of replication is a server start. Values are times (less is faster), all arithmetic is on their logarithms:
means are geometric, intervals 95 % by Student's t, effects ratios, above 1 where `other` is faster than `baseline`.

The design fixes the test, never the outcome. Independent sides: Welch's t. Sides whose starts a sweep interleaved in
blocks (start 1 of both, start 2 of both ...), from FEW_STARTS blocks on: paired t, free of what a block's starts share.
With fewer blocks pairing leaves so few degrees of freedom (n = 3: t 4.30 against 2.78) that it costs more than it
gives, and Welch's t stays valid: what blocks share makes it cautious. Three starts are too few to bootstrap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from benchlib.errors import ComparisonError

__all__ = [
    *("ALPHA", "FEW_STARTS", "MARGIN", "ONE_START", "Drift", "Level", "Starts", "Verdict", "Word", "adjust"),
    *("between_sd", "build_drift", "enough", "find_outliers", "judge", "level_of"),
    *("log_interval", "log_ratio", "observations", "starts_needed"),
]

ALPHA = 0.05
POWER = 0.8
# Below this many starts a side an interval may exclude 1 by luck of a small spread: it must clear 1 by MARGIN too.
FEW_STARTS = 5
MARGIN = 0.01
ONE_START = "1 start: no verdict"
# Looking at the interval after every round until it pleases makes it cover 90 % and not 95 %: few looks, and the first
# one strict, keep it above 93 % whatever the spread (simulated).
LOOK_EVERY = 5
FIRST_LOOK = 0.5

Level = Literal["start", "round"]
Word = Literal["faster", "slower", "no difference found", "cannot decide"]
Ratio = tuple[float, float, float, float]
# Of each server start its timed rounds, each (seconds, tokens or steps in them).
Starts = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Time of `baseline` over time of `other`, above 1 where other is faster; `low` to `high` is of this pair alone.

    `p_value` is None where rounds stand in for starts. `error` and `df` are of the ratio's logarithm.
    """

    ratio: float
    low: float
    high: float
    p_value: float | None
    n_baseline: int
    n_other: int
    level: Level
    paired: bool
    error: float
    df: float
    p_adjusted: float | None
    family: int = 1

    @property
    def verdict(self) -> Word:
        """Decided by the adjusted p-value; with few starts the interval must clear 1 by MARGIN, too."""
        margin = MARGIN if self._few else 0.0
        if self.p_adjusted is not None and self.p_adjusted < ALPHA:
            if self.low > 1 + margin:
                return "faster"
            if self.high < 1 - margin:
                return "slower"
        return "cannot decide" if self._few or self.level == "round" else "no difference found"

    @property
    def note(self) -> str:
        """The verdict with what it rests on: `cannot decide (3 starts)`, `no difference found (0.4% would show)`."""
        if self.level == "round":
            return ONE_START
        if self.verdict == "cannot decide":
            return f"cannot decide ({min(self.n_baseline, self.n_other)} starts)"
        if self.verdict != "no difference found" or self.detectable is None:
            return self.verdict
        among = f" among {self.family} compared" if self.low > 1 or self.high < 1 else ""
        return f"{self.verdict}{among} ({100 * self.detectable:.2g}% would show)"

    @property
    def detectable(self) -> float | None:
        """The smallest difference that these n and spreads find in POWER of cases; 0.01 is 1 %. None for rounds."""
        if self.level == "round":
            return None
        return math.expm1(_detectable(self.error, self.df, self._few, ALPHA / self.family, POWER))

    @property
    def _few(self) -> bool:
        return min(self.n_baseline, self.n_other) < FEW_STARTS


def log_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(geometric mean, low, high) of positive values: 95 % by Student's t on logs; ends None below two values."""
    logs = [math.log(v) for v in values]
    centre = fmean(logs)
    if len(logs) < 2:
        return math.exp(centre), None, None
    half = _t_quantile(len(logs) - 1) * math.sqrt(_variance(logs) / len(logs))
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def log_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """(ratio of geometric means a/b, low, high, p) by Welch's t on logs; ComparisonError below two values a side."""
    return _ratio(*_difference(a, b, paired=False))


def level_of(*sides: Starts) -> Level:
    """`start` when every side has two starts, else `round`: then there is an interval and no verdict."""
    return "start" if all(len(starts) > 1 for starts in sides) else "round"


def observations(starts: Starts, level: Level) -> list[float]:
    """Seconds a unit of each start, its rounds pooled; of each round at level `round`."""
    if level == "round":
        return [seconds / units for start in starts for seconds, units in start]
    return [sum(s for s, _ in start) / sum(n for _, n in start) for start in starts]


def judge(baseline: Starts, other: Starts, *, blocks: tuple[Sequence[int], Sequence[int]] | None = None) -> Verdict:
    """Compare two sides as a family of one; ComparisonError below two rounds a side.

    `blocks` names the block of every start of either side, only where a sweep interleaved them (its start number).
    Two campaigns made one after the other have none.
    """
    level = level_of(baseline, other)
    a, b = observations(baseline, level), observations(other, level)
    paired = False
    if blocks and level == "start" and sorted(blocks[0]) == sorted(blocks[1]):
        paired = len(a) == len(set(blocks[0])) >= FEW_STARTS
    if blocks and paired:
        a, b = _by_block(a, blocks[0]), _by_block(b, blocks[1])
    difference, error, df = _difference(a, b, paired)
    ratio, low, high, found = _ratio(difference, error, df)
    p = found if level == "start" else None
    return Verdict(ratio, low, high, p, len(a), len(b), level, paired, error, df, p)


def adjust(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same verdicts as one family: p-values by Holm, which holds for dependent comparisons as well."""
    order = sorted((v.p_value, i) for i, v in enumerate(verdicts) if v.p_value is not None)
    adjusted, highest = list(verdicts), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = replace(verdicts[i], p_adjusted=highest, family=len(order))
    return adjusted


def between_sd(groups: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """(sd of log between starts, its degrees of freedom), pooled over conditions; None without two starts of one."""
    logs = [[math.log(v) for v in group] for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in logs)
    return (math.sqrt(sum(_variance(g) * (len(g) - 1) for g in logs) / df), df) if df else None


def starts_needed(between_sd: float, difference: float, power: float = POWER, alpha: float = ALPHA) -> int:
    """Starts a side that find a relative `difference` (0.01: 1 %) in `power` of cases, by the noncentral t.

    With the n - 1 degrees of freedom of the paired test, the fewest that Welch's can have, and one start more than
    the least, since the sd is an estimate. For a family of m give `alpha` / m. ComparisonError for what cannot be.
    """
    if not (difference > 0 and between_sd >= 0 and 0.5 <= power < 1 and 0 < alpha < 1):
        given = f"difference {difference:g}, sd {between_sd:g}, power {power:g}, alpha {alpha:g}"
        raise ComparisonError(f"no number of starts for {given}: want difference > 0, sd >= 0, 0.5 <= power < 1")

    def seen(n: int) -> bool:
        error = between_sd * math.sqrt(2 / n)
        return _detectable(error, n - 1, n < FEW_STARTS, alpha, power) <= math.log1p(difference)

    return 3 + bisect.bisect_left(range(2, 10**7), True, key=seen)


def enough(values: Sequence[float], target: float = 0.01, cap: int = 30) -> bool:
    """Whether rounds of one cell may stop: the 95 % interval's half-width is at most `target`, or `cap` is reached.

    Looked at after every LOOK_EVERY rounds alone, the first time against FIRST_LOOK of the target.
    """
    n = len(values)
    if n >= cap or n == 0 or n % LOOK_EVERY:
        return n >= cap
    centre, _, high = log_interval(values)
    return high is not None and high / centre - 1 <= target * (FIRST_LOOK if n == LOOK_EVERY else 1)


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative change of the time from the campaign's first start to its last; above 0: it became slower."""

    change: float
    low: float
    high: float
    p_value: float
    n: int

    def __str__(self) -> str:
        word = "slower" if self.change > 0 else "faster"
        found = f"Drift: from first to last start the same condition became {100 * abs(self.change):.2g}% {word}"
        text = found if self.p_value < ALPHA else "No drift found: change of a condition's time, first to last start"
        ends = f"95% interval {100 * self.low:+.2g}% to {100 * self.high:+.2g}% in time"
        return f"{text} ({ends}, p = {self.p_value:.2g}, {self.n} starts)."


def build_drift(conditions: Iterable[Sequence[tuple[float, float]]]) -> Drift | None:
    """Straight line through (place in the campaign, time) of every start, each condition with a level of its own.

    By least squares on logs, t with N - conditions - 1 degrees of freedom; None where none is left: with one start a
    condition, a drift cannot be told from the conditions. A machine that changes in one step raises it as well.
    """
    groups = [[(x, math.log(value)) for x, value in starts] for starts in conditions if len(starts) > 1]
    centred = []
    for group in groups:
        x0, y0 = fmean(x for x, _ in group), fmean(y for _, y in group)
        centred += [(x - x0, y - y0) for x, y in group]
    df, xx = len(centred) - len(groups) - 1, sum(x * x for x, _ in centred)
    if df < 1 or xx == 0:
        return None
    slope = sum(x * y for x, y in centred) / xx
    rest = sum((y - slope * x) ** 2 for x, y in centred)
    places = [x for group in groups for x, _ in group]
    span = max(places) - min(places)
    ratio, low, high, p_value = _ratio(slope * span, span * math.sqrt(rest / df / xx), df)
    return Drift(ratio - 1, low - 1, high - 1, p_value, len(centred))


def find_outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Places of values to mark (never to drop), by the modified z-score on logs; none below five values.

    The usual limit of 3.5 would mark something in 20 % of clean fives: it is widened so that fewer than 5 % are.
    """
    if len(values) < FEW_STARTS:
        return ()
    logs = [math.log(v) for v in values]
    centre = median(logs)
    away = [abs(v - centre) for v in logs]
    # Half of the values equal: the median deviation is 0, the mean one takes its place (Iglewicz and Hoaglin).
    scale = median(away) / 0.6745 or fmean(away) * 1.2533
    limit = 3.5 * (1 + 5 / (len(values) - 1))
    return tuple(i for i, d in enumerate(away) if d > limit * scale)


def _by_block(values: Sequence[float], blocks: Sequence[int]) -> list[float]:
    return [value for _, value in sorted(zip(blocks, values, strict=True))]


def _difference(a: Sequence[float], b: Sequence[float], paired: bool) -> tuple[float, float, float]:
    """(difference of mean logs, its standard error, degrees of freedom)."""
    if min(len(a), len(b)) < 2:
        raise ComparisonError(
            f"{len(a)} against {len(b)} observations: an interval needs two a side; raise repeats or starts"
        )
    x, y = ([math.log(v) for v in side] for side in (a, b))
    if paired:
        steps = [p - q for p, q in zip(x, y, strict=True)]
        return fmean(steps), math.sqrt(_variance(steps) / len(steps)), len(steps) - 1
    vx, vy = _variance(x) / len(x), _variance(y) / len(y)
    df = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1)) if vx + vy else 1.0
    return fmean(x) - fmean(y), math.sqrt(vx + vy), df


def _ratio(difference: float, error: float, df: float) -> Ratio:
    from scipy import special

    if error == 0:
        return (*(math.exp(difference),) * 3, float(difference == 0))
    half, p_value = _t_quantile(df) * error, 2 * float(special.stdtr(df, -abs(difference) / error))
    return math.exp(difference), math.exp(difference - half), math.exp(difference + half), p_value


def _detectable(error: float, df: float, few: bool, alpha: float, power: float) -> float:
    """Difference of logs whose interval lies beyond 1 (few starts: beyond MARGIN) in `power` of cases."""
    from scipy import special

    away = float(special.nctdtrinc(df, 1 - power, _t_quantile(df, alpha)))
    return away * error + (math.log1p(MARGIN) if few else 0.0)


def _t_quantile(df: float, alpha: float = ALPHA) -> float:
    from scipy import special

    return float(special.stdtrit(df, 1 - alpha / 2))


def _variance(logs: Sequence[float]) -> float:
    centre = fmean(logs)
    return math.fsum((v - centre) ** 2 for v in logs) / (len(logs) - 1)
