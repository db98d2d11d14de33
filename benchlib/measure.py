"""Warm-up, repeats and concurrency: what is sent to a running server, and in which order.

Cells are interleaved: round 1 of every cell, then round 2 of every cell, so that a machine that slows down does so for
all prompts alike. Nothing is computed here; the result is the requests as they were seen.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchlib.client import call, generate_round, run_async
from benchlib.draft_tree import DraftTree, measure_draft_tree, save_draft_tree
from benchlib.errors import RequestError
from benchlib.gaps import PromptGaps, measure_gaps, save_gaps
from benchlib.nccl import NcclLog, parse_nccl_log
from benchlib.progress import Teller, remove_told
from benchlib.prompts import Prompt, build_prompts
from benchlib.record import CellRecord, RequestRecord, RunRecord, ServerRecord, run_identity, save_run
from benchlib.server_log import read_log_facts
from benchlib.spec import RunSpec
from benchlib.stream import request_record
from benchlib.telemetry import Telemetry, TelemetryRecord, save_telemetry
from benchlib.verdicts import enough
from benchlib.warnings import check_cell, check_log, check_run, check_throttling, format_warning, round_rates

__all__ = ["CLOCK_FILE", "WARMUP_TOKENS", "Measurement", "format_requests", "measure_run", "save_measurement"]

# A server that has just answered still holds the request for some milliseconds and refuses to flush.
FLUSH_ATTEMPTS = 20
FLUSH_PAUSE_S = 0.05
# Two different cells failing whole, one after the other, is a sick server and not a bad prompt.
MAX_FAILED_ROUNDS = 2
# Enough for a prompt's prefill and a few rounds of decoding: what is compiled or captured lazily is, by then.
WARMUP_TOKENS = 32
CLOCK_FILE = "clock.json"  # beside a campaign's runs


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt x max_new_tokens x concurrency."""

    prompt: Prompt
    max_new_tokens: int
    concurrency: int

    def timed(self, requests: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Its own among a run's requests, without the warm-ups."""
        key = self.prompt.name, self.max_new_tokens, self.concurrency
        return [r for r in requests if not r.warmup and (r.prompt, r.max_new_tokens, r.concurrency) == key]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything one run saw. `error` says why it is not a whole one; None: every cell has a timed request."""

    started_at: str
    duration_s: float
    cells: tuple[CellRecord, ...]
    requests: tuple[RequestRecord, ...]
    warnings: tuple[str, ...]
    error: str | None
    telemetry: TelemetryRecord | None = None
    gaps: dict[str, PromptGaps] | None = None
    draft_tree: DraftTree | None = None


def measure_run(spec: RunSpec, server: ServerRecord, *, folder: Path | None = None) -> Measurement:
    """Measure every cell of `spec` on a running server.

    Failed requests do not raise; they are in the result. Raises SpecError for prompts that do not exist. A sweep that
    waits is told in `folder`, the run's, between rounds, how far it is.
    """
    work = spec.workload
    vocab_size = _vocab_size(spec, server) if work.prompt_set == "random-ids" else None
    prompts = build_prompts(work.prompt_set, work.prompts, seed=spec.seed, vocab_size=vocab_size)
    asked = [Cell(*axes) for axes in itertools.product(prompts, work.max_new_tokens, work.concurrency)]
    limit = server.effective_max_running_requests or max(work.concurrency)
    cells = [cell for cell in asked if cell.concurrency <= limit]
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    epoch = time.perf_counter()
    requests: list[RequestRecord] = []
    warnings: list[str] = []
    error, failed_rounds = None, 0
    timed = range(max(work.repeats, work.max_repeats))
    rounds = [(number, True) for number in range(work.warmups)] + [(number, False) for number in timed]
    order = list(itertools.product(rounds, cells))
    teller = Teller(folder, [_asked_tokens(cell, warmup) for (_, warmup), cell in order])
    records: list[RequestRecord] = []
    gpus = server.placement.gpus if server.placement else ()
    with Telemetry(gpus, epoch=epoch) as telemetry:
        for at, ((number, warmup), cell) in enumerate(order):
            if not warmup and number >= work.repeats and _precise(spec, cell.timed(requests)):
                continue
            teller.tell(_format_round(spec, cell, number, warmup), at, round_rates(records))
            warnings += _flush(server.url)
            records = _measure_round(spec, server.url, cell, epoch, round=number, warmup=warmup)
            requests += records
            failed_rounds = failed_rounds + 1 if all(r.error for r in records) else 0
            if failed_rounds == MAX_FAILED_ROUNDS:
                error = f"measuring stopped after {failed_rounds} rounds in a row failed whole, the last with: "
                error += str(records[0].error)
                break
    seen = telemetry.build_record() if gpus else None
    gaps = None
    if error is None and _is_reference(spec, server):
        teller.tell("asking gaps")
        try:
            longest, patience_s = max(work.max_new_tokens), spec.request_timeout_s
            gaps = measure_gaps(server.url, prompts, longest, ignore_eos=work.ignore_eos, timeout_s=patience_s)
        except RequestError as missing:
            warnings.append(format_warning("no-gaps", reason=str(missing)))
    tree = None
    if error is None and server.info.get("returns_draft_tree"):
        try:
            tree = measure_draft_tree(server.url, prompts[0], timeout_s=spec.request_timeout_s)
        except RequestError as missing:
            warnings.append(format_warning("no-draft-tree", reason=str(missing)))
    return Measurement(
        started_at=started_at,
        duration_s=time.perf_counter() - epoch,
        cells=tuple(_cell_record(spec, cell, cell.timed(requests), limit, seen) for cell in asked),
        requests=tuple(requests),
        warnings=tuple(dict.fromkeys(warnings)),
        error=error or _incomplete(cells, requests, limit),
        telemetry=seen,
        gaps=gaps,
        draft_tree=tree,
    )


def save_measurement(
    folder: Path, spec: RunSpec, *, environment: dict[str, Any], server: ServerRecord, measurement: Measurement
) -> RunRecord:
    """Write the run's record and requests into `folder`; `status` is failed where a cell could not be measured."""
    Teller(folder, ()).tell("writing record")
    # What the sweep's self-check found of this machine's client; by hand there was none.
    if (check := folder.parent / CLOCK_FILE).is_file():
        environment = {**environment, "clock": json.loads(check.read_bytes())}
    path = folder / server.log
    log = path.read_text(encoding="utf-8", errors="replace") if server.log and path.is_file() else ""
    told = parse_nccl_log(log) if spec.tp_size > 1 and log else NcclLog()
    nccl = None if told == NcclLog() else told  # an engine without NCCL has nothing to say
    warnings = (
        *check_run(spec, environment, server, nccl),
        *(check_log(read_log_facts(log)) if server.placement else ()),
    )
    record = RunRecord(
        status="failed" if measurement.error else "ok",
        error=measurement.error and "; ".join(filter(None, (server.death, measurement.error))),
        spec=spec,
        identity=run_identity(spec, environment),
        started_at=measurement.started_at,
        duration_s=measurement.duration_s,
        environment=environment,
        server=server,
        nccl=nccl,
        cells=measurement.cells,
        warnings=(*warnings, *measurement.warnings),
    )
    if measurement.telemetry:
        save_telemetry(folder, measurement.telemetry)
    if measurement.gaps:
        save_gaps(folder, measurement.gaps)
    if measurement.draft_tree:
        save_draft_tree(folder, measurement.draft_tree)
    saved = save_run(folder, record, measurement.requests)
    remove_told(folder)
    return saved


def _asked_tokens(cell: Cell, warmup: bool) -> int:
    return min(cell.max_new_tokens, WARMUP_TOKENS) if warmup else cell.max_new_tokens


def _format_round(spec: RunSpec, cell: Cell, number: int, warmup: bool) -> str:
    """`round 2 of 3: fib 256 x1`."""
    work = spec.workload
    most = f"at most {work.max_repeats}" if work.max_repeats > work.repeats else str(work.repeats)
    which = "warm-up" if warmup else f"round {number + 1} of {most}"
    return f"{which}: {cell.prompt.name} {cell.max_new_tokens} x{cell.concurrency}"


def _precise(spec: RunSpec, timed: Sequence[RequestRecord]) -> bool:
    """Whether a cell needs no further round."""
    work = spec.workload
    rates = round_rates([r for r in timed if r.error is None])
    return enough([1 / rate for rate in rates.values()], work.precision, work.max_repeats)


def _is_reference(spec: RunSpec, server: ServerRecord) -> bool:
    """Whether others' outputs are held against this run's: then it is asked how close its choices were."""
    simulated = any("SIMULATE_ACC" in name for name in server.env)
    return spec.method == "auto" and spec.workload.temperature == 0 and not simulated


def format_requests(measurement: Measurement) -> str:
    """The timed requests as a Markdown table, and the warnings below it; for a look, not for analysis."""
    lines = [
        "| prompt | tokens | at once | round | first token, s | last token, s | chunks | verify steps | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in measurement.requests if not r.warmup):
        times = [f"{r.ticks[0][0]:.3f}", f"{r.ticks[-1][0]:.3f}"] if r.ticks else ["", ""]
        row = [r.prompt, r.completion_tokens or 0, r.concurrency, r.round + 1, *times, len(r.ticks)]
        lines.append("| " + " | ".join(map(str, [*row, r.verify_ct or "", r.error or ""])) + " |")
    notes = [f"- {cell.prompt}: {text}" for cell in measurement.cells for text in cell.warnings]
    return "\n".join([*lines, "", *notes, *(f"- {text}" for text in measurement.warnings)])


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


def _measure_round(spec: RunSpec, url: str, cell: Cell, epoch: float, **place: Any) -> list[RequestRecord]:
    work = spec.workload
    asked = _asked_tokens(cell, place["warmup"])
    sampling = {"temperature": work.temperature, "max_new_tokens": asked, "ignore_eos": work.ignore_eos}
    bodies = [{**cell.prompt.payload, "stream": True, "sampling_params": sampling}] * cell.concurrency
    exchanges = run_async(generate_round(url, bodies, timeout_s=spec.request_timeout_s, stall_s=spec.stall_timeout_s))
    place |= {"prompt": cell.prompt.name, "max_new_tokens": asked, "concurrency": cell.concurrency}
    return [
        request_record(exchange, epoch=epoch, ignore_eos=work.ignore_eos, stream=stream, **place)
        for stream, exchange in enumerate(exchanges)
    ]


def _flush(url: str) -> list[str]:
    """Empty the prefix cache; a warning where the server cannot."""
    status = 0
    for _ in range(FLUSH_ATTEMPTS):
        try:
            status, _body = call(f"{url}/flush_cache", "POST")
        except RequestError:
            return []  # the round that follows says what is wrong with the server
        if status == 200:
            return []
        if status == 404:
            break
        time.sleep(FLUSH_PAUSE_S)
    return [format_warning("cache-not-flushed", status=status)]


def _cell_record(
    spec: RunSpec, cell: Cell, timed: Sequence[RequestRecord], limit: int, telemetry: TelemetryRecord | None
) -> CellRecord:
    slowed = check_throttling(timed, telemetry) if telemetry else ()
    capped = format_warning("requests-capped", limit=limit, asked=cell.concurrency)
    return CellRecord(
        prompt=cell.prompt.name,
        max_new_tokens=cell.max_new_tokens,
        concurrency=cell.concurrency,
        rounds=len({r.round for r in timed}),
        prompt_sha256=cell.prompt.sha256,
        warnings=(*check_cell(timed, real_text=spec.weights == "real"), *slowed)
        if cell.concurrency <= limit
        else (capped,),
    )


def _incomplete(cells: Sequence[Cell], requests: Sequence[RequestRecord], limit: int) -> str | None:
    if not cells:
        return f"nothing could be measured: the server runs {limit} requests at once, every cell asks for more"
    for cell in cells:
        timed = cell.timed(requests)
        if all(r.error for r in timed):
            which = f"{cell.prompt.name} ({cell.max_new_tokens} tokens, {cell.concurrency} at once)"
            return f"no timed request of {which} succeeded: {timed[0].error}"
    return None
