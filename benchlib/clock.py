"""Whether the client's clock can be believed on this machine, and a quick look at any server with it.

`self_check` measures a server whose schedule is known and says how far off the client was; `run_bench` measures any
SGLang or OpenAI-compatible server in a closed loop. Bytes are kept while requests run and read afterwards.

Under speculation a chunk carries several tokens: `tpot_ms` is a token's time, `itl_chunk_ms` a chunk's.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from benchlib.client import call, closed_loop, generate_round, get_json, run_async
from benchlib.errors import RequestError
from benchlib.metrics import Tick, accept_length, decode_tok_s, peak_concurrency, tpot_s, ttft_s
from benchlib.paced_server import Schedule, run_paced_server
from benchlib.stream import Exchange, read_reason, split_response

__all__ = ["Bench", "ClockCheck", "Reply", "read_reply", "run_bench", "self_check"]

CountedBy = Literal["server", "usage", "chunks"]
TIMEOUT_S, STALL_S, CHECK_TIMEOUT_S, WARMUP_TOKENS = 600.0, 60.0, 10.0, 16
# A quote inside a JSON string is escaped, and a line's end too: none of these matches a reply's own text.
TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
TEXT = re.compile(rb'"text": ?"[^"]')
ERROR = re.compile(rb'data: ?(\{"error".*)')
SPLIT = re.compile(rb"\r\n[0-9a-fA-F]+\r\n(?!data:|\r\n)")  # an HTTP chunk that begins inside an event
READ_AT = re.compile(rb"X-Paced-Read: ([\d.]+)")
CHECKED, CHECK_TOKENS, LAG_PROBE_S = Schedule(ttft_ms=20.0, interval_ms=10.0), 40, 0.01
CHECK_ROUND_S = 0.001 * (CHECKED.ttft_ms + CHECKED.interval_ms * (CHECK_TOKENS - 1))


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """How far off this machine's client is against a known schedule, milliseconds; JSON-able by `asdict`.

    `bias_ttft_ms`: a median over requests. `bias_rate_percent`: the decode rate seen over the true one, less 1. From
    both, the server's own lateness is taken off. `loop_lag_ms_p99`: of the event loop's timers, to a millisecond.
    `n`: whole replies.
    """

    bias_ttft_ms: float
    bias_rate_percent: float
    loop_lag_ms_p99: float
    cpu_us_per_chunk: float
    server_lateness_ms_p99: float
    streams: int
    n: int


@dataclass(frozen=True, slots=True)
class Bench:
    """What a closed loop saw of a server; None: not to be had. Medians (p50) are over requests, of `itl` over chunks.

    `tokens_counted_by`: `server` (a count in each chunk), `usage` (one at the end, spread evenly over the chunks),
    `chunks` (the server never says: each counts as one token). `cpu_us_per_chunk`: this process, reading included.
    `error`: the first failed request's.
    """

    streams: int
    requests: int
    failed: int
    output_throughput_tok_s: float | None
    decode_tok_s: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    itl_chunk_ms_p50: float | None
    peak_concurrency: int | None
    accept_length: float | None
    cpu_us_per_chunk: float | None
    tokens_counted_by: CountedBy | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reply's bytes say: ticks as in `metrics`; `steps` are (accepted drafts, verify steps)."""

    sent: float
    ticks: tuple[Tick, ...]
    end_s: float | None
    steps: tuple[int | None, int | None]
    counted_by: CountedBy
    error: str | None


def read_reply(exchange: Exchange) -> Reply:
    """Read a reply of `/generate` or `/v1/completions`. Looks for counts alone: twice as fast as `stream`."""
    pieces = exchange.pieces
    data = b"".join([piece for _, piece in pieces])
    if SPLIT.search(data):
        pieces = split_response(pieces)[1]
        data = b"".join([piece for _, piece in pieces])
    ends = list(itertools.accumulate([len(piece) for _, piece in pieces]))

    def arrival(at: int) -> float:
        """Seconds after sending until the event that holds byte `at` had come whole."""
        return pieces[bisect_left(ends, data.find(b"\n", at) + 1 or len(data))][0] - exchange.sent

    counts = [(arrival(found.end()), int(found[1])) for found in TOKENS.finditer(data)]
    counted_by: CountedBy = "server"
    if b'"meta_info"' not in data and len(counts) < 2:
        texts = [arrival(found.end()) for found in TEXT.finditer(data)]
        total = counts[0][1] if counts else len(texts)
        counted_by = "chunks" if not counts else "server" if total == len(texts) else "usage"
        counts = [(at, round(total * number / len(texts))) for number, at in enumerate(texts, 1)]
    ticks = tuple([(at, n) for (_, before), (at, n) in itertools.pairwise([(0.0, 0), *counts]) if n > before])
    meta = _meta(data)
    error = exchange.failure or _error(exchange, data, meta) or (None if ticks else "ended without a token")
    end_s = None if error else exchange.pieces[-1][0] - exchange.sent
    steps = meta.get("spec_num_correct_drafts"), meta.get("spec_verify_ct")
    return Reply(exchange.sent, ticks, end_s, steps, counted_by, error)


