"""Believable campaigns of records, made by a known rule, so that tests can compute every figure by hand.

A verify step takes `STEP_MS[verify tokens]`, auto one token in 1.8 ms; each round's clock is stretched by a small
seeded factor, and by `PACE` under some NCCL profiles, policies and variants. Accepted drafts of a step follow a
geometric law that a larger budget flattens, the same in every round.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchlib.engines import nccl_variables
from benchlib.nccl import NcclLog
from benchlib.record import CellRecord, RequestRecord, RunRecord, ServerRecord, run_identity, save_run
from benchlib.spec import RunSpec, Sweep, Workload, content_hash

PROMPTS = {"fib": 0.72, "qsort": 0.70, "arith": 0.80, "json": 0.84}
GAIN = {None: 0.0, 15: 0.03, 16: 0.035, 32: 0.06, 64: 0.08}
STEP_MS = {1: 1.8, 16: 3.3, 17: 3.35, 33: 4.6, 65: 6.9}
PACE = {"pcie": 0.9, "spread": 1.05, "slow": 1.2}
PROMPT_S = 0.020
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"benchlib": "0.1.0", "torch": "2.13.0+cpu"},
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
    "system": "Linux 6.1 x86_64",
    "cpu_model": "Example CPU 9000",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "gpus": [],
    "identity": {
        "packages": {"benchlib": "0.1.0", "torch": "2.13.0+cpu"},
        "engine_digest": "feedfacefeedface",
        "variables": {},
        "gpus": [],
        "cpu_model": "Example CPU 9000",
    },
}


def build_sweep(**changes: Any) -> Sweep:
    """The laptop sweep: TP {1,2} x {auto, linear, b15, b16, b32, b64}, four prompts, 3 rounds."""
    base: dict[str, Any] = {
        "name": "synthetic",
        "tp_size": (1, 2),
        "tree_budgets": (15, 16, 32, 64),
        "workload": Workload(max_new_tokens=(96,)),
    }
    return Sweep(**{**base, **changes})


def build_run(spec: RunSpec, *, noise: float = 0.01) -> tuple[RunRecord, list[RequestRecord]]:
    """One finished run and its requests; `noise` is the spread (sd of log) of a round's clock, and of a start's."""
    rng = random.Random(f"{spec.hash}")
    start = rng.gauss(0, noise)
    work = spec.workload
    verify = None if spec.method == "auto" else 1 + (spec.tree_budget or spec.block_size - 1)
    requests, cells, epoch = [], [], 0.0
    for prompt in work.prompts:
        for tokens in work.max_new_tokens:
            for streams in work.concurrency:
                sha = hashlib.sha256(prompt.encode()).hexdigest()
                cells.append(
                    CellRecord(
                        prompt=prompt, max_new_tokens=tokens, concurrency=streams,
                        rounds=work.repeats, prompt_sha256=sha,
                    )
                )  # fmt: skip
                for number in range(work.warmups + work.repeats):
                    warmup = number < work.warmups
                    pace = math.exp(start + rng.gauss(0, noise)) * (1.1 if warmup else 1)
                    for stream in range(streams):
                        cell = {"prompt": prompt, "max_new_tokens": tokens, "concurrency": streams}
                        where = {"round": number if warmup else number - work.warmups, "stream": stream}
                        requests.append(
                            _request(spec, verify, pace, sent_s=epoch + 0.001 * stream, warmup=warmup,
                                     **cell, **where)
                        )  # fmt: skip
                    epoch = max(r.sent_s + (r.end_s or 0) for r in requests) + 0.01
    variables, on_gpus = nccl_variables(spec), spec.engine == "sglang" and spec.tp_size > 1
    way = "nccl" if "--disable-custom-all-reduce" in spec.server_args else "custom"
    nccl = content_hash(variables) if variables else None
    environment = {**ENVIRONMENT, "identity": {**ENVIRONMENT["identity"], "nccl": nccl}}
    record = RunRecord(
        status="ok",
        spec=spec,
        identity=run_identity(spec, environment),
        started_at="2026-11-29T12:00:00+00:00",
        duration_s=epoch,
        environment=environment,
        nccl=NcclLog(nranks=spec.tp_size, decode_all_reduce=way) if on_gpus else None,
        server=ServerRecord(
            url="http://127.0.0.1:30000", version="0.1.0", verify_tokens=verify, info={"device": "cpu"}
        ),
        cells=tuple(cells),
    )  # fmt: skip
    return record, requests


def _request(spec: RunSpec, verify: int | None, pace: float, **cell: Any) -> RequestRecord:
    rng = random.Random(cell["prompt"])  # greedy: every round of every run meets the same luck
    crowd = 1 + 0.05 * (cell["concurrency"] - 1)
    pace *= math.prod(PACE.get(name, 1) for name in (spec.nccl_profile, spec.numa_policy, spec.variant))
    step = STEP_MS[verify or 1] / 1000 * pace * crowd * (0.62 if spec.tp_size == 2 else 1)
    now, done, ticks = PROMPT_S * pace, 1, [(PROMPT_S * pace, 1)]
    histogram = [0] * spec.block_size
    chance = PROMPTS[cell["prompt"]] + GAIN[spec.tree_budget]
    while done < cell["max_new_tokens"]:
        lucky = int(math.log(1 - rng.random()) / math.log(chance))
        drafts = min(lucky, spec.block_size - 1) if verify else 0
        histogram[drafts] += 1
        now += step
        done = min(done + 1 + drafts, cell["max_new_tokens"])
        ticks.append((now, done))
    steps = sum(histogram)
    speculative: dict[str, Any] = {
        "verify_ct": steps,
        "correct_drafts": sum(i * n for i, n in enumerate(histogram)),
        "proposed_drafts": steps * ((verify or 1) - 1),
        "drafts_histogram": tuple(histogram),
    }
    return RequestRecord(
        **cell,
        ticks=tuple(ticks),
        end_s=now + 0.0005,
        prompt_tokens=40,
        completion_tokens=done,
        finish_reason="length",
        **(speculative if verify else {}),
    )


Change = Callable[[RunRecord, list[RequestRecord]], tuple[RunRecord, list[RequestRecord]]]


def save_campaign(
    folder: Path,
    sweep: Sweep | None = None,
    *,
    skip: Iterable[str] = (),
    changes: dict[str, Change] | None = None,
    noise: float = 0.01,
) -> Path:
    """Write a campaign's folders below `folder`; `changes` alter the runs they name, `skip` leaves runs out."""
    sweep = sweep or build_sweep()
    campaign = folder / sweep.name
    for spec in sweep.runs():
        if spec.run_name in set(skip):
            continue
        record, requests = build_run(spec, noise=noise)
        if changes and spec.run_name in changes:
            record, requests = changes[spec.run_name](record, requests)
        save_run(campaign / spec.run_name, record, requests)
    return campaign


