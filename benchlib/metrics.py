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
    "METRICS",
    "Metric",
    "accept_length",
    "accept_length_macro",
    "add_histograms",
    "budget_efficiency",
    "decode_steps",
    "decode_tok_s",
    "decode_window",
    "e2e_latency_s",
    "full_block_share",
    "output_throughput_tok_s",
    "peak_concurrency",
    "step_ms",
    "tpot_s",
    "ttft_s",
]

Tick = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Metric:
    """How one figure is named wherever it is shown; `better` is None where neither direction is."""

    key: str
    unit: str
    label: str
    better: Literal["higher", "lower"] | None

    @property
    def axis(self) -> str:
        """Label with unit, for an axis or a table header: `Decode rate (tok/s)`."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


METRICS: dict[str, Metric] = {
    m.key: m
    for m in (
        Metric("ttft_s", "s", "Time to first token", "lower"),
        Metric("tpot_s", "s", "Time per output token", "lower"),
        Metric("decode_tok_s", "tok/s", "Decode rate", "higher"),
        Metric("e2e_latency_s", "s", "End-to-end latency", "lower"),
        Metric("output_throughput_tok_s", "tok/s", "Output throughput", "higher"),
        Metric("peak_concurrency", "requests", "Peak concurrency", None),
        Metric("accept_length", "tok/step", "Accept length", "higher"),
        Metric("accept_length_macro", "tok/step", "Accept length, mean of requests", "higher"),
        Metric("full_block_share", "%", "Steps accepting the whole block", None),
        Metric("step_ms", "ms", "Time per step", "lower"),
        Metric("budget_efficiency", "%", "Verified tokens kept", "higher"),
        Metric("speedup", "×", "Speedup over autoregressive", "higher"),
        Metric("verify_tokens", "tokens", "Tokens per verify step", None),
    )
}


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
    if last_n <= first_n or last_t <= first_t:
        return None
    return last_t - first_t, last_n - first_n


def tpot_s(ticks: Sequence[Tick]) -> float | None:
    """Seconds per output token after the first chunk: (t_last - t_first) / (n_last - n_first)."""
    window = decode_window(ticks)
    return None if window is None else window[0] / window[1]


def decode_tok_s(ticks: Sequence[Tick]) -> float | None:
    """One request's decode rate, tokens a second: the inverse of `tpot_s`."""
    window = decode_window(ticks)
    return None if window is None else window[1] / window[0]


def e2e_latency_s(ticks: Sequence[Tick], end_s: float | None) -> float | None:
    """Seconds from sending to the stream's end; None for a stream that did not end or held no token."""
    return end_s if any(n > 0 for _, n in ticks) else None


def output_throughput_tok_s(requests: Iterable[tuple[float, float, int]]) -> float | None:
    """All completion tokens over the wall clock of the window that holds `(start_s, stop_s, tokens)` requests."""
    rows = list(requests)
    if not rows:
        return None
    span = max(stop for _, stop, _ in rows) - min(start for start, _, _ in rows)
    return sum(tokens for _, _, tokens in rows) / span if span > 0 else None


def peak_concurrency(intervals: Iterable[tuple[float, float]]) -> int | None:
    """Most requests open at one moment, by a sweep line: exact. One that ends as another starts does not overlap it."""
    events = [e for start, stop in intervals for e in ((start, 1), (stop, -1))]
    if not events:
        return None
    open_now = peak = 0
    for _, change in sorted(events):  # at equal times -1 sorts before +1
        open_now += change
        peak = max(peak, open_now)
    return peak


def accept_length(steps: Iterable[tuple[int | None, int | None]]) -> float | None:
    """Tokens gained a verify step, bonus included: 1 + sum(accepted drafts) / sum(verify steps), pooled.

    `steps` are (accepted drafts, verify steps) of requests; None when one lacks a counter or no step was made.
    """
    pairs = list(steps)
    if any(accepted is None or count is None for accepted, count in pairs):
        return None
    total = sum(count or 0 for _, count in pairs)
    return 1 + sum(accepted or 0 for accepted, _ in pairs) / total if total else None


def accept_length_macro(steps: Iterable[tuple[int | None, int | None]]) -> float | None:
    """Mean over requests of each one's accept length; None as for `accept_length`, of any request."""
    each = [accept_length([pair]) for pair in steps]
    known = [value for value in each if value is not None]
    return sum(known) / len(known) if known and len(known) == len(each) else None


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> tuple[int, ...] | None:
    """Sum of histograms of accepted drafts, shorter ones padded with zeros; None when one is missing."""
    rows = list(histograms)
    present = [row for row in rows if row is not None]
    if not present or len(present) != len(rows):
        return None
    width = max(map(len, present))
    return tuple(sum(row[i] if i < len(row) else 0 for row in present) for i in range(width))


def full_block_share(histogram: Sequence[int] | None, block_size: int) -> float | None:
    """Share (0 to 1) of verify steps that accept the whole block: `block_size - 1` drafts, in a tree a path as deep."""
    if histogram is None or not sum(histogram):
        return None
    last = block_size - 1
    return (histogram[last] if last < len(histogram) else 0) / sum(histogram)


def decode_steps(ticks: Sequence[Tick], verify_ct: int | None) -> float | None:
    """Verify steps inside the decode window; for autoregressive decoding (`verify_ct` None) one a token.

    The first token comes from the prefill, so all steps lie inside unless the first chunk already held several
    tokens; then the share of tokens inside is taken.
    """
    window = decode_window(ticks)
    if window is None:
        return None
    if verify_ct is None:
        return float(window[1])
    return verify_ct * window[1] / (ticks[-1][1] - 1)


def step_ms(decode_s: float | None, steps: float | None) -> float | None:
    """Milliseconds a step: decode seconds over the verify steps (autoregressive: tokens) inside them."""
    return 1000 * decode_s / steps if decode_s is not None and steps else None


def budget_efficiency(length: float | None, verify_tokens: int | None) -> float | None:
    """Share (0 to 1) of the verified tokens that are kept, bonus included: accept length / verify tokens."""
    return length / verify_tokens if length is not None and verify_tokens else None
