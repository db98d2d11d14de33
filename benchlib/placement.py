"""Which GPUs a run gets, and why: the best-linked free set of the machine, whole on one NUMA node where that is equal.

Order of preference among sets of `tp_size` GPUs: best worst link (by label, or as measured), then one NUMA node, then
best sum of links, then lowest indices. Policy `spread` asks for an even division over NUMA nodes before all of that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb, log
from typing import Literal, NamedTuple, get_args

from benchlib.errors import PlacementError
from benchlib.links import NOISE, Links, link_strength, pair_labels, pair_times_us
from benchlib.topology import Topology, format_cpu_list, parse_cpu_list

__all__ = [
    "NumaPolicy", "Placement", "custom_all_reduce_expected", "format_devices", "place_gpus", "placement_env",
    "restrict_to_visible",
]  # fmt: skip

NumaPolicy = Literal["pack", "allow-cross", "spread"]
Indices = tuple[int, ...]
MAX_SETS = comb(16, 8)  # all are compared, in about half a second


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

    @property
    def label(self) -> str:
        """The GPUs as `0-3`."""
        return format_devices(self.gpus)


class _Set(NamedTuple):
    """GPUs behind what they are ordered by: the lowest is the best set."""

    unevenness: int  # of the division over nodes; 0 but under `spread`
    worst: float
    crossing: int  # 0 no, 1 unknown, 2 yes
    weakness: int
    gpus: tuple[int, ...]


BEHIND = (
    "is divided less evenly over NUMA nodes", "has a worse link", "is less surely on one NUMA node",
    "has weaker links in sum", "is equal and has higher indices",
)  # fmt: skip


def place_gpus(
    topology: Topology,
    tp_size: int,
    *,
    numa_policy: NumaPolicy = "pack",
    busy: Mapping[int, str] | None = None,
    measured: Links | None = None,
) -> Placement:
    """Choose `tp_size` GPUs that are not in `busy` (index -> who holds it), none of them in MIG mode.

    PlacementError where that is impossible. Under `pack` also where busy GPUs leave only a worse worst link, or a
    crossing of NUMA nodes over PCIe, and the whole machine has better: `allow-cross` takes and marks such a set.
    """
    busy = busy or {}
    sets = list(combinations(_usable(topology, tp_size, numa_policy, busy), tp_size))
    ordered = _ordered_sets(topology, sets, spread=numa_policy == "spread", measured=measured)
    best, (chosen, *others) = ordered[0], [one for one in ordered if busy.keys().isdisjoint(one.gpus)]
    link, nodes = _worst_link(topology, chosen.gpus), _nodes(topology, chosen.gpus)
    over_pcie = link_strength(link) < link_strength("NV1")
    worse = chosen[:2] > best[:2] or (over_pcie and chosen.crossing == 2 and best.crossing == 0)
    taken = _describe(topology, chosen.gpus, measured)
    whole = f"the whole machine would give {_describe(topology, best.gpus, measured)}; busy: {_who(busy)}"
    if numa_policy == "pack" and worse:
        raise PlacementError(f"{tp_size=}: {whole}. Left is {taken}. Free some, or allow it: --numa-policy allow-cross")
    if numa_policy == "spread" and len(nodes) == 1:
        raise PlacementError(f"numa_policy=spread: the free GPUs are on one NUMA node; {whole}. Free some")
    gpus = [topology.gpus[index] for index in chosen.gpus]
    cpus = [parse_cpu_list(gpu.cpus) for gpu in gpus if gpu.cpus]
    return Placement(
        gpus=chosen.gpus,
        uuids=tuple(gpu.uuid for gpu in gpus),
        names=tuple(gpu.name for gpu in gpus),
        numa_nodes=nodes,
        cpus=format_cpu_list(frozenset().union(*cpus)) if len(cpus) == len(gpus) else None,
        memory_node=nodes[0] if len(nodes) == 1 else None,
        cross_numa=len(nodes) > 1 if nodes else None,
        worst_link=link,
        numa_policy=numa_policy,
        worse_than=best.gpus if worse else None,
        runner_up=others[0].gpus if others else None,
        reason=f"{taken}; {_compare(chosen, others)}." + (f" Worse than need be: {whole}." if worse else ""),
    )


def placement_env(placement: Placement) -> dict[str, str]:
    """The variables that show a server its GPUs. Integers: UUIDs switch off SGLang's custom all-reduce."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, placement.gpus))}


def custom_all_reduce_expected(topology: Topology, placement: Placement) -> bool | None:
    """Whether SGLang's own all-reduce would carry decode's sums instead of NCCL; None where that cannot be told.

    SGLang 0.5.23, `custom_all_reduce*.py`: with NVLink between all pairs, sizes 2, 4, 6 and 8 always (odd ones by the
    newer of its two kernels only: None here); over PCIe two GPUs alone, if they pass its peer-to-peer test as well.
    """
    labels = [topology.links[a][b] for a, b in combinations(placement.gpus, 2)]
    pcie = any(0 < link_strength(label) < link_strength("NV1") for label in labels)
    if not labels or (pcie and len(placement.gpus) > 2):
        return False
    return True if None not in labels and len(placement.gpus) in (2, 4, 6, 8) else None


