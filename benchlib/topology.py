"""The machine's GPUs, the links between them and their NUMA nodes: read from the driver, or from a saved text.

Unknown is None everywhere: a node that the driver does not tell is never node 0, a link that cannot be read is never
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.errors import PlacementError

__all__ = ["Gpu", "Topology", "load_topology", "nvml_session", "parse_cpu_list", "parse_topology", "read_topology"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is its PCI-ordered number, `cpus` a kernel CPU list such as `0-31,64-95`."""

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs in index order and the square matrix of link labels between them.

    Labels are those of `nvidia-smi topo -m`: `NV<n>`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, `X` on the diagonal, None
    where unknown. `source` says where it was read: `nvml`, `sysfs` or a file's path.
    """

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[str | None, ...], ...]
    source: str


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The initialised pynvml module; PlacementError, with the driver's own words, where NVML cannot be used."""
    raise NotImplementedError
    yield


def parse_topology(text: str, *, source: str) -> Topology:
    """From the text of `nvidia-smi topo -m`, pasted or saved. PlacementError that shows the line it cannot read."""
    raise NotImplementedError


def load_topology(path: Path | str) -> Topology:
    """From a file that holds such a text."""
    raise NotImplementedError


def read_topology() -> Topology:
    """This machine's, from NVML, or from sysfs where that fails. PlacementError where there is no GPU."""
    raise NotImplementedError


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}. PlacementError for anything else."""
    raise PlacementError(text)
