"""Keeps a server on its GPUs' NUMA node: by numactl where it works, else by CPU affinity alone, and says which.

SGLang binds each of its ranks by itself, but neither its HTTP and tokenizer processes nor another engine's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.errors import PlacementError
from benchlib.placement import Placement
from benchlib.topology import format_cpu_list, parse_cpu_list

__all__ = ["Binding", "plan_binding"]


@dataclass(frozen=True, slots=True)
class Binding:
    """How to start the server: `prefix` before its argv, or `cpus` for os.sched_setaffinity; `how` in words."""

    prefix: tuple[str, ...]
    cpus: tuple[int, ...] | None  # None: `prefix` binds, or nothing does
    how: str


def plan_binding(
    placement: Placement,
    *,
    which: Callable[[str], str | None] = shutil.which,
    run: Callable[..., Any] = subprocess.run,
    sysfs: Path | str = "/sys",
) -> Binding:
    """Bind to the placement's memory node, within the CPUs that this process may use. Raises nothing of its own."""
    node, nodes = placement.memory_node, Path(sysfs) / "devices/system/node"
    if node is None:
        why = "the GPUs are on several NUMA nodes" if placement.cross_numa else "the GPUs' NUMA node is unknown"
        return Binding((), None, f"not bound: {why}; SGLang binds each rank by itself")
    online = _read_list(nodes / "online")
    if len(online) < 2 or node not in online:
        told = format_cpu_list(online) or "unknown"
        return Binding((), None, f"not bound: NUMA nodes online here: {told}, that of the GPUs: {node}")
    theirs = parse_cpu_list(placement.cpus) if placement.cpus else _read_list(nodes / f"node{node}/cpulist")
    cpus = theirs & os.sched_getaffinity(0)
    if not cpus:
        return Binding((), None, f"not bound: no CPU of NUMA node {node} is open to this process")
    # By node, numactl would hand back CPUs that were taken from this process.
    by_cpu = f"--cpunodebind={node}" if cpus == theirs else f"--physcpubind={format_cpu_list(cpus)}"
    prefix = ("numactl", by_cpu, f"--membind={node}")
    if refusal := _refusal(prefix, which, run):
        how = f"CPU affinity to {format_cpu_list(cpus)} alone, memory not bound: {refusal}"
        return Binding((), tuple(sorted(cpus)), how)
    return Binding(prefix, None, " ".join(prefix))


def _refusal(prefix: tuple[str, ...], which: Callable[[str], str | None], run: Callable[..., Any]) -> str:
    """Why numactl cannot start a program so, as in a container that may not bind memory; empty: it can."""
    if which(prefix[0]) is None:
        return "numactl is not installed"
    try:
        done = run([*prefix, "true"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"numactl failed ({error})"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"numactl was refused ({last})" if done.returncode else ""


def _read_list(path: Path) -> frozenset[int]:
    """The numbers in a kernel list; empty where there is none."""
    with suppress(OSError, PlacementError):
        return parse_cpu_list(path.read_text())
    return frozenset()
