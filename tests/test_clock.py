"""The clock's proof: what replies' bytes say, a closed loop against a known schedule, and the command around it."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from benchlib.cli_bench import _server_limit, app
from benchlib.client import closed_loop, run_async
from benchlib.clock import Bench, Reply, _quantile, _summary, read_reply, run_bench, self_check
from benchlib.errors import RequestError
from benchlib.paced_server import Schedule, run_paced_server
from benchlib.stream import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
KEYS = {
    *("streams", "requests", "failed", "output_throughput_tok_s", "decode_tok_s", "ttft_ms_p50", "ttft_ms_p99"),
    *("tpot_ms_p50", "itl_chunk_ms_p50", "peak_concurrency", "accept_length", "cpu_us_per_chunk"),
}
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    with run_paced_server(Schedule(ttft_ms=20, interval_ms=20, tokens_per_chunk=4)) as url:
        yield url


@pytest.fixture(scope="module")
def openai() -> Iterator[str]:
    with run_paced_server(Schedule(ttft_ms=20, interval_ms=10, tokens_per_chunk=2), "--only-openai") as url:
        yield url


def event(tokens: int, text: str = "a", **meta: Any) -> bytes:
    return b"data: %s\n\n" % orjson.dumps({"text": text, "meta_info": {"completion_tokens": tokens, **meta}})


def completion(text: str, usage: int | None = None) -> bytes:
    value: dict[str, Any] = {"choices": [{"text": text}], "usage": usage and {"completion_tokens": usage}}
    return b"data: %s\n\n" % orjson.dumps(value)


def framed(*parts: bytes) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]


def reply(*pieces: bytes, head: bytes = HEAD, failure: str | None = None) -> Reply:
    """Read pieces that came at 1 s, 2 s, ... after sending; the head is the first."""
    return read_reply(Exchange(100.0, [(101.0 + n, piece) for n, piece in enumerate([head, *pieces])], failure))


def test_tokens_come_with_the_bytes_that_complete_their_event_and_not_with_the_head() -> None:
    first, second = event(1), event(5, finish_reason={"type": "length"})
    r = reply(*framed(first, second, DONE))
    assert r.error is None
    assert r.ticks == ((2.0, 1), (3.0, 5))
    assert r.end_s == 5.0
    # Not framed, and cut anywhere: the stamp is that of the last byte.
    r = reply(first[:9], first[9:] + second[:30], second[30:-2], second[-2:] + DONE, head=HEAD[:15] + b"\r\n\r\n")
    assert (r.error, r.ticks) == (None, ((3.0, 1), (5.0, 5)))


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_http_chunks_that_split_events_read_alike(size: int) -> None:
    data = event(12) + event(134, spec_verify_ct=4, spec_num_correct_drafts=130) + DONE
    r = reply(b"".join(framed(*(data[at : at + size] for at in range(0, len(data), size)))))
    assert (r.error, [n for _, n in r.ticks], r.steps) == (None, [12, 134], (130, 4))


def test_a_text_that_looks_like_a_count_is_none() -> None:
    sly = '"completion_tokens": 99, data: {"error": 1} \r\n3\r\n'
    assert [n for _, n in reply(*framed(event(2, sly), event(3, sly), DONE)).ticks] == [2, 3]


def test_chunks_that_bring_no_token_are_no_ticks() -> None:
    assert [n for _, n in reply(*framed(event(0), event(2), event(2), event(4), DONE)).ticks] == [2, 4]


def test_counts_without_the_servers_are_said_to_be() -> None:
    texts = [completion("ab"), completion(""), completion("c"), completion("d")]
    last = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
    assert reply(*framed(*texts, DONE)).counted_by == "chunks"
    r = reply(*framed(*texts, last, DONE))
    assert (r.error, r.counted_by) == (None, "usage")
    assert r.ticks == ((2.0, 2), (4.0, 5), (5.0, 7))  # 7 over 3 chunks
    each = [completion("ab", 3), completion("c", 5), last]
    r = reply(*framed(*each, DONE))
    assert (r.counted_by, [n for _, n in r.ticks]) == ("server", [3, 5, 7])


@pytest.mark.parametrize(
    ("pieces", "expected", "ticks"),
    [
        (framed(event(1), event(2)), "the stream ended without [DONE]", 2),
        (framed(event(1), b'data: {"error": {"message": "out of pages"}}\n\n', DONE), "reported: out of pages", 1),
        (framed(event(1, finish_reason={"type": "abort", "message": "no room"}), DONE), "server: no room", 1),
        (framed(DONE), "ended without a token", 0),
        (framed(b"data: {broken\n\n", DONE), "ended without a token", 0),
    ],
)
def test_broken_replies_keep_their_ticks(pieces: list[bytes], expected: str, ticks: int) -> None:
    r = reply(*pieces)
    assert expected in (r.error or "")
    assert (len(r.ticks), r.end_s) == (ticks, None)


def test_refused_and_lost_requests_say_why() -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 20\r\n\r\n"
    assert reply(b'{"message": "too long"}', head=head).error == "HTTP 400: too long"
    assert read_reply(Exchange(0.0)).error == "connection closed without a response"
    assert reply(*framed(event(1)), failure="no end after 1 s").error == "no end after 1 s"


def test_quantiles_are_linear_and_nothing_has_none() -> None:
    assert _quantile([4.0, 1.0, None, 2.0, 3.0], 0.5) == 2.5
    assert _quantile([0.0, 100.0], 0.99, 1000) == pytest.approx(99_000)
    assert _quantile([7.0], 0.99) == 7.0
    assert _quantile([None], 0.5) is None


def test_times_of_tokens_and_of_chunks_are_both_right() -> None:
    """Two requests, 13 tokens each in chunks of 4, 4, 4 and 1 every 40 ms, the second half a second after the first."""
    ticks = ((0.02, 4), (0.06, 8), (0.10, 12), (0.14, 13))
    replies = [Reply(sent, ticks, 0.15, (9, 4), "server", None) for sent in (10.0, 10.5)]
    lost = Reply(10.1, ticks[:1], None, (None, None), "server", "connection lost")
    found = _summary([*replies, lost], 2, cpu_s=80e-6)
    assert (found.requests, found.failed, found.error) == (3, 1, "connection lost")
    assert found.itl_chunk_ms_p50 == pytest.approx(40)
    assert found.tpot_ms_p50 == pytest.approx(120 / 9)  # the first chunk's tokens are outside: 13 - 4
    assert found.decode_tok_s == pytest.approx(75)
    assert found.output_throughput_tok_s == pytest.approx(26 / 0.65)
    assert found.ttft_ms_p50 == found.ttft_ms_p99 == pytest.approx(20)
    assert found.accept_length == pytest.approx(1 + 18 / 8)
    assert found.peak_concurrency == 1  # exact: the two do not overlap
    assert found.cpu_us_per_chunk == pytest.approx(10)


def test_a_known_schedule_is_seen_as_it_is(sglang: str) -> None:
    found = run_bench(sglang, streams=4, requests=8, new_tokens=80)
    assert (found.requests, found.failed, found.error, found.tokens_counted_by) == (8, 0, None, "server")
    assert found.peak_concurrency == 4
    assert found.accept_length == pytest.approx(4.0)
    # Never early, and late by what else the machine does: 20 chunks take 400 ms.
    assert 19.9 < (found.ttft_ms_p50 or 0) <= (found.ttft_ms_p99 or 0)
    assert 0 < (found.output_throughput_tok_s or 0) <= 4 * 80 / 0.4
    assert (found.decode_tok_s or 0) < 250


def test_a_closed_loop_keeps_its_streams_busy_and_its_connections_open(sglang: str) -> None:
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 8}, "paced": {"interval_ms": 1}}
    exchanges = run_async(closed_loop(f"{sglang}/generate", [body] * 9, streams=3, timeout_s=20))
    replies = [read_reply(exchange) for exchange in exchanges]
    assert [r.error for r in replies] == [None] * 9
    assert all(before.sent <= after.sent for before, after in pairwise(replies))
    # The next request leaves as the last one ends: in the same turn of the loop.
    ends = sorted(r.sent + (r.end_s or 0) for r in replies)
    starts = sorted(r.sent for r in replies)[3:]
    assert all(start >= end for start, end in zip(starts, ends, strict=False))


def test_a_server_that_closes_each_connection_is_measured_too(serve: Serve) -> None:
    """As is one that speaks no OpenAI, or is refused: the fake server closes after each reply."""
    found = run_bench(serve("--chunk", "4"), streams=3, requests=7, new_tokens=16)
    assert (found.failed, found.tokens_counted_by, found.peak_concurrency) == (0, "server", 3)


@pytest.mark.parametrize(("mode", "error"), [("http400", "HTTP 400: The input is longer"), ("cut", "without [DONE]")])
def test_failures_are_counted_and_the_first_is_told(serve: Serve, mode: str, error: str) -> None:
    found = run_bench(serve("--mode", mode), streams=2, requests=4, new_tokens=16)
    assert (found.requests, found.failed, found.decode_tok_s, found.tokens_counted_by) == (4, 4, None, None)
    assert error in (found.error or "")


def test_openai_servers_are_measured_by_usage(openai: str) -> None:
    found = run_bench(openai + "/", streams=2, requests=4, new_tokens=20)
    assert (found.failed, found.tokens_counted_by, found.accept_length) == (0, "server", None)
    assert (found.tpot_ms_p50 or 0) > 3
    assert found.peak_concurrency == 2


def test_an_address_where_nobody_speaks_is_an_error(serve: Serve) -> None:
    with pytest.raises(RequestError, match="no answer"):
        run_bench(nobody())
    with run_paced_server(None, "--only-openai") as url, pytest.raises(RequestError, match="nor /v1/models"):
        run_bench(f"{url}/v1")


def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_the_self_check_tells_this_machines_bias() -> None:
    found = self_check(1.0, streams=8)
    assert (found.streams, found.n >= 8, found.n % 8) == (8, True, 0)
    # Generous: other tests run beside this one. The tight bars are those of `make bench-client`.
    assert -10 < found.bias_ttft_ms < 500
    assert -90 < found.bias_rate_percent < 10
    assert 0 <= found.loop_lag_ms_p99 < 2000
    assert found.server_lateness_ms_p99 >= 0
    assert found.cpu_us_per_chunk > 0
    assert json.loads(json.dumps(dataclasses.asdict(found)))["streams"] == 8


def test_the_command_prints_json_or_lines(sglang: str, openai: str) -> None:
    run = CliRunner().invoke
    options = ["--streams", "2", "--requests", "2", "--new-tokens", "8"]
    told = json.loads(run(app, [sglang, *options, "--json"]).stdout)
    assert set(told) >= KEYS
    assert set(told) == {field.name for field in dataclasses.fields(Bench)}
    text = run(app, [openai, *options]).stdout
    assert "tokens counted by the server" in text
    assert "accept_length" not in text  # not to be had
    assert "peak_concurrency" in text


def test_the_command_fails_when_every_request_did(serve: Serve) -> None:
    done = CliRunner().invoke(app, [serve("--mode", "http400"), "--streams", "1", "--requests", "2"])
    assert done.exit_code == 1
    assert "2 failed, the first with: HTTP 400" in done.stdout


@pytest.mark.parametrize("options", [["--streams", "0"], ["--new-tokens", "0"], ["--streams", "4", "--requests", "2"]])
def test_the_command_refuses_what_measures_nothing(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["http://127.0.0.1:1", *options])
    assert isinstance(done.exception, Exception)
    assert "give" in str(done.exception)


def test_a_queue_is_told_from_a_measurement(serve: Serve) -> None:
    """The fake server runs as many requests at once as it was told to."""
    url = serve("--max-running-requests", "2")
    options = ["--new-tokens", "4", "--streams"]
    note = "the server runs 2 requests at once: with 3 streams this measured its queue"
    run = CliRunner().invoke
    assert note in run(app, [url, *options, "3"]).stdout
    assert "queue" not in run(app, [url, *options, "2"]).stdout
    told = json.loads(run(app, [url, *options, "3", "--json"]).stdout)
    assert told.pop("note") == note
    assert set(told) == {field.name for field in dataclasses.fields(Bench)}
    assert "note" not in json.loads(run(app, [url, *options, "2", "--json"]).stdout)


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        ({"internal_states": [{"effective_max_running_requests_per_dp": 6}], "max_running_requests": 8}, 6),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 6}], "dp_size": 4}, 24),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 6}], "dp_size": "4"}, 6),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 6}], "dp_size": 0}, 6),
        ({"internal_states": [{}], "max_running_requests": 8, "dp_size": 4}, 8),  # of all replicas already
        ({"internal_states": {"effective_max_running_requests_per_dp": 6}}, None),
        ({"internal_states": [3], "max_running_requests": 8}, 8),
        ({"internal_states": [], "max_running_requests": "8"}, None),
        ({"internal_states": None, "max_running_requests": True}, None),
        ({}, None),
    ],
)
def test_a_servers_limit_is_a_number_or_unknown(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], limit: int | None
) -> None:
    monkeypatch.setattr("benchlib.client.get_json", lambda url: info)
    assert _server_limit("http://server") == limit
