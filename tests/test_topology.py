"""Topologies from texts, a driver's answers and sysfs: what is not told stays None, what is broken is shown."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchlib.errors import PlacementError
from benchlib.topology import (
    Gpu,
    Topology,
    format_cpu_list,
    format_topology,
    load_topology,
    nvml_session,
    parse_cpu_list,
    parse_topology,
    read_topology,
    topology_json,
)

DATA = Path(__file__).parent / "data" / "topology"
CASES = sorted(DATA.glob("*.json"))
H200 = sorted(DATA.glob("h200_*.txt"))
FAST = settings(max_examples=100, deadline=None, derandomize=True)
HEADER = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
PAIR = HEADER + "GPU0\t X \tPIX\t0-7\t0\t\tN/A\nGPU1\tPIX\t X \t8-15\t1\t\tN/A\n"


def parse(text: str) -> Topology:
    return parse_topology(text, source="pasted")


def bare(topology: Topology) -> Topology:
    """What a printed matrix can tell of it."""
    gpus = (Gpu(g.index, numa_node=g.numa_node, cpus=g.cpus) for g in topology.gpus)
    return Topology(tuple(gpus), topology.links, "pasted")


# Texts


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_saved_cases(case: Path) -> None:
    expected = json.loads(case.read_text())
    if expected.get("error"):
        with pytest.raises(PlacementError, match=r"\nGPU1\tNODE$"):
            load_topology(case.with_suffix(".txt"))
        return
    topology = load_topology(case.with_suffix(".txt"))
    assert len(topology.gpus) == len(topology.links) == expected["gpus"]
    assert [gpu.numa_node for gpu in topology.gpus] == expected["numa"]
    assert [gpu.cpus for gpu in topology.gpus] == expected["cpus"]
    assert topology.source == str(case.with_suffix(".txt"))
    assert parse(format_topology(topology)) == bare(topology)


def test_saved_links() -> None:
    assert load_topology(DATA / "quad_pxb_pix_no_gpu_numa_id.txt").links == (
        ("X", "PXB", "SYS", "SYS"), ("PXB", "X", "SYS", "SYS"), ("SYS", "SYS", "X", "PIX"), ("SYS", "SYS", "PIX", "X"),
    )  # fmt: skip
    nics = load_topology(DATA / "b300_8x_nvlink_ansi_header.txt").links
    assert nics == tuple(tuple("X" if i == j else "NV18" for j in range(8)) for i in range(8))


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_virtual_machines_with_a_peer_matrix_below(path: Path) -> None:
    topology = load_topology(path)
    count = 1 if path.stem == "h200_vm" else 2
    assert {(gpu.numa_node, gpu.cpus) for gpu in topology.gpus} == {(0, "0-15" if count == 1 else "0-31")}
    assert topology.links == ((("X",),) if count == 1 else (("X", "NV18"), ("NV18", "X")))


def test_a_lone_gpus_peer_matrix_does_not_count() -> None:
    text = (DATA / "h200_vm.txt").read_text() + " \t\x1b[4mGPU0\t\x1b[0m\n GPU0\tX\t\n\nLegend:\n"
    assert parse(text).gpus == (Gpu(0, numa_node=0, cpus="0-15"),)


@pytest.mark.parametrize(
    ("cells", "node", "cpus"),
    [
        ("0-7\t1\t\tN/A", 1, "0-7"),
        ("0-7\t0-1\t\tN/A", None, "0-7"),  # beside both nodes
        ("0-7\t0,1\t\tN/A", None, "0-7"),
        ("0-7\tN/A\t\tN/A", None, "0-7"),
        ("0-7\t\t\tN/A", None, "0-7"),
        ("\t1\t\tN/A", 1, None),
        ("\t\t\tN/A", None, None),  # as under WSL
        ("      N/A", None, None),  # the same with the tabs lost
        ("0-7\t1\t\t3", 1, "0-7"),  # a Grace GPU's own memory is node 3, the GPU sits beside node 1
        ("0,4-7 1 N/A", 1, "0,4-7"),
    ],
)
def test_what_a_row_leaves_out_is_unknown(cells: str, node: int | None, cpus: str | None) -> None:
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t{cells}\n"
    assert parse(text).gpus == (Gpu(0, numa_node=node, cpus=cpus),)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("X \tPIX", "X \tFOO", "'FOO' is no link to GPU1"),
        ("X \tPIX", "X \tNV0", "'NV0' is no link to GPU1"),
        ("X \tPIX", "X \tX", "'X' is no link to GPU1"),
        ("X \tPIX", "X \t", "'' is no link to GPU1"),
        ("X \tPIX", "X \tPHB", "GPU0 has 'PHB' for the link to GPU1"),
        ("X \tPIX", "X \tN/A", "GPU0 has 'N/A' for the link to GPU1"),
        ("X \tPIX", "PIX\tPIX", "'PIX' is no link to GPU0"),
        ("X \tPIX\t", "X \t", "one value for each of GPU0, GPU1, CPU Affinity"),
        ("\t0-7\t", "\t", "one value for each"),
        ("0-7", "7-0", "'7-0' is no list"),
        ("0-7", "0-7,", "'0-7,' is no list"),
        ("0-7\t0", "0-7\t-1", "'-1' is no list"),
        ("0-7\t0", "0-7\tnode0", "'node0' is no list"),
        ("\nGPU1", "\nGPU0", "GPU0 has two rows"),
        ("\nGPU1", "\nGPU2", "GPU2 has a row but no column"),
        ("\nGPU1", "\nG", "no row for GPU1"),
        ("\tGPU1", "", "one value for each of GPU0, CPU Affinity"),
        ("\tGPU0\tGPU1", "\tGPU1\tGPU0", "columns GPU0, GPU1, ... in this order"),
        ("\tGPU0\tGPU1", "\tGPU0\tGPU0", "columns GPU0, GPU1, ... in this order"),
        ("\tGPU1", "\tGPU1S", "columns GPU0, GPU1, ... in this order"),
        ("0-7", "0-07", "'0-07' is no list"),
        ("NUMA Affinity", "NUMA Affi", "one value for each"),
    ],
)
def test_a_broken_text_is_refused_with_its_line(old: str, new: str, said: str) -> None:
    broken = PAIR.replace(old, new, 1)
    assert broken != PAIR
    with pytest.raises(PlacementError, match=said) as error:
        parse(broken)
    assert str(error.value).splitlines()[-1] in broken.splitlines()


@pytest.mark.parametrize("text", ["", "no gpu", "GPU0 GPU1\nGPU0 X OK\nGPU1 OK X\n", HEADER, "GPU0: NVIDIA H200"])
def test_a_text_without_a_topology_says_what_is_expected(text: str) -> None:
    with pytest.raises(PlacementError, match=r"pasted holds no topology\. Expected the output of `nvidia-smi topo -m`"):
        parse(text)


def test_two_topologies_must_agree() -> None:
    assert parse(f"$ nvidia-smi topo -m\n{PAIR}$ nvidia-smi topo -m\n{PAIR}") == parse(PAIR)
    with pytest.raises(PlacementError, match="2 topologies that differ"):
        parse(PAIR + PAIR.replace("PIX", "PXB"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "utf16").write_text(PAIR, encoding="utf-16")
    (tmp_path / "bom").write_text(PAIR, encoding="utf-8-sig")
    for name in ("missing", ".", "utf16"):
        with pytest.raises(PlacementError, match="cannot read the topology file"):
            load_topology(tmp_path / name)
    assert load_topology(tmp_path / "bom").links == parse(PAIR).links


FULL = Topology(
    (Gpu(0, "GPU-a", "NVIDIA H200", "0000:c3:00.0", 1, "0-3,8", mig=True), Gpu(1)), (("X", None), (None, "X")), "nvml"
)


def test_json_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(topology_json(FULL)))
    assert load_topology(path) == FULL
    assert topology_json(FULL)["gpus"][0] == {
        "index": 0, "uuid": "GPU-a", "name": "NVIDIA H200", "pci_bus_id": "0000:c3:00.0", "numa_node": 1,
        "cpus": "0-3,8", "mig": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": [{"index": 0, "numa": 1}]}, "gpus.0.numa"),
        ({"gpus": [{"index": "0"}, {"index": 1}]}, "gpus.0.index: Input should be a valid integer"),
        ({"gpus": [{"index": 0}]}, "one link for each pair of its 1 GPUs"),
        ({"gpus": [{"index": 1}, {"index": 0}]}, "columns GPU0, GPU1"),
        ({"gpus": [], "links": []}, "no topology"),
        ({"links": [["X", "NODE"], ["NODE"]]}, "one link for each pair"),
        ({"links": [["X", "NODE"], ["SYS", "X"]]}, "'NODE' for the link to GPU1"),
        ({"links": [["X", "ABC"], ["ABC", "X"]]}, "'ABC' is no link"),
        ({"gpus": [{"index": 0, "numa_node": -1}, {"index": 1}]}, "'-1' is no list"),
        ({"gpus": [{"index": 0, "cpus": "all"}, {"index": 1}]}, "'all' is no list"),
    ],
)
def test_json_is_checked_like_a_text(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(topology_json(FULL) | change))
    with pytest.raises(PlacementError, match=said):
        load_topology(path)


def test_format_shows_devices_below_the_matrix() -> None:
    assert format_topology(FULL) == (
        "      GPU0  GPU1  CPU Affinity  NUMA Affinity\n"
        "GPU0  X     N/A   0-3,8         1\n"
        "GPU1  N/A   X     N/A           N/A\n"
        "GPU 0: NVIDIA H200, GPU-a, 0000:c3:00.0, MIG on\n"
    )


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    for text in ("", " ", "3-0", "0-", "-1", "a", "0--3", "0,,1", "0 1", "0-999999", "٣"):
        with pytest.raises(PlacementError, match="is no list of numbers and rising ranges"):
            parse_cpu_list(text)
    assert format_cpu_list([]) is None


@FAST
@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus) or "") == cpus


# Generated texts

LABELS = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV18"]
CPUS = st.sets(st.integers(0, 99), min_size=1, max_size=9).map(format_cpu_list)
JUNK = st.lists(
    st.sampled_from([
        "", "user@host:~$ nvidia-smi topo -m", "GPU 0: NVIDIA H200 (UUID: GPU-1)", "rc=0", "Legend:", "  X    = Self",
        "  NV#  = Connection traversing a bonded set of # NVLinks", "NIC0: mlx5_0", "GPUs: 8", "GPU0: 42 C",
        "| N/A   29C    P0   69W /  700W |",
        " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tCNS\t\n GPU1\tCNS\tX\t\n\nLegend:",
    ]),
    max_size=6,
)  # fmt: skip


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    count = draw(st.integers(1, 5))
    pairs = {(i, j): draw(st.sampled_from([*LABELS, None])) for j in range(count) for i in range(j)}
    links = tuple(tuple("X" if i == j else pairs[min(i, j), max(i, j)] for j in range(count)) for i in range(count))
    node = st.one_of(st.none(), st.integers(0, 9))
    gpus = tuple(Gpu(i, numa_node=draw(node), cpus=draw(st.one_of(st.none(), CPUS))) for i in range(count))
    return Topology(gpus, links, "pasted")


@st.composite
def printed(draw: st.DrawFn) -> tuple[Topology, list[list[str]]]:
    """A topology, and the cells of a text that tells it: tabs or blanks, with and without NICs and columns."""
    topology, flag = draw(topologies()), st.booleans()
    tabs, nics = draw(flag), draw(st.integers(0, 3))
    cpu_column, node_column, id_column = draw(flag), draw(flag), draw(flag)
    gpus = [
        replace(gpu, cpus=gpu.cpus if cpu_column else None, numa_node=gpu.numa_node if node_column else None)
        for gpu in topology.gpus
    ]
    unknown = st.sampled_from(["N/A", ""] if tabs else ["N/A"])
    columns = [(cpu_column, "CPU Affinity"), (node_column, "NUMA Affinity"), (id_column, "GPU NUMA ID")]
    names = [f"GPU{gpu.index}" for gpu in gpus] + draw(st.permutations(["NIC0", "mlx5_1", "NIC12"]))[:nics]
    rows = [["", *names, *(name for there, name in columns if there)]]
    for gpu, links in zip(gpus, topology.links, strict=True):
        cells = [f"GPU{gpu.index}", *(label or draw(st.sampled_from(["N/A", "?"])) for label in links)]
        cells += [draw(st.sampled_from(LABELS)) for _ in range(nics)]
        cells += [gpu.cpus or draw(unknown)] if cpu_column else []
        cells += [draw(unknown) if gpu.numa_node is None else str(gpu.numa_node)] if node_column else []
        cells += ["", "N/A"] if id_column and node_column and tabs else ["N/A"] if id_column else []
        rows.append(cells)
    rows += [[name, *(draw(st.sampled_from(LABELS)) for _ in names)] for name in names[len(gpus) :]]
    return replace(topology, gpus=tuple(gpus)), [["\t" if tabs else "    "], *rows]


def text_of(rows: list[list[str]]) -> list[str]:
    (separator,), *lines = rows
    return [separator.join(cells) for cells in lines]


@FAST
@given(printed(), JUNK, JUNK, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n", "  \n"]))
def test_a_printed_topology_is_read_exactly(
    case: tuple[Topology, list[list[str]]], before: list[str], after: list[str], ansi: bool, bare: bool, end: str
) -> None:
    topology, rows = case
    header, *lines = text_of(rows)
    header = header.lstrip() if bare else header
    header = header.replace("GPU0", "\x1b[4mGPU0", 1) + "\x1b[0m" if ansi else header
    assert parse(end.join([*before, header, *lines, "", *after, ""])) == topology


@FAST
@given(topologies())
def test_the_formatted_matrix_parses_back(topology: Topology) -> None:
    assert parse(format_topology(topology)) == topology


@FAST
@given(st.data(), printed())
def test_no_mutation_makes_a_link(data: st.DataObject, case: tuple[Topology, list[list[str]]]) -> None:
    topology, rows = case
    lines = text_of(rows)
    row = data.draw(st.integers(1, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[row]) - 1))
    kind = data.draw(st.sampled_from(["delete", "blank", "swap", "cut", "drop", "repeat"]))
    if kind == "cut":
        lines[row - 1] = lines[row - 1][: data.draw(st.integers(0, len(lines[row - 1])))]
    elif kind in ("drop", "repeat"):
        lines[row - 1 : row] = [lines[row - 1]] * (2 if kind == "repeat" else 0)
    else:
        new = {"delete": [], "blank": [""], "swap": [data.draw(st.sampled_from([*LABELS, "X", "N/A", "FOO", "OK"]))]}
        rows = [*rows[:row], [*rows[row][:column], *new[kind], *rows[row][column + 1 :]], *rows[row + 1 :]]
        lines = text_of(rows)
    try:
        found = parse("\n".join(lines))
    except PlacementError:
        return
    assert found.links == topology.links


@FAST
@given(
    st.one_of(st.text(), st.lists(st.sampled_from([*PAIR.split("\t"), "GPU0", "X", "OK", "\n", "0"])).map("\t".join))
)
def test_arbitrary_text_is_read_or_refused(text: str) -> None:
    try:
        topology = parse(text)
    except PlacementError:
        return
    assert parse(format_topology(topology)) == topology


# A driver's answers


class Driver:
    """NVML's answers for a machine: one dict a GPU (bus, cpus, nodes, nvlinks, mig), levels of common ancestors."""

    def __init__(self, gpus: list[dict[str, Any]], levels: list[list[int | None]]) -> None:
        self.gpus, self.levels, self.sessions = gpus, levels, 0

    def module(self, **changes: Any) -> SimpleNamespace:
        constants = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_")}
        calls = {f"nvml{name}": getattr(self, name) for name in dir(self) if name[0].isupper()}
        # The driver's own names: a call that the real module lacks would make this fake a fiction.
        assert all(callable(getattr(pynvml, name)) for name in calls)
        return SimpleNamespace(**{**constants, "NVMLError": pynvml.NVMLError, **calls, **changes})

    def Init(self) -> None:
        self.sessions += 1

    def Shutdown(self) -> None:
        self.sessions -= 1

    def DeviceGetCount(self) -> int:
        return len(self.gpus)

    def DeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def DeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{self.gpus[gpu]['bus'].upper()}")

    def DeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def DeviceGetName(self, gpu: int) -> str:
        return "NVIDIA Test"

    def DeviceGetCpuAffinity(self, gpu: int, words: int) -> list[int]:
        return self._mask(self.gpus[gpu].get("cpus"), words)

    def DeviceGetMemoryAffinity(self, gpu: int, words: int, scope: int) -> list[int]:
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return self._mask(self.gpus[gpu].get("nodes"), words)

    def DeviceGetMigMode(self, gpu: int) -> list[int]:
        return [self._told(self.gpus[gpu].get("mig")), 0]

    def DeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        return int(self._link(gpu, link) is not None)

    def DeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if self._link(gpu, link) == "switch" else 0

    def DeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:
        remote = self._link(gpu, link)
        return SimpleNamespace(busId="FFFFFFFF:FF:FF.0" if remote == "switch" else f"0000{remote.upper()}")

    def DeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self._told(self.levels[one][other])

    def _link(self, gpu: int, link: int) -> Any:
        links = self._told(self.gpus[gpu].get("nvlinks"))
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]

    def _mask(self, bits: Any, words: int) -> list[int]:
        mask = sum(1 << bit for bit in self._told(bits))
        return [mask >> 64 * word & (2**64 - 1) for word in range(words)]

    @staticmethod
    def _told(value: Any) -> Any:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver, **changes: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver.module(**changes))


