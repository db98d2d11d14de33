"""The machine's GPUs, the links between them and their NUMA nodes: read from the driver, or from a saved text.

Unknown is None everywhere: a node that the driver does not tell is never node 0, a link that cannot be read is never
guessed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from benchlib.errors import PlacementError

__all__ = [
    "Gpu", "Topology", "format_cpu_list", "format_topology", "load_topology", "nvml_session", "parse_cpu_list",
    "parse_topology", "read_topology", "topology_json",
]  # fmt: skip

COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
UNKNOWN = {"N/A", "?", ""}
GPU_NAME = re.compile(r"GPU[0-9]+")
HEADER = re.compile(r"(GPU[0-9]+(?: [A-Za-z]\S*)*?)" + "".join(f"( {column})?" for column in COLUMNS))
# Those of NVIDIA's legend; its X stands on the diagonal alone.
LABEL = re.compile(r"SYS|NODE|PHB|PXB|PIX|NV[1-9][0-9]*|N/A|\?")
# `nvidia-smi topo -p2p` prints a matrix of the same form, with these.
P2P_LABELS = {"X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
# The header is underlined, also where a copy has lost or spelled out the escape character.
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|(?:\^\[)?\[[0-9;]*m")
CPU_RANGE = re.compile(r"(0|[1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?")
GPU_CLASS = re.compile(r"0x030[02]..")  # VGA or 3D controller
ROOT_COMPLEX = re.compile(r"pci[0-9a-f]+:[0-9a-f]+")
# nvmlGpuTopologyLevel_t; INTERNAL, two GPUs of one board, is PIX to nvidia-smi.
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, numbered in PCI order.

    `pci_bus_id` is the kernel's `0000:c3:00.0`, `cpus` its CPU list such as `0-31,64-95`, `numa_node` the host's node
    beside the GPU.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    mig: bool = False


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs in index order and the square matrix of link labels between them.

    Labels are those of `nvidia-smi topo -m`: `NV<n>`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, `X` on the diagonal, None
    where unknown. `source` says where it was read: `nvml`, `sysfs` (which shows no NVLink) or a file's path.
    """

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[str | None, ...], ...]
    source: str


class _Matrix(NamedTuple):
    """A printed matrix: the line of names, what it names, and the lines of the GPUs."""

    header: str
    devices: list[str]
    columns: list[str]
    rows: list[str]


def parse_topology(text: str, *, source: str) -> Topology:
    """From the text of `nvidia-smi topo -m`, pasted or saved. PlacementError that shows the line it cannot read."""
    matrices = _find_matrices(text)
    # One GPU's P2P matrix is a lone X: it says nothing beside a real one.
    telling = [matrix for matrix in matrices if matrix.columns or len(matrix.devices) > 1]
    found = [_read_matrix(matrix, source) for matrix in telling or matrices]
    if not found:
        raise PlacementError(
            f"{source} holds no topology. Expected the output of `nvidia-smi topo -m`: a line of names (GPU0 GPU1 ... "
            "CPU Affinity NUMA Affinity) and a row for each GPU below it"
        )
    if any(other != found[0] for other in found):
        raise PlacementError(f"{source} holds {len(found)} topologies that differ. Keep that of the machine meant")
    return found[0]


