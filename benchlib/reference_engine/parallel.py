"""Tensor parallel over processes: one thread and one `Decoder` a rank; sums through shared memory, or gloo.

Rank 0 lives in the server's process. Before each prefill and each round it tells the other ranks what to do with one
small broadcast of integers, and then all ranks run the same code on their shards. An all-reduced sum has the same bits
on every rank, so all ranks choose the same tokens and nothing else needs to be sent; each round's header carries rank
0's last tokens, so that a rank that ever disagreed would end the server instead of decoding nonsense.

The drafter is replicated. A rank that dies ends the server: a collective cannot go on without it.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from benchlib.reference_engine.decode import Decoder, Generation, Request
from benchlib.reference_engine.exchange import CAPACITY, Exchange, new_file, usable
from benchlib.reference_engine.loading import (
    LoadError,
    ModelPlan,
    build_decoder,
    load_models,
    tree_budget,
)
from benchlib.reference_engine.model import Shard
from benchlib.reference_engine.planted import plant_fault

__all__ = ["MirroredDecoder", "WorkerError", "Workers"]

log = logging.getLogger("benchlib.engine")
LOOPBACK = "127.0.0.1"
# An idle server's ranks wait in a broadcast: that is no fault, however long it lasts.
PATIENCE = timedelta(days=365)
JOIN_S = 1.0
PR_SET_PDEATHSIG = 1
PREFILL, STEP, STOP = 1, 2, 3
PREFILL_FIELDS = 8
DIVERGED = 3


class WorkerError(RuntimeError):
    """A tensor-parallel rank is gone."""


class _Group:
    """This process's place among the ranks: gloo for everything, or for what the shared memory cannot carry."""

    def __init__(self, store: Store, rank: int, plan: ModelPlan, lost: Callable[[], bool] = lambda: False) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        world = plan.tp_size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        group = dist.group.WORLD
        assert group is not None
        self._group = group
        self.rank, self.world = rank, world
        self._exchange: Exchange | None = None
        if plan.custom_all_reduce and usable():
            self._exchange = self._map_memory(store, lost)

    def _map_memory(self, store: Store, lost: Callable[[], bool]) -> Exchange:
        if self.rank == 0:
            store.set("memory", str(new_file(self.world)))
        path = Path(store.get("memory").decode())
        exchange = Exchange(path, self.rank, self.world, lost)
        self._group.allreduce([torch.ones(1)]).wait()
        if self.rank == 0:
            path.unlink()
        return exchange

    def shard(self) -> Shard:
        """This rank's part of the target."""
        return Shard(self.rank, self.world, self.all_reduce)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; the same bits on each."""
        if self._exchange is not None and x.numel() * x.element_size() <= CAPACITY:
            return self._exchange.all_reduce(x)
        self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values on every rank, in place."""
        if self._exchange is not None and x.numel() * x.element_size() <= CAPACITY:
            return self._exchange.broadcast(x)
        self._group.broadcast(x, 0).wait()
        return x

    def close(self) -> None:
        """Leave; the other ranks do the same."""
        dist.destroy_process_group()


