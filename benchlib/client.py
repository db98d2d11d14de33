"""One streamed request, from the first byte sent to the last byte received.

Under speculation a chunk carries several tokens, so chunks say nothing: tokens are counted by the server's own
cumulative `meta_info.completion_tokens`, and time by this process's clock. The clock is the product here. While a
request runs, the client keeps `(time.perf_counter(), bytes)` and does nothing else; HTTP, SSE and JSON are read by
`stream` after every request of the round has ended.

A failed request is a measurement too: what went wrong goes to `RequestRecord.error`, beside the ticks that came.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import math
import re
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from benchlib.errors import RequestError
from benchlib.stream import Exchange, Piece, read_reason

__all__ = ["call", "closed_loop", "generate_round", "get_json", "run_async"]

T = TypeVar("T")
S = TypeVar("S", bound="_Stream")
CONNECT_TIMEOUT_S = 10.0
LAST_CHUNK = b"\r\n0\r\n\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def _split_url(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise RequestError(f"{url!r} is no URL: {error}") from None
    if parts.scheme != "http" or not parts.hostname:
        raise RequestError(f"{url!r} is not an http:// URL with a host: servers are measured over plain HTTP")
    return parts.hostname, port, parts.path.rstrip("/")


def call(url: str, method: str = "GET", *, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """One plain request to a server's control surface: (status, body). RequestError when no answer comes.

    Proxy variables are ignored on purpose: a server under test is never behind one.
    """
    host, port, path = _split_url(url)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, path or "/")
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{method} {url}: no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()


def get_json(url: str) -> dict[str, Any]:
    """The JSON object at `url`; RequestError for a status other than 200 or a body that is not an object."""
    status, body = call(url)
    if status != 200:
        raise RequestError(f"GET {url}: HTTP {status}: {read_reason(body)}")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"GET {url}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"GET {url}: a JSON object was expected, got {type(value).__name__}")
    return value


class _Stream(asyncio.Protocol):
    """Collects stamped bytes until the server closes the connection, which `Connection: close` asks of it."""

    def __init__(self) -> None:
        self.exchange = Exchange(sent=time.perf_counter())
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without the base class.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.exchange.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        # Also after a clean end: whether the stream was whole is decided when it is read.
        self.finish(f"connection lost: {error}" if error else None)

    def finish(self, failure: str | None) -> None:
        if not self.done.done():
            self.exchange.failure = failure
            self.done.set_result(None)


async def generate_round(
    url: str, bodies: Sequence[dict[str, Any]], *, timeout_s: float, stall_s: float = math.inf
) -> list[Exchange]:
    """Send every body to `/generate` at once, all connections being open before the first is written.

    A request is given up `timeout_s` after it was sent, or when no byte arrived for `stall_s`.
    """
    host, port, path = _split_url(url)
    opened = await asyncio.gather(*(_open(_Stream(), host, port) for _ in bodies))
    messages = [_message(host, port, f"{path}/generate", body) for body in bodies]
    for stream, message in zip(opened, messages, strict=True):
        stream.exchange.sent = time.perf_counter()
        if stream.transport is not None:
            stream.transport.write(message)
    await asyncio.gather(*(_ended(stream, timeout_s, stall_s) for stream in opened))
    return [stream.exchange for stream in opened]


class _Worker(_Stream):
    """Sends the next of the shared messages as soon as a reply has ended: no task is woken in between."""

    def __init__(self, messages: deque[bytes], exchanges: list[Exchange]) -> None:
        super().__init__()
        self.messages, self.exchanges = messages, exchanges

    def send_next(self) -> None:
        if not self.messages:
            self.finish(None)
            return
        message = self.messages.popleft()
        # A connection that could not be opened fails its message; a reply that ended left no failure.
        self.exchange = Exchange(time.perf_counter(), failure=self.exchange.failure)
        self.exchanges.append(self.exchange)
        if self.transport is not None:
            self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        pieces = self.exchange.pieces
        pieces.append((time.perf_counter(), data))
        # Elsewhere a reply does not end, unless it is a short one of known length.
        if (data.endswith(LAST_CHUNK) or len(data) < 8 or len(pieces) < 4) and _is_whole(pieces):
            self.send_next()


def _is_whole(pieces: Sequence[Piece]) -> bool:
    """Whether a reply has ended and leaves its connection open for the next one."""
    head, separator, body = b"".join(data for _, data in pieces).partition(b"\r\n\r\n")
    if not separator or head.startswith(b"HTTP/1.0") or b"\r\nconnection: close" in head.lower():
        return False
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        return (b"\r\n" + body).endswith(LAST_CHUNK)
    found = LENGTH.search(head)
    return found is not None and len(body) >= int(found[1])


async def closed_loop(
    url: str, bodies: Sequence[dict[str, Any]], *, streams: int, timeout_s: float, stall_s: float = math.inf
) -> list[Exchange]:
    """POST every body to `url`, `streams` at any time, each connection's next one when its last has ended.

    In the order sent. Connections are open before the first is written, and used again where the server lets them.
    Given up as in `generate_round`.
    """
    host, port, path = _split_url(url)
    messages = deque(_message(host, port, path, body, "keep-alive") for body in bodies)
    exchanges: list[Exchange] = []

    async def work(worker: _Worker) -> None:
        while messages:
            worker.send_next()
            await _ended(worker, timeout_s, stall_s)
            worker = await _open(_Worker(messages, exchanges), host, port) if messages else worker

    opened = await asyncio.gather(*(_open(_Worker(messages, exchanges), host, port) for _ in range(streams)))
    await asyncio.gather(*map(work, opened))
    return exchanges


async def _open(stream: S, host: str, port: int) -> S:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(lambda: stream, host, port)
    except (OSError, TimeoutError) as error:
        stream.finish(f"cannot connect to {host}:{port}: {error or 'timed out'}")
    return stream


async def _ended(stream: _Stream, timeout_s: float, stall_s: float) -> None:
    """Wait for the end of a stream; give it up when it takes too long or nothing arrives for too long."""
    try:
        while not stream.done.done():
            pieces = stream.exchange.pieces  # of the present reply
            heard = pieces[-1][0] if pieces else stream.exchange.sent
            end, stall = stream.exchange.sent + timeout_s, heard + stall_s
            if (left := min(end, stall) - time.perf_counter()) > 0:
                await asyncio.wait([stream.done], timeout=left)
            else:
                stream.finish(
                    f"no end after {timeout_s:g} s" if end <= stall else f"no byte for {stall_s:g} s: it hangs"
                )
    finally:
        if stream.transport is not None:
            stream.transport.abort()


def _message(host: str, port: int, path: str, body: dict[str, Any], connection: str = "close") -> bytes:
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\nConnection: {connection}\r\n\r\n"
    )
    return head.encode() + data


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an uvloop of its own, in a thread: a notebook's kernel already runs a loop in this one."""
    import uvloop

    loop = uvloop.new_event_loop()
    task = loop.create_task(work)
    collecting = gc.isenabled()
    gc.disable()  # a collection is a pause, and a round's pieces would be looked through again and again
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="benchlib-client") as pool:
            try:
                return pool.submit(loop.run_until_complete, task).result()
            except KeyboardInterrupt:
                loop.call_soon_threadsafe(task.cancel)
                raise
    finally:
        loop.close()
        if collecting:
            gc.enable()
