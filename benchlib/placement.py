"""Which GPUs a run gets, and why: the best-linked free set of the machine, whole on one NUMA node where that is equal.

Order of preference among sets of `tp_size` GPUs: best worst link, then one NUMA node, then best sum of links, then
lowest indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchlib.topology import Topology

__all__ = ["Placement", "place_gpus"]

NumaPolicy = Literal["pack", "allow-cross", "spread"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen GPUs; every label of a run's devices comes from here."""

    gpus: tuple[int, ...]
    uuids: tuple[str | None, ...]
    names: tuple[str | None, ...]
    numa_nodes: tuple[int, ...]  # distinct, sorted; empty: unknown
    cpus: str | None  # union of the GPUs' CPU lists
    memory_node: int | None  # None: unknown, or more than one
    cross_numa: bool | None  # None: unknown
    worst_link: str | None  # None: one GPU, or unknown
    numa_policy: NumaPolicy
    worse_than: tuple[int, ...] | None  # the set that the whole machine, were it free, would have given; None: this one
    runner_up: tuple[int, ...] | None
    reason: str


def place_gpus(
    topology: Topology,
    tp_size: int,
    *,
    numa_policy: NumaPolicy = "pack",
    busy: Mapping[int, str] | None = None,
) -> Placement:
    """Choose `tp_size` GPUs that are not in `busy` (index -> who holds it). PlacementError where that is impossible."""
    raise NotImplementedError
