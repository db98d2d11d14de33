"""Continuous batching: one thread that owns the decoder, and the sequences it shares with the HTTP side.

The engine thread admits waiting sequences into free slots, one prefill at a time, then runs a round for all that are
live, and hands over what is new with one `call_soon_threadsafe` a round. A `Job` is written by one side at a time:
its first group of fields by the engine, its last by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from benchlib.reference_engine.decode import Decoder, Generation, Request
from benchlib.reference_engine.loading import LoadError
from benchlib.reference_engine.parallel import MirroredDecoder, WorkerError

__all__ = ["Batcher", "Job", "Stats"]

log = logging.getLogger("benchlib.engine")
LOG_INTERVAL = 40  # rounds, as SGLang's --decode-log-interval
WARM_UP = Request(input_ids=(1,) * 70, max_new_tokens=40, ignore_eos=True)
LogProb = tuple[float, int, None]


@dataclass(slots=True, eq=False)
class Job:
    """One sequence asked for, and how far it is. Clocks are `time.perf_counter`."""

    request: Request
    rid: str
    streamed: bool = False
    top_logprobs: int | None = None
    received: float = field(default_factory=time.perf_counter)
    # the engine's
    sequence: Generation | None = None
    admitted: float | None = None
    prefilled: float | None = None
    finished: float | None = None
    chosen_logprobs: list[LogProb] = field(default_factory=list)
    likeliest: list[list[LogProb]] = field(default_factory=list)
    counted: int = 0
    handed: int = 0
    # the event loop's
    aborted: str | None = None
    output_ids: list[int] = field(default_factory=list)
    done: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Until there are new tokens or the end."""
        await self.changed.wait()
        self.changed.clear()


@dataclass(slots=True)
class Stats:
    """Totals since the start, and accepted drafts since the last flush."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    verify_calls: int = 0
    flushed_verify: int = 0
    flushed_correct: int = 0
    last_gen_throughput: float = 0.0

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify step since the last flush, bonus included; None when there was no step."""
        return 1 + self.flushed_correct / self.flushed_verify if self.flushed_verify else None

    def flush(self) -> None:
        """Forget the averages; totals stay, as Prometheus wants them."""
        self.flushed_verify = self.flushed_correct = 0
        self.last_gen_throughput = 0.0


Update = tuple[Job, list[int], bool]


