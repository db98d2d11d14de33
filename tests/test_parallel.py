"""Tensor parallel: two ranks give what one gives, whatever the drafter, and a lost rank is said to be lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchlib.reference_engine import train
from benchlib.reference_engine.decode import Decoder, Method, Request
from benchlib.reference_engine.drafter import Drafter
from benchlib.reference_engine.loading import ModelPlan, load_decoder
from benchlib.reference_engine.model import Target
from benchlib.reference_engine.parallel import MirroredDecoder, WorkerError, Workers
from tests.engine import (
    BUDGETS,
    FAULTS,
    Job,
    Meeting,
    Pair,
    check_counters,
    check_same,
    generate,
    make_jobs,
    packaged_folder,
    random_drafter_weights,
    random_prompt,
    random_weights,
    scripted_drafters,
    small_config,
    small_drafter_config,
)


@cache
def small_pair() -> Pair:
    return Pair.random(1)


@cache
def small_jobs() -> list[Job]:
    return make_jobs(small_pair(), [1, 64, 65, 30], [20, 8, 16, 25], seed=60, stagger=2)


def check_two_ranks(drafter: str, method: Method, budget: int) -> None:
    """Greedy over two shards in two threads, each with a drafter of its own, as processes have."""
    pair, jobs = small_pair(), small_jobs()
    config = small_drafter_config(pair.config)
    weights = random_drafter_weights(config, 1)

    def work(shard: Any) -> list[Any]:
        target = Target(pair.config, pair.weights, taps=pair.target.taps, shard=shard)
        own: Any = None
        if drafter == "random":
            own = Drafter(config, weights, target)
        elif method != "auto":
            own = scripted_drafters(pair)[drafter]()
        decoder = Decoder(target, own, method=method, budget=budget, slots=3)
        return generate(decoder, jobs, order=[2, 0, 1])

    ranks = Meeting(2).run(work)
    for job, *same in zip(jobs, *ranks, strict=True):
        assert same[0].output_ids == same[1].output_ids, "ranks parted"
        check_same(pair, job.request.input_ids, same[0].output_ids, job.expected)
        if method != "auto":
            check_counters(same[0], 15 if method == "linear" else budget)


class TestTwoThreads:
    @pytest.mark.parametrize(
        ("drafter", "method", "budget"),
        [
            ("", "auto", 0),
            ("noisy", "linear", 0),
            ("second_first", "ddtree", 32),
            ("random", "ddtree", 15),
        ],
    )
    def test_lossless(self, drafter: str, method: Method, budget: int) -> None:
        check_two_ranks(drafter, method, budget)

    @pytest.mark.parametrize("fault", ["flat_scan", "commit_by_count", "flat_window"])
    def test_planted_faults_are_caught(self, fault: str) -> None:
        small_jobs()
        with FAULTS[fault][0](), pytest.raises(AssertionError):
            check_two_ranks("second_first", "ddtree", 32)

    @pytest.mark.engine
    @pytest.mark.parametrize("budget", BUDGETS)
    @pytest.mark.parametrize("drafter", ["random", "oracle", "second_best", "second_first", "uniform", "noisy"])
    def test_grid(self, drafter: str, budget: int) -> None:
        check_two_ranks(drafter, "ddtree", budget)


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small pair as files."""
    folder = tmp_path_factory.mktemp("pair")
    config = small_config()
    own = small_drafter_config(config)
    train.save_model(folder / "target", random_weights(config, 1), config.to_json())
    train.save_model(folder / "drafter", random_drafter_weights(own, 1), own.to_json())
    return folder


@contextmanager
def two_processes(
    folder: Path, method: Method, budget: int, deaths: list[str], *, lost: bool = False
) -> Iterator[MirroredDecoder]:
    """Rank 0 here, rank 1 in a process of its own."""
    plan = ModelPlan(
        folder / "target", folder / "drafter", method=method, budget=budget or None, slots=8, tp_size=2,
        pack=False,
    )  # fmt: skip
    workers = Workers(plan, deaths.append)
    try:
        with torch.inference_mode():
            decoder = MirroredDecoder(plan, workers)
            yield decoder
            if not lost:
                decoder.close()
    finally:
        for process in workers.processes:
            process.kill()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def check_processes(folder: Path, decoder: Decoder, *, long: bool) -> None:
    """Batch 1 and 8, greedy, and a sampled one, against one process."""
    pair = Pair.load(folder)
    lengths, new = [1, 64, 65, 128, 17, 3, 90, 40], [60, 30, 45, 25, 70, 1, 2, 50]
    if not long:
        lengths, new = lengths[2:6], [20, 12, 25, 1]
    for jobs in (make_jobs(pair, [20], [50]), make_jobs(pair, lengths, new, stagger=2)):
        for job, g in zip(jobs, generate(decoder, jobs), strict=True):
            check_same(pair, job.request.input_ids, g.output_ids, job.expected)
            check_counters(g, decoder.nodes)
    request = Request(random_prompt(pair.config, 9, 1), 16, 0.9, ignore_eos=True, seed=2**40 + 5)
    sampled = [Job(request), Job(request)]
    one, other = generate(decoder, sampled)
    assert one.output_ids == other.output_ids, "a seed decides, on every rank alike"


def test_two_processes(small_folder: Path) -> None:
    """Lossless, closed without a word, and no rank left behind."""
    deaths: list[str] = []
    with two_processes(small_folder, "ddtree", 16, deaths) as decoder:
        check_processes(small_folder, decoder, long=False)
        processes = decoder.workers.processes
    assert not any(p.is_alive() for p in processes)
    assert deaths == []


def test_one_process_loads_the_same_pair(small_folder: Path) -> None:
    plan = ModelPlan(small_folder / "target", small_folder / "drafter", method="ddtree", budget=16, pack=True)
    check_processes(small_folder, load_decoder(plan), long=False)


@pytest.mark.engine
class TestProcessGrid:
    @pytest.mark.parametrize(("method", "budget"), [("auto", 0), ("linear", 0), *(("ddtree", b) for b in BUDGETS)])
    @pytest.mark.parametrize("name", ["small", "packaged"])
    def test_lossless(self, small_folder: Path, name: str, method: Method, budget: int) -> None:
        folder = small_folder if name == "small" else packaged_folder()
        with two_processes(folder, method, budget, []) as decoder:
            check_processes(folder, decoder, long=True)

    def test_a_lost_rank_is_named(self, small_folder: Path) -> None:
        deaths: list[str] = []
        with two_processes(small_folder, "linear", 0, deaths, lost=True) as decoder:
            process = decoder.workers.processes[0]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            deadline = time.monotonic() + 5
            while not deaths and time.monotonic() < deadline:
                time.sleep(0.05)
            with pytest.raises(WorkerError, match="rank 1"):
                decoder.prefill(Request((9, 10, 11), 4), 0)
        assert len(deaths) == 1
        assert "rank 1" in deaths[0]