def load_topology(path: Path | str) -> Topology:
    """From a file that holds such a text, or `topology_json` as JSON. PlacementError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise PlacementError(f"cannot read the topology file {path}: {getattr(error, 'strerror', error)}") from error
    if not text.lstrip().startswith("{"):
        return parse_topology(text, source=str(path))
    try:
        topology = TypeAdapter(Topology).validate_json(text, strict=True)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PlacementError(f"{path} is not the JSON of a topology: {problems}") from None
    if {len(topology.gpus)} != {len(rows) for rows in (topology.links, *topology.links)}:
        raise PlacementError(f"{path} does not give one link for each pair of its {len(topology.gpus)} GPUs")
    parse_topology(format_topology(topology), source=str(path))
    return topology


def topology_json(topology: Topology) -> dict[str, Any]:
    """Of JSON types: `{"gpus": [{"index", "uuid", ...}], "links": [["X", "NODE"], ...], "source"}`."""
    return dict(TypeAdapter(Topology).dump_python(topology, mode="json"))


def format_topology(topology: Topology) -> str:
    """The matrix as `nvidia-smi topo -m` prints it, and a line for each GPU; `parse_topology` reads it back."""
    rows, facts = [["", *(f"GPU{gpu.index}" for gpu in topology.gpus), *COLUMNS[:2]]], []
    for gpu, links in zip(topology.gpus, topology.links, strict=True):
        node = None if gpu.numa_node is None else str(gpu.numa_node)
        rows.append([f"GPU{gpu.index}", *(cell or "N/A" for cell in (*links, gpu.cpus, node))])
        if known := list(filter(None, (gpu.name, gpu.uuid, gpu.pci_bus_id, "MIG on" if gpu.mig else None))):
            facts.append(f"GPU {gpu.index}: {', '.join(known)}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), *facts]) + "\n"


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}. PlacementError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = CPU_RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise PlacementError(f"{text.strip()!r} is no list of numbers and rising ranges such as 0-31,64")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str | None:
    """{0, 1, 2, 3, 8} -> `0-3,8`; None of no CPUs."""
    runs = groupby(enumerate(sorted(set(cpus))), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ends) or None


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The initialised pynvml module. PlacementError, in NVML's own words, where it is missing or a call fails."""
    try:
        import pynvml
    except ImportError as error:
        raise PlacementError(f"the driver cannot be asked: {error}. Install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise PlacementError(f"NVML says: {error}. See whether `nvidia-smi` finds a driver and GPUs") from error


def read_topology(sysfs: Path | str = "/sys") -> Topology:
    """This machine's, from NVML, or from `sysfs` where NVML is missing. PlacementError where there is no GPU."""
    with ExitStack() as stack:
        try:
            nvml = stack.enter_context(nvml_session())
        except PlacementError as error:
            return _read_sysfs(Path(sysfs), str(error))
        return _read_nvml(nvml, Path(sysfs))


def _find_matrices(text: str) -> list[_Matrix]:
    found: list[_Matrix] = []
    current: _Matrix | None = None
    for line in ANSI.sub("", text).splitlines():
        words = line.split()
        match = HEADER.fullmatch(" ".join(words))
        # Inside a matrix, a row cut after its first words looks like a header.
        if match and (current is None or any(match.groups()[1:]) or GPU_NAME.fullmatch("".join(words[1:2]))):
            columns = [name for name, there in zip(COLUMNS, match.groups()[1:], strict=True) if there]
            found.append(current := _Matrix(line, match[1].split(), columns, []))
        elif current and words and GPU_NAME.fullmatch(words[0]):
            current.rows.append(line)
        elif current and words and words[0] not in current.devices:
            current = None
    return [matrix for matrix in found if _is_topology(matrix)]


def _is_topology(matrix: _Matrix) -> bool:
    labels = {word for row in matrix.rows for word in row.split()[1:]}
    return "X" in labels and (bool(matrix.columns) or labels == {"X"} or not labels <= P2P_LABELS)


def _read_matrix(matrix: _Matrix, source: str) -> Topology:
    names = [name for name in matrix.devices if name.startswith("GPU")]
    table: dict[str, dict[str, str]] = {}
    line = matrix.header
    try:
        if names != [f"GPU{index}" for index in range(len(names))]:
            raise PlacementError("expected the columns GPU0, GPU1, ... in this order")
        for line in matrix.rows:
            if (name := line.split()[0]) in table or name not in names:
                raise PlacementError(f"{name} has {'two rows' if name in table else 'a row but no column'}")
            table[name] = _read_row(line, matrix)
            for other in table:
                if table[other][name] != table[name][other]:
                    raise PlacementError(f"{other} has {table[other][name]!r} for the link to {name}")
        line = matrix.header
        if missing := [name for name in names if name not in table]:
            raise PlacementError(f"no row for {', '.join(missing)}")
    except PlacementError as problem:
        text = f"{source} is no whole output of `nvidia-smi topo -m`: {problem}. The line:\n{line}"
        raise PlacementError(text) from None
    links = tuple(tuple(None if table[a][b] in UNKNOWN else table[a][b] for b in names) for a in names)
    return Topology(tuple(_row_gpu(index, table[name]) for index, name in enumerate(names)), links, source)


def _read_row(line: str, matrix: _Matrix) -> dict[str, str]:
    """The checked cells of a GPU's row, by the name of their column."""
    names = [*matrix.devices, *matrix.columns]
    if (cells := _split_row(line, len(matrix.devices), matrix.columns)) is None:
        raise PlacementError(f"expected one value for each of {', '.join(names)}")
    row = dict(zip(names, ("N/A" if cell == "?" else cell for cell in cells), strict=True))
    for name in matrix.devices:
        if not (row[name] == "X" if name == line.split()[0] else LABEL.fullmatch(row[name])):
            raise PlacementError(f"{row[name]!r} is no link to {name}: expected SYS, NODE, PHB, ..., X to itself")
    for name in matrix.columns:
        if row[name] not in UNKNOWN:
            parse_cpu_list(row[name])
    return row


def _split_row(line: str, devices: int, columns: list[str]) -> list[str] | None:
    """A cell for each device and column, empty where tabs leave one out; None where it cannot be told which that is."""
    words, count = line.split()[1:], devices + len(columns)
    if len(words) == count:
        return words
    if devices < len(words) < count and UNKNOWN.issuperset(words[devices:]):
        return words + [""] * (count - len(words))
    cells = [cell.strip() for cell in line.lstrip().split("\t")][1:]
    # The driver ends the node's cell with a second tab, to stay below the wide header.
    padded = columns[-2:] == [*COLUMNS[1:]]
    if len(cells) < count + padded or (padded and cells.pop(count - 1)) or any(cells[count:]):
        return None
    return cells[:count]


def _row_gpu(index: int, row: dict[str, str]) -> Gpu:
    cpus, nodes, _ = (None if row.get(name, "") in UNKNOWN else row[name] for name in COLUMNS)
    return Gpu(index, cpus=cpus, numa_node=_only(parse_cpu_list(nodes)) if nodes else None)


def _only(nodes: Iterable[int]) -> int | None:
    """A GPU beside several nodes belongs to none of them."""
    first, *others = nodes
    return None if others else first


def _read_nvml(nvml: Any, sysfs: Path) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        raise PlacementError("NVML finds no GPU: see whether this machine, or this container, has been given one")
    gpus = tuple(_nvml_gpu(nvml, index, handle, sysfs) for index, handle in enumerate(handles))
    peers = [_count_nvlinks(nvml, handle) for handle in handles]

    def link(i: int, j: int) -> str | None:
        if count := peers[i][gpus[j].pci_bus_id] or min(peers[i]["switch"], peers[j]["switch"]):
            return f"NV{count}"
        return LEVELS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j]))

    return Topology(gpus, _mirror(len(gpus), link), "nvml")