def _error(exchange: Exchange, data: bytes, meta: dict[str, Any]) -> str | None:
    status, body = split_response(exchange.pieces[:4])
    if status != 200:
        reason = read_reason(b"".join([piece for _, piece in body]))
        return "connection closed without a response" if status is None else f"HTTP {status}: {reason}"
    if found := ERROR.search(data):
        return f"the server reported: {read_reason(found[1])}"
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        return f"aborted by the server: {finish.get('message') or 'no reason given'}"
    return None if b"data: [DONE]" in data[-64:] else "the stream ended without [DONE]"


def _meta(data: bytes) -> dict[str, Any]:
    """`meta_info` of the last event, as SGLang sends it."""
    at = data.rfind(b"data: {") + 6
    try:
        meta = orjson.loads(data[at : data.find(b"\n", at)]).get("meta_info")
    except orjson.JSONDecodeError:
        return {}
    return meta if isinstance(meta, dict) else {}


def run_bench(url: str, *, streams: int = 8, requests: int = 32, new_tokens: int = 128) -> Bench:
    """Measure a running server: `requests` prompts, `streams` at any time, greedy. RequestError where none answers."""
    path, extra = _surface(url := url.rstrip("/"))

    async def ask(count: int, tokens: int) -> list[Reply]:
        bodies, at_once = [_body(path, extra, number, tokens) for number in range(count)], min(streams, count)
        sent = await closed_loop(url + path, bodies, streams=at_once, timeout_s=TIMEOUT_S, stall_s=STALL_S)
        return [read_reply(exchange) for exchange in sent]

    (warmed,) = run_async(ask(1, min(new_tokens, WARMUP_TOKENS)))
    if extra and warmed.error and warmed.error.startswith("HTTP 4"):
        extra = {"model": extra["model"]}  # a strict server: what it does not know is left out
    began = time.process_time()
    replies = run_async(ask(requests, new_tokens))
    return _summary(replies, streams, time.process_time() - began)


def _surface(url: str) -> tuple[str, dict[str, Any]]:
    """The path that generates, and the fields that only OpenAI's requests have."""
    if any(call(url + page)[0] == 200 for page in ("/server_info", "/model_info")):
        return "/generate", {}
    if call(f"{url}/v1/models")[0] != 200:
        raise RequestError(
            f"{url} answers neither /server_info nor /model_info (SGLang) nor /v1/models (OpenAI): "
            "give a server's address without a path, such as http://127.0.0.1:30000"
        )
    model = (get_json(f"{url}/v1/models").get("data") or [{}])[0].get("id")
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return "/v1/completions", {"model": model, "ignore_eos": True, "stream_options": usage}


def _body(path: str, extra: dict[str, Any], number: int, tokens: int) -> dict[str, Any]:
    prompt = f"{number}: tell the story of the number {number}, slowly."  # differs at once: no shared prefix
    if path == "/generate":
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return {"text": prompt, "stream": True, "sampling_params": sampling}
    return {"prompt": prompt, "stream": True, "max_tokens": tokens, "temperature": 0.0, **extra}


