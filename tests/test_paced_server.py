"""The paced server keeps its schedule, says how late it was, and speaks both surfaces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchlib.client import call, closed_loop, generate_round, get_json, run_async
from benchlib.clock import Reply, read_reply
from benchlib.errors import ServerError
from benchlib.paced_server import Schedule, run_paced_server
from benchlib.stream import Exchange, request_record

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_paced_server(Schedule(ttft_ms=30, interval_ms=5, tokens_per_chunk=4)) as address:
        yield address


def body(tokens: int, **paced: Any) -> dict[str, Any]:
    return {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": tokens}, "paced": paced}


def generate(url: str, *bodies: dict[str, Any]) -> list[Exchange]:
    return run_async(generate_round(url, bodies, timeout_s=TIMEOUT_S))


def complete(url: str, **fields: Any) -> Reply:
    asked = {"model": "paced", "prompt": "x", "stream": True, "max_tokens": 10, **fields}
    (exchange,) = run_async(closed_loop(f"{url}/v1/completions", [asked], streams=1, timeout_s=TIMEOUT_S))
    return read_reply(exchange)


def test_chunks_come_when_they_are_due_and_hold_what_was_asked(url: str) -> None:
    (exchange,) = generate(url, body(18))
    reply = read_reply(exchange)
    assert reply.error is None
    assert [n for _, n in reply.ticks] == [4, 8, 12, 16, 18]
    # Never early; how late depends on what else the machine does.
    assert all(at >= (30 + 5 * step - 0.1) / 1000 for step, (at, _) in enumerate(reply.ticks))
    assert reply.ticks[-1][0] < 1


def test_a_sweeps_reader_reads_it_alike(url: str) -> None:
    (exchange,) = generate(url, body(18))
    place = {"prompt": "p", "max_new_tokens": 18, "concurrency": 1, "round": 0}
    record, reply = request_record(exchange, epoch=0.0, ignore_eos=True, **place), read_reply(exchange)
    assert (record.error, record.completion_tokens, record.finish_reason) == (None, 18, "length")
    assert [n for _, n in record.ticks] == [n for _, n in reply.ticks]
    assert [t for t, _ in record.ticks] == pytest.approx([t for t, _ in reply.ticks])
    assert (record.correct_drafts, record.verify_ct) == reply.steps == (13, 5)
    assert record.end_s == pytest.approx(reply.end_s)


def test_the_head_goes_out_long_before_the_first_token(url: str) -> None:
    (exchange,) = generate(url, body(4, ttft_ms=300))
    assert exchange.pieces[0][1].startswith(b"HTTP/1.1 200")
    assert b"data:" not in exchange.pieces[0][1]
    assert exchange.pieces[0][0] - exchange.sent < 0.2
    assert read_reply(exchange).ticks[0][0] >= 0.2999


def test_a_request_may_bring_its_own_schedule(url: str) -> None:
    began = time.perf_counter()
    slow, quick = map(read_reply, generate(url, body(3, interval_ms=100, tokens_per_chunk=1), body(8, ttft_ms=1)))
    assert [n for _, n in slow.ticks] == [1, 2, 3]
    assert slow.ticks[-1][0] - slow.ticks[0][0] > 0.15  # 0.2 less what the first may be late
    assert quick.ticks[-1][0] < slow.ticks[-1][0]
    assert time.perf_counter() - began < 5


def test_it_says_how_late_it_was_and_forgets_it_then(url: str) -> None:
    get_json(f"{url}/lateness")
    generate(url, body(40), body(40))
    told = get_json(f"{url}/lateness")
    assert told["chunks"] == 20
    assert 0 <= told["p50_ms"] <= told["p99_ms"] <= told["max_ms"] < 1000
    assert 0 <= told["first_p50_ms"] <= told["max_ms"]
    empty = get_json(f"{url}/lateness")
    assert (empty["chunks"], empty["p99_ms"]) == (0, None)


def test_what_it_says_of_its_lateness_is_what_a_client_sees(url: str) -> None:
    """A server that is asked for more than it can do is late by its own account as well."""
    get_json(f"{url}/lateness")
    rushed = body(400, ttft_ms=0, interval_ms=0.001, tokens_per_chunk=1)
    reply = read_reply(generate(url, *[rushed] * 4)[0])
    late = get_json(f"{url}/lateness")
    assert reply.error is None
    assert late["last_p50_ms"] > 1  # 1,600 chunks, all due within half a millisecond
    assert 1000 * reply.ticks[-1][0] > late["last_p50_ms"] * 0.5


@pytest.mark.parametrize(
    ("options", "counted_by", "counts"),
    [
        ({}, "chunks", [1, 2, 3]),
        ({"include_usage": True}, "usage", [3, 7, 10]),
        ({"include_usage": True, "continuous_usage_stats": True}, "server", [4, 8, 10]),
    ],
)
def test_openai_streams_count_as_asked(url: str, options: dict[str, bool], counted_by: str, counts: list[int]) -> None:
    reply = complete(url, stream_options=options)
    assert reply.error is None
    assert (reply.counted_by, [n for _, n in reply.ticks]) == (counted_by, counts)
    assert reply.steps == (None, None)


def test_one_token_a_chunk_is_exact_without_a_count_in_each(url: str) -> None:
    reply = complete(url, stream_options={"include_usage": True}, paced={"tokens_per_chunk": 1})
    assert (reply.counted_by, [n for _, n in reply.ticks]) == ("server", list(range(1, 11)))


def test_what_cannot_be_paced_is_refused_and_said(url: str) -> None:
    bad = [body(0), body(99_999), {**body(1), "stream": False}, {"stream": True}, body(1, speed=3)]
    errors = [read_reply(exchange).error or "" for exchange in generate(url, *bad)]
    assert all(error.startswith("HTTP 400: cannot be paced") for error in errors)
    assert "1 to 4096" in errors[0]
    assert call(f"{url}/nowhere")[0] == 404
    assert call(f"{url}/health")[0] == 200


def test_a_client_that_leaves_does_not_end_it(url: str) -> None:
    (cut,) = run_async(generate_round(url, [body(4000)], timeout_s=0.1))
    assert cut.failure == "no end after 0.1 s"
    assert read_reply(generate(url, body(4))[0]).error is None


def test_it_ends_with_its_opener() -> None:
    with run_paced_server() as address:
        assert call(f"{address}/model_info")[0] == 200
    with pytest.raises(Exception, match="no answer"):
        call(f"{address}/model_info")


def test_a_server_that_does_not_start_says_so() -> None:
    with pytest.raises(ServerError, match="did not start"), run_paced_server(None, "--port=99999999"):
        pass


def test_help_names_every_flag() -> None:
    command = [sys.executable, "-m", "benchlib.paced_server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(flag in text for flag in ("--port", "--ttft-ms", "--interval-ms", "--tokens-per-chunk"))
