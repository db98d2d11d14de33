"""What a run gets of a pretended machine of 8 GPUs, when it is refused, and whether it runs where it was put."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchlib import machine
from benchlib.errors import PlacementError, ServerError
from benchlib.host import GpuState
from benchlib.links import Links, save_links
from benchlib.machine import (
    allot,
    build_places,
    busy_here,
    check_devices,
    examine,
    find_topology,
    wait_for_release,
)
from benchlib.placement import Placement
from benchlib.spec import RunSpec

GIB = 2**30
HELD: dict[str, Any] = {"processes": ((4242, "python", 48 * GIB),), "memory_used_bytes": 48 * GIB}
Pretend = Callable[..., tuple[GpuState, ...]]


def sglang(**parameters: Any) -> RunSpec:
    return RunSpec.from_parameters({"engine": "sglang", "server_python": "python", **parameters})


def placed(tp_size: int = 4) -> Placement:
    found = allot(sglang(tp_size=tp_size)).placement
    assert found is not None
    return found


def using(states: tuple[GpuState, ...], gpus: tuple[int, ...], **changes: Any) -> tuple[GpuState, ...]:
    return tuple(dataclasses.replace(s, **changes) if s.index in gpus else s for s in states)


# ---- another machine, or an example


EXAMPLE = Path(__file__).parent / "data" / "topology" / "seed_8x_pcie_two_sockets.txt"


def test_a_saved_machine_is_looked_at_as_it_is(pretend: Pretend) -> None:
    pretend("healthy_8", {0: HELD})
    seen = find_topology(EXAMPLE.with_name("h200_vm_pair.txt"), example=EXAMPLE)
    assert (len(seen.topology.gpus), seen.busy) == (2, {})
    assert seen.source == "A saved machine, h200_vm_pair.txt."


def test_this_machine_is_looked_at_with_who_holds_its_gpus(pretend: Pretend) -> None:
    pretend("healthy_8", {0: HELD})
    seen = find_topology(example=EXAMPLE)
    assert (seen.source, list(seen.busy)) == ("This machine.", [0])


def test_without_a_gpu_the_example_is_shown_and_named_as_one(pretend: Pretend) -> None:
    pretend("no_gpu")
    seen = find_topology(example=EXAMPLE)
    assert (len(seen.topology.gpus), seen.busy) == (8, {})
    assert seen.source.startswith("This machine has no GPU that could be shown (no NVIDIA GPU here). Instead, ")


def test_each_size_has_its_gpus_or_the_reason(pretend: Pretend) -> None:
    pretend("healthy_8", {0: HELD})
    one, four, eight = build_places(find_topology(example=EXAMPLE), (1, 4, 8))
    assert (one["tp_size"], one["gpus"], one["worst_link"]) == (1, (1,), None)
    assert (four["gpus"], four["worst_link"], four["numa_nodes"], four["cpus"]) == ((4, 5, 6, 7), "NODE", (1,), "32-63")
    assert (eight["gpus"], eight["cpus"]) == ((), None)
    assert "7 free" in eight["why"]


# ---- allot


@pytest.mark.parametrize(("tp_size", "gpus", "custom", "bound"), [
    (1, "0", False, "to node 0"), (2, "0-1", True, "to node 0"),
    (4, "0-3", False, "to node 0"), (8, "0-7", False, "to node None"),
])  # fmt: skip
def test_a_run_is_placed_and_bound(pretend: Pretend, tp_size: int, gpus: str, custom: bool, bound: str) -> None:
    states = pretend()
    given = allot(sglang(tp_size=tp_size))
    assert given.placement is not None
    assert given.placement.label == gpus
    assert given.placement.uuids == tuple(s.uuid for s in states[:tp_size])
    assert (given.custom_all_reduce, given.binding.how) == (custom, bound)
    assert (given.links_disagree, given.before) == ((), states)


@pytest.mark.parametrize("spec", [RunSpec(), sglang(tp_size=2, server_args=["--device", "cpu"])])
def test_a_run_without_gpus_gets_none(pretend: Pretend, monkeypatch: pytest.MonkeyPatch, spec: RunSpec) -> None:
    pretend("no_gpu" if spec.engine == "reference" else "healthy_8")
    monkeypatch.setattr(machine, "read_topology", lambda: pytest.fail("nothing asks for the topology"))
    given = allot(spec)
    assert (given.placement, given.custom_all_reduce, given.before) == (None, None, ())
    assert given.binding == machine.NO_BINDING


def test_busy_gpus_are_left_out_and_named_where_too_few_are_left(pretend: Pretend) -> None:
    pretend(gpus={1: HELD})
    assert placed().label == "4-7"
    pretend(gpus={1: HELD, 5: {"memory_used_bytes": GIB}})
    with pytest.raises(PlacementError) as refusal:
        allot(sglang(tp_size=4))
    assert "GPU 1 (PID 4242 python holds 48.0 GiB), GPU 5 (1024 MiB in use by no visible process)" in str(refusal.value)
    taken = allot(sglang(tp_size=4, numa_policy="allow-cross")).placement
    assert taken is not None
    assert (taken.label, taken.worse_than, taken.cross_numa) == ("0,2-4", (0, 1, 2, 3), True)


def test_an_inherited_cuda_visible_devices_restricts(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(gpus={4: HELD})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    held = busy_here(machine.read_topology(), machine.read_gpu_states())
    assert sorted(held) == [0, 1, 4, 6, 7]
    assert held[0] == "outside CUDA_VISIBLE_DEVICES=2,3,4,5 of this process"
    assert held[4].startswith("PID 4242")
    assert placed(2).label == "2-3"
    with pytest.raises(PlacementError, match="outside CUDA_VISIBLE_DEVICES"):
        allot(sglang(tp_size=4))


def test_a_launch_that_cannot_work_names_every_failed_check(pretend: Pretend) -> None:
    pretend("seed_container")
    with pytest.raises(ServerError, match=r"the launch of tp4-auto would fail:\n") as refusal:
        allot(sglang(tp_size=4))
    first = [line for line in str(refusal.value).splitlines()[1:] if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in first] == ["FAIL  device nodes", "FAIL  cuInit"]
    assert "lxc.cgroup2.devices.allow" in str(refusal.value)


def test_without_a_gpu_the_preflight_says_why(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("no_gpu")
    with pytest.raises(ServerError, match="FAIL  device nodes: no NVIDIA GPU is visible"):
        allot(sglang())
    # Where it has no objection, the topology's own words must do.
    monkeypatch.setattr(machine, "run_checks", lambda *_, **__: ())
    with pytest.raises(PlacementError, match="no NVIDIA GPU here"):
        allot(sglang())


def test_custom_all_reduce_that_is_switched_off_is_not_expected(pretend: Pretend) -> None:
    pretend()
    assert allot(sglang(tp_size=2, server_args=["--disable-custom-all-reduce"])).custom_all_reduce is False


def test_measured_links_choose_and_are_held_against_the_labels(pretend: Pretend, tmp_path: Path) -> None:
    states = pretend()
    time = {pair: 40.0 for pair in combinations(range(8), 2)} | {(2, 6): 10.0}
    rows = tuple(tuple(None if i == j else time[min(i, j), max(i, j)] for j in range(8)) for i in range(8))
    uuids = tuple(str(s.uuid) for s in states)
    save_links(Links(uuids, rows, rows, rows, "cuda", "2026-01-01T00:00:00+00:00", 5), tmp_path / "l.json")
    given = allot(sglang(tp_size=2, measured_links=str(tmp_path / "l.json")))
    assert given.placement is not None
    assert given.placement.label == "2,6"
    assert len(given.links_disagree) == 1
    assert given.links_disagree[0].startswith("GPUs 2 and 6 (SYS) all-reduce in 10.0 us, faster than")


# ---- examine


def test_every_check_of_a_campaign_is_made_once(pretend: Pretend) -> None:
    pretend()
    specs = [sglang(tp_size=tp, method=m, draft_model_path="") for tp in (1, 4, 8) for m in ("auto", "linear")]
    found = examine(specs)
    assert len(set(found)) == len(found)
    assert {check.status for check in found} == {"ok"}
    boot = examine(specs[:1], since_boot="another")[-1]
    assert (boot.name, boot.status, boot.saw) == ("boot", "warn", "rebooted since the campaign began")


def test_an_impossible_placement_is_a_failed_check(pretend: Pretend) -> None:
    pretend(gpus={1: HELD, 5: HELD})
    failed = [check for check in examine([sglang(tp_size=2), sglang(tp_size=4)]) if check.status == "fail"]
    assert [check.name for check in failed] == ["placement"]
    assert failed[0].saw.startswith("tp4-auto: tp_size=4: the whole machine would give GPUs 0-3")


def test_examining_without_gpus_raises_nothing(pretend: Pretend) -> None:
    pretend("no_gpu")
    assert {c.name for c in examine([sglang(tp_size=4)]) if c.status == "fail"} == {"device nodes", "packages"}
    assert {c.status for c in examine([RunSpec()])} == {"ok"}


# ---- check_devices


@pytest.mark.parametrize(("changes", "how"), [
    ({"processes": ((77, None, None),)}, "verified by its processes"),
    ({"memory_used_bytes": 9 * GIB}, "verified by memory in use"),
    # Numbered as outside the container: of no use, memory is.
    ({"processes": ((90077, None, None),), "memory_used_bytes": 9 * GIB}, "verified by memory in use"),
    ({"memory_used_bytes": 100 * 2**20}, "not verified: the driver shows neither its processes nor its memory"),
])  # fmt: skip
def test_how_the_devices_were_verified(pretend: Pretend, changes: dict[str, Any], how: str) -> None:
    before = pretend()
    assert check_devices(placed(), before, using(before, (0, 1, 2, 3), **changes), frozenset({76, 77})) == how


@pytest.mark.parametrize(("changes", "how"), [
    ({"processes": ((77, None, None),)}, "by its processes"), ({"memory_used_bytes": 9 * GIB}, "by memory in use"),
])  # fmt: skip
def test_a_server_on_other_gpus_is_refused(pretend: Pretend, changes: dict[str, Any], how: str) -> None:
    before = pretend()
    for seen, shown in (((4, 5, 6, 7), "4, 5, 6, 7"), ((0, 1, 2), "0, 1, 2")):
        with pytest.raises(ServerError) as refusal:
            check_devices(placed(), before, using(before, seen, **changes), frozenset({77}))
        assert f"runs on GPUs [{shown}] ({how}), planned were [0, 1, 2, 3]" in str(refusal.value)
        assert "CUDA_VISIBLE_DEVICES" in str(refusal.value)


def test_a_gpu_that_was_renumbered_meanwhile_is_another_gpu(pretend: Pretend) -> None:
    before = pretend()
    after = using(before, (0,), processes=((77, None, None),), uuid="GPU-another")
    with pytest.raises(ServerError, match="was the machine changed"):
        check_devices(placed(1), before, after, frozenset({77}))


def test_memory_that_others_held_before_does_not_count(pretend: Pretend) -> None:
    before = pretend(gpus={7: {"memory_used_bytes": 20 * GIB}})
    after = using(before, (0,), memory_used_bytes=9 * GIB)
    assert check_devices(placed(1), before, after, frozenset()) == "verified by memory in use"


# ---- wait_for_release


def test_release_is_waited_for(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pretend(gpus={0: {"memory_used_bytes": 300 * 2**20}})
    placement = placed(1)
    monkeypatch.setattr(machine, "RELEASE_POLL_S", 0.0)
    # Others' GPUs may fill meanwhile.
    looks = [using(before, (0, 5), memory_used_bytes=n * GIB) for n in (9, 2)] + [using(before, (5,), **HELD)]
    asked = iter(looks)
    monkeypatch.setattr(machine, "read_gpu_states", lambda: next(asked))
    wait_for_release(placement, before)
    assert next(asked, None) is None


def test_who_holds_the_memory_is_named(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pretend()
    placement = placed(2)
    after = using(using(before, (0,), **HELD), (1,), memory_used_bytes=GIB)
    monkeypatch.setattr(machine, "RELEASE_S", 0.02)
    monkeypatch.setattr(machine, "RELEASE_POLL_S", 0.005)
    monkeypatch.setattr(machine, "read_gpu_states", lambda: after)
    with pytest.raises(ServerError) as refusal:
        wait_for_release(placement, before)
    assert str(refusal.value) == (
        "0.02 s after the server ended, its GPUs still hold memory: GPU 0: PID 4242 python holds 48.0 GiB; "
        "GPU 1: 1024 MiB in use by no visible process. End what holds it"
    )