class Workers:
    """The processes of ranks 1 and up. Start them from the main thread: they die with the thread that did."""

    def __init__(self, plan: ModelPlan, on_death: Callable[[str], None]) -> None:
        """`on_death` is called once, from a thread, when a rank ends although nobody asked it to."""
        self.world = plan.tp_size
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # A fork has torch loaded already, which takes seconds; it must come before this process has other threads.
        forked = sys.platform == "linux" and threading.active_count() == 1
        context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
        arguments = (port, os.getpid(), listener if forked else None)
        self.processes = [
            context.Process(target=_work, args=(plan, rank, *arguments), daemon=True) for rank in range(1, self.world)
        ]
        for process in self.processes:
            process.start()
        # The store listens on the socket that it is handed, so nothing is open beyond loopback.
        self.store = TCPStore(
            LOOPBACK, port, self.world, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._closing = False
        self._on_death = on_death
        threading.Thread(target=self._watch, name="tp-watch", daemon=True).start()

    def _watch(self) -> None:
        wait([process.sentinel for process in self.processes])
        if not self._closing and (message := self.death(JOIN_S)):
            self._on_death(message)

    def death(self, patience_s: float = 0.0) -> str | None:
        """What became of the first rank found dead; None while all live."""
        for rank, process in enumerate(self.processes, 1):
            process.join(patience_s)
            if process.exitcode is not None:
                why = ": it chose other tokens" if process.exitcode == DIVERGED else ""
                return (
                    f"tensor-parallel rank {rank} (process {process.pid}) ended with exit code {process.exitcode}{why}"
                )
        return None

    def close(self) -> None:
        """End the processes, by force where they do not end by themselves."""
        self._closing = True
        for process in self.processes:
            process.join(JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join(JOIN_S)


class MirroredDecoder(Decoder):
    """Rank 0's decoder: every call is announced to the other ranks, which make the same one."""

    def __init__(self, plan: ModelPlan, workers: Workers) -> None:
        """Join the ranks and load; the thread that does this is the one that decodes."""
        self.workers = workers
        self._group = _Group(workers.store, 0, plan, lambda: workers.death() is not None)
        target, drafter = load_models(plan, self._group.shard())
        budget = tree_budget(plan, drafter)
        super().__init__(target, drafter, method=plan.method, budget=budget, slots=plan.slots)
        self._header = _new_header(plan.slots)
        with self._guard():
            self._group.all_reduce(torch.ones(1))  # all have loaded

    def prefill(self, request: Request, slot: int) -> Generation:
        """As `Decoder.prefill`, on all ranks."""
        with self._guard():
            header, tokens = _pack_request(request, slot)
            self._announce(PREFILL, header)
            self._group.broadcast(tokens)
            return super().prefill(request, slot)

    def step(self, sequences: Sequence[Generation]) -> None:
        """As `Decoder.step`, on all ranks."""
        with self._guard():
            fields = [len(sequences)]
            for sequence in sequences:
                fields += _fingerprint(sequence)
            self._announce(STEP, fields)
            super().step(sequences)

    def close(self) -> None:
        """Let the other ranks go; nothing can be decoded afterwards."""
        if self.workers.death() is None:
            self._announce(STOP, [])
            self._group.close()
        self.workers.close()

    def _announce(self, command: int, fields: Sequence[int]) -> None:
        self._header[: len(fields) + 1] = torch.tensor([command, *fields])
        self._group.broadcast(self._header)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Say which rank died rather than what the transport noticed of it."""
        try:
            yield
        except RuntimeError as error:
            if message := self.workers.death(JOIN_S):
                raise WorkerError(message) from error
            raise


def _new_header(slots: int) -> Tensor:
    return torch.zeros(1 + max(PREFILL_FIELDS, 1 + 3 * slots), dtype=torch.int64)


def _fingerprint(sequence: Generation) -> tuple[int, int, int]:
    return sequence.slot, len(sequence.output_ids), sequence.root


def _pack_request(request: Request, slot: int) -> tuple[list[int], Tensor]:
    (temperature,) = struct.unpack("<q", struct.pack("<d", request.temperature))
    header = [
        slot,
        len(request.input_ids),
        len(request.stop_token_ids),
        request.max_new_tokens,
        int(request.ignore_eos),
        request.seed,
        temperature,
    ]
    return header, torch.tensor([*request.input_ids, *request.stop_token_ids], dtype=torch.int64)


def _unpack_request(fields: list[int], group: _Group) -> tuple[Request, int]:
    slot, prompt, stops, longest, ignore_eos, seed, bits = fields[: PREFILL_FIELDS - 1]
    tokens = group.broadcast(torch.zeros(prompt + stops, dtype=torch.int64)).tolist()
    (temperature,) = struct.unpack("<d", struct.pack("<q", bits))
    request = Request(
        input_ids=tuple(tokens[:prompt]),
        max_new_tokens=longest,
        temperature=temperature,
        ignore_eos=bool(ignore_eos),
        seed=seed,
        stop_token_ids=tuple(tokens[prompt:]),
    )
    return request, slot


def _work(plan: ModelPlan, rank: int, port: int, parent: int, listener: socket.socket | None) -> None:
    """Life of one rank beyond 0: join, load, follow."""
    _die_with(parent)
    if listener is not None:
        listener.close()  # rank 0's, inherited
    # Signals to the group are for rank 0, which then lets the others go.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(plan.threads)
    try:
        store = TCPStore(LOOPBACK, port, plan.tp_size, is_master=False)
        group = _Group(store, rank, plan)
        plant_fault()
        with torch.inference_mode():
            decoder = build_decoder(plan, group.shard())
            group.all_reduce(torch.ones(1))
            _follow(decoder, group, plan.slots)
        group.close()
        os._exit(0)  # nothing is left to tidy, and torch takes its time
    except (LoadError, RuntimeError) as error:
        sys.exit(f"tensor-parallel rank {rank}: {error}")


def _die_with(parent: int) -> None:
    """End when the parent ends, whatever ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server ended while a rank was starting")


def _follow(decoder: Decoder, group: _Group, slots: int) -> None:
    """Do what rank 0 announces until it says stop."""
    header = _new_header(slots)
    sequences: dict[int, Generation] = {}
    while True:
        command, *fields = group.broadcast(header).tolist()
        if command == STOP:
            return
        if command == PREFILL:
            request, slot = _unpack_request(fields, group)
            sequences[slot] = decoder.prefill(request, slot)
            continue
        count, *said = fields
        live = [sequences[slot] for slot in said[: 3 * count : 3]]
        if [x for sequence in live for x in _fingerprint(sequence)] != said[: 3 * count]:
            log.error("rank %d and rank 0 disagree on the tokens so far", group.rank)
            sys.exit(DIVERGED)
        decoder.step(live)
