"""What a request's bytes say: HTTP head, body, SSE events, ticks. Read after the request has ended.

Each event is stamped with the arrival of the bytes that completed it. Nothing a server sends raises here: what is wrong
becomes the record's `error`, beside the ticks that came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchlib.record import RequestRecord, Tick

__all__ = ["Exchange", "read_reason", "request_record", "split_response"]

# Numbers of meta_info that are kept as the server's own view of time; no rate is computed from them.
CLOCK_DIGITS = 9  # the clock counts nanoseconds; what a difference shows beyond is not time
SERVER_TIME_SUFFIXES = ("_time", "_latency", "_ts", "_s", "_throughput")
Piece = tuple[float, bytes]
Event = dict[str, Any]


@dataclass(slots=True)
class Exchange:
    """What one request left on the wire: `pieces` are (seconds on this process's clock, bytes), as they came."""

    sent: float
    pieces: list[Piece] = field(default_factory=list)
    failure: str | None = None


def request_record(exchange: Exchange, *, epoch: float, ignore_eos: bool, **place: Any) -> RequestRecord:
    """The record of an exchange; `place` are the fields that say which request it was, `epoch` the run's zero."""
    status, body = split_response(exchange.pieces)
    events = list(_events(body)) if status == 200 else []
    meta = _meta(events[-1][1]) if events else {}
    ticks, error = _ticks((round(stamp - exchange.sent, CLOCK_DIGITS), event) for stamp, event in events)
    end_s, tokens, asked = None, meta.get("completion_tokens"), place["max_new_tokens"]
    if status is None:
        error = exchange.failure or "connection closed without a response"
    elif status != 200:
        error = f"HTTP {status}: {read_reason(b''.join(data for _, data in body))}"
    elif error := exchange.failure or error or _unfinished(meta):
        error = f"{error}; {ticks[-1][1] if ticks else 0} tokens came"
    else:
        end_s = round(exchange.pieces[-1][0] - exchange.sent, CLOCK_DIGITS)
        if not tokens:
            error = "finished without a token"
        elif ignore_eos and tokens != asked:
            error = f"{tokens} of {asked} tokens came though ignore_eos was set"
    reason = meta.get("finish_reason")
    return RequestRecord(
        **place,
        sent_s=round(exchange.sent - epoch, CLOCK_DIGITS),
        ticks=ticks,
        end_s=end_s,
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=tokens,
        cached_tokens=meta.get("cached_tokens"),
        finish_reason=reason.get("type") if isinstance(reason, dict) else reason,
        verify_ct=meta.get("spec_verify_ct"),
        correct_drafts=meta.get("spec_num_correct_drafts"),
        proposed_drafts=meta.get("spec_num_proposed_drafts"),
        drafts_histogram=meta.get("spec_correct_drafts_histogram") or None,
        forecast_length=meta.get("spec_forecast_length"),
        output_ids=_output_ids([event for _, event in events], tokens),
        server_times={
            key: value
            for key, value in meta.items()
            if key.endswith(SERVER_TIME_SUFFIXES) and isinstance(value, int | float)
        },
        error=error,
    )


def split_response(pieces: Sequence[Piece]) -> tuple[int | None, list[Piece]]:
    """Status and body; None where not even the head came whole."""
    seen = b""
    for index, (stamp, data) in enumerate(pieces):
        seen += data
        head, separator, rest = seen.partition(b"\r\n\r\n")
        if separator:
            body = [(stamp, rest), *pieces[index + 1 :]]
            code = head[9:12]  # HTTP/1.1 200 OK
            chunked = b"transfer-encoding: chunked" in head.lower()
            return int(code) if code.isdigit() else 0, list(_unchunked(body)) if chunked else body
    return None, []


def _unchunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    buffer, left = b"", 0  # left: bytes of the current chunk and its CRLF still to come
    for stamp, data in pieces:
        buffer += data
        while buffer:
            if left:
                take, buffer = buffer[:left], buffer[left:]
                # The chunk's last two bytes are its CRLF, not body.
                yield stamp, take[: max(0, left - 2)]
                left -= len(take)
                continue
            line, separator, rest = buffer.partition(b"\r\n")
            if not separator:
                break
            size = line.partition(b";")[0].strip()
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                return  # not chunked after all: what came so far is all that can be trusted
            left, buffer = int(size, 16) + 2, rest


def _events(pieces: Iterable[Piece]) -> Iterator[tuple[float, Event]]:
    rest = b""
    for stamp, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or (payload := line[5:].strip()) == b"[DONE]":
                continue
            try:
                event = orjson.loads(payload)
            except orjson.JSONDecodeError:
                event = {"error": {"message": f"an event is not JSON: {payload[:80]!r}"}}
            yield stamp, event if isinstance(event, dict) else {}


def _meta(event: Event) -> dict[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _ticks(events: Iterable[tuple[float, Event]]) -> tuple[tuple[Tick, ...], str | None]:
    """A tick per event that brought tokens: a last event that only says "finished" would delay the last token."""
    ticks: list[Tick] = []
    count = 0
    for stamp, event in events:
        if "error" in event:
            return tuple(ticks), f"the server reported: {_message_of(event)}"
        tokens = _meta(event).get("completion_tokens")
        if not isinstance(tokens, int) or tokens == count:
            continue
        if tokens < count:
            return tuple(ticks), f"completion_tokens fell from {count} to {tokens}"
        ticks.append((stamp, tokens))
        count = tokens
    return tuple(ticks), None


def _unfinished(meta: dict[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    if not reason:
        return "the stream ended without finish_reason"
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return f"aborted by the server: {reason.get('message') or 'no reason given'}"
    return None


def _output_ids(events: Iterable[Event], total: int | None) -> tuple[int, ...] | None:
    """All output ids, whether the chunks were cumulative or (`--incremental-streaming-output`) deltas."""
    parts = [event["output_ids"] for event in events if isinstance(event.get("output_ids"), list)]
    for ids in (parts[-1] if parts else [], [token for part in parts for token in part]):
        if ids and len(ids) == total:
            return tuple(ids)
    return None


def read_reason(body: bytes) -> str:
    """What an error's body says, in SGLang's forms or as it is; at most 300 characters."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode(errors="replace").strip() or "no reason given"
    return _message_of(value) if isinstance(value, dict) else str(value)[:300]


def _message_of(value: dict[str, Any]) -> str:
    inner = value.get("error", value)
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner)[:300]
