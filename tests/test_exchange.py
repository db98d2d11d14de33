"""The shared-memory sums: same bits on every rank, in step, and an end to waiting when a rank is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchlib.reference_engine import exchange
from benchlib.reference_engine.exchange import CAPACITY, Exchange, PeerLost, new_file, usable

pytestmark = pytest.mark.skipif(not usable(), reason="this processor may reorder stores")


@pytest.fixture
def memory() -> Iterator[Path]:
    path = new_file(3)
    yield path
    path.unlink()


def on_ranks(memory: Path, world: int, work: Callable[[Exchange, int], Any]) -> list[Any]:
    """What `work` returns on each rank; ranks are threads, each with its own mapping of the file."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        results[rank] = work(Exchange(memory, rank, world, lambda: False), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_right_and_the_same_bits_on_every_rank(memory: Path, world: int) -> None:
    parts = [torch.randn(40, 7, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(world)]
    sums = on_ranks(memory, world, lambda ranks, rank: ranks.all_reduce(parts[rank].clone()))
    torch.testing.assert_close(sums[0], sum(parts), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(total, sums[0]) for total in sums)


def test_many_rounds_stay_in_step(memory: Path) -> None:
    """A rank that read another's next value, or its last, would be off by one."""

    def work(ranks: Exchange, rank: int) -> list[float]:
        seen = []
        for turn in range(2000):
            size = 1 + turn % 5
            seen.append(ranks.all_reduce(torch.full((size,), float(turn * (rank + 1)))).sum().item() / size)
        return seen

    wanted = [3.0 * turn for turn in range(2000)]
    assert on_ranks(memory, 2, work) == [wanted, wanted]


def test_broadcast_gives_everyone_the_integers_of_rank_0(memory: Path) -> None:
    got = on_ranks(memory, 3, lambda ranks, rank: ranks.broadcast(torch.arange(5) * (1 - rank)).tolist())
    assert got == [[0, 1, 2, 3, 4]] * 3


def test_the_largest_exchange_fits(memory: Path) -> None:
    ones = on_ranks(memory, 2, lambda ranks, _: ranks.all_reduce(torch.ones(CAPACITY // 4)))
    assert all(bool((total == 2).all()) for total in ones)


def test_a_lost_rank_ends_the_wait(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ASK_S", 0.01)
    alone = Exchange(memory, 0, 2, lambda: True)
    with pytest.raises(PeerLost):
        alone.all_reduce(torch.ones(3))
