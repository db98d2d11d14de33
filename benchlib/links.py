"""Links as `link_probe` measures them, beside the driver's labels, which tell a transfer's way and not its time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import combinations, permutations
from math import inf
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from benchlib.errors import PlacementError
from benchlib.topology import Topology

__all__ = [
    "NOISE", "Links", "format_links", "link_strength", "links_disagree", "load_links", "measure_links", "pair_labels",
    "pair_times_us", "save_links",
]  # fmt: skip

PROBE = Path(__file__).with_name("link_probe.py")
PCIE = ("SYS", "NODE", "PHB", "PXB", "PIX")  # worst first
NVLINK = 100
NOISE = 1.1  # times closer than this count as equal
Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Links:
    """What the probe measured: matrices of [from][to] in the order of `uuids`, None on the diagonal, medians of `n`.

    `bandwidth_gb_s`: copies of 64 MiB, 10^9 bytes/s. `latency_us`: copies of 8 KiB. `all_reduce_us`: a sum between the
    two alone, of a decode step's size (8 rows of 5120 bf16). `measured_at`: UTC, ISO 8601.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    uuids: tuple[str, ...]
    bandwidth_gb_s: Matrix
    latency_us: Matrix
    all_reduce_us: Matrix
    device: str
    measured_at: str
    n: int


def link_strength(label: str | None) -> int:
    """Higher is better: NVLink by its number of links, then PIX, PXB, PHB, NODE, SYS; 0 where unknown."""
    if label is not None and label.startswith("NV"):
        return NVLINK + int(label[2:])
    return 1 + PCIE.index(label) if label in PCIE else 0


def pair_labels(topology: Topology) -> dict[tuple[int, int], str | None]:
    """Label of each pair of GPU indices, the lower first."""
    pairs = combinations(enumerate(topology.gpus), 2)
    return {(a.index, b.index): topology.links[i][j] for (i, a), (j, b) in pairs}


def pair_times_us(topology: Topology, links: Links) -> dict[tuple[int, int], float]:
    """Measured all-reduce of each pair of GPU indices, the lower first. PlacementError for links of other GPUs."""
    uuids = [gpu.uuid for gpu in topology.gpus]
    if set(uuids) != set(links.uuids):
        seen, here = ", ".join(links.uuids), ", ".join(map(str, uuids))
        raise PlacementError(f"links were measured on {seen}; {topology.source} has {here}. Measure all of these")
    at = {gpu.index: links.uuids.index(str(gpu.uuid)) for gpu in topology.gpus}
    return {(a, b): links.all_reduce_us[at[a]][at[b]] or inf for a, b in combinations(at, 2)}


def links_disagree(topology: Topology, links: Links) -> tuple[str, ...]:
    """A sentence for each two labels of which the worse has a pair over 10% faster than one of the better."""
    times, labels = pair_times_us(topology, links), pair_labels(topology)
    found = []
    for better, worse in permutations(sorted({label for label in labels.values() if label}), 2):
        slow = max((pair for pair in labels if labels[pair] == better), key=times.__getitem__)
        fast = min((pair for pair in labels if labels[pair] == worse), key=times.__getitem__)
        if link_strength(better) > link_strength(worse) and times[slow] > NOISE * times[fast]:
            found.append(
                f"GPUs {fast[0]} and {fast[1]} ({worse}) all-reduce in {times[fast]:.1f} us, faster than "
                f"{slow[0]} and {slow[1]} ({better}) in {times[slow]:.1f} us"
            )
    return tuple(found)


def format_links(links: Links) -> str:
    """A line for each pair, numbered as in `uuids`: both ways' bandwidth and latency, and the all-reduce."""
    lines = [f"median of {links.n}, {links.measured_at}: copies of 64 MiB and of 8 KiB each way, decode's all-reduce"]
    for i, j in combinations(range(len(links.uuids)), 2):
        gb, us = (f"{of[i][j]:.1f} | {of[j][i]:.1f}" for of in (links.bandwidth_gb_s, links.latency_us))
        lines.append(f"GPUs {i} and {j}: {gb} GB/s, {us} us; {links.all_reduce_us[i][j]:.1f} us")
    return "\n".join(lines)


def measure_links(python: str = "", *, timeout_s: float = 600.0) -> Links:
    """Run the probe in `python` (empty: this one), which needs torch with CUDA. PlacementError in the probe's words."""
    command = [python or sys.executable, str(PROBE), "--json", "--timeout-s", f"{timeout_s:.0f}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.CalledProcessError as error:
        raise PlacementError(
            f"the link probe failed in {command[0]}: {(error.stderr.splitlines() or [error])[-1]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlacementError(f"cannot measure links: {error}. Name a Python with torch, or allow more time") from error
    return _parse_links(done.stdout, "the link probe's output")


def load_links(path: Path | str) -> Links:
    """From a file of `save_links`. PlacementError for anything else, the probe's dry run on a CPU among it."""
    try:
        return _parse_links(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read measured links from {path}: {error}") from error


def save_links(links: Links, path: Path | str) -> None:
    """As JSON; a reader sees the old file or the new one."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(asdict(links), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _parse_links(text: str, where: str) -> Links:
    try:
        links = TypeAdapter(Links).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise PlacementError(f"{where} holds no measured links: {first['loc']}: {first['msg']}") from error
    if links.device == "cpu":
        raise PlacementError(f"{where} is a dry run on a CPU and says nothing of any link. Measure on the GPUs")
    size = range(len(links.uuids))
    for name in ("bandwidth_gb_s", "latency_us", "all_reduce_us"):
        signs = [[None if value is None else value > 0 for value in row] for row in getattr(links, name)]
        if signs != [[i != j or None for j in size] for i in size]:
            raise PlacementError(f"{where}: {name} must be {len(size)} x {len(size)}, positive, null on its diagonal")
    return links
