"""The embedded engine's server: `python -m benchlib.reference_engine.server`, with SGLang's flags and HTTP surface.

The event loop reads requests and writes answers; the engine thread (`batching`) decodes. They share one interpreter,
so the loop's work a round is kept small: one wake-up, one serialisation and one write a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web

from benchlib.reference_engine.batching import Batcher, Job
from benchlib.reference_engine.decode import Decoder, Method, Request
from benchlib.reference_engine.loading import LoadError, ModelPlan, load_decoder, read_configs
from benchlib.reference_engine.model import TargetConfig
from benchlib.reference_engine.parallel import MirroredDecoder, Workers
from benchlib.reference_engine.planted import plant_fault
from benchlib.reference_engine.protocol import BadRequest, Reader, Stream, answer, error_body
from benchlib.reference_engine.tokenizer import Tokenizer

__all__ = ["Prepared", "build_parser", "main", "prepare", "serve"]

log = logging.getLogger("benchlib.engine")
WEIGHTS = Path(__file__).parent / "weights"
METHODS: dict[str | None, Method] = {None: "auto", "DFLASH": "linear", "DDTREE": "ddtree"}
MAX_BODY = 4 << 20
SHUTDOWN_S = 0.5
READY = "The server is fired up and ready to roll!"
METRICS = (
    ("prompt_tokens_total", "counter", "Number of prefill tokens processed."),
    ("generation_tokens_total", "counter", "Number of generation tokens processed."),
    ("spec_verify_calls_total", "counter", "Number of verify steps, summed over sequences."),
    ("spec_accept_length", "gauge", "Tokens a verify step since the last flush, bonus included."),
    ("gen_throughput", "gauge", "Generation throughput (token/s) over the last rounds."),
    ("num_running_reqs", "gauge", "Number of running requests."),
    ("num_queue_reqs", "gauge", "Number of requests in the waiting queue."),
)


# --- command line -------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """SGLang's flags, as far as they mean something here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchlib.reference_engine.server",
        description="Serve the embedded engine over SGLang's HTTP surface.",
        allow_abbrev=False,
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_server_flags(parser.add_argument_group("server"))
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-path", default=None, help="folder of the target, or one that holds target/ and drafter/ "
        "(default: the weights that ship with benchlib)")  # fmt: skip
    add("--served-model-name", default=None, help="name in /v1/models (default: the model path)")
    add("--context-length", type=int, default=None, help="longest sequence (default: the model's)")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add("--speculative-algorithm", choices=("DFLASH", "DDTREE"), default=None)
    add("--speculative-draft-model-path", default=None, help="folder of the drafter")
    add("--speculative-num-draft-tokens", type=int, default=None, help="block size, anchor included; the drafter's "
        "own is the only one possible")  # fmt: skip
    add("--speculative-ddtree-budget", type=int, default=None, help="nodes of the tree without its root "
        "(default: block size - 1)")  # fmt: skip


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tp-size",
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="processes the model is split over",
    )
    add("--threads", type=int, default=1, help="torch threads of each rank")
    add(
        "--disable-custom-all-reduce",
        action="store_true",
        help="sum over sockets (gloo) instead of shared memory",
    )
    add("--linear-backend", choices=("auto", "packed", "plain"), default="auto", help="packed: weights laid out once "
        "for oneDNN; auto: packed where this torch can")  # fmt: skip
    add(
        "--random-seed",
        type=int,
        default=0,
        help="seeds requests that bring no seed, and dummy weights",
    )
    add(
        "--max-running-requests",
        type=int,
        default=8,
        choices=range(1, 9),
        metavar="1..8",
        help="more wait",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 takes a free one")
    add("--enable-metrics", action="store_true", help="serve /metrics")
    add("--stream-interval", type=int, default=1, help="tokens a chunk, at least")
    add("--incremental-streaming-output", action="store_true", help="chunks carry only what is new")
    add("--skip-server-warmup", action="store_true", help="be ready without having generated")
    add(
        "--disable-radix-cache",
        action="store_true",
        help="accepted without effect: no prefix is ever reused",
    )
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="info")


