"""The closed list of quality warnings: what looks wrong with a measurement, by how much, and what to do.

A warning never changes a figure. It is stored in the record as `code: text`, so that it reaches every table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchlib.metrics import REPETITIVE, repetition_share
from benchlib.nccl import NcclLog, variables_differ
from benchlib.placement import format_devices
from benchlib.record import RequestRecord, ServerRecord
from benchlib.server_log import LogFacts
from benchlib.spec import RunSpec
from benchlib.telemetry import MAX_THROTTLED_SHARE, TelemetryRecord, mean_share, round_windows

__all__ = ["CODES", "check_cell", "check_log", "check_run", "check_throttling", "format_warning", "round_rates"]

# Spread above which two rounds can hardly be told from two conditions: a tenth of the speedups looked for.
MAX_SPREAD = 0.05
# Modified z-score of Iglewicz and Hoaglin (1993); 3.5 is their recommended threshold.
OUTLIER_Z = 3.5
# A first round this much slower than the median of the others was a warm-up in disguise.
SLOW_FIRST = 0.10
MIN_ROUNDS = 3
MAX_LOAD_SHARE = 0.5
MAX_BIAS_PERCENT = 2.0

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
    "requests-capped": "not measured: the server runs {limit} requests at once, the cell asks for {asked} and would "
    "measure a queue. Make room for their state (see the log), or lower concurrency.",
    "cache-not-flushed": "/flush_cache gave HTTP {status}; prompts may meet a warm prefix cache. "
    "Start the server with --disable-radix-cache.",
    "worse-placement": "GPUs {gpus} were taken where the free machine would give {best}: {why} Free those, or compare "
    "only with runs placed alike.",
    "links-disagree": "{what} Measure again, or set measured_links so that placement goes by it.",
    "nccl-bypassed": "NCCL profile {profile} was set, but decode's all-reduce was {which}: past NCCL, so the profile "
    "compares nothing. Add --disable-custom-all-reduce to server_args to measure NCCL.",
    "nccl-variable": "{what}. See what else sets it, or leave it out of the profile.",
    "custom-all-reduce-off": "SGLang's custom all-reduce was expected on GPUs {gpus} and was not used: {evidence}. "
    "Decode is slower for it; see the server's log.",
    "ended-badly": "after the record was written: {what}. The measurement is whole; see what is left on the machine.",
    "no-graph": "{n} of {total} logged decode batches ran without a CUDA graph: their steps are longer. Capture the "
    "batch sizes in use (--cuda-graph-bs-decode).",
    "no-gaps": "how close the server's choices were could not be asked ({reason}): `validate` cannot tell a near tie "
    "from a fault.",
    "degenerate-output": "{percent:.0f}% of an output's 8-grams had stood in it before: a loop, which is easy to draft "
    "and flatters acceptance. Take other prompts, or stop at EOS.",
    "retracted": "the server put running requests back {n} times for want of memory: their times hold a queue. Lower "
    "concurrency, or give its caches more memory.",
    "throttled": "GPU {gpu} was slowed down for {percent:.0f}% of the timed rounds (power cap or heat, see "
    "telemetry.json). Raise its power limit or cool it, or read this point as one of a slower GPU.",
    "client-bias": "against a known schedule this machine's client saw {streams} streams run {percent:+.1f}% off, more "
    "than {limit:.0f}%. Quiet the machine, or give the client cores of its own.",
    "no-draft-tree": "a round's draft tree could not be asked ({reason}): there will be no picture of one.",
    "few-starts": "{what}: fewer than {least} server starts a side cannot say that there is no difference. "
    "Raise starts: `benchlib plan` says to how many, once a condition has two.",
    "drift": "{what} Raise starts, so that conditions and drift are told apart, or find what changed: clocks and heat "
    "are in telemetry.json.",
    "mixed-devices": "its runs were made on {what}. Compare only what ran on the same devices.",
    "attached": "the server was started elsewhere: its flags are checked only as far as it reports them.",
}


def format_warning(code: str, **values: object) -> str:
    """`code: text` with its numbers; KeyError for a code that is not in the list."""
    return f"{code}: {CODES[code].format(**values)}"


def check_cell(timed: Sequence[RequestRecord], *, real_text: bool = True) -> tuple[str, ...]:
    """Warnings of one cell, from its timed requests; without `real_text` what they say means nothing."""
    total, found = len(timed), []
    whole = [r for r in timed if r.error is None]
    if failed := [r for r in timed if r.error is not None]:
        found.append(format_warning("failed-requests", n=len(failed), total=total, error=failed[0].error))
    if hits := [r.cached_tokens for r in whole if r.cached_tokens]:
        found.append(format_warning("cached-tokens", n=len(hits), total=total, most=max(hits)))
    if short := [r for r in whole if (r.completion_tokens or 0) < r.max_new_tokens]:
        found.append(format_warning("short-output", n=len(short), total=total, asked=short[0].max_new_tokens))
    shares = [share for r in whole if r.output_ids and (share := repetition_share(r.output_ids)) is not None]
    if real_text and shares and max(shares) >= REPETITIVE:
        found.append(format_warning("degenerate-output", percent=100 * max(shares)))
    return (*found, *_check_spread(round_rates(whole)))


def check_throttling(timed: Sequence[RequestRecord], telemetry: TelemetryRecord) -> tuple[str, ...]:
    """A warning for each GPU that was slowed down for more than MAX_THROTTLED_SHARE of a cell's timed rounds."""
    windows = round_windows(timed)
    shares = {gpu: mean_share(telemetry.samples, gpu, windows) for gpu in telemetry.uuids}
    slowed = {gpu: share for gpu, share in shares.items() if share is not None and share > MAX_THROTTLED_SHARE}
    return tuple(format_warning("throttled", gpu=gpu, percent=100 * share) for gpu, share in slowed.items())


