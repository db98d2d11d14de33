"""Warm-up, repeats and concurrency: what is sent to a running server, and in which order.

Cells are interleaved: round 1 of every cell, then round 2 of every cell, so that a machine that slows down does so for
all prompts alike. Nothing is computed here; the result is the requests as they were seen.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchlib.client import call, generate_round, run_async
from benchlib.errors import RequestError
from benchlib.prompts import Prompt, build_prompts
from benchlib.record import (
    CellRecord,
    RequestRecord,
    RunRecord,
    ServerRecord,
    run_identity,
    save_run,
)
from benchlib.spec import RunSpec
from benchlib.stream import request_record
from benchlib.warnings import check_cell, check_run, format_warning

__all__ = ["Measurement", "format_requests", "measure_run", "save_measurement"]

Progress = Callable[[int, int, str], None]
# A server that has just answered still holds the request for some milliseconds and refuses to flush.
FLUSH_ATTEMPTS = 20
FLUSH_PAUSE_S = 0.05
# Two different cells failing whole, one after the other, is a sick server and not a bad prompt.
MAX_FAILED_ROUNDS = 2
# Enough for a prompt's prefill and a few rounds of decoding: what is compiled or captured lazily is, by then.
WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt x max_new_tokens x concurrency."""

    prompt: Prompt
    max_new_tokens: int
    concurrency: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.prompt.name, self.max_new_tokens, self.concurrency


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything one run saw. `error` says why it is not a whole one; None: every cell has a timed request."""

    started_at: str
    duration_s: float
    cells: tuple[CellRecord, ...]
    requests: tuple[RequestRecord, ...]
    warnings: tuple[str, ...]
    error: str | None


@dataclass(slots=True)
class _Session:
    """State of a measurement under way."""

    spec: RunSpec
    url: str
    epoch: float
    requests: list[RequestRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failed_rounds: int = 0
    broken: str | None = None


def measure_run(spec: RunSpec, server: ServerRecord, *, progress: Progress | None = None) -> Measurement:
    """Measure every cell of `spec` on a running server; `progress` gets (rounds done, rounds in all, cell).

    Failed requests do not raise; they are in the result. Raises SpecError for prompts that do not exist.
    """
    cells = _build_cells(spec, server)
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    session = _Session(spec, server.url, time.perf_counter())
    rounds = list(_rounds(spec, cells))
    for done, (cell, number, warmup) in enumerate(rounds):
        if session.broken is None:
            if progress:
                progress(done, len(rounds), f"{cell.prompt.name} {cell.max_new_tokens}")
            _measure_round(session, cell, number, warmup)
    if progress:
        progress(len(rounds), len(rounds), "")
    records = tuple(_cell_record(cell, session.requests) for cell in cells)
    return Measurement(
        started_at=started_at,
        duration_s=time.perf_counter() - session.epoch,
        cells=records,
        requests=tuple(session.requests),
        warnings=tuple(dict.fromkeys(session.warnings)),
        error=session.broken or _incomplete(cells, session.requests),
    )


def save_measurement(
    folder: Path,
    spec: RunSpec,
    *,
    environment: dict[str, Any],
    server: ServerRecord,
    measurement: Measurement,
) -> RunRecord:
    """Write the run's record and requests into `folder`; `status` is failed where a cell could not be measured."""
    warnings = check_run(
        load=environment.get("load_average_1m"),
        cores=environment.get("cores"),
        concurrency=max(spec.workload.concurrency),
        limit=server.effective_max_running_requests,
        attached=server.attached,
    )
    record = RunRecord(
        status="failed" if measurement.error else "ok",
        error=measurement.error,
        spec=spec,
        identity=run_identity(spec, environment),
        started_at=measurement.started_at,
        duration_s=measurement.duration_s,
        environment=environment,
        server=server,
        cells=measurement.cells,
        warnings=(*warnings, *measurement.warnings),
    )
    return save_run(folder, record, measurement.requests)


