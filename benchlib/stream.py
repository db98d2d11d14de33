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

__all__ = ["Exchange", "Reply", "read_exchange", "read_reason", "request_record"]

# Numbers of meta_info that are kept as the server's own view of time; no rate is computed from them.
SERVER_TIME_SUFFIXES = ("_time", "_latency", "_ts", "_s", "_throughput")


@dataclass(slots=True)
class Exchange:
    """What one request left on the wire: `pieces` are (seconds on this process's clock, bytes), as they came."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An exchange read: the events' ticks, the last event and what went wrong."""

    ticks: tuple[Tick, ...]
    end_s: float | None
    meta: dict[str, Any]
    output_ids: tuple[int, ...] | None
    error: str | None


def read_exchange(exchange: Exchange) -> Reply:
    """Read the bytes of an exchange: HTTP head, body, SSE events, ticks. Never raises for what a server sent."""
    head, body = _split_head(exchange.pieces)
    if head is None:
        return Reply((), None, {}, None, exchange.failure or "connection closed without a response")
    status = _status(head)
    pieces = list(_body_pieces(head, body))
    if status != 200:
        reason = read_reason(b"".join(data for _, data in pieces))
        return Reply((), None, {}, None, f"HTTP {status}: {reason}")
    events = list(_events(pieces))
    ticks, error = _ticks((stamp - exchange.sent, event) for stamp, event in events)
    meta = _meta(events[-1][1]) if events else {}
    error = exchange.failure or error or _unfinished(meta)
    ended = error is None and exchange.pieces
    return Reply(
        ticks=ticks,
        end_s=exchange.pieces[-1][0] - exchange.sent if ended else None,
        meta=meta,
        output_ids=_output_ids([event for _, event in events]),
        error=f"{error}; {ticks[-1][1] if ticks else 0} tokens came" if error else None,
    )


def _split_head(
    pieces: Sequence[tuple[float, bytes]],
) -> tuple[bytes | None, Iterable[tuple[float, bytes]]]:
    seen = b""
    for index, (stamp, data) in enumerate(pieces):
        seen += data
        head, separator, rest = seen.partition(b"\r\n\r\n")
        if separator:
            return head, [(stamp, rest), *pieces[index + 1 :]]
    return None, []


def _status(head: bytes) -> int:
    words = head.split(b"\r\n", 1)[0].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _body_pieces(head: bytes, pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    chunked = b"transfer-encoding: chunked" in head.lower()
    if not chunked:
        yield from pieces
        return
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


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
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


def _meta(event: dict[str, Any]) -> dict[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _ticks(events: Iterable[tuple[float, dict[str, Any]]]) -> tuple[tuple[Tick, ...], str | None]:
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


def _output_ids(events: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
    """All output ids, whether the chunks were cumulative or (`--incremental-streaming-output`) deltas."""
    parts = [event["output_ids"] for event in events if isinstance(event.get("output_ids"), list)]
    total = _meta(events[-1]).get("completion_tokens") if events else None
    if not parts:
        return None
    if len(parts[-1]) == total:
        return tuple(parts[-1])
    joined = tuple(token for part in parts for token in part)
    return joined if len(joined) == total else None


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


def request_record(exchange: Exchange, *, epoch: float, ignore_eos: bool, **place: Any) -> RequestRecord:
    """The record of a read exchange; `place` are the fields that say which request it was, `epoch` the run's zero."""
    reply = read_exchange(exchange)
    meta = reply.meta
    tokens = meta.get("completion_tokens")
    asked = place["max_new_tokens"]
    error = reply.error
    if error is None and not tokens:
        error = "finished without a token"
    if error is None and ignore_eos and tokens < asked:
        error = f"{tokens} of {asked} tokens came though ignore_eos was set"
    histogram = meta.get("spec_correct_drafts_histogram")
    reason = meta.get("finish_reason")
    return RequestRecord(
        **place,
        sent_s=exchange.sent - epoch,
        ticks=reply.ticks,
        end_s=reply.end_s,
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=tokens,
        cached_tokens=meta.get("cached_tokens"),
        finish_reason=reason.get("type") if isinstance(reason, dict) else reason,
        verify_ct=meta.get("spec_verify_ct"),
        correct_drafts=meta.get("spec_num_correct_drafts"),
        proposed_drafts=meta.get("spec_num_proposed_drafts"),
        drafts_histogram=tuple(histogram) if histogram else None,
        output_ids=reply.output_ids,
        server_times={
            key: float(value)
            for key, value in meta.items()
            if key.endswith(SERVER_TIME_SUFFIXES) and isinstance(value, int | float)
        },
        error=error,
    )
