"""Verdicts: hand-computed cases, agreement with scipy, and what simulation says of false alarms and power."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchlib import verdicts
from benchlib.errors import ComparisonError
from benchlib.verdicts import (
    Verdict,
    adjust,
    between_sd,
    build_drift,
    enough,
    find_outliers,
    judge,
    log_interval,
    log_ratio,
    starts_needed,
)
from tests import simulate
from tests.simulate import DESIGNS, SIZES, SPREADS, WANTED, one_start_each

A = [1.00, 1.02, 0.99, 1.01, 1.03, 0.98]
B = [0.97, 0.99, 0.95, 0.98, 0.99, 0.96]


def verdict(low: float, high: float, n: int = 8, **changes: Any) -> Verdict:
    """One whose interval is given; the p-value agrees with it."""
    p_value = 0.01 if low > 1 or high < 1 else 0.5
    given: dict[str, Any] = {
        **{"ratio": math.sqrt(low * high), "low": low, "high": high, "p_value": p_value, "p_adjusted": p_value},
        **{"n_baseline": n, "n_other": n, "level": "start", "paired": False, "error": 0.01, "df": 2.0 * n - 2},
    }
    return Verdict(**given | changes)


def test_interval_is_students_on_logs() -> None:
    # Logs 0, 1, 2: mean 1, sd 1, n 3; t(0.975, 2) = 4.302653, half-width 4.302653 / sqrt(3) = 2.484138.
    value, low, high = log_interval([1.0, math.e, math.e**2])
    assert value == pytest.approx(math.e)
    assert (low, high) == (pytest.approx(math.exp(1 - 2.484138)), pytest.approx(math.exp(1 + 2.484138)))
    assert log_interval([2.0]) == (pytest.approx(2.0), None, None)


def test_independent_sides_are_welchs_t_on_logs() -> None:
    found = judge(one_start_each(A), one_start_each(B[:5]))
    test = stats.ttest_ind([math.log(v) for v in A], [math.log(v) for v in B[:5]], equal_var=False)
    ends = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert (found.p_value, found.df, found.paired) == (pytest.approx(test.pvalue), pytest.approx(test.df), False)
    assert (found.ratio, found.low, found.high, found.p_value) == log_ratio(A, B[:5])


def test_interleaved_sides_are_paired_by_block_in_any_order() -> None:
    blocks, turned = [1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 6, 5]
    shuffled = [B[block - 1] for block in turned]
    found = judge(one_start_each(A), one_start_each(shuffled), blocks=(blocks, turned))
    test = stats.ttest_rel([math.log(v) for v in A], [math.log(v) for v in B])
    ends = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert (found.p_value, found.df, found.paired) == (pytest.approx(test.pvalue), 5, True)


@pytest.mark.parametrize(
    ("n", "blocks"),
    [
        (4, ([1, 2, 3, 4], [1, 2, 3, 4])),  # too few to spend their degrees of freedom
        (6, ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7])),  # one start failed on a side
        (6, ([1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 5, 5])),  # a block with two starts
        (6, None),
    ],
)
def test_without_whole_blocks_the_sides_count_as_independent(n: int, blocks: Any) -> None:
    a, b = one_start_each(A[:n]), one_start_each(B[:n])
    assert judge(a, b, blocks=blocks) == judge(a, b)


def test_the_choice_of_test_does_not_look_at_the_values() -> None:
    rng = random.Random(5)
    sides = [[one_start_each([math.exp(rng.gauss(0, sd)) for _ in range(5)]) for sd in (0.1, 0.001)] for _ in range(50)]
    assert {judge(a, b, blocks=(range(5), range(5))).paired for a, b in sides} == {True}


def test_rounds_of_a_start_are_pooled_and_one_start_gets_no_verdict() -> None:
    # 3 s over 30 tokens and 1 s over 20: 4 / 50 of a second a token, not the mean of 0.1 and 0.05.
    start = [(3.0, 30.0), (1.0, 20.0)]
    assert verdicts.observations([start], "start") == [pytest.approx(0.08)]
    found = judge([start], [[(1.0, 30.0), (1.0, 31.0)], [(1.0, 30.0)]])
    assert (found.level, found.p_value, found.n_baseline, found.n_other) == ("round", None, 2, 3)
    assert (found.verdict, found.note, found.detectable) == ("cannot decide", "1 start: no verdict", None)
    assert found.low < found.ratio < found.high
    with pytest.raises(ComparisonError, match="1 against 1 observations: an interval needs two a side"):
        judge([[(1.0, 2.0)]], [[(1.0, 3.0)]])


@pytest.mark.parametrize(
    ("low", "high", "n", "word"),
    [
        (1.02, 1.2, 3, "faster"),
        (1.005, 1.2, 4, "cannot decide"),
        (1.005, 1.2, 5, "faster"),
        (0.8, 0.985, 3, "slower"),
        (0.8, 0.995, 3, "cannot decide"),
        (0.8, 0.995, 5, "slower"),
        (0.9, 1.1, 4, "cannot decide"),
        (0.9, 1.1, 8, "no difference found"),
    ],
)
def test_few_starts_must_clear_a_margin(low: float, high: float, n: int, word: str) -> None:
    assert verdict(low, high, n).verdict == word


def test_notes_say_what_a_verdict_rests_on() -> None:
    assert verdict(0.9, 1.1, 3).note == "cannot decide (3 starts)"
    assert verdict(0.9, 1.1, 4, n_other=3).note == "cannot decide (3 starts)"
    assert verdict(1.02, 1.1).note == "faster"
    # t with 14 degrees of freedom: noncentrality 3.013 finds 80 %; times 0.01, as a ratio: 3.06 %.
    assert verdict(0.99, 1.01).note == "no difference found (3.1% would show)"
    one_of_many = verdict(1.001, 1.05, p_adjusted=0.06, family=6)
    assert (one_of_many.verdict, one_of_many.note[:38]) == (
        "no difference found",
        "no difference found among 6 compared (",
    )


def test_holm_by_hand() -> None:
    family = [verdict(0.9, 1.1, p_value=p) for p in (0.01, 0.04, 0.03, 0.005)]
    family.insert(1, verdict(0.9, 1.1, level="round", p_value=None, p_adjusted=None))
    adjusted = adjust(family)
    # Sorted .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04, never falling: .02 .03 .06 .06.
    assert [v.p_adjusted for v in adjusted] == [pytest.approx(0.03), None, *map(pytest.approx, (0.06, 0.06, 0.02))]
    assert [v.family for v in adjusted] == [4, 1, 4, 4, 4]
    assert adjust([]) == []


def test_sides_without_spread_are_decided_by_their_ratio() -> None:
    flat = one_start_each([2.0] * 5)
    assert judge(flat, flat).verdict == "no difference found"
    assert judge(flat, one_start_each([1.0] * 5)).verdict == "faster"
    assert log_ratio([2.0, 2.0], [1.0, 1.0]) == pytest.approx((2.0, 2.0, 2.0, 0.0))


@pytest.mark.parametrize("n", SIZES)
def test_a_a_comparisons_raise_at_most_6_alarms_in_100(n: int) -> None:
    # 1,500 at each spread: a true 5 % comes out above 6 in 1,000 one time in fourteen, in 3,000 one in a hundred.
    spreads = list(enumerate(SPREADS))
    rates = {d: [simulate.alarms(n, sd, d, 1500, seed=i) for i, sd in spreads] for d in DESIGNS}
    assert max(sum(both) / 2 for both in rates.values()) <= 0.06, rates
    assert max(map(max, rates.values())) <= 0.07, rates
    if n >= verdicts.FEW_STARTS:  # and the test is not just deaf
        assert min(min(rates[d]) for d in DESIGNS if d != "the same, blocks not told") > 0.03


def test_three_starts_are_not_bootstrapped() -> None:
    assert simulate.bootstrap_alarms(3) > 0.15
    assert simulate.alarms(3, 0.03, "independent sides") < 0.03


def test_a_family_of_comparisons_raises_alarms_as_rarely_as_one() -> None:
    assert simulate.family_alarms(12, 5, holm=False) > 0.3
    assert simulate.family_alarms(12, 5) < 0.06


@pytest.mark.parametrize(("sd", "effect"), WANTED)
def test_the_proposed_starts_have_the_power(sd: float, effect: float) -> None:
    n = starts_needed(sd, effect)
    for design in ("independent sides", "interleaved, no block effect"):
        assert simulate.power(n, sd, effect, design, trials=600) >= 0.8, (n, design)


def test_fewer_starts_than_proposed_would_not_do() -> None:
    n = starts_needed(0.03, 0.03)
    assert simulate.power(n - 4, 0.03, 0.03, "interleaved, no block effect") < 0.8


def test_pairing_finds_what_blocks_hide() -> None:
    told, hidden = "interleaved, blocks twice as wide", "the same, blocks not told"
    assert simulate.power(8, 0.03, 0.06, told, 300) > 2 * simulate.power(8, 0.03, 0.06, hidden, 300)


def test_detectable_is_what_is_found_in_80_of_100() -> None:
    # Spread known exactly: 0.03 on both sides, 6 starts, 10 degrees of freedom.
    error = 0.03 * math.sqrt(2 / 6)
    detectable = verdict(0.9, 1.1, 6, error=error, df=10.0).detectable
    assert detectable is not None
    assert simulate.power(6, 0.03, detectable, "independent sides", 2000) == pytest.approx(0.8, abs=0.03)
    few = verdict(0.9, 1.1, 4, error=error, df=10.0).detectable
    assert few == pytest.approx((1 + detectable) * 1.01 - 1)


def test_starts_needed_grows_with_the_spread_and_shrinks_with_the_difference() -> None:
    assert starts_needed(0.0005, 0.02) == 3
    assert starts_needed(0.03, 0.01) > 100 > starts_needed(0.03, 0.03) > starts_needed(0.03, 0.05)
    assert starts_needed(0.03, 0.05, alpha=0.05 / 12) > starts_needed(0.03, 0.05, power=0.9) > 9
    # Below FEW_STARTS the margin must be cleared, too: nothing under 1 % is promised of four.
    assert starts_needed(1e-6, 0.005) >= verdicts.FEW_STARTS


@pytest.mark.parametrize("given", [(0.03, 0.0), (0.03, -0.1), (-0.01, 0.1), (0.03, 0.1, 1.0), (0.03, 0.1, 0.8, 0.0)])
def test_starts_needed_refuses_what_cannot_be(given: tuple[float, ...]) -> None:
    with pytest.raises(ComparisonError, match="no number of starts"):
        starts_needed(*given)


def test_between_sd_pools_the_conditions() -> None:
    # Logs 0 and 2: variance 2 of one degree of freedom; 0, 1, 2: variance 1 of two. (2 + 2) / 3.
    groups = [[1.0, math.e**2], [1.0, math.e, math.e**2], [5.0]]
    assert between_sd(groups) == (pytest.approx(math.sqrt(4 / 3)), 3)
    assert between_sd([[1.0], [2.0]]) is None


def test_enough_looks_every_five_rounds_and_first_strictly() -> None:
    def rounds(n: int, half: float) -> list[float]:
        """n values around 1 whose interval reaches `half` up."""
        side = [1.0 if i % 2 else -1.0 for i in range(n - n % 2)] + [0.0] * (n % 2)
        sd = math.sqrt(sum(s * s for s in side) / (n - 1))
        step = math.log1p(half) / (float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n))
        return [math.exp(step * s) for s in side]

    assert [n for n in range(31) if enough(rounds(n, 1e-4) if n > 1 else [1.0] * n)] == [5, 10, 15, 20, 25, 30]
    assert (enough(rounds(5, 0.0049)), enough(rounds(5, 0.0051))) == (True, False)
    assert (enough(rounds(10, 0.0099)), enough(rounds(10, 0.0101))) == (True, False)
    assert enough(rounds(10, 0.04), target=0.05)
    assert (enough([1.0, 9.0], cap=2), enough([1.0, 9.0], cap=3)) == (True, False)


@pytest.mark.parametrize("sd", [0.0001, 0.005, 0.008, 0.015])
def test_stopped_intervals_still_cover_93_times_in_100(sd: float) -> None:
    covered, rounds = simulate.coverage(sd, 3000, seed=1)
    assert covered >= 0.93 - 0.005  # three thousand trials know it to half a per cent
    assert 5 <= rounds < 30


def test_looking_after_every_round_would_not() -> None:
    assert simulate.coverage(0.015, 2000, every=True)[0] < 0.915


def test_drift_is_found_with_its_size_and_not_where_there_is_none() -> None:
    # Two conditions of unlike speed, taking turns; each start 1 % slower than the one before: 7 % over eight places.
    wobble = [0.001, -0.001, -0.001, 0.001, 0.001, -0.001, -0.001, 0.001]
    place = [(i, (1.0, 3.0)[i % 2] * math.exp(0.01 * i + wobble[i])) for i in range(8)]
    drift = build_drift([place[::2], place[1::2]])
    assert drift is not None
    assert drift.change == pytest.approx(math.expm1(0.07), abs=0.002)
    assert drift.low < drift.change < drift.high
    assert str(drift).startswith("Drift: from first to last start the same condition became 7.")
    assert "% slower (95% interval +" in str(drift)
    still = build_drift([[(i, v / math.exp(0.01 * i)) for i, v in side] for side in (place[::2], place[1::2])])
    assert "No drift found" in str(still)
    assert "8 starts" in str(still)


def test_drift_by_regression_agrees_with_scipy_for_one_condition() -> None:
    found = build_drift([list(enumerate(A))])
    line = stats.linregress(range(6), [math.log(v) for v in A])
    assert found is not None
    assert (found.change, found.p_value) == (pytest.approx(math.expm1(5 * line.slope)), pytest.approx(line.pvalue))


def test_drift_needs_starts_to_be_told_from_the_conditions() -> None:
    assert build_drift([[(0, 1.0)], [(1, 2.0)], [(2, 3.0)]]) is None
    assert build_drift([[(0, 1.0), (1, 2.0)]]) is None
    assert build_drift([[(0, 1.0), (0, 2.0), (0, 3.0)]]) is None
    assert build_drift([]) is None


@pytest.mark.parametrize("n", [2, 3])
def test_drift_raises_few_alarms_at_small_n(n: int) -> None:
    assert simulate.drift_alarms(6, n, 0.0, 600) <= 0.065
    assert simulate.drift_alarms(6, n, 0.2, 200) > 0.95


def test_outliers_are_marked_from_five_values_on() -> None:
    values = [1.0, 1.001, 0.999, 1.002, 0.998, 1.0]
    assert find_outliers(values) == ()
    assert find_outliers([*values, 1.1]) == (6,)
    assert find_outliers([0.9, *values]) == (0,)
    assert find_outliers([1.0, 1.001, 5.0]) == ()
    assert find_outliers([1.0] * 6) == ()
    assert find_outliers([1.0] * 19 + [2.0]) == (19,)  # the median deviation is 0


@pytest.mark.parametrize("n", [5, 8, 20])
def test_outliers_are_rarely_marked_in_clean_values(n: int) -> None:
    assert simulate.outlier_marks(n, 1500) <= 0.06
    assert simulate.outlier_marks(n, 300, 20.0) > 0.8


def test_the_module_reads_nothing() -> None:
    text = Path(verdicts.__file__).read_text(encoding="utf-8")
    assert "pandas" not in text
    assert "numpy" not in text
