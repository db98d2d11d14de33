"""The client: what it reads from real servers' bytes, and that every failure becomes an error beside its ticks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchlib.client import call, generate_round, get_json, run_async
from benchlib.errors import RequestError
from benchlib.record import RequestRecord
from benchlib.stream import Exchange, request_record

DATA = Path(__file__).parent / "data"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
Serve = Callable[..., str]


def exchange(body: bytes, *, head: bytes = HEAD, size: int | None = None, step: float = 0.01) -> Exchange:
    """`body` arriving `size` bytes at a time, `step` seconds apart, sent at 100 s."""
    data = head + b"\r\n" + body
    size = size or len(data)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return Exchange(100.0, [(100 + step * (i + 1), part) for i, part in enumerate(parts)])


def event(tokens: int, *, ids: list[int] | None = None, finish: Any = None, **meta: Any) -> bytes:
    meta |= {"completion_tokens": tokens, "finish_reason": finish}
    ids = list(range(tokens)) if ids is None else ids
    return b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def record(ex: Exchange, asked: int = 4, **options: Any) -> RequestRecord:
    place = {"prompt": "p", "max_new_tokens": asked, "concurrency": 1, "round": 0}
    return request_record(ex, epoch=90.0, ignore_eos=True, **(place | options))


DONE = {"type": "length", "length": 4}


def test_stock_autoregressive_stream_is_one_token_a_tick() -> None:
    r = record(exchange((DATA / "sglang_auto.sse").read_bytes()), asked=6)
    assert r.error is None
    assert [n for _, n in r.ticks] == [1, 2, 3, 4, 5, 6]
    assert (r.prompt_tokens, r.completion_tokens, r.cached_tokens) == (4, 6, 3)
    assert (r.finish_reason, r.verify_ct, r.drafts_histogram) == ("length", None, None)
    assert r.output_ids == (169, 8, 169, 8, 169, 8)
    assert r.server_times["e2e_latency"] == pytest.approx(0.0198966)
    assert "prompt_tokens" not in r.server_times


def test_stock_dflash_stream_counts_tokens_and_not_chunks() -> None:
    r = record(exchange((DATA / "sglang_dflash.sse").read_bytes()), asked=32)
    assert r.error is None
    assert [n for _, n in r.ticks] == [1, 5, 9, 13, 17, 21, 25, 29, 32]
    assert (r.verify_ct, r.correct_drafts, r.proposed_drafts) == (8, 24, 120)
    assert r.drafts_histogram == (0, 0, 0, 8)
    assert r.output_ids is not None
    assert len(r.output_ids) == 32


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_any_split_of_the_bytes_reads_alike(size: int) -> None:
    body = chunked(event(1), event(4, finish=DONE) + b"data: [DONE]\n\n")
    head = HEAD + b"Transfer-Encoding: chunked\r\n"
    r = record(exchange(body, head=head, size=size))
    assert r.error is None
    assert [n for _, n in r.ticks] == [1, 4]
    assert r.output_ids == (0, 1, 2, 3)


def test_a_tick_is_stamped_when_the_bytes_that_complete_it_arrive() -> None:
    first, second = event(1), event(4, finish=DONE)
    ex = Exchange(100.0)
    for stamp, data in [
        (100.01, HEAD + b"\r\n"),
        (100.02, first[:-20]),
        (100.03, first[-20:] + second[:5]),
        (100.08, second[5:]),
        (100.09, b"data: [DONE]\n\n"),
    ]:
        ex.pieces.append((stamp, data))
    r = record(ex)
    assert [t for t, _ in r.ticks] == pytest.approx([0.03, 0.08])
    assert r.sent_s == pytest.approx(10.0)
    assert r.end_s == pytest.approx(0.09)


def test_a_chunk_without_new_tokens_is_no_tick() -> None:
    body = event(0) + event(2) + event(2) + event(4) + event(4, finish=DONE)
    assert [n for _, n in record(exchange(body)).ticks] == [2, 4]


def test_incremental_output_is_joined() -> None:
    body = event(1, ids=[7]) + event(3, ids=[8, 9]) + event(4, ids=[5], finish=DONE)
    assert record(exchange(body)).output_ids == (7, 8, 9, 5)
    # Ids that do not add up to the count are not kept.
    assert record(exchange(event(1, ids=[7]) + event(4, ids=[5], finish=DONE))).output_ids is None


@pytest.mark.parametrize(
    ("body", "expected", "ticks"),
    [
        (event(1) + event(2), "ended without finish_reason; 2 tokens", 2),
        (event(1) + b'data: {"error":{"message":"out of pages"}}\n\n', "out of pages; 1 tokens", 1),
        (event(1) + b"data: {broken\n\n", "not JSON", 1),
        (event(3) + event(1, finish=DONE), "fell from 3 to 1", 1),
        (event(2, finish=DONE), "2 of 4 tokens came though ignore_eos", 1),
        (event(0, finish=DONE), "without a token", 0),
        (
            event(1, finish={"type": "abort", "message": "no room"}),
            "aborted by the server: no room",
            1,
        ),
        (b"", "without finish_reason", 0),
    ],
)
def test_broken_streams_keep_their_ticks(body: bytes, expected: str, ticks: int) -> None:
    r = record(exchange(body))
    assert r.error is not None
    assert expected in r.error
    assert len(r.ticks) == ticks


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((DATA / "sglang_toolong.json").read_bytes(), "longer than the model's context length"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"upstream went away", "upstream went away"),
        (b"", "no reason given"),
    ],
)
def test_an_http_error_keeps_the_reason_in_its_body(body: bytes, reason: str) -> None:
    r = record(exchange(body, head=b"HTTP/1.1 400 Bad Request\r\n"))
    assert r.error is not None
    assert r.error.startswith("HTTP 400: ")
    assert reason in r.error


def test_no_response_at_all_is_an_error() -> None:
    assert record(Exchange(0.0)).error == "connection closed without a response"
    assert record(exchange(b"zz\r\nx", head=HEAD + b"Transfer-Encoding: chunked\r\n")).error


def stream(url: str, tokens: int = 16, streams: int = 1, timeout_s: float = 5.0, **more: float) -> list[RequestRecord]:
    body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": tokens}}
    exchanges = run_async(generate_round(url, [body] * streams, timeout_s=timeout_s, **more))
    return [record(ex, asked=tokens) for ex in exchanges]


def test_a_whole_request_over_a_socket(serve: Serve) -> None:
    (r,) = stream(serve("--chunk", "4", "--pause", "0.02"))
    assert r.error is None
    assert [n for _, n in r.ticks] == [1, 5, 9, 13, 16]
    assert r.ticks[-1][0] > 0.099  # five pauses
    assert r.end_s is not None
    assert r.end_s >= r.ticks[-1][0]


def test_concurrent_requests_overlap(serve: Serve) -> None:
    records = stream(serve("--pause", "0.01"), streams=8)
    assert all(r.error is None for r in records)
    starts = [r.sent_s for r in records]
    assert max(starts) - min(starts) < 0.02
    assert max(starts) < min(r.sent_s + r.ticks[0][0] for r in records)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("http400", "HTTP 400: The input is longer"),
        ("cut", "finish_reason; 9 tokens came"),
        ("short", "8 of 16 tokens"),
        ("incremental", None),
    ],
)
def test_faults_over_a_socket(serve: Serve, mode: str, expected: str | None) -> None:
    (r,) = stream(serve("--mode", mode))
    assert (r.error is None) if expected is None else expected in (r.error or "")
    if expected is None:
        assert r.output_ids == tuple(range(16))


def test_a_stalled_request_times_out(serve: Serve) -> None:
    began = time.monotonic()
    (r,) = stream(serve("--mode", "stall"), timeout_s=0.3)
    assert r.error == "no end after 0.3 s"
    assert time.monotonic() - began < 2


def test_a_silent_request_is_given_up_early(serve: Serve) -> None:
    began = time.monotonic()
    (r,) = stream(serve("--mode", "stall"), timeout_s=60, stall_s=0.3)
    assert r.error == "no byte for 0.3 s: it hangs"
    assert 0.3 <= time.monotonic() - began < 3
    # Whichever comes first tells why.
    (r,) = stream(serve("--mode", "stall"), timeout_s=0.2, stall_s=0.3)
    assert r.error == "no end after 0.2 s"


def test_a_slow_stream_is_no_silent_one(serve: Serve) -> None:
    (r,) = stream(serve("--pause", "0.1"), tokens=6, stall_s=0.4)  # 0.6 s in all
    assert (r.error, len(r.ticks)) == (None, 6)


def test_a_stream_that_slows_down_keeps_what_came(serve: Serve) -> None:
    (r,) = stream(serve("--pause", "0.1"), timeout_s=0.45)
    assert r.error is not None
    assert r.error.startswith("no end after 0.45 s")
    assert 1 <= len(r.ticks) < 6
    assert r.end_s is None


def test_nobody_listening_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (r,) = stream(url)
    assert r.error is not None
    assert r.error.startswith("cannot connect to 127.0.0.1")
    with pytest.raises(RequestError, match="no answer"):
        get_json(f"{url}/server_info")


def test_control_requests(serve: Serve) -> None:
    url = serve()
    assert get_json(f"{url}/server_info")["tp_size"] == 1
    assert call(f"{url}/flush_cache", "POST") == (200, b"Cache flushed.\n")
    with pytest.raises(RequestError, match="HTTP 404: Not Found"):
        get_json(f"{url}/nothing")
    with pytest.raises(RequestError, match="not JSON"):
        get_json(f"{url}/text")
    with pytest.raises(RequestError, match="object was expected"):
        get_json(f"{url}/list")
    with pytest.raises(RequestError, match="plain HTTP"):
        call("https://example.org/")


def test_a_loop_may_already_run_here() -> None:
    """As in a notebook's kernel."""

    async def inner() -> int:
        return 7

    async def outer() -> int:
        return run_async(inner())

    assert asyncio.run(outer()) == 7


def test_errors_come_out_of_the_loops_thread() -> None:
    async def fail() -> None:
        raise RequestError("as it is")

    with pytest.raises(RequestError, match="as it is"):
        run_async(fail())
