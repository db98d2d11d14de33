"""Every definition of a number this project reports, as pure functions over raw ticks.

A tick is `(seconds after the request was sent, completion tokens so far)`. Times are seconds, rates tokens a second,
`step_ms` milliseconds. What cannot be computed is `None`, never 0 and never NaN. Pooled figures divide sums by sums:
a long request weighs more than a short one; `_macro` figures are means over requests.

`METRICS` names each figure once, with its unit, label and better direction, for every table header and axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    *(
        "METRICS",
        "Metric",
        "REPETITIVE",
        "accept_length",
        "add_histograms",
        "budget_efficiency",
        "decode_steps",
        "decode_tok_s",
    ),
    *(
        "decode_window",
        "e2e_latency_s",
        "full_block_share",
        "peak_concurrency",
        "repetition_share",
        "step_ms",
        "tpot_s",
        "ttft_s",
    ),
]

Tick = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Metric:
    """How one figure is named wherever it is shown.

    `short` heads a table's column; `decimals` None: as its uncertainties warrant; `better` None: neither direction is.
    """

    key: str
    unit: str
    label: str
    better: Literal["higher", "lower"] | None
    short: str
    decimals: int | None = 2

    @property
    def axis(self) -> str:
        """Label with unit, for an axis: `Decode rate (tok/s)`."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


METRICS: dict[str, Metric] = {
    m.key: m
    for m in (
        Metric("ttft_s", "s", "Time to first token", "lower", "TTFT"),
        Metric("tpot_s", "s", "Time per output token", "lower", "TPOT"),
        Metric("decode_tok_s", "tok/s", "Decode rate", "higher", "Decode", None),
        Metric("e2e_latency_s", "s", "End-to-end latency", "lower", "E2E"),
        Metric("output_throughput_tok_s", "tok/s", "Output throughput", "higher", "Throughput", 1),
        Metric("peak_concurrency", "requests", "Peak concurrency", None, "Peak", 0),
        Metric("accept_length", "tok/step", "Accept length", "higher", "Accept"),
        Metric("accept_length_macro", "tok/step", "Accept length, mean of requests", "higher", "Accept"),
        Metric("forecast_length", "tok/step", "Accept length the drafter promised", None, "Forecast"),
        Metric("full_block_share", "%", "Steps accepting the whole block", None, "Full", 1),
        Metric("step_ms", "ms", "Time per step", "lower", "Step"),
        Metric("budget_efficiency", "%", "Verified tokens kept", "higher", "Kept", 1),
        Metric("speedup", "×", "Speedup over autoregressive", "higher", "Speedup", None),
        Metric("scaling", "×", "Decode rate over the smallest TP's", "higher", "Scaling", None),
        Metric("break_even", "tok/step", "Accept length that pays for a step", None, "Break-even"),
        Metric("floor_tok_s", "tok/s", "Decode rate at measured bandwidth", None, "Ceiling", 1),
        Metric("floor_share", "%", "Decode rate over that ceiling", "higher", "Of ceiling", 1),
        Metric("energy_per_token_j", "J", "GPU energy per output token", "lower", "Energy", 2),
        Metric("power_w", "W", "Mean GPU power, all GPUs", None, "Power", 0),
        Metric("throttled_share", "%", "Time slowed by power cap or heat", "lower", "Slowed", 1),
        Metric("difference", "%", "Decode rate over the other condition's, less 1", None, "Difference", 2),
        Metric("efficiency", "%", "Scaling over the ideal", "higher", "Of ideal", 0),
        Metric("verify_tokens", "tokens", "Tokens per verify step", None, "Verify", 0),
    )
}


REPETITIVE = 0.5  # of a whole output: from here on it says the same again, which a drafter guesses at once


def repetition_share(ids: Sequence[int], size: int = 8) -> float | None:
    """Share (0 to 1) of an output's runs of `size` tokens that it held before: 0 all new, near 1 a loop.

    None for an output too short to tell, of fewer than `2 * size` tokens.
    """
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if len(ids) >= 2 * size else None


def ttft_s(ticks: Sequence[Tick]) -> float | None:
    """Seconds from sending to the first chunk that holds a token; None when none came."""
    return next((t for t, n in ticks if n > 0), None)