def _plan(options: argparse.Namespace) -> ModelPlan:
    """What the flags ask for. LoadError when they cannot be had together."""
    for name in ("tp_size", "threads", "stream_interval"):
        if getattr(options, name) < 1:
            raise LoadError(f"--{name.replace('_', '-')} must be at least 1")
    if options.speculative_ddtree_budget is not None and options.speculative_algorithm != "DDTREE":
        raise LoadError("--speculative-ddtree-budget needs --speculative-algorithm DDTREE")
    if not options.speculative_algorithm:
        for name in ("speculative_draft_model_path", "speculative_num_draft_tokens"):
            if getattr(options, name) is not None:
                raise LoadError(f"--{name.replace('_', '-')} needs --speculative-algorithm")
    target, drafter = _folders(options)
    return ModelPlan(
        target=target,
        drafter=drafter,
        method=METHODS[options.speculative_algorithm],
        budget=options.speculative_ddtree_budget,
        block_size=options.speculative_num_draft_tokens,
        slots=options.max_running_requests,
        tp_size=options.tp_size,
        threads=options.threads,
        custom_all_reduce=not options.disable_custom_all_reduce,
        context_length=options.context_length,
        pack=options.linear_backend != "plain",
        dummy=options.load_format == "dummy",
        seed=options.random_seed,
    )


def _folders(options: argparse.Namespace) -> tuple[Path, Path | None]:
    """Folders of target and drafter, from SGLang's two flags or from one folder that holds both."""
    root = Path(options.model_path) if options.model_path else WEIGHTS
    pair = not options.model_path or (root / "target" / "config.json").is_file()
    own = root / "drafter" if pair else None
    given = options.speculative_draft_model_path
    return (root / "target" if pair else root), (Path(given) if given else own)


