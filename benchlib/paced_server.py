"""A streaming server whose schedule is known, so that a client's error can be told from a server's.

It speaks SGLang's `/generate` and OpenAI's `/v1/completions`, generates nothing, and writes ready-made bytes: of N
tokens, K a chunk, the first chunk is due `ttft_ms` after the request was read, the last (ceil(N/K) - 1) * `interval_ms`
later. `GET /lateness` says how late it was itself: milliseconds from due to written, over the chunks since last asked.

    python -m benchlib.paced_server --port 0 --ttft-ms 20 --interval-ms 10 --tokens-per-chunk 4

prints its address. A request may bring its own schedule: `{"paced": {"interval_ms": 5}, ...}`. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import gc
import json
import re
import select
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from benchlib.errors import ServerError

__all__ = ["Schedule", "run_paced_server"]

HOST = "127.0.0.1"
MAX_TOKENS = 4096  # /generate repeats the whole text in each chunk: the ready-made bytes grow with the square
PR_SET_TIMERSLACK = 29  # prctl(2)
SEND_BUFFER = 2**21  # a client that leaves this much unread, or what the system allows, is cut off
READ_EVERY = 16  # chunks written before new requests are looked for, whose time runs from their reading
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Paced-Read: %.6f\r\n\r\n"
GENERATE, COMPLETIONS = "/generate", "/v1/completions"
PAGES: dict[str, Any] = {"/v1/models": {"data": [{"id": "paced", "object": "model"}]}, "/health": {"status": "ok"}}
SGLANG_PAGES = {page: {"model_path": "paced", "is_generation": True} for page in ("/server_info", "/model_info")}


@dataclass(frozen=True, slots=True)
class Schedule:
    """When chunks are due, milliseconds: the first after its request was read, each further one after the last."""

    ttft_ms: float = 20.0
    interval_ms: float = 10.0
    tokens_per_chunk: int = 1


@functools.lru_cache(maxsize=64)
def _parts(path: str, tokens: int, per_chunk: int, usage: str) -> tuple[bytes, ...]:
    """Ready-made chunks; as in SGLang, counts are cumulative, and in `/generate` the text is, too."""
    parts = []
    for step, count in enumerate([*range(per_chunk, tokens, per_chunk), tokens], 1):
        last = count == tokens
        if path == GENERATE:
            reason = {"type": "length", "length": tokens} if last else None
            meta: dict[str, Any] = {"id": "x", "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": count}
            if per_chunk > 1:  # each chunk stands for one verify step
                meta |= {"spec_verify_ct": step, "spec_num_correct_drafts": count - step}
            event: dict[str, Any] = {"text": " token" * count, "output_ids": [], "meta_info": meta}
        else:
            text = " token" * (count - (step - 1) * per_chunk)
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length" if last else None}
            event = {"id": "x", "object": "text_completion", "model": "paced", "choices": [choice]}
            event |= _usage(count) if usage == "each" else {}
        parts.append(_chunk(event))
    parts[-1] += b"" if usage == "none" or path == GENERATE else _chunk({"id": "x", "choices": [], **_usage(tokens)})
    return (*parts[:-1], parts[-1] + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _usage(count: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}}


def _chunk(event: dict[str, Any]) -> bytes:
    data = f"data: {json.dumps(event)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(slots=True)
class _Peer:
    """A connection: what it sent, and the reply that is under way."""

    sock: socket.socket
    received: bytes = b""
    close: bool = False  # after the reply, as asked
    parts: tuple[bytes, ...] = ()
    step: int = 0
    ttft: float = 0.0
    interval: float = 0.0


class _PacedServer:
    def __init__(self, port: int, schedule: Schedule, *, only_openai: bool, until_eof: bool) -> None:
        self._schedule, self._pages = schedule, PAGES if only_openai else PAGES | SGLANG_PAGES
        self._listener = socket.create_server((HOST, port), backlog=4096)
        self.address = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._poll, self._open = select.epoll(), True
        self._poll.register(self._listener, select.EPOLLIN)
        if until_eof:
            self._poll.register(sys.stdin, select.EPOLLIN)
        self._peers: dict[int, _Peer] = {}
        # By delay: what waits equally long falls due in the order it came, so no heap is needed.
        self._lines: defaultdict[float, deque[tuple[float, _Peer]]] = defaultdict(deque)
        self._late: dict[str, list[float]] = {"all": [], "first": [], "last": []}  # seconds

    def run(self) -> None:
        gc.disable()  # a collection is a pause, and nothing here needs one
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # nanoseconds; 50 us unless asked
        while self._open:
            self._read()
            self._write(until=time.perf_counter())
            heads = [line[0][0] for line in self._lines.values() if line]
            wait = min(heads) - time.perf_counter() if heads else None
            if wait is None or wait > 0:
                select.select([self._poll], [], [], wait)  # epoll's own timeout counts whole milliseconds

    def _write(self, *, until: float) -> None:
        """Write what was due by `until`: not by now, so that a server that cannot keep pace still reads."""
        written, clock, late = 0, time.perf_counter, self._late
        for line in list(self._lines.values()):
            while line and line[0][0] <= until:
                at, peer = line.popleft()
                step, parts = peer.step, peer.parts
                peer.step = step + 1
                if step:
                    late["all"].append(clock() - at)
                if step == 1:
                    late["first"].append(late["all"][-1])
                self._send(peer, parts[step - 1] if step else HEAD % at)
                if step == len(parts):
                    late["last"].append(late["all"][-1])
                if step < len(parts) and peer.sock.fileno() >= 0:
                    delay = peer.interval if step else peer.ttft
                    self._lines[delay].append((at + delay, peer))
                else:
                    peer.parts = ()
                    if peer.close:
                        self._close(peer)
                written += 1
                if not written % READ_EVERY:
                    self._read()

    def _send(self, peer: _Peer, data: bytes) -> None:
        try:
            if peer.sock.send(data) == len(data):
                return
        except OSError:  # gone, or its buffer is full
            pass
        self._close(peer)

    def _close(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock.fileno(), None):
            peer.sock.close()

    def _read(self) -> None:
        for fd, _ in self._poll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif peer := self._peers.get(fd):
                self._receive(peer)
            elif fd == sys.stdin.fileno():
                self._open = False  # it has ended

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._peers[sock.fileno()] = _Peer(sock)
        self._poll.register(sock, select.EPOLLIN)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(peer)
            return
        now = time.perf_counter()
        peer.received += data
        head, separator, rest = peer.received.partition(b"\r\n\r\n")
        length = int(found[1]) if (found := LENGTH.search(head)) else 0
        if separator and len(rest) >= length:
            peer.received, peer.close = rest[length:], b"\r\nconnection: close" in head.lower()
            self._answer(peer, head.decode(errors="replace"), rest[:length], now)
            if peer.close and not peer.parts:
                self._close(peer)

    def _answer(self, peer: _Peer, head: str, body: bytes, now: float) -> None:
        method, path, *_ = [*head.split(" ", 2), ""]
        status, page = "200 OK", self._pages.get(path)
        if method == "POST" and path in (GENERATE, COMPLETIONS):
            try:
                self._begin(peer, path, json.loads(body), now)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                status, page = "400 Bad Request", {"error": {"message": f"cannot be paced: {error!r}"}}
        elif path == "/lateness":
            page = _told(self._late)
            for values in self._late.values():
                values.clear()
        elif page is None:
            status, page = "404 Not Found", {"detail": "Not Found"}
        if page is not None:
            text = json.dumps(page)
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            self._send(peer, (head + text).encode())

    def _begin(self, peer: _Peer, path: str, body: dict[str, Any], now: float) -> None:
        options = body.get("stream_options") or {}
        usage = "each" if options.get("continuous_usage_stats") else "last" if options.get("include_usage") else "none"
        tokens = body["sampling_params"]["max_new_tokens"] if path == GENERATE else body["max_tokens"]
        if not body.get("stream") or not 1 <= tokens <= MAX_TOKENS or peer.parts:
            raise ValueError(f"only streams of 1 to {MAX_TOKENS} tokens, one at a time")
        paced = dataclasses.replace(self._schedule, **body.get("paced", {}))
        peer.parts, peer.step = _parts(path, tokens, paced.tokens_per_chunk, usage), 0
        peer.ttft, peer.interval = paced.ttft_ms / 1000, paced.interval_ms / 1000
        # The head is due at once, but after every request that waits has been read.
        self._lines[0.0].append((now, peer))


def _told(late: dict[str, list[float]]) -> dict[str, float | None]:
    def at(name: str, share: float) -> float | None:
        values = sorted(late[name])
        return 1000 * values[round(share * (len(values) - 1))] if values else None

    told = {"p50_ms": at("all", 0.5), "p99_ms": at("all", 0.99), "max_ms": at("all", 1.0)}
    return {"chunks": len(late["all"]), **told, "first_p50_ms": at("first", 0.5), "last_p50_ms": at("last", 0.5)}


@contextmanager
def run_paced_server(schedule: Schedule | None = None, *flags: str) -> Iterator[str]:
    """Address of a paced server in a process of its own, which ends with the block and with this process."""
    given = [f"--{key.replace('_', '-')}={value}" for key, value in dataclasses.asdict(schedule or Schedule()).items()]
    command = [sys.executable, "-m", "benchlib.paced_server", "--until-eof", *given, *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not (address := process.stdout.readline().strip()):
            raise ServerError(f"the paced server did not start: {' '.join(command)} ended with code {process.wait()}")
        try:
            yield address
        finally:
            process.communicate(timeout=10)  # closes its standard input


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchlib.paced_server", description="stream on a known schedule")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    for field in dataclasses.fields(Schedule):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, help="%(default)s")
    parser.add_argument("--only-openai", action="store_true", help="do not show SGLang's pages")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does")
    given = parser.parse_args()
    schedule = Schedule(given.ttft_ms, given.interval_ms, given.tokens_per_chunk)
    server = _PacedServer(given.port, schedule, only_openai=given.only_openai, until_eof=given.until_eof)
    print(server.address, flush=True)  # noqa: T201
    with suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
