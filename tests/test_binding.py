"""How a server is kept on its GPUs' NUMA node, and what is said where it is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchlib.binding import Binding, plan_binding
from benchlib.placement import place_gpus
from benchlib.topology import Gpu, Topology

TWO_NODES = ("0-3", "4-7")


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the CPUs that this process may use."""

    def set_allowed(*cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    set_allowed(*range(8))
    return set_allowed


def bind(
    sysfs: Path,
    *,
    gpus: tuple[int, ...] = (2, 3),
    online: str | None = "0-1",
    nodes: tuple[int | None, ...] = (0, 0, 1, 1),
    cpus: tuple[str, str] | None = TWO_NODES,
    installed: bool = True,
    trial: Any = 0,
) -> tuple[Binding, list[list[str]]]:
    """The binding of `gpus` on a machine whose numactl ends with `trial`, and the commands that were tried."""
    folder = sysfs / "devices/system/node"
    folder.mkdir(parents=True)
    if online is not None:
        (folder / "online").write_text(online + "\n")
    (folder / "node1").mkdir()
    (folder / "node1/cpulist").write_text("4-7\n")
    tried = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        tried.append(command)
        if isinstance(trial, Exception):
            raise trial
        return subprocess.CompletedProcess(command, trial, "", "mbind: Operation not permitted\n" if trial else "")

    listed = tuple(Gpu(i, numa_node=n, cpus=cpus and cpus[n or 0]) for i, n in enumerate(nodes))
    links = tuple(tuple("X" if i == j else "NODE" for j in range(len(nodes))) for i in range(len(nodes)))
    busy = {index: "named busy" for index in range(len(nodes)) if index not in gpus}
    placement = place_gpus(Topology(listed, links, "test"), len(gpus), busy=busy, numa_policy="allow-cross")
    binding = plan_binding(placement, which=lambda _: "/bin/numactl" if installed else None, run=run, sysfs=sysfs)
    return binding, tried


@pytest.mark.usefixtures("allow")
def test_numactl_binds_cpus_and_memory(tmp_path: Path) -> None:
    binding, tried = bind(tmp_path)
    assert binding.prefix == ("numactl", "--cpunodebind=1", "--membind=1")
    assert (binding.cpus, binding.how) == (None, "numactl --cpunodebind=1 --membind=1")
    assert tried == [[*binding.prefix, "true"]]


def test_cpus_taken_from_this_process_stay_taken(tmp_path: Path, allow: Any) -> None:
    allow(0, 1, 5, 6)
    assert bind(tmp_path)[0].prefix == ("numactl", "--physcpubind=5-6", "--membind=1")


@pytest.mark.usefixtures("allow")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"installed": False}, "numactl is not installed"),
        ({"trial": 1}, "numactl was refused (mbind: Operation not permitted)"),
        ({"trial": OSError("no fork")}, "numactl failed (no fork)"),
        ({"trial": subprocess.TimeoutExpired("numactl", 10)}, "numactl failed (Command 'numactl' timed out after 10"),
    ],
)
def test_affinity_alone_where_numactl_does_not_work(tmp_path: Path, arguments: dict[str, Any], why: str) -> None:
    binding, _ = bind(tmp_path, **arguments)
    assert (binding.prefix, binding.cpus) == ((), (4, 5, 6, 7))
    assert binding.how.startswith(f"CPU affinity to 4-7 alone, memory not bound: {why}")


def test_affinity_leaves_out_what_this_process_may_not_use(tmp_path: Path, allow: Any) -> None:
    allow(0, 4, 6)
    assert bind(tmp_path, installed=False)[0].cpus == (4, 6)


@pytest.mark.usefixtures("allow")
def test_unknown_cpus_of_the_gpus_are_those_of_their_node(tmp_path: Path) -> None:
    assert bind(tmp_path, cpus=None, installed=False)[0].cpus == (4, 5, 6, 7)


@pytest.mark.usefixtures("allow")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"gpus": (1, 2)}, "the GPUs are on several NUMA nodes; SGLang binds each rank by itself"),
        ({"nodes": (0, 0, 1, None)}, "the GPUs' NUMA node is unknown; SGLang binds each rank by itself"),
        ({"online": "1"}, "NUMA nodes online here: 1, that of the GPUs: 1"),
        ({"online": None}, "NUMA nodes online here: unknown, that of the GPUs: 1"),
        ({"online": "junk"}, "NUMA nodes online here: unknown, that of the GPUs: 1"),
        # Two nodes, but the placement is that of another machine.
        ({"online": "0,2"}, "NUMA nodes online here: 0,2, that of the GPUs: 1"),
    ],
)
def test_nothing_to_bind(tmp_path: Path, arguments: dict[str, Any], why: str) -> None:
    binding, tried = bind(tmp_path, **arguments)
    assert binding == Binding((), None, f"not bound: {why}")
    assert not tried


def test_no_cpu_left(tmp_path: Path, allow: Any) -> None:
    allow(0, 1)
    binding, tried = bind(tmp_path)
    assert binding == Binding((), None, "not bound: no CPU of NUMA node 1 is open to this process")
    assert not tried