def _nvml_gpu(nvml: Any, index: int, handle: Any, sysfs: Path) -> Gpu:
    gpu = _sysfs_gpu(index, sysfs, _address(nvml.nvmlDeviceGetPciInfo(handle)))
    # Not nvmlDeviceGetNumaNodeId: that is the node which the GPU's own memory is, as on Grace.
    nodes = _set_bits(_ask(nvml, "nvmlDeviceGetMemoryAffinity", handle, 16, nvml.NVML_AFFINITY_SCOPE_NODE))
    cpus = _set_bits(_ask(nvml, "nvmlDeviceGetCpuAffinity", handle, 128))
    return replace(
        gpu,
        uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
        name=_ask(nvml, "nvmlDeviceGetName", handle),
        numa_node=_only(nodes) if nodes else gpu.numa_node,
        cpus=format_cpu_list(cpus) or gpu.cpus,
        mig=(_ask(nvml, "nvmlDeviceGetMigMode", handle) or [None])[0] == nvml.NVML_DEVICE_MIG_ENABLE,
    )


def _count_nvlinks(nvml: Any, handle: Any) -> Counter[str | None]:
    """Active NVLinks by what they lead to: a PCI address, or `switch`."""
    peers: Counter[str | None] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == nvml.NVML_FEATURE_ENABLED:
            # A switch's address is hidden from virtual machines; its kind is not.
            if _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                peers["switch"] += 1
            elif remote := _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link):
                peers[_address(remote)] += 1
    return peers


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """NVML's answer; None where this GPU or driver has none, or for a link beyond the GPU's last (invalid argument)."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError as error:
        known = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)
        if error.value not in known:
            raise
        return None


def _address(info: Any) -> str:
    """`00000000:C3:00.0` -> `0000:c3:00.0`."""
    domain, _, rest = info.busId.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _set_bits(words: Iterable[int] | None) -> list[int]:
    mask = sum(word << 64 * index for index, word in enumerate(words or ()))
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _mirror(count: int, link: Callable[[int, int], str | None]) -> tuple[tuple[str | None, ...], ...]:
    pairs = {(i, j): link(i, j) for i in range(count) for j in range(i + 1, count)}
    return tuple(tuple("X" if i == j else pairs[min(i, j), max(i, j)] for j in range(count)) for i in range(count))


def _read_sysfs(sysfs: Path, reason: str) -> Topology:
    devices = sorted((sysfs / "bus/pci/devices").glob("*"), key=lambda device: (len(device.name), device.name))
    devices = [d for d in devices if _read(d / "vendor") == "0x10de" and GPU_CLASS.fullmatch(_read(d / "class"))]
    if not devices:
        raise PlacementError(f"no NVIDIA GPU among the PCI devices of {sysfs}, and {reason}")
    gpus = tuple(_sysfs_gpu(index, sysfs, device.name) for index, device in enumerate(devices))
    paths = [device.resolve() for device in devices]

    def link(i: int, j: int) -> str | None:
        common = Path(os.path.commonpath([paths[i].parent, paths[j].parent]))
        if ROOT_COMPLEX.fullmatch(common.name):
            return "PHB"
        if any(map(ROOT_COMPLEX.fullmatch, common.parts)):
            # Under one switch only a downstream port stands between a GPU and the upstream port.
            return "PIX" if max(len(paths[k].relative_to(common).parts) for k in (i, j)) <= 2 else "PXB"
        nodes = {gpus[i].numa_node, gpus[j].numa_node}
        return None if None in nodes else "NODE" if len(nodes) == 1 else "SYS"

    return Topology(gpus, _mirror(len(gpus), link), "sysfs")


def _sysfs_gpu(index: int, sysfs: Path, address: str) -> Gpu:
    device = sysfs / "bus/pci/devices" / address
    node = _read(device / "numa_node")
    if not node.isdigit():
        # -1 tells nothing, which matters not where the host has one node.
        node = _read(sysfs / "devices/system/node/online")
    cpus = _read(device / "local_cpulist") or None
    return Gpu(index, pci_bus_id=address, numa_node=int(node) if node.isdigit() else None, cpus=cpus)


def _read(path: Path) -> str:
    """A sysfs file's text; empty where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