def format_requests(measurement: Measurement) -> str:
    """The timed requests as a Markdown table, and the warnings below it; for a look, not for analysis."""
    lines = [
        "| prompt | tokens | at once | round | first token, s | last token, s | chunks | verify steps | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in measurement.requests if not r.warmup):
        first, last = (f"{r.ticks[0][0]:.3f}", f"{r.ticks[-1][0]:.3f}") if r.ticks else ("", "")
        row = (
            r.prompt,
            r.completion_tokens or 0,
            r.concurrency,
            r.round + 1,
            first,
            last,
            len(r.ticks),
        )
        lines.append("| " + " | ".join(map(str, (*row, r.verify_ct or "", r.error or ""))) + " |")
    notes = [f"- {cell.prompt}: {text}" for cell in measurement.cells for text in cell.warnings]
    return "\n".join([*lines, "", *notes, *(f"- {text}" for text in measurement.warnings)])


def _build_cells(spec: RunSpec, server: ServerRecord) -> list[Cell]:
    work = spec.workload
    vocab_size = _vocab_size(spec, server) if work.prompt_set == "random-ids" else None
    prompts = build_prompts(work.prompt_set, work.prompts, seed=spec.seed, vocab_size=vocab_size)
    return [Cell(*axes) for axes in itertools.product(prompts, work.max_new_tokens, work.concurrency)]


def _vocab_size(spec: RunSpec, server: ServerRecord) -> int | None:
    """From /server_info or the model's config.json: stock SGLang reports none."""
    if isinstance(size := server.info.get("vocab_size"), int):
        return size
    try:
        config = json.loads((Path(spec.model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    size = config.get("text_config", config).get("vocab_size")
    return size if isinstance(size, int) else None


def _rounds(spec: RunSpec, cells: Sequence[Cell]) -> Iterator[tuple[Cell, int, bool]]:
    work = spec.workload
    for count, warmup in ((work.warmups, True), (work.repeats, False)):
        yield from ((cell, number, warmup) for number in range(count) for cell in cells)


def _measure_round(session: _Session, cell: Cell, number: int, warmup: bool) -> None:
    _flush(session)
    spec = session.spec
    asked = min(cell.max_new_tokens, WARMUP_TOKENS) if warmup else cell.max_new_tokens
    body = {
        **cell.prompt.payload,
        "stream": True,
        "sampling_params": {
            "temperature": spec.workload.temperature,
            "max_new_tokens": asked,
            "ignore_eos": spec.workload.ignore_eos,
        },
    }
    bodies = [body] * cell.concurrency
    exchanges = run_async(generate_round(session.url, bodies, timeout_s=spec.request_timeout_s))
    records = [
        request_record(
            exchange,
            epoch=session.epoch,
            ignore_eos=spec.workload.ignore_eos,
            prompt=cell.prompt.name,
            max_new_tokens=asked,
            concurrency=cell.concurrency,
            round=number,
            stream=stream,
            warmup=warmup,
        )
        for stream, exchange in enumerate(exchanges)
    ]
    session.requests += records
    failed = all(record.error for record in records)
    session.failed_rounds = session.failed_rounds + 1 if failed else 0
    if session.failed_rounds >= MAX_FAILED_ROUNDS:
        session.broken = (
            f"measuring stopped after {MAX_FAILED_ROUNDS} rounds in a row failed whole, the last with: "
            f"{records[0].error}"
        )


def _flush(session: _Session) -> None:
    """Empty the prefix cache; a server that cannot is noted once, not refused."""
    status = 0
    for _ in range(FLUSH_ATTEMPTS):
        try:
            status, _body = call(f"{session.url}/flush_cache", "POST")
        except RequestError:
            return  # the round that follows says what is wrong with the server
        if status == 200:
            return
        if status == 404:
            break
        time.sleep(FLUSH_PAUSE_S)
    session.warnings.append(format_warning("cache-not-flushed", status=status))


def _of_cell(cell: Cell, requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in requests if (r.prompt, r.max_new_tokens, r.concurrency) == cell.key]


def _cell_record(cell: Cell, requests: Sequence[RequestRecord]) -> CellRecord:
    own = _of_cell(cell, requests)
    return CellRecord(
        prompt=cell.prompt.name,
        max_new_tokens=cell.max_new_tokens,
        concurrency=cell.concurrency,
        rounds=len({r.round for r in own if not r.warmup}),
        prompt_sha256=cell.prompt.sha256,
        warnings=check_cell(own),
    )


def _incomplete(cells: Sequence[Cell], requests: Sequence[RequestRecord]) -> str | None:
    for cell in cells:
        timed = [r for r in _of_cell(cell, requests) if not r.warmup]
        if all(r.error for r in timed):
            name, tokens, concurrency = cell.key
            return f"no timed request of {name} ({tokens} tokens, {concurrency} at once) succeeded: {timed[0].error}"
    return None