def decode_window(ticks: Sequence[Tick]) -> tuple[float, int] | None:
    """(seconds, tokens) between the first and the last token's arrival.

    The first chunk's tokens are all outside: with K of them, (N - 1) as divisor would flatter the rate by (K-1)/(N-1).
    None when every token came in one chunk or at one time.
    """
    arrived = [tick for tick in ticks if tick[1] > 0]
    if not arrived:
        return None
    (first_t, first_n), last_n = arrived[0], arrived[-1][1]
    # Chunks after the last token (usage only, empty) repeat the count: time ends where the count was reached.
    last_t = next(t for t, n in arrived if n == last_n)
    return (last_t - first_t, last_n - first_n) if last_n > first_n and last_t > first_t else None


def tpot_s(ticks: Sequence[Tick]) -> float | None:
    """Seconds per output token after the first chunk: (t_last - t_first) / (n_last - n_first)."""
    window = decode_window(ticks)
    return window and window[0] / window[1]


def decode_tok_s(ticks: Sequence[Tick]) -> float | None:
    """One request's decode rate, tokens a second: the inverse of `tpot_s`."""
    window = decode_window(ticks)
    return window and window[1] / window[0]


def e2e_latency_s(ticks: Sequence[Tick], end_s: float | None) -> float | None:
    """Seconds from sending to the stream's end; None for a stream that did not end or held no token."""
    return end_s if any(n > 0 for _, n in ticks) else None


def peak_concurrency(intervals: Iterable[tuple[float, float]]) -> int | None:
    """Most requests open at one moment, by a sweep line: exact. One that ends as another starts does not overlap it."""
    events = [e for start, stop in intervals for e in ((start, 1), (stop, -1))]
    open_now = peak = 0
    for _, change in sorted(events):  # at equal times -1 sorts before +1
        open_now += change
        peak = max(peak, open_now)
    return peak if events else None


def accept_length(steps: Iterable[tuple[int | None, int | None]]) -> float | None:
    """Tokens gained a verify step, bonus included: 1 + sum(accepted drafts) / sum(verify steps), pooled.

    `steps` are (accepted drafts, verify steps) of requests; None when one lacks a counter or no step was made.
    """
    pairs = list(steps)
    known = [(accepted, count) for accepted, count in pairs if accepted is not None and count is not None]
    total = sum(count for _, count in known)
    return 1 + sum(accepted for accepted, _ in known) / total if total and len(known) == len(pairs) else None


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> tuple[int, ...] | None:
    """Sum of histograms of accepted drafts, shorter ones padded with zeros; None when one is missing."""
    rows = list(histograms)
    present = [row for row in rows if row is not None]
    if not present or len(present) != len(rows):
        return None
    return tuple(sum(row[i] for row in present if i < len(row)) for i in range(max(map(len, present))))


def full_block_share(histogram: Sequence[int] | None, block_size: int) -> float | None:
    """Share (0 to 1) of verify steps that accept the whole block: `block_size - 1` drafts, in a tree a path as deep."""
    if histogram is None or not sum(histogram):
        return None
    return sum(histogram[block_size - 1 : block_size]) / sum(histogram)


def decode_steps(ticks: Sequence[Tick], verify_ct: int | None) -> float | None:
    """Verify steps inside the decode window; for autoregressive decoding (`verify_ct` None) one a token.

    The first token comes from the prefill, so all steps lie inside unless the first chunk already held several
    tokens; then the share of tokens inside is taken.
    """
    window = decode_window(ticks)
    if window is None:
        return None
    return float(window[1]) if verify_ct is None else verify_ct * window[1] / (ticks[-1][1] - 1)


def step_ms(decode_s: float | None, steps: float | None) -> float | None:
    """Milliseconds a step: decode seconds over the verify steps (autoregressive: tokens) inside them."""
    return 1000 * decode_s / steps if decode_s is not None and steps else None


def budget_efficiency(length: float | None, verify_tokens: int | None) -> float | None:
    """Share (0 to 1) of the verified tokens that are kept, bonus included: accept length / verify tokens."""
    return length / verify_tokens if length is not None and verify_tokens else None
