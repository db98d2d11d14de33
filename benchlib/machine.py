"""What a run gets of this machine: its GPUs among the free ones, how it is bound, and whether its launch can work."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.binding import Binding, plan_binding
from benchlib.engines import flag_value, needs_gpus
from benchlib.errors import PlacementError, ServerError
from benchlib.host import Check, GpuState, Machine, busy_gpus, format_checks, read_gpu_states, run_checks, would_fail
from benchlib.links import links_disagree, load_links
from benchlib.placement import NumaPolicy, Placement, custom_all_reduce_expected, place_gpus, restrict_to_visible
from benchlib.spec import RunSpec
from benchlib.topology import Topology, load_topology, read_topology

__all__ = [
    "Allotment", "Seen", "allot", "build_places", "busy_here", "check_devices", "examine", "find_topology",
    "place_run", "wait_for_release",
]  # fmt: skip

NO_BINDING = Binding((), None, "not bound: no GPU")
# Fewer bytes than this may come and go with another process's context.
GROWTH_BYTES = 500 * 2**20
RELEASE_S, RELEASE_POLL_S = 10.0, 0.25


@dataclass(frozen=True, slots=True)
class Allotment:
    """Of one run: None and empty where it takes no GPU. `before`: the GPUs' state before it starts."""

    placement: Placement | None
    binding: Binding
    custom_all_reduce: bool | None
    links_disagree: tuple[str, ...]
    before: tuple[GpuState, ...]


def allot(spec: RunSpec) -> Allotment:
    """Place, bind and check a run that is about to start here.

    PlacementError where no fitting GPUs are free, ServerError with every failed check where its launch cannot work.
    """
    if not needs_gpus(spec):
        _check(spec, None)
        return Allotment(None, NO_BINDING, None, (), ())
    states = read_gpu_states()
    topology = _topology(spec, states)
    placement, expected = place_run(spec, topology, busy_here(topology, states))
    links = load_links(Path(spec.measured_links)) if spec.measured_links else None
    notes = links_disagree(topology, links) if links else ()
    _check(spec, placement)
    return Allotment(placement, plan_binding(placement), expected, notes, states)


def _topology(spec: RunSpec, states: tuple[GpuState, ...]) -> Topology:
    try:
        return read_topology()
    except PlacementError as error:
        # Why there is none is the preflight's to say.
        _check(spec, None)
        raise error


def place_run(
    spec: RunSpec, topology: Topology, busy: Mapping[int, str] | None = None
) -> tuple[Placement, bool | None]:
    """The run's GPUs, and whether SGLang's custom all-reduce is expected on them (None: unknown)."""
    links = load_links(Path(spec.measured_links)) if spec.measured_links else None
    policy = spec.numa_policy
    placement = place_gpus(topology, needs_gpus(spec), numa_policy=policy, busy=busy, measured=links)
    if "--disable-custom-all-reduce" in spec.server_args:
        return placement, False
    # Of ranks on other hosts the topology here says nothing.
    return placement, None if flag_value(spec, "--nnodes") else custom_all_reduce_expected(topology, placement)


class Seen(NamedTuple):
    """A machine to look at: its links, who holds which GPU, and in words where that was read."""

    topology: Topology
    busy: dict[int, str]
    source: str


def find_topology(saved: Path | str = "", *, example: Path) -> Seen:
    """The `saved` machine, or this one; where this one has no GPU, the saved `example`, and words that say so."""
    if saved:
        return Seen(load_topology(saved), {}, f"A saved machine, {Path(saved).name}.")
    try:
        topology = read_topology()
        return Seen(topology, busy_here(topology, read_gpu_states()), "This machine.")
    except PlacementError as error:
        text = f"This machine has no GPU that could be shown ({error}). Instead, a saved example: {example.name}."
        return Seen(load_topology(example), {}, text)


def build_places(seen: Seen, sizes: Sequence[int], *, numa_policy: NumaPolicy = "pack") -> list[dict[str, Any]]:
    """A row for each tensor-parallel size: the GPUs it would get and why, or no GPUs and the reason."""
    return [{"tp_size": size, **_place(seen, size, numa_policy)} for size in sizes]


def _place(seen: Seen, size: int, numa_policy: NumaPolicy) -> dict[str, Any]:
    try:
        got = place_gpus(seen.topology, size, numa_policy=numa_policy, busy=seen.busy)
    except PlacementError as error:
        return {"gpus": (), "worst_link": None, "numa_nodes": (), "cpus": None, "why": str(error)}
    named = {key: getattr(got, key) for key in ("gpus", "worst_link", "numa_nodes", "cpus")}
    return {**named, "why": got.reason}


