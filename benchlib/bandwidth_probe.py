"""Memory bandwidth of each visible GPU, as JSON. Stand-alone: it runs in an engine's Python, which lacks benchlib.

python - < bandwidth_probe.py        as a file, its neighbour warnings.py would hide Python's own
python - --cpu < bandwidth_probe.py  small buffers on the CPU: tries it out, tells of no ceiling
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Bandwidth"]

N, WARMUPS = 20, 3
FASTER = 10  # a CPU's caches, and noise, may make products seem faster than the memory; ten times is no measurement


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What a device's memory gave, GB/s (1e9 bytes): medians of `n` timings with their standard deviations."""

    device: str  # its name, or "cpu"
    uuid: str | None
    n: int
    copy_gb_s: float  # read and write both counted
    copy_sd: float
    read_gb_s: float
    read_sd: float
    linear_gb_s: float  # the weights of a chain of bf16 matrix-vector products
    linear_sd: float


def main(arguments: list[str]) -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch: {error}"
    if "--cpu" in arguments:
        torch.set_num_threads(1)
        devices = ["cpu"]
    elif torch.cuda.is_available():
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    else:
        return f"torch {torch.__version__} sees no CUDA device; see the driver and CUDA_VISIBLE_DEVICES"
    found = [_probe(torch, device) for device in devices]
    if wrong := [b for b in found if b.linear_gb_s > FASTER * max(b.read_gb_s, b.copy_gb_s)]:
        return (
            f"products on {wrong[0].uuid} read {wrong[0].linear_gb_s:.0f} GB/s, its memory {wrong[0].read_gb_s:.0f}: "
            "they were not timed where they ran"
        )
    sys.stdout.write(json.dumps([dataclasses.asdict(one) for one in found]) + "\n")
    return None


def _probe(torch: Any, device: str) -> Bandwidth:
    gpu = device != "cpu"
    # 4.3 GB, far beyond any cache, in the shapes of a 27B model's feed-forward layers.
    narrow, wide, pairs = (5120, 17408, 12) if gpu else (64, 128, 2)
    if gpu:
        torch.cuda.set_device(device)
    source = torch.empty(2 * pairs * narrow * wide, dtype=torch.bfloat16, device=device).uniform_(-0.01, 0.01)
    shapes = [(wide, narrow), (narrow, wide)] * pairs
    weights = [part.view(shape) for part, shape in zip(source.chunk(2 * pairs), shapes, strict=True)]
    start = torch.ones(1, narrow, dtype=torch.bfloat16, device=device)

    def chain() -> None:
        x = start
        for weight in weights:
            x = torch.nn.functional.linear(x, weight)

    target, integers, size = torch.empty_like(source), source.view(torch.int64), 2 * source.numel()
    rates = _rates(torch, gpu, "copy", 2 * size, lambda: target.copy_(source))
    rates |= _rates(torch, gpu, "read", size, lambda: integers.sum())
    rates |= _rates(torch, gpu, "linear", size, _graphed(torch, chain) if gpu else chain)
    properties = torch.cuda.get_device_properties(device) if gpu else None
    name, uuid = (properties.name, f"GPU-{properties.uuid}") if properties else ("cpu", None)
    return Bandwidth(device=name, uuid=uuid, n=N, **rates)


def _graphed(torch: Any, work: Callable[[], None]) -> Any:
    """As engines decode: without the host's launches between the products."""
    work()  # libraries set themselves up in the first call, which a graph may not hold
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A stream of this GPU's own: torch keeps its default one for captures, and that is the first GPU's for ever.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        work()
    return graph.replay


def _rates(torch: Any, gpu: bool, name: str, moved: int, work: Callable[[], Any]) -> dict[str, float]:
    def mark() -> Any:
        if not gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    rates = []
    for _ in range(WARMUPS + N):
        begin, _, end = mark(), work(), mark()
        if gpu:
            end.synchronize()
        rates.append(moved / 1e9 / (begin.elapsed_time(end) / 1e3 if gpu else end - begin))
    return {f"{name}_gb_s": statistics.median(rates[WARMUPS:]), f"{name}_sd": statistics.stdev(rates[WARMUPS:])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
