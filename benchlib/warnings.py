"""The closed list of quality warnings: what looks wrong with a measurement, by how much, and what to do.

A warning never changes a figure. It is stored in the record as `code: text`, so that it reaches every table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchlib.record import RequestRecord, ServerRecord

__all__ = ["CODES", "check_cell", "check_run", "format_warning"]

# Spread above which two rounds can hardly be told from two conditions: a tenth of the speedups looked for.
MAX_SPREAD = 0.05
# Modified z-score of Iglewicz and Hoaglin (1993); 3.5 is their recommended threshold.
OUTLIER_Z = 3.5
# A first round this much slower than the median of the others was a warm-up in disguise.
SLOW_FIRST = 0.10
MIN_ROUNDS = 3
MAX_LOAD_SHARE = 0.5

CODES = {
    "few-rounds": "{n} timed rounds, fewer than {least}: the spread is hardly known. Raise repeats.",
    "first-round-slow": "round 1 ran {percent:.0f}% below the others' median. Raise warmups.",
    "high-spread": "decode rate varies by {percent:.1f}% (standard deviation over mean, n={n}), more than "
    "{limit:.0f}%. Raise repeats, or quiet the machine.",
    "outlier": "round {round} decoded {rate:.1f} tokens/s, the median is {median:.1f}. See what else ran, "
    "or raise repeats.",
    "cached-tokens": "{n} of {total} timed requests hit the prefix cache (up to {most} tokens): their TTFT is not a "
    "prefill. Start the server with --disable-radix-cache.",
    "failed-requests": "{n} of {total} timed requests failed, first: {error}. They are kept and counted.",
    "short-output": "{n} of {total} timed requests ended before {asked} tokens. Set ignore_eos for equal lengths.",
    "machine-busy": "load average was {load:.1f} on {cores} cores at the start. Wait until the machine is idle.",
    "requests-capped": "the server runs {limit} requests at once, the workload asks for {asked}: some queued. "
    "Raise max_running_requests, or lower concurrency.",
    "cache-not-flushed": "/flush_cache gave HTTP {status}; prompts may meet a warm prefix cache. "
    "Start the server with --disable-radix-cache.",
    "attached": "the server was started elsewhere: its flags are checked only as far as it reports them.",
}


def format_warning(code: str, **values: object) -> str:
    """`code: text` with its numbers; KeyError for a code that is not in the list."""
    return f"{code}: {CODES[code].format(**values)}"


def check_cell(timed: Sequence[RequestRecord]) -> tuple[str, ...]:
    """Warnings of one cell, from its timed requests."""
    total, found = len(timed), []
    whole = [r for r in timed if r.error is None]
    if failed := [r for r in timed if r.error is not None]:
        found.append(format_warning("failed-requests", n=len(failed), total=total, error=failed[0].error))
    if hits := [r.cached_tokens for r in whole if r.cached_tokens]:
        found.append(format_warning("cached-tokens", n=len(hits), total=total, most=max(hits)))
    if short := [r for r in whole if (r.completion_tokens or 0) < r.max_new_tokens]:
        found.append(format_warning("short-output", n=len(short), total=total, asked=short[0].max_new_tokens))
    return (*found, *_check_spread(_round_rates(whole)))


def check_run(environment: dict[str, Any], server: ServerRecord, *, concurrency: int) -> tuple[str, ...]:
    """Warnings of the run as a whole: the machine and the server rather than the figures."""
    found = []
    load, cores = environment.get("load_average_1m"), environment.get("cores")
    if load is not None and cores and load > MAX_LOAD_SHARE * cores:
        found.append(format_warning("machine-busy", load=load, cores=cores))
    limit = server.effective_max_running_requests
    if limit is not None and limit < concurrency:
        found.append(format_warning("requests-capped", limit=limit, asked=concurrency))
    if server.attached:
        found.append(format_warning("attached"))
    return tuple(found)


def _round_rates(requests: Sequence[RequestRecord]) -> dict[int, float]:
    """Mean decode rate of each round, tokens/s: what followed the first chunk over the time it took."""
    rounds: dict[int, list[float]] = {}
    for request in requests:
        if len(request.ticks) > 1:
            (first_s, first_n), (last_s, last_n) = request.ticks[0], request.ticks[-1]
            if last_s > first_s:
                rounds.setdefault(request.round, []).append((last_n - first_n) / (last_s - first_s))
    return {number: statistics.fmean(rates) for number, rates in sorted(rounds.items())}


def _check_spread(rates: dict[int, float]) -> list[str]:
    if len(rates) < MIN_ROUNDS:
        return [format_warning("few-rounds", n=len(rates), least=MIN_ROUNDS)]
    found = []
    values = list(rates.values())
    spread = statistics.stdev(values) / statistics.fmean(values)
    if spread > MAX_SPREAD:
        found.append(format_warning("high-spread", percent=100 * spread, n=len(values), limit=100 * MAX_SPREAD))
    rest = statistics.median(values[1:])
    if values[0] < (1 - SLOW_FIRST) * rest:
        found.append(format_warning("first-round-slow", percent=100 * (1 - values[0] / rest)))
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    for number, rate in rates.items():
        # Where the spread is small anyway, a small deviation makes harmless values look far off.
        if deviation and spread > MAX_SPREAD and 0.6745 * abs(rate - median) / deviation > OUTLIER_Z:
            found.append(format_warning("outlier", round=number + 1, rate=rate, median=median))
    return found
