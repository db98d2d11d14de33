"""A sweep: every run one server start, measured by one parametrised notebook, leaving one record.

The record file is the only truth about a run. A notebook's own cell status is not: a kernel killed for memory leaves
a notebook that says "completed". The server belongs to this process, not to the kernel, so neither a killed kernel nor
an interrupted sweep leaves one behind.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from benchlib.clock import self_check
from benchlib.engines import Launch, build_launch, needs_gpus
from benchlib.environment import collect_environment
from benchlib.errors import BenchlibError, RecordError, SpecError
from benchlib.host import read_gpu_states
from benchlib.machine import busy_here, place_run
from benchlib.measure import CLOCK_FILE, WARMUP_TOKENS
from benchlib.notebook import execute_notebook, read_parameters
from benchlib.placement import Placement
from benchlib.progress import Follower, Listener, remove_told, show_progress
from benchlib.prompts import build_prompts
from benchlib.record import RunRecord, load_record, load_requests, run_folder, run_identity, save_run, write_atomic
from benchlib.server import HOST, Server, Starting, attach_server
from benchlib.spec import Assumed, RunSpec, Sweep
from benchlib.topology import Topology, read_topology
from benchlib.warnings import format_warning

__all__ = ["NOTEBOOK", "Outcome", "Planned", "RunState", "plan_sweep", "run_sweep", "select_runs", "signals_raise"]

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "02_measure.ipynb"
CLOCK_S = 3.0
PLAN_PORT = 30000  # shown in a plan; a run takes a free one
RunState = Literal["new", "finished", "failed", "stale", "partial"]


class Planned(NamedTuple):
    """What a sweep would do with a run: a `finished` one is skipped, every other is (re-)run.

    `estimate_s` is the time to start and measure it, from its own earlier record or the mean of its campaign's, else
    from the sweep's `assumed`; 0 when it is finished, None when nothing is known. `placement` is None where the run
    takes no GPU or cannot be placed; then `problem` says why, or what else it cannot be started for.
    """

    spec: RunSpec
    state: RunState
    estimate_s: float | None
    placement: Placement | None
    launch: Launch | None
    problem: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of a sweep ended; `seconds` is its whole wall time, server start included."""

    spec: RunSpec
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    error: str | None = None


def plan_sweep(
    runs: Sequence[RunSpec],
    results: Path,
    *,
    topology: Topology | None = None,
    busy: Mapping[int, str] | None = None,
    assumed: Assumed | None = None,
) -> list[Planned]:
    """What running these would do, on which GPUs, and for about how long. Starts nothing.

    `topology` plans for another machine: GPUs in `busy` are taken there, and no engine is asked what it can do.
    """
    looked = [(spec, *_look(spec, results)) for spec in runs]
    took = {spec.run_name: _took_s(record) for spec, _, record in looked if record and record.status == "ok"}
    mean = statistics.fmean(took.values()) if took else None
    planned, where = [], _Where(topology, busy or {})
    for spec, state, _ in looked:
        guess = mean if mean is not None or assumed is None else _assumed_s(spec, assumed)
        estimate = 0.0 if state == "finished" else took.get(spec.run_name, guess)
        planned.append(Planned(spec, state, estimate, *_plan_launch(spec, where)))
    return planned


def _took_s(record: RunRecord) -> float:
    return record.duration_s + ((record.server and record.server.startup_s) or 0.0)


def _assumed_s(spec: RunSpec, assumed: Assumed) -> float:
    """Start, then every token of every round at the assumed rate; concurrent requests run side by side."""
    work = spec.workload
    rounds = len(work.prompts) * len(work.concurrency)
    tokens = sum(work.warmups * min(n, WARMUP_TOKENS) + work.repeats * n for n in work.max_new_tokens)
    return assumed.start_s + rounds * tokens / assumed.decode_tok_s


class _Where:
    """The machine planned for: the one given, or this one, which is read once and only if a run takes a GPU."""

    def __init__(self, topology: Topology | None, busy: Mapping[int, str]) -> None:
        self.topology, self.busy, self.elsewhere = topology, busy, topology is not None

    def place(self, spec: RunSpec) -> tuple[Placement, bool | None]:
        if self.topology is None:
            self.topology = read_topology()
            self.busy = {**busy_here(self.topology, read_gpu_states()), **self.busy}
        return place_run(spec, self.topology, self.busy)


