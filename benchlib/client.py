"""One streamed request, from the first byte sent to the last byte received.

Under speculation a chunk carries several tokens, so chunks say nothing: tokens are counted by the server's own
cumulative `meta_info.completion_tokens`, and time by this process's clock. The clock is the product here. While a
request runs, the client keeps `(time.perf_counter(), bytes)` and does nothing else; HTTP, SSE and JSON are read by
`stream` after every request of the round has ended.

A failed request is a measurement too: what went wrong goes to `RequestRecord.error`, beside the ticks that came.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from benchlib.errors import RequestError
from benchlib.stream import Exchange, read_reason

__all__ = ["call", "generate_round", "get_json", "run_async"]

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0


def split_url(url: str) -> tuple[str, int, str]:
    """Host, port and path prefix of an http URL; RequestError for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise RequestError(f"{url!r} is not an http:// URL with a host: servers are measured over plain HTTP")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/")


def call(url: str, method: str = "GET", *, body: object = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """One plain request to a server's control surface: (status, body). RequestError when no answer comes.

    Proxy variables are ignored on purpose: a server under test is never behind one.
    """
    host, port, path = split_url(url)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        data = None if body is None else orjson.dumps(body)
        connection.request(method, path or "/", body=data, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{method} {url}: no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()


def get_json(url: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """The JSON object at `url`; RequestError for a status other than 200 or a body that is not an object."""
    status, body = call(url, timeout_s=timeout_s)
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
    """Collects stamped bytes; looks into them only as far as needed to see the response's end."""

    def __init__(self, exchange: Exchange, done: asyncio.Future[None]) -> None:
        self.exchange = exchange
        self.done = done
        self.transport: asyncio.Transport | None = None
        self._received = 0
        self._expected: int | None = None  # header + content-length, when the server gives one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without the base class.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.exchange.pieces.append((time.perf_counter(), data))
        if not self._received:
            self._expected = _content_end(data)
        self._received += len(data)
        whole = self._expected is not None and self._received >= self._expected
        if whole or data.endswith(b"0\r\n\r\n"):
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        # Also after a clean end: whether the stream was whole is decided when it is read.
        self._finish(f"connection lost: {error}" if error else None)

    def _finish(self, failure: str | None) -> None:
        if not self.done.done():
            self.exchange.failure = failure
            self.done.set_result(None)


def _content_end(data: bytes) -> int | None:
    head, separator, _ = data.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if separator and name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(head) + 4 + int(value)
    return None


async def generate_round(url: str, bodies: Sequence[dict[str, Any]], *, timeout_s: float) -> list[Exchange]:
    """Send every body to `/generate` at once, all connections being open before the first is written."""
    host, port, path = split_url(url)
    opened = await asyncio.gather(*(_open(host, port) for _ in bodies))
    messages = [_message(host, port, f"{path}/generate", body) for body in bodies]
    for stream, message in zip(opened, messages, strict=True):
        stream.exchange.sent = time.perf_counter()
        if stream.transport is not None:
            stream.transport.write(message)
    await asyncio.gather(*(_ended(stream, timeout_s) for stream in opened))
    return [stream.exchange for stream in opened]


async def _open(host: str, port: int) -> _Stream:
    loop = asyncio.get_running_loop()
    stream = _Stream(Exchange(sent=time.perf_counter()), loop.create_future())
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: stream, host, port)
    except (OSError, TimeoutError) as error:
        stream._finish(f"cannot connect to {host}:{port}: {error or 'timed out'}")
    return stream


async def _ended(stream: _Stream, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await stream.done
    except TimeoutError:
        stream.exchange.failure = f"no end after {timeout_s:g} s"
    finally:
        if stream.transport is not None:
            stream.transport.abort()


def _message(host: str, port: int, path: str, body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own, uvloop where installed; works inside a notebook, whose loop is busy.

    The loop lives in a thread because a notebook's kernel already runs one in this thread. An interrupt cancels it.
    """
    runner = asyncio.Runner(loop_factory=_loop_factory())
    loop = runner.get_loop()
    task = loop.create_task(work)

    def run() -> T:
        with runner:
            return runner.run(_await(task))

    executor = ThreadPoolExecutor(1, thread_name_prefix="benchlib-client")
    try:
        return executor.submit(run).result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        executor.shutdown(wait=False)


async def _await(task: asyncio.Task[T]) -> T:
    return await task


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