def test_eight_pcie_gpus_on_two_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    levels: list[list[int | None]] = [[40 if i // 4 == j // 4 else 50 for j in range(8)] for i in range(8)]
    levels[0][1], levels[2][3], levels[4][5], levels[6][7] = 0, 10, 20, 30
    gpus = [
        {"bus": f"0000:{i:x}1:00.0", "cpus": range(32 * (i // 4), 32 * (i // 4) + 32), "nodes": [i // 4], "mig": i == 7}
        for i in range(8)
    ]
    driver = Driver(gpus, levels)
    install(monkeypatch, driver)
    topology = read_topology(tmp_path)
    assert driver.sessions == 0
    assert topology.source == "nvml"
    assert topology.gpus[7] == Gpu(7, "GPU-7", "NVIDIA Test", "0000:71:00.0", 1, "32-63", mig=True)
    assert topology.gpus[0] == Gpu(0, "GPU-0", "NVIDIA Test", "0000:01:00.0", 0, "0-31")
    assert topology.links[0] == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert [topology.links[i][i + 1] for i in (2, 4, 6)] == ["PIX", "PXB", "PHB"]
    assert all(topology.links[i][j] == topology.links[j][i] for i in range(8) for j in range(8))
    assert parse(format_topology(topology)) == bare(topology)


def test_a_pair_behind_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As two H200 answer in a virtual machine: the switches' addresses are hidden, one link of a GPU is down.
    links: list[str | None] = ["switch"] * 18
    gpus = [{"bus": f"0000:00:0{i}.0", "cpus": range(32), "nodes": [0], "nvlinks": links} for i in (6, 7)]
    install(monkeypatch, Driver(gpus, [[30, 30], [30, 30]]))
    assert read_topology(tmp_path).links == (("X", "NV18"), ("NV18", "X"))
    gpus[1]["nvlinks"] = [*links[:-1], None]
    assert read_topology(tmp_path).links == (("X", "NV17"), ("NV17", "X"))


def test_bridged_pairs_are_counted_by_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    buses = [f"0000:{i}1:00.0" for i in range(3)]
    links = [[buses[1]] * 4, [buses[0]] * 4, ["0004:00:00.0"]]
    gpus = [{"bus": bus, "nvlinks": there} for bus, there in zip(buses, links, strict=True)]
    install(monkeypatch, Driver(gpus, [[None] * 3, [None, None, 50], [None] * 3]))
    topology = read_topology(tmp_path)
    assert topology.links == (("X", "NV4", None), ("NV4", "X", "SYS"), (None, "SYS", "X"))
    # Neither the driver nor sysfs tells a node or CPUs, nor whether MIG is there.
    assert topology.gpus[0] == Gpu(0, "GPU-0", "NVIDIA Test", buses[0])


@pytest.mark.parametrize(
    ("nodes", "online", "told", "expected"),
    [
        (None, "0", "-1", 0),  # a virtual machine with one node
        ([], "0", "-1", 0),
        (None, "0-1", "-1", None),
        (None, "0-1", "1", 1),
        ([0, 1], "0-1", "1", None),  # beside both
        ([1], "0-1", "0", 1),
    ],
)
def test_the_node_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: Any, online: str, told: str, expected: int | None
) -> None:
    build_sysfs(tmp_path, {"0000:00:06.0": ("pci0000:00", told)}, online=online)
    install(monkeypatch, Driver([{"bus": "0000:00:06.0", "nodes": nodes}], [[None]]))
    topology = read_topology(tmp_path)
    assert topology.gpus == (Gpu(0, "GPU-0", "NVIDIA Test", "0000:00:06.0", expected, "0-15"),)
    assert topology.links == (("X",),)


def raising(code: int) -> Any:
    def call(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    return call


def test_a_failed_call_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = Driver([{"bus": "0000:00:06.0"}], [[None]])
    install(monkeypatch, driver, nvmlDeviceGetCpuAffinity=raising(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(PlacementError, match="NVML says: GPU is lost"):
        read_topology(tmp_path)
    assert driver.sessions == 0
    install(monkeypatch, Driver([], []))
    with pytest.raises(PlacementError, match="NVML finds no GPU"):
        read_topology(tmp_path)


def test_a_missing_driver_or_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, Driver([], []), nvmlInit=raising(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with pytest.raises(PlacementError, match="NVML says: Driver Not Loaded"), nvml_session():
        pass
    with pytest.raises(PlacementError, match=r"no NVIDIA GPU among the PCI devices of .*NVML says: Driver Not Loaded"):
        read_topology(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(PlacementError, match="Install nvidia-ml-py"), nvml_session():
        pass


# sysfs


def build_sysfs(root: Path, gpus: dict[str, tuple[str, str]], *, online: str = "0-1", cpus: str = "0-15") -> None:
    """A saved tree: GPU address -> (path of bridges above it, numa_node)."""
    links = root / "bus/pci/devices"
    links.mkdir(parents=True)
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text(f"{online}\n")
    others = {
        "0000:00:02.0": ("pci0000:00", "0", "0x8086", "0x030000"),
        "0000:01:00.1": ("pci0000:00", "0", "0x10de", "0x040300"),
    }
    devices = {**others, **{address: (*where, "0x10de", "0x030200") for address, where in gpus.items()}}
    for address, (above, node, vendor, kind) in devices.items():
        device = root / "devices" / above / address
        device.mkdir(parents=True)
        files = {"numa_node": node, "vendor": vendor, "class": kind, "local_cpulist": cpus}
        for name, value in files.items():
            (device / name).write_text(f"{value}\n")
        (links / address).symlink_to(device)


def test_links_from_the_pci_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switch, cascade = "pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:40/0000:40:01.0/0000:41:00.0"
    build_sysfs(
        tmp_path,
        {
            "0000:03:00.0": (f"{switch}/0000:02:00.0", "0"),
            "0000:04:00.0": (f"{switch}/0000:02:01.0", "0"),
            "0000:10:00.0": ("pci0000:00/0000:00:05.0", "0"),
            "0000:44:00.0": (f"{cascade}/0000:42:00.0/0000:43:00.0/0000:43:01.0", "0"),
            "0000:45:00.0": (f"{cascade}/0000:42:01.0", "0"),
            "0000:81:00.0": ("pci0000:80/0000:80:01.0", "1"),
            "10000:01:00.0": ("pci10000:00/10000:00:01.0", "-1"),
        },
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    topology = read_topology(tmp_path)
    assert topology.source == "sysfs"
    assert [gpu.pci_bus_id for gpu in topology.gpus][0::6] == ["0000:03:00.0", "10000:01:00.0"]
    assert topology.gpus[5] == Gpu(5, pci_bus_id="0000:81:00.0", numa_node=1, cpus="0-15")
    assert topology.gpus[6].numa_node is None
    assert topology.links[0] == ("X", "PIX", "PHB", "NODE", "NODE", "SYS", None)
    assert topology.links[3][4] == "PXB"
    assert all(b.index == a.index + 1 for a, b in pairwise(topology.gpus))
    assert parse(format_topology(topology)) == bare(topology)