def _plan_launch(spec: RunSpec, where: _Where) -> tuple[Placement | None, Launch | None, str | None, tuple[str, ...]]:
    placement, notes = None, []
    try:
        if needs_gpus(spec):
            placement, custom = where.place(spec)
            notes = [note for note in (_crossing(placement), _compares_nothing(spec, custom)) if note]
        probe = not where.elsewhere
        launch = (
            None if spec.attach else build_launch(spec, host=HOST, port=PLAN_PORT, placement=placement, probe=probe)
        )
    except BenchlibError as error:
        return placement, None, str(error), tuple(notes)
    return placement, launch, None, tuple(notes)


def _crossing(placement: Placement) -> str | None:
    return f"crosses NUMA nodes {', '.join(map(str, placement.numa_nodes))}" if placement.cross_numa else None


def _compares_nothing(spec: RunSpec, custom_all_reduce: bool | None) -> str | None:
    if spec.nccl_profile == "none" or not custom_all_reduce:
        return None
    return "decode's all-reduce is expected to go past NCCL here: the profile would compare nothing"


def select_runs(sweep: Sweep, only: Sequence[str] = ()) -> list[RunSpec]:
    """The sweep's runs in measuring order; `only` names runs (`tp1-b16.1`, `tp1-b16.2`) or conditions (`tp1-b16`)."""
    runs = sweep.runs()
    names = [(run.condition_name, f"{run.condition_name}.{run.start}") for run in runs]
    if unknown := sorted(set(only) - {name for both in names for name in both}):
        raise SpecError(f"sweep {sweep.name} has no run {unknown}; it has {sorted({both[0] for both in names})}")
    return [run for run, both in zip(runs, names, strict=True) if not only or set(both) & set(only)]


def run_sweep(
    runs: Sequence[RunSpec],
    *,
    results: Path,
    force: bool = False,
    notebook: Path = NOTEBOOK,
    assumed: Assumed | None = None,
    listener: Listener | None = None,
) -> list[Outcome]:
    """Run what is not finished, one after the other; a failed run is recorded and the next one goes on.

    `listener` hears how far it is; without one that is shown on standard output. `assumed` tells the time left until a
    record does. Raises, before anything starts, SpecError for a parameter that the notebook does not know or a prompt
    that is none, RecordError when another sweep works on the same campaign.
    """
    if not runs:
        raise SpecError("nothing to run: the selection is empty")
    _check_parameters(notebook, runs[0])
    for work in {spec.workload for spec in runs}:  # of a sweep they are one
        build_prompts(work.prompt_set, work.prompts, vocab_size=1)  # SpecError for what is none
    outcomes, checked = [], False
    shown = show_progress() if listener is None else nullcontext(listener)
    with _locked(results / runs[0].campaign), signals_raise(), shown as hears:
        follower = _follow(runs, results, force, assumed, hears)
        for number, spec in enumerate(runs, 1):
            state, _ = _look(spec, results)
            if state == "finished" and not force:
                outcome = Outcome(spec, "skipped", 0.0)
            else:
                follower.begin(number, spec)
                if not checked:
                    follower.enter("checking the clock")
                    _check_clock(runs, results / spec.campaign)
                    checked = True
                outcome = _run_one(spec, results, notebook, state, follower)
            outcomes.append(outcome)
            follower.end(number, spec, outcome.status, outcome.seconds)
    return outcomes


def _follow(
    runs: Sequence[RunSpec], results: Path, force: bool, assumed: Assumed | None, listener: Listener
) -> Follower:
    looked = [(spec, *_look(spec, results)) for spec in runs]
    took = {
        (spec.condition_name, spec.start): _took_s(record)
        for spec, _, record in looked
        if record and record.status == "ok" and record.spec.workload == spec.workload
    }
    guess = None if assumed is None else functools.partial(_assumed_s, assumed=assumed)
    todo = [spec for spec, state, _ in looked if force or state != "finished"]
    return Follower(todo, len(runs), took, guess, listener)


def _check_clock(runs: Sequence[RunSpec], campaign: Path) -> None:
    """Measure a known schedule at the sweep's highest concurrency: how true the client is goes into each record."""
    streams = max(max(spec.workload.concurrency) for spec in runs)
    try:
        found: dict[str, Any] = asdict(self_check(CLOCK_S, streams=streams))
    except BenchlibError as error:
        found = {"error": str(error)}
    write_atomic(campaign / CLOCK_FILE, json.dumps(found, indent=1).encode() + b"\n")