def busy_here(topology: Topology, states: tuple[GpuState, ...]) -> dict[int, str]:
    """Who holds each GPU that a run started by this process may not take."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    outside = restrict_to_visible(topology, visible) if visible is not None else {}
    return {**outside, **busy_gpus(states)}


def examine(specs: Sequence[RunSpec], *, since_boot: str | None = None) -> tuple[Check, ...]:
    """Every check of these runs on this machine, each once; a placement that is impossible is a failed check.

    `since_boot`: the boot id that the campaign's records were made under.
    """
    found: dict[Check, None] = {}
    machine = Machine.here()
    for spec in {(s.tp_size, s.numa_policy, s.method, s.tree_budget, s.variant): s for s in specs}.values():
        gpus, problem = _try_place(spec)
        found |= dict.fromkeys(run_checks(spec, engine=spec.engine, machine=machine, gpus=gpus, since_boot=since_boot))
        if problem:
            why = "a run takes the best-linked GPUs that are free, and never worse ones in silence"
            found[Check("placement", "fail", f"{spec.run_name}: {problem}", why, None)] = None
    return tuple(found)


def _try_place(spec: RunSpec) -> tuple[tuple[int, ...] | None, str | None]:
    """The GPUs of a run, or why there are none where the machine has some; without any, other checks say more."""
    if not needs_gpus(spec) or not (states := read_gpu_states()):
        return None, None
    try:
        topology = read_topology()
        return place_run(spec, topology, busy_here(topology, states))[0].gpus, None
    except PlacementError as error:
        return None, str(error)


def _check(spec: RunSpec, placement: Placement | None) -> None:
    gpus = placement.gpus if placement else None
    checks = run_checks(spec, engine=spec.engine, machine=Machine.here(), gpus=gpus)
    if would_fail(checks):
        failed = tuple(check for check in checks if check.status == "fail")
        raise ServerError(f"the launch of {spec.run_name} would fail:\n{format_checks(failed)}")


def check_devices(
    placement: Placement, before: tuple[GpuState, ...], after: tuple[GpuState, ...], pids: frozenset[int]
) -> str:
    """How it was seen that the server runs on the GPUs planned; ServerError where it runs on others.

    By its processes, as the driver lists them; where those are hidden (containers), by which GPUs' memory grew.
    """
    used = {gpu.index: gpu.memory_used_bytes or 0 for gpu in before}
    owned = {gpu.index for gpu in after if any(pid in pids for pid, _, _ in gpu.processes)}
    grown = {g.index for g in after if (g.memory_used_bytes or 0) - used.get(g.index, 0) > GROWTH_BYTES}
    how, seen = ("by its processes", owned) if owned else ("by memory in use", grown)
    if not seen:
        return "not verified: the driver shows neither its processes nor its memory"
    names = {gpu.index: gpu.uuid for gpu in after}
    if seen != set(placement.gpus) or any(names[i] != u for i, u in zip(placement.gpus, placement.uuids, strict=True)):
        raise ServerError(
            f"the server runs on GPUs {sorted(seen)} ({how}), planned were {list(placement.gpus)}. "
            "Does something else set CUDA_VISIBLE_DEVICES, or was the machine changed?"
        )
    return f"verified {how}"


def wait_for_release(placement: Placement, before: tuple[GpuState, ...]) -> None:
    """Wait until the placed GPUs' memory is back to what it was; ServerError that says who holds it where it is not."""
    used = {gpu.index: gpu.memory_used_bytes or 0 for gpu in before}
    until = time.monotonic() + RELEASE_S
    while True:
        states = [gpu for gpu in read_gpu_states() if gpu.index in placement.gpus]
        held = [g for g in states if (g.memory_used_bytes or 0) - used.get(g.index, 0) > GROWTH_BYTES]
        if not held:
            return
        if time.monotonic() > until:
            who = busy_gpus(tuple(held), threshold_mib=0)
            raise ServerError(
                f"{RELEASE_S:g} s after the server ended, its GPUs still hold memory: "
                f"{'; '.join(f'GPU {index}: {text}' for index, text in who.items())}. End what holds it"
            )
        time.sleep(RELEASE_POLL_S)