def _summary(replies: Sequence[Reply], streams: int, cpu_s: float) -> Bench:
    good = [(r, r.end_s) for r in replies if r.end_s is not None]
    errors = [r.error for r in replies if r.error]
    ticks = [r.ticks for r, _ in good]
    spans = [(r.sent, r.sent + end_s) for r, end_s in good]
    wall_s = max(stop for _, stop in spans) - min(start for start, _ in spans) if spans else None
    gaps = [after[0] - before[0] for t in ticks for before, after in itertools.pairwise(t)]
    ttfts = [ttft_s(t) for t in ticks]
    chunks = sum(map(len, ticks))
    return Bench(
        streams=streams,
        requests=len(replies),
        failed=len(errors),
        output_throughput_tok_s=sum(t[-1][1] for t in ticks) / wall_s if wall_s else None,
        decode_tok_s=_quantile(map(decode_tok_s, ticks), 0.5),
        ttft_ms_p50=_quantile(ttfts, 0.5, 1000),
        ttft_ms_p99=_quantile(ttfts, 0.99, 1000),
        tpot_ms_p50=_quantile(map(tpot_s, ticks), 0.5, 1000),
        itl_chunk_ms_p50=_quantile(gaps, 0.5, 1000),
        peak_concurrency=peak_concurrency(spans),
        accept_length=accept_length(r.steps for r, _ in good),
        cpu_us_per_chunk=1e6 * cpu_s / chunks if chunks else None,
        tokens_counted_by=good[0][0].counted_by if good else None,
        error=errors[0] if errors else None,
    )


def _quantile(values: Iterable[float | None], share: float, scale: float = 1.0) -> float | None:
    """Linear between neighbours; None of nothing."""
    known = sorted(value for value in values if value is not None)
    if len(known) < 2:
        return scale * known[0] if known else None
    return scale * statistics.quantiles(known, n=100, method="inclusive")[round(100 * share) - 1]


def self_check(seconds: float = 3.0, *, streams: int = 64) -> ClockCheck:
    """Measure a paced server as a sweep measures its own, for about `seconds` at most; one round at least.

    ServerError when the paced server does not start, RequestError when no reply came whole.
    """
    deadline = time.perf_counter() + seconds
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": CHECK_TOKENS}}
    replies: list[tuple[Exchange, Reply]] = []
    lags: list[float] = []
    with run_paced_server(CHECKED) as url:
        run_async(generate_round(url, [body | {"paced": {"interval_ms": 0.1}}], timeout_s=CHECK_TIMEOUT_S))
        get_json(f"{url}/lateness")  # of the first request, which is not measured
        began = time.process_time()
        while not replies or time.perf_counter() + 2 * CHECK_ROUND_S < deadline:
            work = generate_round(url, [body] * streams, timeout_s=CHECK_TIMEOUT_S)
            replies += run_async(_watched(work, lags))
        cpu_s = time.process_time() - began
        late = get_json(f"{url}/lateness")
    seen = [(exchange, reply) for exchange, reply in replies if reply.error is None]
    if not seen:
        raise RequestError(f"the self-check saw no whole reply of {len(replies)}: {replies[0][1].error}")
    delays_ms = [1000 * (r.sent + r.ticks[0][0] - _read_at(x)) - CHECKED.ttft_ms for x, r in seen]
    rate = statistics.median(rate for _, r in seen if (rate := decode_tok_s(r.ticks)))
    true_ms = CHECKED.interval_ms + (late["last_p50_ms"] - late["first_p50_ms"]) / (CHECK_TOKENS - 1)
    return ClockCheck(
        bias_ttft_ms=statistics.median(delays_ms) - late["first_p50_ms"],
        bias_rate_percent=100 * (rate * true_ms / 1000 - 1),
        loop_lag_ms_p99=_quantile(lags, 0.99, 1000) or 0.0,
        cpu_us_per_chunk=1e6 * cpu_s / sum(len(r.ticks) for _, r in replies),
        server_lateness_ms_p99=late["p99_ms"],
        streams=streams,
        n=len(seen),
    )


def _read_at(exchange: Exchange) -> float:
    """When the server read the request: both processes have the same clock."""
    found = READ_AT.search(exchange.pieces[0][1])
    return float(found[1]) if found else exchange.sent


async def _watched(work: Coroutine[Any, Any, list[Exchange]], lags: list[float]) -> list[tuple[Exchange, Reply]]:
    """`work`, read, while a timer of the same loop says how late it was called."""

    async def probe() -> None:
        while True:
            due = time.perf_counter() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            lags.append(max(0.0, time.perf_counter() - due))

    task = asyncio.ensure_future(probe())
    try:
        exchanges = await work
    finally:
        task.cancel()
    return [(exchange, read_reply(exchange)) for exchange in exchanges]