class Batcher:
    """The engine thread. Everything public may be called from the event loop."""

    def __init__(
        self,
        load: Callable[[], Decoder],
        *,
        slots: int,
        threads: int,
        warm_up: bool,
        on_ready: Callable[[Decoder], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.stats = Stats()
        self._load, self._threads, self._warm = load, threads, warm_up
        self._on_ready, self._on_failure = on_ready, on_failure
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._live: dict[int, Job] = {}
        self._free = list(range(slots))
        self._known: set[Job] = set()  # handed in and not yet let go by the engine
        self._stopping = False
        self._window = (0.0, 0, 0)  # (since, tokens then, rounds)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- the event loop's side

    @property
    def running(self) -> int:
        """Sequences in a slot."""
        return len(self._live)

    @property
    def queued(self) -> int:
        """Sequences without a slot yet."""
        return max(0, len(self._known) - len(self._live))

    @property
    def busy(self) -> bool:
        """Whether the engine still holds any sequence."""
        return bool(self._known)

    def submit(self, job: Job) -> None:
        """Queue a job; its `changed` is set whenever there is something new."""
        self._known.add(job)
        self._inbox.put(job)

    def abort(self, job: Job, reason: str) -> None:
        """Free the job's slot before the next round; no effect on one that is done."""
        if not job.done:
            job.aborted = reason

    def abort_all(self, reason: str, rid: str | None = None) -> None:
        """Abort every job, or those of one id."""
        for job in self._known:
            if rid is None or job.rid == rid:
                self.abort(job, reason)

    def end_all(self, reason: str) -> None:
        """Tell whoever waits for a job that it will not go on."""
        self.abort_all(reason)
        for job in self._known:
            job.done = True
            job.changed.set()

    def stop(self, patience_s: float) -> None:
        """End the thread after its current round."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(patience_s)

    def _deliver(self, updates: list[Update], gone: list[Job]) -> None:
        self._known.difference_update(gone)
        for job, tokens, done in updates:
            if job.done:
                continue
            job.output_ids += tokens
            job.done = done
            job.changed.set()

    # --- the engine's side

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                decoder = self._load()
                self._decoder = decoder
                if self._warm:
                    self._run_once(WARM_UP)
                decoder.record_logits = None
                self._loop.call_soon_threadsafe(self._on_ready, decoder)
                while self._admit():
                    self._round()
                if isinstance(decoder, MirroredDecoder):
                    decoder.close()
        except (LoadError, WorkerError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")

    def _fail(self, message: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_failure, message)

    def _run_once(self, request: Request) -> None:
        vocabulary = self._decoder.target.config.vocab_size
        context = self._decoder.target.context_length
        ids = tuple(i % vocabulary for i in request.input_ids)[: context // 2]
        longest = min(request.max_new_tokens, context - len(ids))
        sequence = self._decoder.prefill(Request(ids, longest, ignore_eos=True), 0)
        while sequence.finish_reason is None and not self._stopping:
            self._decoder.step([sequence])

    def _admit(self) -> bool:
        """Fill free slots; waits where there is nothing to do. False when it is time to stop."""
        self._receive(wait=not self._live and not self._waiting)
        self._drop_aborted()
        while self._waiting and self._free and not self._stopping:
            self._prefill(self._waiting.popleft())
            self._receive(wait=False)
            self._drop_aborted()
        return not self._stopping

    def _receive(self, wait: bool) -> None:
        try:
            while True:
                job = self._inbox.get(block=wait)
                if wait:
                    wait = False
                    self._window = (time.perf_counter(), self.stats.generation_tokens, 0)
                if job is not None:
                    self._waiting.append(job)
        except Empty:
            return

    def _drop_aborted(self) -> None:
        gone = [job for job in self._waiting if job.aborted is not None]
        if gone:
            self._waiting = deque(job for job in self._waiting if job.aborted is None)
            self._release(gone, [(job, [], True) for job in gone])

    def _prefill(self, job: Job) -> None:
        slot = self._free.pop(0)
        job.admitted = time.perf_counter()
        self._live[slot] = job
        self._record()
        job.sequence = self._decoder.prefill(job.request, slot)
        job.prefilled = time.perf_counter()
        self.stats.prompt_tokens += len(job.request.input_ids)
        self._hand_over([job])

    def _round(self) -> None:
        gone = [job for job in self._live.values() if job.aborted is not None]
        if gone:
            self._release(gone, [(job, [], True) for job in gone])
        # In order of slots, so that neighbours are views of the cache and not copies.
        jobs = [self._live[slot] for slot in sorted(self._live)]
        if not jobs:
            return
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        before = sum(s.correct_drafts for s in sequences)
        self._decoder.step(sequences)
        if self._decoder.method != "auto":
            self.stats.verify_calls += len(sequences)
            self.stats.flushed_verify += len(sequences)
            self.stats.flushed_correct += sum(s.correct_drafts for s in sequences) - before
        self._hand_over(jobs)
        self._measure()

    def _hand_over(self, jobs: list[Job]) -> None:
        """What is new since the last time: tokens of streams, ends of all."""
        updates: list[Update] = []
        done: list[Job] = []
        for job in jobs:
            assert job.sequence is not None
            ids = job.sequence.output_ids
            ended = job.sequence.finish_reason is not None
            self.stats.generation_tokens += len(ids) - job.counted
            job.counted = len(ids)
            if ended:
                job.finished = time.perf_counter()
                done.append(job)
            if ended or job.streamed:
                updates.append((job, ids[job.handed :], ended))
                job.handed = len(ids)
        if done:
            self._release(done, updates)
        elif updates:
            self._loop.call_soon_threadsafe(self._deliver, updates, done)

    def _release(self, jobs: list[Job], updates: list[Update]) -> None:
        for job in jobs:
            job.finished = job.finished or time.perf_counter()
            if job.sequence is not None:
                del self._live[job.sequence.slot]
                self._free.append(job.sequence.slot)
        self._free.sort()
        self._record()
        self._loop.call_soon_threadsafe(self._deliver, updates, jobs)

    def _record(self) -> None:
        wanted = any(job.top_logprobs is not None for job in self._live.values())
        self._decoder.record_logits = self._keep_logprobs if wanted else None

    def _keep_logprobs(self, sequence: Generation, logits: Tensor, picks: list[int]) -> None:
        """Of the distribution that was sampled from, as SGLang gives them: after the temperature."""
        job = self._live[sequence.slot]
        if job.top_logprobs is None:
            return
        logprobs = (logits[0] / (job.request.temperature or 1.0)).log_softmax(-1)
        job.chosen_logprobs.append((float(logprobs[picks[0]]), picks[0], None))
        top = logprobs.topk(min(job.top_logprobs, len(logprobs)))
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        job.likeliest.append([(value, token, None) for value, token in pairs])

    def _measure(self) -> None:
        since, tokens, rounds = self._window
        rounds += 1
        self._window = (since, tokens, rounds)
        if rounds < LOG_INTERVAL:
            return
        now, total = time.perf_counter(), self.stats.generation_tokens
        self.stats.last_gen_throughput = (total - tokens) / (now - since)
        self._window = (now, total, 0)
        length = self.stats.accept_length
        log.info(
            "Decode batch, #running-req: %d, %sgen throughput (token/s): %.2f, #queue-req: %d",
            len(self._live),
            "" if length is None else f"accept len: {length:.2f}, ",
            self.stats.last_gen_throughput,
            self.queued,
        )