def check_run(
    spec: RunSpec, environment: dict[str, Any], server: ServerRecord, nccl: NcclLog | None
) -> tuple[str, ...]:
    """Warnings of the run as a whole: the machine and the server rather than the figures."""
    found = []
    load, cores = environment.get("load_average_1m"), environment.get("cores")
    if load is not None and cores and load > MAX_LOAD_SHARE * cores:
        found.append(format_warning("machine-busy", load=load, cores=cores))
    clock = environment.get("clock") or {}
    bias = clock.get("bias_rate_percent")
    if bias is not None and abs(bias) > MAX_BIAS_PERCENT:
        found.append(format_warning("client-bias", streams=clock["streams"], percent=bias, limit=MAX_BIAS_PERCENT))
    if server.attached:
        found.append(format_warning("attached"))
    found += [format_warning("links-disagree", what=text) for text in server.links_disagree]
    if (placed := server.placement) and placed.worse_than:
        best = format_devices(placed.worse_than)
        found.append(format_warning("worse-placement", gpus=placed.label, best=best, why=placed.reason))
    return (*found, *_check_collectives(spec, server, nccl))


def check_log(facts: LogFacts) -> tuple[str, ...]:
    """What an SGLang server's log tells of its decoding that no figure shows."""
    found = []
    if facts.without_graph:
        found.append(format_warning("no-graph", n=facts.without_graph, total=facts.decode_batches))
    if facts.retractions:
        found.append(format_warning("retracted", n=facts.retractions))
    return tuple(found)


def _check_collectives(spec: RunSpec, server: ServerRecord, nccl: NcclLog | None) -> list[str]:
    """What the server's log tells of its all-reduce, against what the run asked for."""
    if nccl is None:
        return []
    found = [format_warning("nccl-variable", what=text) for text in variables_differ(_nccl_variables(server), nccl)]
    which, placement = nccl.decode_all_reduce, server.placement
    if spec.nccl_profile != "none" and which not in ("nccl", None):
        found.append(format_warning("nccl-bypassed", profile=spec.nccl_profile, which=which))
    asked_off = "--disable-custom-all-reduce" in spec.server_args
    if server.custom_all_reduce_expected and which == "nccl" and placement and not asked_off:
        evidence = nccl.decode_all_reduce_evidence
        found.append(format_warning("custom-all-reduce-off", gpus=placement.label, evidence=evidence))
    return found


def _nccl_variables(server: ServerRecord) -> dict[str, str]:
    return {k: v for k, v in server.env.items() if k.startswith("NCCL_") and not k.startswith("NCCL_DEBUG")}


def round_rates(requests: Sequence[RequestRecord]) -> dict[int, float]:
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