def fail_run(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
    """A run whose server died before it answered."""
    error = "sglang exited with code 1 after 41 s, before /health answered. Full log: /home/someone/x/server.log"
    return record.model_copy(update={"status": "failed", "error": error, "cells": ()}), []


def fail_request(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
    """A run whose first timed request of fib broke off."""
    index = next(i for i, r in enumerate(requests) if r.prompt == "fib" and not r.warmup)
    broken = requests[index].model_copy(update={"error": "the stream broke off after 3 chunks", "end_s": None})
    return record, [*requests[:index], broken, *requests[index + 1 :]]


def build_ab_sweep(**changes: Any) -> Sweep:
    """Autoregressive decoding at TP 4 of an engine that has NCCL, on one prompt."""
    base: dict[str, Any] = {
        **{"engine": "sglang", "tp_size": (4,), "methods": ("auto",), "tree_budgets": ()},
        "workload": Workload(prompts=("fib",), max_new_tokens=(48,)),
    }
    return build_sweep(**{**base, **changes})


def cap(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
    """A run whose server had no room for more than one request at once."""
    text = "requests-capped: not measured: the server runs 1 requests at once, the cell asks for 8."
    cells = [c.model_copy(update={"rounds": 0, "warnings": (text,)}) if c.concurrency > 1 else c for c in record.cells]
    return record.model_copy(update={"cells": tuple(cells)}), [r for r in requests if r.concurrency == 1]