def restrict_to_visible(topology: Topology, visible: str | None) -> dict[int, str]:
    """The GPUs outside an inherited CUDA_VISIBLE_DEVICES, for `busy`; integers are taken in PCI order, None is unset.

    PlacementError for an entry that is not the index, the UUID or the beginning of the UUID of exactly one GPU.
    """
    if visible is None:
        return {}
    outside = {gpu.index: f"outside CUDA_VISIBLE_DEVICES={visible} of this process" for gpu in topology.gpus}
    for name in map(str.strip, visible.split(",")):
        by_uuid = [gpu for gpu in topology.gpus if name.startswith("GPU-") and (gpu.uuid or "").startswith(name)]
        found = by_uuid or [gpu for gpu in topology.gpus if name == str(gpu.index)]
        if len(found) != 1:
            raise PlacementError(
                f"CUDA_VISIBLE_DEVICES={visible}: {name!r} names {len(found)} GPUs of {topology.source}, expected 1. "
                f"Name GPUs by index ({format_devices(gpu.index for gpu in topology.gpus)}) or UUID, or unset it"
            )
        outside.pop(found[0].index, None)
    return outside


def format_devices(gpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 6) -> `0-3,6`."""
    return format_cpu_list(gpus) or ""


def _usable(topology: Topology, tp_size: int, numa_policy: NumaPolicy, busy: Mapping[int, str]) -> list[int]:
    """The GPUs that a set may hold were they free; PlacementError for what no set can fulfil."""
    usable, mig = ([gpu.index for gpu in topology.gpus if gpu.mig is mode] for mode in (False, True))
    n_free, n_sets = len(set(usable) - busy.keys()), comb(len(usable), max(tp_size, 0))
    nodes = {topology.gpus[index].numa_node for index in usable}
    strange = busy.keys() - set(usable + mig)
    spread, where = numa_policy == "spread", f"of {topology.source}"
    has = f"{len(usable)} {where} can be used" + (f" ({_named(mig)} in MIG mode cannot)" if mig else "")
    for wrong, text in (
        (numa_policy not in get_args(NumaPolicy), f"{numa_policy=}: expected one of {get_args(NumaPolicy)}"),
        (tp_size < 1, f"{tp_size=}: expected 1 or more"),
        (strange, f"busy names {_named(strange)}, and the GPUs {where} are {format_devices(usable + mig)}"),
        (tp_size > len(usable), f"{tp_size=} needs as many GPUs: {has}. Lower tp_size"),
        (tp_size > n_free, f"{tp_size=} needs as many free GPUs: {has}, {n_free} free; busy: {_who(busy)}. Free some"),
        (spread and tp_size == 1, "numa_policy=spread needs tp_size 2 or more, for one GPU is on one NUMA node"),
        (spread and None in nodes, f"numa_policy=spread needs every GPU's NUMA node, and some {where} is unknown"),
        (spread and len(nodes) == 1, f"numa_policy=spread needs two NUMA nodes, and all GPUs {where} are on one"),
        (n_sets > MAX_SETS, f"{tp_size=} of {len(usable)} GPUs: {n_sets} sets are too many to compare ({MAX_SETS})"),
    ):
        if wrong:
            raise PlacementError(text)
    return usable


def _ordered_sets(topology: Topology, sets: list[Indices], *, spread: bool, measured: Links | None) -> list[_Set]:
    strengths = {pair: link_strength(label) for pair, label in pair_labels(topology).items()}
    times = pair_times_us(topology, measured) if measured else {}
    found = []
    for gpus in sets:
        pairs, on = list(combinations(gpus, 2)), [topology.gpus[index].numa_node for index in gpus]
        cost = max((times[pair] if times else -strengths[pair] for pair in pairs), default=0)
        crossing = 1 if None in on else 2 * (len(set(on)) > 1)
        unevenness = sum(map(on.count, on)) if spread else 0
        found.append(_Set(unevenness, cost, crossing, -sum(map(strengths.__getitem__, pairs)), gpus))
    if times and (least := min(found, key=lambda one: one.worst).worst):
        # Steps of 10% above the best: noise must not choose.
        found = [one._replace(worst=int(log(one.worst / least, NOISE))) for one in found]
    return sorted(found)


def _worst_link(topology: Topology, gpus: Indices) -> str | None:
    return min((topology.links[a][b] for a, b in combinations(gpus, 2)), key=link_strength, default=None)


def _nodes(topology: Topology, gpus: Indices) -> tuple[int, ...]:
    nodes = {topology.gpus[index].numa_node for index in gpus}
    return tuple(sorted(node for node in nodes if node is not None)) if None not in nodes else ()


def _describe(topology: Topology, gpus: Indices, measured: Links | None) -> str:
    """`GPUs 0-3 (worst link NODE, NUMA node 0)`."""
    link = f"worst link {_worst_link(topology, gpus) or 'unknown'}, " if len(gpus) > 1 else ""
    if measured and len(gpus) > 1:
        times = pair_times_us(topology, measured)
        link += f"by measurement {max(times[pair] for pair in combinations(gpus, 2)):.1f} us an all-reduce, "
    return f"{_named(gpus)} ({link}{_named(_nodes(topology, gpus), 'NUMA node')})"


def _compare(chosen: _Set, others: list[_Set]) -> str:
    if not others:
        return "no other set is free"
    first = next(i for i, (a, b) in enumerate(zip(chosen, others[0], strict=True)) if a != b)
    return f"the runner-up {format_devices(others[0].gpus)} {BEHIND[first]}"


def _named(numbers: Collection[int], kind: str = "GPU") -> str:
    return f"{kind}{'s' if len(numbers) > 1 else ''} {format_cpu_list(numbers) or 'unknown'}"


def _who(busy: Mapping[int, str]) -> str:
    """`GPUs 0-1 (named busy), GPU 5 (PID 4242 python, 48.0 GiB)`."""
    holders = {text: [index for index in sorted(busy) if busy[index] == text] for text in busy.values()}
    return ", ".join(f"{_named(gpus)} ({text})" for text, gpus in holders.items())
