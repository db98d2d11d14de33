"""The ranks' fast path: small sums through memory that all of them map, awake.

It is to this engine what the custom all-reduce is to SGLang: a forward of the miniature makes sixteen all-reduces of a
kilobyte or a few, and a collective over sockets must wake a sleeping thread on each side every time, which on a
two-core virtual machine takes milliseconds. Each rank publishes its part and a counter, and looks at the others'
counters until they have done the same. Two buffers a rank take turns, so nobody overwrites what another still reads:
a rank two exchanges ahead has seen everyone begin the one between.

Publishing data before the counter needs stores that become visible in order, which x86 promises; elsewhere `usable` is
false and everything goes through gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["CAPACITY", "Exchange", "PeerLost", "new_file", "usable"]

CAPACITY = 1 << 20  # bytes an exchange may carry; larger ones go through gloo
LINE = 64  # counters of two ranks never share a cache line
AWAKE_S = 0.05
ASK_S = 0.2


class PeerLost(RuntimeError):
    """Another rank is gone."""


def usable() -> bool:
    """Whether this processor keeps stores in order."""
    return platform.machine().lower() in {"x86_64", "amd64", "i686", "x86"}


def new_file(world: int) -> Path:
    """A file of zeros for `Exchange`, in memory where there is such a place; unlink it once all have mapped it."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    handle, name = tempfile.mkstemp(prefix="benchlib-", dir=place)
    os.ftruncate(handle, world * (LINE + 2 * CAPACITY))
    os.close(handle)
    return Path(name)


class Exchange:
    """One rank's view of the shared memory. Every rank must make the same calls in the same order."""

    def __init__(self, path: Path, rank: int, world: int, lost: Callable[[], bool]) -> None:
        """`lost` is asked now and then while waiting; when it says yes, PeerLost is raised."""
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), world * (LINE + 2 * CAPACITY))
        self._lost, self.rank, self.others = lost, rank, [r for r in range(world) if r != rank]
        flat = np.frombuffer(memory, np.uint8)
        self._counters = [flat[r * LINE : r * LINE + 8].view(np.int64) for r in range(world)]
        data = torch.from_numpy(flat[world * LINE :]).view(world, 2, CAPACITY)
        self._data = [[data[r, turn] for turn in range(2)] for r in range(world)]
        self._turn = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; added in the ranks' order, so the same bits on each."""
        parts = self._publish(x)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return x.copy_(total.view(x.shape))

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values on every rank, in place."""
        return x.copy_(self._publish(x)[0].view(x.shape))

    def _publish(self, x: Tensor) -> list[Tensor]:
        """Put down one's own, wait for the others', and return all in rank order."""
        self._turn += 1
        turn, size = self._turn % 2, x.numel() * x.element_size()
        parts = [rank[turn][:size].view(x.dtype) for rank in self._data]
        parts[self.rank].copy_(x.reshape(-1))
        self._counters[self.rank][0] = self._turn
        for other in self.others:
            self._wait(self._counters[other])
        return parts

    def _wait(self, counter: np.ndarray) -> None:
        begun = asked = time.monotonic()
        while counter[0] < self._turn:
            now = time.monotonic()
            # sleep(0) lets other threads have the interpreter; an idle server's ranks sleep for real
            time.sleep(0 if now - begun < AWAKE_S else 0.001)
            if now - asked > ASK_S:
                asked = now
                if self._lost():
                    raise PeerLost("another tensor-parallel rank is gone")