def _run_one(spec: RunSpec, results: Path, notebook: Path, state: RunState, follower: Follower) -> Outcome:
    began = time.monotonic()
    follower.enter("placing")
    if state in ("stale", "finished") and (hindrance := _hindrance(spec)):
        return Outcome(spec, "failed", 0.0, f"its finished record stays where it is: {hindrance}")
    folder = run_folder(results, spec)
    _make_room(folder, state)
    environment = collect_environment(spec)
    identity = run_identity(spec, environment)
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    server: Server | None = None
    error = None
    try:
        with attach_server(spec, url=spec.attach) if spec.attach else Starting(spec, folder=folder) as server:
            # The notebook's kernel starts while the server does; the notebook then waits for it.
            parameters = {**spec.to_parameters(), "server_url": server.record.url, "results_dir": str(results)}
            watch = functools.partial(_watch, server, folder, follower)
            error = execute_notebook(notebook, folder / "notebook.ipynb", parameters, watch=watch)
            follower.enter("ending")
    except BenchlibError as failure:
        error = str(failure)
    seconds = time.monotonic() - began
    remove_told(folder)
    try:
        record = load_record(folder)
    except RecordError as missing:
        failed = RunRecord(
            status="failed",
            error=error or str(missing),
            spec=spec,
            identity=identity,
            started_at=started_at,
            duration_s=seconds,
            environment=environment,
            server=server.record if server else None,
        )
        record = save_run(folder, failed, ())
    if record.status == "failed" and server and (death := server.death()) and death not in (record.error or ""):
        record = record.model_copy(update={"error": f"{death}\n{record.error}"})
        record = save_run(folder, record, load_requests(folder))
    if record.status == "ok" and error:
        record = record.model_copy(update={"warnings": (*record.warnings, format_warning("ended-badly", what=error))})
        record = save_run(folder, record, load_requests(folder))
    if record.status == "ok" and record.identity != identity:
        changed = (
            "code, packages, variables or devices changed between the sweep's plan and its notebook: "
            "leave them alone while a sweep runs, then run it again"
        )
        record = record.model_copy(update={"status": "failed", "error": changed})
        record = save_run(folder, record, load_requests(folder))
    return Outcome(spec, record.status, seconds, record.error)


def _watch(server: Server, folder: Path, follower: Follower) -> bool:
    ready = server.poll()
    follower.look(folder, ready=ready)
    return ready


def _hindrance(spec: RunSpec) -> str:
    """Why a server cannot even be asked for; empty where it can. What is measured is not put aside for such a run."""
    try:
        if not spec.attach:
            build_launch(spec, host=HOST, port=PLAN_PORT)
    except BenchlibError as error:
        return str(error)
    return ""


def _look(spec: RunSpec, results: Path) -> tuple[RunState, RunRecord | None]:
    folder = run_folder(results, spec)
    if not folder.exists():
        return "new", None
    try:
        record = load_record(folder)
    except RecordError:
        return "stale" if (folder / "record.json").exists() else "partial", None
    if record.status != "ok":
        return "failed", record
    same = record.identity == run_identity(spec, collect_environment(spec))
    return "finished" if same else "stale", record


def _make_room(folder: Path, state: RunState) -> None:
    """Move an old record aside, marked by its folder; drop what never became one."""
    if state == "partial":
        shutil.rmtree(folder)
    elif state != "new":
        aside = folder.parent / "superseded"
        aside.mkdir(exist_ok=True)
        number = 1
        while (target := aside / f"{folder.name}-{number}").exists():
            number += 1
        folder.rename(target)
    folder.mkdir(parents=True)


def _check_parameters(notebook: Path, spec: RunSpec) -> None:
    """papermill only warns of a parameter that the notebook lacks; the run would then measure something else."""
    if not notebook.is_file():
        raise SpecError(f"no notebook {notebook}: sweeps run in a clone of the repository")
    known = read_parameters(notebook)
    if unknown := sorted({*spec.to_parameters(), "server_url", "results_dir"} - known):
        raise SpecError(f"{notebook} has no parameter {unknown}; its parameters cell has {sorted(known)}")


@contextmanager
def _locked(campaign: Path) -> Iterator[None]:
    campaign.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(campaign / ".lock", timeout=0):
            yield
    except Timeout:
        raise RecordError(f"another sweep is writing {campaign}: wait for it, or give another --results") from None


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that servers are ended in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SIGINT too: a job started in the background by a shell inherits it ignored. Not SIGHUP, which nohup had ignored.
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
