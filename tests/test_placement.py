"""Which GPUs are chosen: the handed machines, a restatement of the order by brute force, and every refusal."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchlib.errors import PlacementError
from benchlib.links import Links
from benchlib.placement import (
    NumaPolicy,
    Placement,
    custom_all_reduce_expected,
    format_devices,
    place_gpus,
    placement_env,
    restrict_to_visible,
)
from benchlib.topology import Gpu, Topology, load_topology

DATA = Path(__file__).parent / "data" / "topology"
CASES = {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}
PLACED = [(name, int(tp), gpus) for name, case in CASES.items() for tp, gpus in case.get("place", {}).items()]
# The order of the module's docstring, written out: each before all that follow it.
BEST_FIRST = ["NV18", "NV12", "NV4", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", None]


def machine(name: str) -> Topology:
    return load_topology(DATA / f"{name}.txt")


def seed_machine() -> Topology:
    return machine("seed_8x_pcie_two_sockets")


def build(nodes: list[int | None], links: dict[tuple[int, int], str | None], *, mig: tuple[int, ...] = ()) -> Topology:
    gpus = tuple(Gpu(i, uuid=f"GPU-{i}{i}", numa_node=node, mig=i in mig) for i, node in enumerate(nodes))
    size = range(len(nodes))
    rows = tuple(tuple("X" if i == j else links[min(i, j), max(i, j)] for j in size) for i in size)
    return Topology(gpus, rows, "test")


def uniform(nodes: list[int | None], label: str | None, **others: Any) -> Topology:
    return build(nodes, dict.fromkeys(combinations(range(len(nodes)), 2), label), **others)


def measured(topology: Topology, times: dict[tuple[int, int], float]) -> Links:
    size = range(len(topology.gpus))
    matrix = tuple(tuple(None if i == j else times[min(i, j), max(i, j)] for j in size) for i in size)
    return Links(tuple(f"GPU-{i}{i}" for i in size), matrix, matrix, matrix, "cuda", "2026-01-01T00:00:00+00:00", 5)


@pytest.mark.parametrize(("name", "tp_size", "gpus"), PLACED)
def test_handed_machines(name: str, tp_size: int, gpus: list[int]) -> None:
    placement = place_gpus(machine(name), tp_size)
    assert list(placement.gpus) == gpus
    assert placement.cross_numa is CASES[name]["cross_numa"][str(tp_size)]
    nodes = {CASES[name]["numa"][index] for index in gpus}
    assert placement.numa_nodes == tuple(sorted(nodes))
    assert placement.memory_node == (nodes.pop() if len(nodes) == 1 else None)
    assert placement.worse_than is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "place_if_busy" in case])
def test_handed_machines_with_busy_gpus(name: str) -> None:
    case = CASES[name]["place_if_busy"]
    busy = {index: f"PID {4000 + index} python, 48.0 GiB" for index in case["busy"]}
    if case["4"] is not None:
        placement = place_gpus(machine(name), 4, busy=busy)
        assert (list(placement.gpus), placement.worse_than) == (case["4"], None)
        return
    with pytest.raises(PlacementError) as refusal:
        place_gpus(machine(name), 4, busy=busy)
    for holder in busy.values():
        assert holder in str(refusal.value)
    placement = place_gpus(machine(name), 4, busy=busy, numa_policy="allow-cross")
    assert list(placement.gpus) == case["4_allow_cross"]


def test_a_refusal_names_what_is_busy_what_is_best_what_is_left_and_the_remedy() -> None:
    with pytest.raises(PlacementError) as refusal:
        place_gpus(seed_machine(), 4, busy={1: "PID 4242 python, 48.0 GiB", 2: "named busy", 5: "named busy"})
    assert str(refusal.value) == (
        "tp_size=4: the whole machine would give GPUs 0-3 (worst link NODE, NUMA node 0); "
        "busy: GPU 1 (PID 4242 python, 48.0 GiB), GPUs 2,5 (named busy). "
        "Left is GPUs 0,4,6-7 (worst link SYS, NUMA nodes 0-1). Free some, or allow it: --numa-policy allow-cross"
    )


def test_a_worse_set_that_is_allowed_is_marked() -> None:
    placement = place_gpus(seed_machine(), 4, busy={1: "a", 2: "a", 5: "a"}, numa_policy="allow-cross")
    assert placement.gpus == (0, 4, 6, 7)
    assert placement.worse_than == (0, 1, 2, 3)
    assert (placement.cross_numa, placement.memory_node, placement.cpus) == (True, None, "0-63")
    assert "Worse than need be: the whole machine would give GPUs 0-3" in placement.reason


def test_a_worse_link_on_one_node_is_refused_too() -> None:
    islands = machine("8x_two_pix_islands_one_node")
    busy = {0: "named busy", 4: "named busy"}
    with pytest.raises(PlacementError, match="worst link PIX"):
        place_gpus(islands, 4, busy=busy)
    assert place_gpus(islands, 4, busy=busy, numa_policy="allow-cross").worst_link == "NODE"


def test_a_crossing_over_nvlink_is_no_worse_set() -> None:
    busy = {0: "named busy", 4: "named busy"}
    placement = place_gpus(machine("b300_8x_nvlink_ansi_header"), 4, busy=busy)
    assert (placement.gpus, placement.cross_numa, placement.worse_than) == ((1, 2, 3, 5), True, None)


def test_a_crossing_that_the_whole_machine_needs_as_well_is_taken() -> None:
    placement = place_gpus(uniform([0, 0, 1, 1], "SYS"), 3, busy={0: "named busy"})
    assert (placement.gpus, placement.cross_numa) == ((1, 2, 3), True)


def test_the_reason_tells_the_runner_up() -> None:
    placement = place_gpus(seed_machine(), 4)
    assert placement.runner_up == (4, 5, 6, 7)
    assert placement.reason == (
        "GPUs 0-3 (worst link NODE, NUMA node 0); the runner-up 4-7 is equal and has higher indices."
    )
    assert place_gpus(seed_machine(), 8).reason.endswith("no other set is free.")
    assert "the runner-up 0-1 has a worse link." in place_gpus(machine("quad_pxb_pix_no_gpu_numa_id"), 2).reason


def test_more_nvlinks_are_better() -> None:
    topology = build([0, 0, 0], {(0, 1): "NV12", (0, 2): "NV18", (1, 2): "NV12"})
    assert place_gpus(topology, 2).gpus == (0, 2)
    with pytest.raises(PlacementError, match=r"GPUs 0,2 \(worst link NV18"):
        place_gpus(topology, 2, busy={2: "named busy"})


def test_unknown_nodes_leave_it_to_the_links() -> None:
    topology = build([None] * 3, {(0, 1): "SYS", (0, 2): "PHB", (1, 2): "PIX"})
    placement = place_gpus(topology, 2)
    assert (placement.gpus, placement.cross_numa, placement.numa_nodes) == ((1, 2), None, ())
    assert place_gpus(topology, 1).cross_numa is None
    assert "NUMA node unknown" in placement.reason
    # One unknown node is enough not to know.
    assert place_gpus(uniform([0, None], "PIX"), 2).cross_numa is None


def test_spread_divides_evenly_over_nodes() -> None:
    four = place_gpus(seed_machine(), 4, numa_policy="spread")
    assert (four.gpus, four.cross_numa, four.worse_than) == ((0, 1, 4, 5), True, None)
    assert place_gpus(machine("quad_nvlink_pairs_four_numa_nodes"), 2, numa_policy="spread").gpus == (0, 1)
    uneven = place_gpus(seed_machine(), 4, numa_policy="spread", busy=dict.fromkeys((0, 1, 2), "named busy"))
    assert (uneven.gpus, uneven.worse_than) == ((3, 4, 5, 6), (0, 1, 4, 5))


@pytest.mark.parametrize(
    ("topology", "tp_size", "arguments", "text"),
    [
        (seed_machine(), 0, {}, "tp_size=0: expected 1 or more"),
        (seed_machine(), 9, {}, "tp_size=9 needs as many GPUs: 8 of .* can be used"),
        (seed_machine(), 7, {"busy": {0: "PID 7", 3: "PID 7"}}, r"6 free; busy: GPUs 0,3 \(PID 7\)"),
        (seed_machine(), 2, {"busy": {9: "named busy"}}, "busy names GPU 9, .* are 0-7"),
        (seed_machine(), 2, {"numa_policy": "pakc"}, "expected one of .*allow-cross"),
        (seed_machine(), 1, {"numa_policy": "spread"}, "tp_size 2 or more"),
        (seed_machine(), 2, {"numa_policy": "spread", "busy": dict.fromkeys(range(4), "PID 7")}, "on one .*PID 7"),
        (uniform([0, 0, 0], "PIX"), 2, {"numa_policy": "spread"}, "all GPUs of test are on one"),
        (uniform([0, 1, None], "PIX"), 2, {"numa_policy": "spread"}, "is unknown"),
        (uniform([0, 0, 0], "PIX", mig=(1,)), 3, {}, r"2 of test can be used \(GPU 1 in MIG mode cannot\)"),
        (uniform([0] * 17, "PIX"), 8, {}, "24310 sets are too many"),
    ],
)  # fmt: skip
def test_impossible_requests(topology: Topology, tp_size: int, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        place_gpus(topology, tp_size, **arguments)


def test_gpus_in_mig_mode_are_passed_over() -> None:
    assert place_gpus(uniform([0, 0, 0], "PIX", mig=(0,)), 2).gpus == (1, 2)


def test_measurement_goes_before_labels() -> None:
    topology = build([0, 0, 1], {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"})
    slow_pix = measured(topology, {(0, 1): 30.0, (0, 2): 20.0, (1, 2): 25.0})
    placement = place_gpus(topology, 2, measured=slow_pix)
    assert placement.gpus == (0, 2)
    assert "by measurement 20.0 us an all-reduce" in placement.reason
    assert "the runner-up 1-2 has a worse link" in placement.reason


def test_noise_of_a_measurement_does_not_choose() -> None:
    topology = build([0, 0, 1], {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"})
    close = measured(topology, {(0, 1): 21.5, (0, 2): 20.0, (1, 2): 20.0})
    assert place_gpus(topology, 2, measured=close).gpus == (0, 1)
    assert place_gpus(topology, 1, measured=close).gpus == (0,)


def test_a_set_that_measures_worse_is_refused() -> None:
    topology = uniform([0, 0, 0], "PIX")
    links = measured(topology, {(0, 1): 20.0, (0, 2): 40.0, (1, 2): 40.0})
    with pytest.raises(PlacementError, match=r"would give GPUs 0-1 .*20\.0 us.* Left is GPUs 1-2 .*40\.0 us"):
        place_gpus(topology, 2, measured=links, busy={0: "named busy"})


def test_links_of_other_gpus_are_refused() -> None:
    topology = uniform([0, 0, 0], "PIX")
    pair = measured(uniform([0, 0], "PIX"), {(0, 1): 20.0})
    with pytest.raises(PlacementError, match="measured on GPU-00, GPU-11; test has GPU-00, GPU-11, GPU-22"):
        place_gpus(topology, 2, measured=pair)
    with pytest.raises(PlacementError, match="None"):
        place_gpus(seed_machine(), 2, measured=pair)


def test_environment_shows_integers_in_pci_order() -> None:
    placement = place_gpus(seed_machine(), 4, busy={0: "named busy"})
    assert placement_env(placement) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_devices_are_formatted_as_ranges() -> None:
    assert format_devices((0, 1, 2, 3)) == "0-3"
    assert format_devices((0, 1, 3, 4)) == "0-1,3-4"
    assert format_devices((5,)) == "5"
    assert place_gpus(seed_machine(), 4).label == "0-3"


@pytest.mark.parametrize(
    ("topology", "tp_size", "expected"),
    [
        (seed_machine(), 1, False),
        (seed_machine(), 2, True),  # two over PCIe, if they pass SGLang's peer-to-peer test
        (seed_machine(), 4, False),
        (machine("b300_8x_nvlink_ansi_header"), 8, True),
        (machine("b300_8x_nvlink_ansi_header"), 3, None),  # one of SGLang's two kernels only
        (machine("quad_nvlink_pairs_four_numa_nodes"), 4, False),  # NVLink, but not between all pairs
        (uniform([0, 0], None), 2, None),
        (build([0] * 3, {(0, 1): None, (0, 2): "PIX", (1, 2): "NV4"}), 3, False),
        (uniform([0] * 4, None), 4, None),
    ],
)
def test_custom_all_reduce(topology: Topology, tp_size: int, expected: bool | None) -> None:
    assert custom_all_reduce_expected(topology, place_gpus(topology, tp_size)) is expected


@pytest.mark.parametrize("visible", ["2,3", "GPU-22, GPU-33", "GPU-2,3"])
def test_gpus_outside_an_inherited_list_are_busy(visible: str) -> None:
    topology = uniform([0] * 5, "PIX")
    outside = restrict_to_visible(topology, visible)
    assert outside == dict.fromkeys((0, 1, 4), f"outside CUDA_VISIBLE_DEVICES={visible} of this process")
    assert place_gpus(topology, 2, busy=outside).gpus == (2, 3)


def test_an_unset_list_hides_nothing() -> None:
    assert restrict_to_visible(seed_machine(), None) == {}


@pytest.mark.parametrize("visible", ["", "8", "0,8", "-1", "NoDevFiles", "GPU-9", "GPU-", "MIG-1", "0x1"])
def test_a_list_that_names_no_gpu_or_several_is_refused(visible: str) -> None:
    with pytest.raises(PlacementError, match=r"index \(0-4\) or UUID, or unset it"):
        restrict_to_visible(uniform([0] * 5, "PIX"), visible)


def test_an_empty_list_does_not_name_the_only_gpu() -> None:
    with pytest.raises(PlacementError, match="names 0 GPUs"):
        restrict_to_visible(uniform([0], None), "")


@st.composite
def requests(draw: st.DrawFn) -> tuple[Topology, int, dict[int, str]]:
    count = draw(st.integers(2, 6))
    nodes = draw(st.lists(st.sampled_from([0, 1, None]), min_size=count, max_size=count))
    links = {pair: draw(st.sampled_from(BEST_FIRST)) for pair in combinations(range(count), 2)}
    hidden = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count - 1))
    cut = draw(st.integers(0, len(hidden)))
    topology = build(nodes, links, mig=tuple(hidden[:cut]))
    return topology, draw(st.integers(1, count - len(hidden))), dict.fromkeys(hidden[cut:], "named busy")


def beats(topology: Topology, one: tuple[int, ...], other: tuple[int, ...], *, even: bool = False) -> bool:
    """Whether `one` comes before `other`, decided step by step."""

    def nodes(gpus: tuple[int, ...]) -> list[int | None]:
        return [topology.gpus[index].numa_node for index in gpus]

    def ranks(gpus: tuple[int, ...]) -> list[int]:
        return [BEST_FIRST.index(topology.links[a][b]) for a, b in combinations(gpus, 2)]

    def surely_whole(gpus: tuple[int, ...]) -> int:
        return 1 if None in nodes(gpus) else 2 if len(set(nodes(gpus))) == 1 else 0

    def weight(rank: int) -> int:
        label = BEST_FIRST[rank]
        return 100 + int(label[2:]) if label and label.startswith("NV") else len(BEST_FIRST) - 1 - rank

    if even:
        gap = [max(map(nodes(gpus).count, (0, 1))) for gpus in (one, other)]
        if gap[0] != gap[1]:
            return gap[0] < gap[1]
    if max(ranks(one), default=0) != max(ranks(other), default=0):
        return max(ranks(one)) < max(ranks(other))
    if surely_whole(one) != surely_whole(other):
        return surely_whole(one) > surely_whole(other)
    sums = [sum(map(weight, ranks(gpus))) for gpus in (one, other)]
    return one < other if sums[0] == sums[1] else sums[0] > sums[1]


def allowed(topology: Topology, tp_size: int, busy: dict[int, str]) -> list[tuple[int, ...]]:
    return list(combinations([g.index for g in topology.gpus if not g.mig and g.index not in busy], tp_size))


@settings(deadline=None)
@given(requests())
def test_nothing_beats_the_chosen_set(request: tuple[Topology, int, dict[int, str]]) -> None:
    topology, tp_size, busy = request
    placement = place_gpus(topology, tp_size, numa_policy="allow-cross", busy=busy)
    candidates = allowed(topology, tp_size, busy)
    assert placement.gpus in candidates
    others = [gpus for gpus in candidates if gpus != placement.gpus]
    assert all(beats(topology, placement.gpus, other) for other in others)
    assert (placement.runner_up is None) == (not others)
    if placement.runner_up:
        assert all(beats(topology, placement.runner_up, o) for o in others if o != placement.runner_up)
    assert placement == place_gpus(topology, tp_size, numa_policy="allow-cross", busy=dict(reversed(busy.items())))


@settings(deadline=None)
@given(requests())
def test_pack_refuses_exactly_what_allow_cross_marks(request: tuple[Topology, int, dict[int, str]]) -> None:
    topology, tp_size, busy = request
    whole = place_gpus(topology, tp_size)
    taken = place_gpus(topology, tp_size, numa_policy="allow-cross", busy=busy)
    order = BEST_FIRST.index(taken.worst_link) > BEST_FIRST.index(whole.worst_link) if tp_size > 1 else False
    nvlink = (taken.worst_link or "").startswith("NV")
    worse = order or (taken.cross_numa is True and whole.cross_numa is False and not nvlink)
    assert taken.worse_than == (whole.gpus if worse else None)
    if worse:
        with pytest.raises(PlacementError, match="allow-cross"):
            place_gpus(topology, tp_size, busy=busy)
    else:
        assert place_gpus(topology, tp_size, busy=busy).gpus == taken.gpus


@settings(deadline=None)
@given(requests(), st.data())
def test_spread_is_as_even_as_can_be(request: tuple[Topology, int, dict[int, str]], data: st.DataObject) -> None:
    topology, tp_size, busy = request
    count = len(topology.gpus)
    nodes = data.draw(st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count))
    links = {pair: topology.links[pair[0]][pair[1]] for pair in combinations(range(count), 2)}
    known = build([*nodes], links, mig=tuple(gpu.index for gpu in topology.gpus if gpu.mig))
    candidates = allowed(known, tp_size, busy)
    if tp_size == 1 or len({nodes[index] for gpus in candidates for index in gpus}) == 1:
        with pytest.raises(PlacementError, match="numa_policy=spread"):
            place_gpus(known, tp_size, numa_policy="spread", busy=busy)
        return
    policy: NumaPolicy = "spread"
    placement: Placement = place_gpus(known, tp_size, numa_policy=policy, busy=busy)
    assert placement.cross_numa is True
    assert all(beats(known, placement.gpus, o, even=True) for o in candidates if o != placement.gpus)
