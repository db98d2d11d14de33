"""Definitions against cases worked out by hand."""

from __future__ import annotations

import pytest

from benchlib import metrics

# Three requests. Ticks are (seconds after sending, tokens so far).
PLAIN = ((0.5, 1), (0.6, 2), (0.7, 3), (0.8, 4), (0.9, 5))  # 4 tokens in 0.4 s after the first
CHUNKED = ((0.2, 4), (0.24, 8), (0.28, 12))  # chunks of 4: 8 tokens in 0.08 s, 10 ms each
TRAILING = ((0.0, 0), (0.3, 2), (0.5, 6), (0.9, 6))  # empty head chunk, usage-only tail


def test_ttft_is_the_first_chunk_that_holds_a_token() -> None:
    assert metrics.ttft_s(PLAIN) == 0.5
    assert metrics.ttft_s(TRAILING) == 0.3
    assert metrics.ttft_s(()) is None
    assert metrics.ttft_s(((0.1, 0),)) is None


def test_tpot_leaves_out_the_first_chunks_tokens() -> None:
    assert metrics.tpot_s(PLAIN) == pytest.approx(0.4 / 4)
    # (E2E - TTFT)/(N - 1) would give 0.08 / 11 = 7.3 ms: the first chunk's 4 tokens flatter it.
    assert metrics.tpot_s(CHUNKED) == pytest.approx(0.010)
    # Time ends at 0.5 s where the sixth token came, not with the usage chunk at 0.9 s: 0.2 s / 4.
    assert metrics.tpot_s(TRAILING) == pytest.approx(0.050)


def test_decode_rate_is_tpots_inverse() -> None:
    assert metrics.decode_tok_s(PLAIN) == pytest.approx(10.0)
    assert metrics.decode_tok_s(CHUNKED) == pytest.approx(100.0)


@pytest.mark.parametrize("ticks", [(), ((0.1, 0),), ((0.1, 5),), ((0.1, 3), (0.1, 5)), ((0.1, 3), (0.2, 3))])
def test_what_cannot_be_computed_is_none(ticks: tuple[tuple[float, int], ...]) -> None:
    assert metrics.decode_window(ticks) is None
    assert metrics.tpot_s(ticks) is None
    assert metrics.decode_tok_s(ticks) is None
    assert metrics.decode_steps(ticks, 3) is None


def test_e2e_needs_an_end_and_a_token() -> None:
    assert metrics.e2e_latency_s(PLAIN, 1.0) == 1.0
    assert metrics.e2e_latency_s(PLAIN, None) is None
    assert metrics.e2e_latency_s((), 1.0) is None


def test_peak_concurrency_is_exact() -> None:
    # Back to back is 1, not 2; 1-second buckets would say 2.
    assert metrics.peak_concurrency([(0.0, 0.4), (0.4, 0.8)]) == 1
    assert metrics.peak_concurrency([(0.0, 1.0), (0.5, 2.0), (0.9, 1.5), (1.6, 2.0)]) == 3
    assert metrics.peak_concurrency([]) is None


def test_accept_length_pools_before_dividing() -> None:
    # (30 + 0) drafts in (10 + 5) steps: 1 + 2.0; the mean of the two requests' 4.0 and 1.0 would be 2.5.
    assert metrics.accept_length([(30, 10), (0, 5)]) == pytest.approx(3.0)


@pytest.mark.parametrize("pairs", [[], [(None, None)], [(3, 1), (None, 2)], [(0, 0)]])
def test_accept_length_without_counters_is_none(pairs: list[tuple[int | None, int | None]]) -> None:
    assert metrics.accept_length(pairs) is None


def test_histograms_add_up_padded() -> None:
    assert metrics.add_histograms([(1, 2), (0, 1, 4)]) == (1, 3, 4)
    assert metrics.add_histograms([(1,), None]) is None
    assert metrics.add_histograms([]) is None


def test_full_block_share_looks_at_the_last_possible_index() -> None:
    # Block of 4: three drafts at most; 2 of 10 steps accept all three.
    assert metrics.full_block_share((3, 3, 2, 2), 4) == pytest.approx(0.2)
    # A histogram cut at its longest step seen: nobody reached the end of a block of 16.
    assert metrics.full_block_share((3, 3, 2, 2), 16) == 0
    assert metrics.full_block_share((0, 0), 4) is None
    assert metrics.full_block_share(None, 4) is None


def test_step_time_divides_by_the_steps_inside_the_window() -> None:
    # All 3 steps lie after a first chunk of one token: 0.4 s / 3.
    assert metrics.step_ms(0.4, metrics.decode_steps(PLAIN, 3)) == pytest.approx(400 / 3)
    # 11 tokens after the prefill's own in 4 steps; 8 of 11 fall inside the window: 80 ms / (4 * 8/11).
    assert metrics.step_ms(0.08, metrics.decode_steps(CHUNKED, 4)) == pytest.approx(80 / (4 * 8 / 11))
    # Autoregressive: one token a step.
    assert metrics.step_ms(0.4, metrics.decode_steps(PLAIN, None)) == pytest.approx(100.0)
    assert metrics.step_ms(None, 4) is None
    assert metrics.step_ms(1.0, 0) is None


def test_budget_efficiency_is_kept_over_verified() -> None:
    assert metrics.budget_efficiency(4.25, 17) == pytest.approx(0.25)
    assert metrics.budget_efficiency(None, 17) is None
    assert metrics.budget_efficiency(4.0, None) is None


def test_registry_labels_carry_units() -> None:
    assert metrics.METRICS["decode_tok_s"].axis == "Decode rate (tok/s)"
    assert metrics.Metric("x", "", "Plain", None, "X").axis == "Plain"
    assert all(key == metric.key for key, metric in metrics.METRICS.items())
