"""A stand-in for a server with SGLang's surface, and with the faults that a real one shows on a bad day.

Standard library only; started like an engine, `fake-python -m MODULE FLAGS`, by the script that conftest writes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="good")
    parser.add_argument("--chunk", type=int, default=1, help="tokens a chunk")
    parser.add_argument("--pause", type=float, default=0.001, help="seconds between chunks")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--model-path", default="", help=argparse.SUPPRESS)
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--speculative-algorithm", default=None)
    parser.add_argument("--speculative-num-draft-tokens", type=int, default=None)
    parser.add_argument("--speculative-ddtree-budget", type=int, default=None)
    return parser.parse_known_args(argv)[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    generated = 0

    def do_GET(self) -> None:
        o = self.options
        if self.path == "/ready":
            self.answer(404 if o.mode == "old" else 503 if o.mode == "never-ready" else 200, b"")
        elif self.path == "/model_info":
            self.answer(200, b"{}")
        elif self.path == "/server_info":
            self.answer(200, json.dumps(self.info()).encode())
        elif self.path in ("/text", "/list"):
            self.answer(200, b"text" if self.path == "/text" else b"[1]")
        else:
            self.answer(404, b'{"detail":"Not Found"}')

    def info(self) -> dict[str, Any]:
        o = self.options
        return {
            "version": "fake 1",
            "tp_size": o.tp_size,
            "model_path": o.model_path,
            "vocab_size": 512,
            "api_key": "sesame",
            "max_total_tokens": 4096,
            "log_file": f"{os.getcwd()}/x.log",
            "speculative_algorithm": o.speculative_algorithm,
            "speculative_num_draft_tokens": o.speculative_num_draft_tokens,
            "speculative_ddtree_budget": o.speculative_ddtree_budget,
            "internal_states": [{"effective_max_running_requests_per_dp": o.max_running_requests}],
        }

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/flush_cache":
            self.answer(
                {"unflushable": 400, "no-flush": 404}.get(self.options.mode, 200),
                b"Cache flushed.\n",
            )
            return
        asked = json.loads(body)
        Handler.generated += 1
        if asked["sampling_params"]["max_new_tokens"] > 1:  # not the canary
            self.fault()
        elif self.options.mode == "die-at-canary":
            os._exit(3)
        self.stream(asked)

    def fault(self) -> None:
        mode = self.options.mode
        if mode == "http400":
            self.answer(400, b'{"error":{"message":"The input is longer than the context."}}')
        elif mode == "die-at-request" or (mode == "die-later" and Handler.generated > 4):
            say("CUDA error: out of memory")
            os._exit(9)
        elif mode == "stall":
            time.sleep(3600)
        else:
            return
        raise ConnectionAbortedError

    def stream(self, asked: dict[str, Any]) -> None:
        if not asked.get("stream"):
            return self.whole(asked["sampling_params"]["max_new_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        o, total = self.options, asked["sampling_params"]["max_new_tokens"]
        if o.mode == "short" and total > 1:
            total //= 2
        sent, steps = 0, 0
        while sent < total:
            time.sleep(o.pause)
            before, sent = sent, min(total, sent + (o.chunk if sent else 1))
            steps += 1 if before else 0
            self.event(self.chunk(before, sent, total, steps))
            if o.mode == "cut" and sent > total // 2 and total > 1:
                raise ConnectionAbortedError
        self.wfile.write(b"E\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self.close_connection = True

    def whole(self, total: int) -> None:
        """An answer in one piece, each token a clear choice before the next one."""
        reply = self.chunk(0, total, total, 1)
        reply["meta_info"]["output_top_logprobs"] = [
            [[-0.1 - 4.0 * rank, i + rank, None] for rank in range(5)] for i in range(total)
        ]
        self.answer(200, json.dumps(reply).encode())

    def chunk(self, before: int, sent: int, total: int, steps: int) -> dict[str, Any]:
        o = self.options
        meta: dict[str, Any] = {
            "prompt_tokens": 7,
            "completion_tokens": sent,
            "cached_tokens": 5 if o.mode == "cached" else 0,
            "finish_reason": {"type": "length", "length": total} if sent >= total else None,
        }
        if sent >= total and o.speculative_algorithm and steps:
            width = o.speculative_ddtree_budget or o.speculative_num_draft_tokens - 1
            meta |= {
                "spec_verify_ct": steps,
                "spec_num_correct_drafts": total - 1 - steps,
                "spec_num_proposed_drafts": steps * width,
                "spec_correct_drafts_histogram": [0] * (o.chunk - 1) + [steps],
                "e2e_latency": 0.5,
            }
        first = before if o.mode == "incremental" else 0
        return {"text": "x" * sent, "output_ids": list(range(first, sent)), "meta_info": meta}

    def event(self, value: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        pass


def make_server(options: argparse.Namespace) -> FakeServer:
    handler = type("BoundHandler", (Handler,), {"options": options})
    return FakeServer(("127.0.0.1", options.port or 0), handler)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    options = parse(argv)
    say(f"fake server, mode {options.mode}, variable {os.environ.get('FAKE_VARIABLE')}")
    if options.mode == "die":
        say("RuntimeError: the weights are nowhere")
        sys.exit(7)
    if options.mode == "hang":
        time.sleep(3600)
    if options.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.mode == "children":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True)
    make_server(options).serve_forever()


def serve_in_thread(*argv: str) -> FakeServer:
    """In this process, for tests of the client: the caller shuts it down and closes it."""
    server = make_server(parse(list(argv)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


if __name__ == "__main__":
    main(sys.argv[1:])
