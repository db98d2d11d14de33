"""What the client and the measuring rely on: alike of the embedded engine, a stock SGLang and any running server."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchlib.client import call, generate_round, run_async
from benchlib.engines import check_server_info, verify_tokens
from benchlib.errors import ServerError
from benchlib.frames import _SERVING
from benchlib.measure import _flush
from benchlib.metrics import accept_length
from benchlib.record import RequestRecord, ServerRecord
from benchlib.server import _says_ready, _with_info
from benchlib.spec import RunSpec
from benchlib.stream import Exchange, request_record

PROMPT = [*range(20, 60)]
METHODS = {None: "auto", "DFLASH": "linear", "DDTREE": "ddtree"}
COMMON_METRICS = ("prompt_tokens_total", "generation_tokens_total", "gen_throughput", "num_running_reqs")
Info = dict[str, Any]


def body(asked: Any, *, prompt: dict[str, Any] | None = None, **sampling: Any) -> Info:
    sampling = {"temperature": 0.0, "max_new_tokens": asked, "ignore_eos": True, **sampling}
    return {**(prompt or {"input_ids": PROMPT}), "stream": True, "sampling_params": sampling}


def exchanges(url: str, *bodies: Info) -> list[Exchange]:
    return run_async(generate_round(url, bodies, timeout_s=120.0, stall_s=60.0))


def ask(url: str, *bodies: Info) -> list[RequestRecord]:
    """As the measuring asks: one round of these at once."""
    seen = exchanges(url, *bodies)
    place = {"prompt": "p", "concurrency": len(bodies), "round": 0}
    wanted = [b["sampling_params"].get("max_new_tokens") for b in bodies]
    return [
        request_record(e, epoch=e.sent, ignore_eos=True, max_new_tokens=n if isinstance(n, int) else 1, **place)
        for e, n in zip(seen, wanted, strict=True)
    ]


def planned(info: Info) -> dict[str, Any]:
    """Parameters of a run that plans this very server."""
    method = METHODS[info["speculative_algorithm"]]
    plan = {"tp_size": info["tp_size"], "method": method, "model_path": info["model_path"]}
    plan |= {"tree_budget": info["speculative_ddtree_budget"]} if method == "ddtree" else {}
    return plan | ({"block_size": info["speculative_num_draft_tokens"]} if method == "linear" else {})


# ---- control


def test_it_says_that_it_is_ready(server_url: str) -> None:
    status, _ = call(f"{server_url}/ready")
    assert status in (200, 404)
    assert call(f"{server_url}/model_info")[0] == 200
    assert _says_ready(server_url)


def test_it_tells_what_a_record_keeps(server_url: str, info: Info) -> None:
    record = _with_info(ServerRecord(url=server_url), info)
    assert record.version == info["version"]
    assert record.version
    assert record.effective_max_running_requests == info["internal_states"][0]["effective_max_running_requests_per_dp"]
    assert (record.effective_max_running_requests or 0) >= 8
    assert (record.verify_tokens is None) == (info["speculative_algorithm"] is None)
    if record.verify_tokens and "verify_tokens" in info:  # the embedded engine counts them itself
        assert record.verify_tokens == info["verify_tokens"]
    assert record.info["disable_radix_cache"] is True
    # SGLang resolves all of these; of an engine that has fewer, the fewer are compared.
    reported = [key for key in _SERVING if key in info]
    assert reported == list(_SERVING) if "attention_backend" in info else "disable_radix_cache" in reported


def test_a_plan_of_it_is_accepted_and_another_is_not(info: Info) -> None:
    plan = planned(info)
    check_server_info(RunSpec.from_parameters(plan), info)
    for other in ({"tp_size": info["tp_size"] + 1}, {"model_path": "another"}):
        with pytest.raises(ServerError, match="not the one planned"):
            check_server_info(RunSpec.from_parameters(plan | other), info)


def test_its_cache_is_flushed_when_idle(server_url: str) -> None:
    ask(server_url, body(2))
    assert _flush(server_url) == []
    assert call(f"{server_url}/flush_cache", "POST")[0] == 200


# ---- generation


def test_a_stream_is_what_the_client_reads(server_url: str) -> None:
    (seen,) = exchanges(server_url, body(5))
    assert seen.failure is None
    head, _, _ = b"".join(data for _, data in seen.pieces).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/event-stream" in head.lower()
    # By another HTTP client than ours, which has the last word on the framing.
    with streamed(server_url, body(5)) as lines:
        events = [line for line in lines if line.strip()]
    assert all(line.startswith(b"data: ") for line in events)
    assert events.pop() == b"data: [DONE]\n"
    told = [json.loads(line[6:]) for line in events]
    counts = [event["meta_info"]["completion_tokens"] for event in told]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 5)
    for event, count in zip(told, counts, strict=True):
        assert event["output_ids"] == told[-1]["output_ids"][:count]
        assert (event["meta_info"]["finish_reason"] is None) == (event is not told[-1])
    last = told[-1]["meta_info"]
    assert (last["prompt_tokens"], last["cached_tokens"]) == (len(PROMPT), 0)
    assert last["finish_reason"] == {"type": "length", "length": 5}


@pytest.mark.parametrize("asked", [1, 2, 33])
def test_exact_lengths(server_url: str, asked: int) -> None:
    (r,) = ask(server_url, body(asked))
    assert (r.error, r.completion_tokens, r.prompt_tokens) == (None, asked, len(PROMPT))
    assert (r.ticks[0][1] >= 1, r.ticks[-1][1]) == (True, asked)
    assert r.output_ids is not None
    assert len(r.output_ids) == asked
    assert r.end_s is not None
    assert 0 < r.ticks[0][0] <= r.ticks[-1][0] <= r.end_s


def test_text_is_a_prompt_too(server_url: str, info: Info) -> None:
    (r,) = ask(server_url, body(6, prompt={"text": "def fib(n):\n"}))
    if info.get("skip_tokenizer_init"):
        assert "skip_tokenizer_init" in (r.error or "")
        return
    assert (r.error, r.completion_tokens) == (None, 6)
    assert 1 <= (r.prompt_tokens or 0) <= 12


def test_greedy_output_repeats_and_nothing_is_cached(server_url: str) -> None:
    runs = [ask(server_url, body(16))[0] for _ in range(2)]
    assert [r.error for r in runs] == [None] * 2
    assert len({r.output_ids for r in runs}) == 1
    assert [r.cached_tokens for r in runs] == [0] * 2


def test_eight_at_once(server_url: str) -> None:
    prompts = [{"input_ids": [n, *PROMPT]} for n in range(8)]
    records = ask(server_url, *(body(8, prompt=prompt) for prompt in prompts))
    assert [(r.error, r.completion_tokens, r.prompt_tokens) for r in records] == [(None, 8, len(PROMPT) + 1)] * 8
    # They ran side by side: the last began before the first had ended.
    assert max(r.sent_s + r.ticks[0][0] for r in records) < max(r.sent_s + r.ticks[-1][0] for r in records)


def test_counters_of_speculation(server_url: str, info: Info) -> None:
    (r,) = ask(server_url, body(33))
    counters = (r.verify_ct, r.correct_drafts, r.proposed_drafts, r.drafts_histogram)
    if info["speculative_algorithm"] is None:
        assert counters == (None,) * 4
        assert accept_length([(r.correct_drafts, r.verify_ct)]) is None
        return
    width = verify_tokens(info)
    assert r.verify_ct
    assert r.correct_drafts is not None
    assert r.drafts_histogram is not None
    assert width is not None
    assert sum(r.drafts_histogram) == r.verify_ct
    assert sum(n * steps for n, steps in enumerate(r.drafts_histogram)) == r.correct_drafts
    assert 0 < (r.proposed_drafts or 0) <= r.verify_ct * (width - 1)
    assert accept_length([(r.correct_drafts, r.verify_ct)]) == 1 + r.correct_drafts / r.verify_ct
    # The prefill gives the first token; of the last step's, some may be past the end.
    produced = 1 + r.verify_ct + r.correct_drafts
    assert 0 <= produced - 33 < info["speculative_num_draft_tokens"]
    assert len(r.ticks) <= 1 + r.verify_ct


# ---- refusals and clients that go away


def too_long(info: Info) -> Info:
    if not isinstance(length := info.get("context_length"), int):
        pytest.skip("the server does not tell its context length")
    return body(4, prompt={"input_ids": [5] * (length + 1)})


@pytest.mark.parametrize("fault", ["too long", "temperature", "type", "unknown"])
def test_a_refusal_is_an_error_of_the_request(server_url: str, info: Info, fault: str) -> None:
    asked = {
        "too long": lambda: too_long(info),
        "temperature": lambda: body(4, temperature=-1.0),
        "type": lambda: body("four"),
        "unknown": lambda: body(4, no_such_parameter=1),
    }[fault]()
    (r,) = ask(server_url, asked)
    # Once a stream has begun, SGLang can only tell it in an event.
    assert (r.error or "").startswith(("HTTP 400: ", "the server reported: "))
    assert "no reason given" not in (r.error or "")
    assert (r.ticks, r.completion_tokens) == ((), None)
    assert ask(server_url, body(2))[0].error is None


@contextlib.contextmanager
def streamed(url: str, asked: Info) -> Iterator[http.client.HTTPResponse]:
    """A response whose connection is closed at the end, however much of it was read."""
    where = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)) as connection:
        connection.request("POST", "/generate", json.dumps(asked), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def test_a_client_that_goes_away_costs_nothing(server_url: str) -> None:
    """A busy server refuses to flush; one whose client has gone is soon idle, and well."""
    with streamed(server_url, body(800)) as response:
        assert response.readline().startswith(b"data: ")
        assert call(f"{server_url}/flush_cache", "POST")[0] == 400
    began = time.monotonic()
    while call(f"{server_url}/flush_cache", "POST")[0] != 200:
        assert time.monotonic() - began < 20
        time.sleep(0.1)
    assert ask(server_url, body(4))[0].error is None


# ---- counters of the whole server


def metric(url: str, name: str) -> float | None:
    status, data = call(f"{url}/metrics")
    assert status == 200
    lines = [line for line in data.decode().splitlines() if line.startswith((f"sglang:{name}{{", f"sglang:{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


def test_metrics_count_tokens(server_url: str, info: Info) -> None:
    if not info.get("enable_metrics"):
        pytest.skip("the server runs without --enable-metrics")
    before = metric(server_url, "generation_tokens_total") or 0.0
    ask(server_url, body(9))
    deadline = time.monotonic() + 10
    while (metric(server_url, "generation_tokens_total") or 0.0) < before + 9 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metric(server_url, "generation_tokens_total") == before + 9
    assert all(metric(server_url, name) is not None for name in COMMON_METRICS)
    if info["speculative_algorithm"]:
        assert (metric(server_url, "spec_accept_length") or 0.0) >= 1.0
