"""What real SGLang servers once answered, read again: 0.5.17 on a GPU (`big*`, `small*`, `tp2`), 0.5.23 on a CPU.

In `tests/data/sglang`: /server_info without the arguments that were left alone, and streams of /generate, the long
ones cut to their head and end. The draft models were untrained; `big_dflash_sim` simulated an accept length of 4. What
the product does not read was not kept: the OpenAI routes, /generate without `stream`, /v1/loads and /metrics.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import benchlib
from benchlib.engines import check_server_info, verify_tokens
from benchlib.errors import ServerError
from benchlib.metrics import accept_length, decode_tok_s, tpot_s
from benchlib.record import RequestRecord, ServerRecord
from benchlib.server import SECRET, _with_info
from benchlib.spec import RunSpec
from benchlib.stream import Exchange, read_reason, request_record

DATA = Path(__file__).parents[1] / "data"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"


class Stream(NamedTuple):
    """A captured stream and what is true of it: tokens, chunks, (verify steps, accepted drafts) and the ratio."""

    path: str
    tokens: int
    chunks: int
    steps: tuple[int, int] | None = None
    accept_length: float | None = None


STREAMS = [
    Stream("sglang/big/generate_stream.sse", 32, 32),
    Stream("sglang/big_dflash/generate_stream.sse", 32, 32, (31, 0), 1.0),
    Stream("sglang_dflash.sse", 32, 9, (8, 24), 4.0),
    Stream("sglang/big_dflash_sim/single_stream_0.sse", 256, 4, (64, 192), 4.0),
    Stream("sglang/small/generate_stream.sse", 32, 32),
    Stream("sglang/small_dflash/generate_stream.sse", 32, 32, (31, 0), 1.0),
    Stream("sglang/tp2/single_stream_0.sse", 256, 4),
    Stream("sglang_auto.sse", 6, 6),
]
SERVERS: dict[str, dict[str, Any]] = {
    "big": {},
    "big_dflash": {"method": "linear"},
    "big_dflash_sim": {"method": "linear"},
    "small": {},
    "small_dflash": {"method": "linear", "block_size": 8},
    "tp2": {"tp_size": 2},
    "cpu": {},
}


def replay(path: str, tokens: int, *, step: float = 0.01) -> RequestRecord:
    """The record of a captured stream whose events come `step` seconds apart, behind a head of their own."""
    events = [event + b"\n\n" for event in (DATA / path).read_bytes().split(b"\n\n") if event.strip()]
    pieces = [(100 + step * n, data) for n, data in enumerate([HEAD, *events])]
    place = {"prompt": "p", "max_new_tokens": tokens, "concurrency": 1, "round": 0}
    return request_record(Exchange(100.0, pieces), epoch=100.0, ignore_eos=True, **place)


def server_info(name: str) -> dict[str, Any]:
    return dict(json.loads((DATA / "sglang" / name / "server_info.json").read_text()))


@pytest.mark.parametrize("s", STREAMS, ids=lambda s: s.path)
def test_streams(s: Stream) -> None:
    r = replay(s.path, s.tokens)
    assert r.error is None
    assert (r.completion_tokens, r.finish_reason) == (s.tokens, "length")
    assert (len(r.ticks), r.ticks[0][1], r.ticks[-1][1]) == (s.chunks, 1, s.tokens)
    assert (len(r.output_ids or ()), r.cached_tokens) == (s.tokens, 3 if s.path == "sglang_auto.sse" else 0)
    if s.steps is None:
        assert (r.verify_ct, r.correct_drafts, r.proposed_drafts, r.drafts_histogram) == (None,) * 4
        return
    assert (r.verify_ct, r.correct_drafts) == s.steps
    assert sum(r.drafts_histogram or ()) == r.verify_ct
    assert accept_length([s.steps[::-1]]) == s.accept_length
    # The server's own ratio holds the prefill's token: 32 of 31 steps, where no draft was accepted.
    assert s.tokens <= 1 + sum(s.steps) < s.tokens + 16


@pytest.mark.parametrize("s", STREAMS, ids=lambda s: s.path)
def test_rates_are_of_ticks_whatever_the_server_says(s: Stream) -> None:
    """`decode_throughput` of one of these is 197 tokens/s, of a whole answer 11.7 million."""
    r = replay(s.path, s.tokens, step=0.5)
    seconds = 0.5 * (s.chunks - 1)
    assert decode_tok_s(r.ticks) == pytest.approx((s.tokens - 1) / seconds)
    assert tpot_s(r.ticks) == pytest.approx(seconds / (s.tokens - 1))
    assert decode_tok_s(r.ticks) != pytest.approx(r.server_times.get("decode_throughput", 0.0))


def test_nothing_reads_the_servers_own_times() -> None:
    package = Path(benchlib.__file__).parent
    readers = {
        path.name for path in package.glob("*.py") if re.search("server_times|decode_throughput", path.read_text())
    }
    assert readers == {"record.py", "stream.py"}  # which keep them


@pytest.mark.parametrize("name", SERVERS)
def test_servers(name: str) -> None:
    info, plan = server_info(name), RunSpec.from_parameters(SERVERS[name])
    check_server_info(plan, info)
    width = plan.block_size if plan.method == "linear" else None
    record = _with_info(ServerRecord(url="http://127.0.0.1:1"), info)
    assert (record.verify_tokens, verify_tokens(info)) == (width, width)
    assert record.version == info["version"]
    assert record.effective_max_running_requests == info["internal_states"][0]["effective_max_running_requests_per_dp"]
    hidden = set(info) - set(record.info)
    assert hidden == {key for key in info if SECRET.search(key)}
    assert {"api_key", "admin_api_key", "ssl_keyfile_password"} <= hidden
    assert {"max_total_tokens", "tokenizer_path", "skip_tokenizer_init"} & set(info) <= set(record.info)
    assert not [key for key in hidden if re.search("page|graph|attention|speculative", key)]


def test_a_server_may_run_fewer_requests_than_it_was_asked_to() -> None:
    limits = {name: _with_info(ServerRecord(url="u"), server_info(name)) for name in ("big", "big_dflash")}
    assert [server_info(name)["max_running_requests"] for name in limits] == [16, 16]
    assert [record.effective_max_running_requests for record in limits.values()] == [16, 8]


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("big", {"method": "linear"}, "speculative_algorithm is None, planned 'DFLASH'"),
        ("big_dflash", {}, "speculative_algorithm is 'DFLASH', planned None"),
        (
            "big_dflash",
            {"method": "ddtree", "tree_budget": 15},
            "speculative_ddtree_budget is not reported, planned 15",
        ),
        ("small_dflash", {"method": "linear"}, "speculative_num_draft_tokens is 8, planned 16"),
        ("tp2", {"tp_size": 4}, "tp_size is 2, planned 4"),
        ("cpu", {"model_path": "m"}, "model_path is 'tiny', planned 'm'"),
    ],
)
def test_servers_of_another_plan(name: str, parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ServerError) as caught:
        check_server_info(RunSpec.from_parameters(parameters), server_info(name))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad", "Either text, input_ids or input_embeds should be provided."),
        ("logprob", "DFLASH speculative decoding does not support return_logprob yet."),
        ("toolong", "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    ],
)
def test_refusals(name: str, reason: str) -> None:
    body = (DATA / "sglang" / f"generate_{name}.json").read_bytes()
    assert read_reason(body) == reason
    place = {"prompt": "p", "max_new_tokens": 8, "concurrency": 1, "round": 0}
    answer = Exchange(0.0, [(0.1, b"HTTP/1.1 400 Bad Request\r\n\r\n" + body)])
    r = request_record(answer, epoch=0.0, ignore_eos=True, **place)
    assert (r.error, r.ticks, r.completion_tokens) == (f"HTTP 400: {reason}", (), None)