def _load_tokenizer(folder: Path, config: TargetConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        raise LoadError(f"cannot read the tokenizer in {folder}: {error}") from error
    if tokenizer.vocab_size < config.vocab_size:
        raise LoadError(f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model {config.vocab_size}")
    return tokenizer


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except (OSError, OverflowError) as error:
        known = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is in use" if known else str(error)
        raise LoadError(f"cannot listen on {host}:{port}: {reason}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that has its port and knows its model, before anything is loaded."""

    options: argparse.Namespace
    plan: ModelPlan
    config: TargetConfig
    tokenizer: Tokenizer
    listener: socket.socket
    fault: str | None = None  # planted, for a test of whoever should find it


def prepare(options: argparse.Namespace) -> Prepared:
    """Check all that can be checked without loading. LoadError with the reason."""
    plan = _plan(options)
    config, _ = read_configs(plan)
    tokenizer = _load_tokenizer(plan.target, config)
    if fault := plant_fault():
        log.warning("PLANTED FAULT %s: this server is wrong on purpose", fault)
    return Prepared(options, plan, config, tokenizer, _listen(options.host, options.port), fault)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM. 0: ended when asked; 1: could not start, or not go on; 2: wrong usage."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
    )
    torch.set_num_threads(options.threads)
    try:
        prepared = prepare(options)
    except LoadError as error:
        log.error("error: %s", error)
        return 1
    return asyncio.run(_serve_until_signal(prepared))


async def _serve_until_signal(prepared: Prepared) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return await serve(prepared, stopped)


async def serve(prepared: Prepared, stopped: asyncio.Event) -> int:
    """Run on this event loop until `stopped` or a failure; the exit code."""
    server = _Server(prepared, stopped)
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, prepared.listener).start()
        log.info("listening on %s:%d", *prepared.listener.getsockname()[:2])
        await server.run()
    finally:
        server.end()
        await runner.cleanup()
    return server.code


# --- the server ---------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals as JSON, like SGLang's."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _json(error_body(str(error)), 400)
    except web.HTTPException as error:
        return _json({"detail": error.reason}, error.status)


class _Server:
    """Routes, and what they share."""

    def __init__(self, prepared: Prepared, stopped: asyncio.Event) -> None:
        options, plan, config = prepared.options, prepared.plan, prepared.config
        self.options, self.plan, self.config = options, plan, config
        self.tokenizer = prepared.tokenizer
        self.fault = prepared.fault
        self.stopped = stopped
        self.code, self._why = 0, "the server is shutting down"
        self.model_path = options.model_path or str(WEIGHTS)
        self.name = options.served_model_name or self.model_path
        self.reader = Reader(
            self.tokenizer,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            algorithm=options.speculative_algorithm,
            seed=options.random_seed,
        )
        self._decoder: Decoder | None = None
        self._started = time.time()
        self._ready_s: float | None = None
        loop = asyncio.get_running_loop()
        self._workers = (
            Workers(plan, lambda message: _call_soon(loop, self._fail, message)) if plan.tp_size > 1 else None
        )
        self.batcher = Batcher(
            self._load,
            slots=plan.slots,
            threads=plan.threads,
            warm_up=not options.skip_server_warmup,
            on_ready=self._ready,
            on_failure=self._fail,
        )

    def _load(self) -> Decoder:
        begun = time.perf_counter()
        decoder = MirroredDecoder(self.plan, self._workers) if self._workers else load_decoder(self.plan)  # fmt: skip
        packed = decoder.target.head.packed is not None
        if self.options.linear_backend == "packed" and not packed:
            raise LoadError("--linear-backend packed: this torch cannot pack weights here")
        log.info(
            "Load weight end. elapsed=%.2f s, tp_size=%d, method=%s, verify_tokens=%d",
            time.perf_counter() - begun,
            self.plan.tp_size,
            self.plan.method,
            decoder.verify_tokens,
        )
        return decoder

    def _ready(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ready_s = time.time() - self._started
        log.info(READY)

    def _fail(self, message: str) -> None:
        if self.code == 0 and not self.stopped.is_set():
            log.error("error: %s", message)
            self.code, self._why = 1, message
            self.stopped.set()

    async def run(self) -> None:
        """Until a signal or a failure."""
        await self.stopped.wait()
        self.batcher.end_all(self._why)
        await asyncio.sleep(0)  # handlers say so to their clients

    def end(self) -> None:
        """Stop the engine and the ranks. A thread inside a collective or a load is left to the process's end."""
        self.batcher.stop(SHUTDOWN_S if self.code else 1.0)
        if self._workers:
            self._workers.close()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_as_json], client_max_size=MAX_BODY)
        get, post = app.router.add_get, app.router.add_post
        post("/generate", self.generate)
        post("/abort_request", self.abort_request)
        for path in ("/server_info", "/get_server_info"):
            get(path, self.server_info)
        for path in ("/model_info", "/get_model_info"):
            get(path, self.model_info)
        get("/v1/models", self.models)
        get("/ready", self.health)
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        get("/flush_cache", self.flush_cache)
        post("/flush_cache", self.flush_cache)
        if self.options.enable_metrics:
            get("/metrics", self.metrics)
        return app

    # --- generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self._decoder is None:
            return _json(error_body("The server is still loading."), 503)
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"The body is not JSON: {error}") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise BadRequest(f"The body is larger than {MAX_BODY} bytes.") from error
        asked = self.reader.read(body)
        for job in asked.jobs:
            self.batcher.submit(job)
        try:
            if asked.stream:
                return await self._stream(request, asked.jobs[0])
            for job in asked.jobs:
                while not job.done:
                    await job.wait()
        finally:
            for job in asked.jobs:  # no effect on those that are done
                self.batcher.abort(job, "the client went away")
        answers = [answer(job, self.tokenizer.stream(), self.tokenizer) for job in asked.jobs]
        return _json(answers if asked.batch else answers[0])

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(request)
        stream = Stream(job, self.tokenizer.stream(), incremental=self.options.incremental_streaming_output)
        interval = self.options.stream_interval
        try:
            while not job.done:
                await job.wait()
                if stream.due(interval):
                    await response.write(b"data: " + orjson.dumps(stream.event()) + b"\n\n")
            await response.write_eof(b"data: [DONE]\n\n")
        except ConnectionError:
            log.debug("request %s: the client went away", job.rid)
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"The body is not JSON: {error}") from error
        rid = body.get("rid") if isinstance(body, dict) else None
        every = isinstance(body, dict) and body.get("abort_all") is True
        if not every and not (isinstance(rid, str) and rid):
            raise BadRequest("rid must be a request's id, or abort_all true.")
        self.batcher.abort_all("Aborted by abort_request.", None if every else rid)
        return web.Response()

    async def health_generate(self, _: web.Request) -> web.Response:
        """One token through the queue: proves that the engine turns."""
        if self._decoder is None:
            return web.Response(status=503)
        job = Job(Request(input_ids=(0,), max_new_tokens=1, ignore_eos=True), rid="HEALTH_CHECK")
        self.batcher.submit(job)
        try:
            while not job.done:
                await job.wait()
        finally:
            self.batcher.abort(job, "the client went away")
        return web.Response(status=200 if job.output_ids else 503)

    # --- state

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._decoder is not None else 503)

    async def flush_cache(self, _: web.Request) -> web.Response:
        if self.batcher.busy:
            return web.Response(
                status=400,
                text="Cache not flushed: there are running or waiting requests.\n",
            )
        self.batcher.stats.flush()
        return web.Response(text="Cache flushed.\n")

    async def model_info(self, _: web.Request) -> web.Response:
        card = self.config.to_json()
        return _json(
            {
                "model_path": self.model_path,
                "served_model_name": self.name,
                "tokenizer_path": str(self.plan.target),
                "is_generation": True,
                "weight_version": "default",
                "load_format": self.options.load_format,
                "model_type": card["model_type"],
                "architectures": card["architectures"],
                "vocab_size": self.config.vocab_size,
                "context_length": self.config.max_position_embeddings,
            }
        )

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "benchlib",
            "root": self.name,
            "parent": None,
            "max_model_len": self.config.max_position_embeddings,
        }
        return _json({"object": "list", "data": [model]})

    async def server_info(self, _: web.Request) -> web.Response:
        planted = {"planted_fault": self.fault} if self.fault else {}
        return _json(self._arguments() | self._resolved() | planted | {"internal_states": [self._state()]})

    def _arguments(self) -> dict[str, Any]:
        names = (
            "host port tp_size random_seed max_running_requests speculative_algorithm load_format threads "
            "enable_metrics stream_interval incremental_streaming_output skip_server_warmup log_level "
            "disable_custom_all_reduce"
        )
        return {name: getattr(self.options, name) for name in names.split()}

    def _resolved(self) -> dict[str, Any]:
        """What the flags came to; what only the loaded model knows is null until then."""
        decoder = self._decoder
        tree = decoder is not None and decoder.method == "ddtree"
        drafter = decoder.drafter if decoder else None
        return {
            "model_path": self.model_path,
            "served_model_name": self.name,
            "tokenizer_path": str(self.plan.target),
            "context_length": self.config.max_position_embeddings,
            "vocab_size": self.config.vocab_size,
            "returns_draft_tree": drafter is not None,
            "speculative_draft_model_path": str(self.plan.drafter) if drafter else None,
            "speculative_num_draft_tokens": drafter.config.block_size if drafter else None,
            "speculative_ddtree_budget": decoder.budget if decoder and tree else None,
            "verify_tokens": decoder.verify_tokens if decoder else None,
            "linear_backend": _backend(decoder) if decoder else None,
            "disable_radix_cache": True,
            "device": "cpu",
            "dtype": "float32",
            "torch_version": torch.__version__,
            "engine": "benchlib.reference_engine",
            "version": importlib.metadata.version("benchlib"),
            "startup_time": self._ready_s,
        }

    def _state(self) -> dict[str, Any]:
        stats = self.batcher.stats
        state: dict[str, Any] = {
            "effective_max_running_requests_per_dp": self.plan.slots,
            "last_gen_throughput": stats.last_gen_throughput,
        }
        if self.plan.method != "auto":
            state["avg_spec_accept_length"] = stats.accept_length
        return state

    async def metrics(self, _: web.Request) -> web.Response:
        stats, batcher = self.batcher.stats, self.batcher
        values = {
            "prompt_tokens_total": stats.prompt_tokens,
            "generation_tokens_total": stats.generation_tokens,
            "spec_verify_calls_total": stats.verify_calls,
            "spec_accept_length": stats.accept_length,
            "gen_throughput": stats.last_gen_throughput if batcher.busy else 0.0,
            "num_running_reqs": batcher.running,
            "num_queue_reqs": batcher.queued,
        }
        label = self.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = []
        for name, kind, text in METRICS:
            value = values[name]
            if value is None or (name.startswith("spec_") and self.plan.method == "auto"):
                continue  # what was not measured is not zero
            lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]
            lines.append(f'sglang:{name}{{model_name="{label}"}} {float(value)}')
        return web.Response(
            body="\n".join([*lines, ""]).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _backend(decoder: Decoder) -> str:
    return "packed" if decoder.target.head.packed is not None else "plain"


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], message: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, message)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # nothing is left to tidy, and torch takes its time
