"""Measures the links between all GPUs that this Python's torch sees: `python link_probe.py --json`.

A script of the standard library and torch, to be run in the engine's own Python. Between every two GPUs: copies each
way (64 MiB: GB/s; 8 KiB: microseconds), and the all-reduce of a decode step through NCCL, between the two alone. GPUs
are in PCI order. `--dry-run-cpu` puts CPU tensors and gloo in their places; its figures say nothing of any link.
"""

from __future__ import annotations

import sys

# ruff: noqa: E402
# A script's own folder comes first on the path, and this one has a `warnings`.
sys.path[:] = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]

import argparse
import functools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # before CUDA starts
try:
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
except ImportError as error:
    sys.exit(f"error: no torch in {sys.executable}: {error}. Name the Python that the engine runs in")

LARGE, SMALL = 64 << 20, 8 << 10  # bytes
ROWS, HIDDEN = 8, 5120
BATCH, LARGE_BATCH = 20, 4  # operations a sample, back to back as in a decode step
WARMUPS = 3
HEAD_START = 4_000_000  # cycles, about 2 ms, in which the host issues the whole batch: its own pace is not timed
cuda: Any = torch.cuda  # not all of it is typed
Matrix = list[list[float | None]]


def main() -> None:
    """Print the matrices; exit code 1 and one line on stderr where there is nothing to measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON, as benchlib reads it")
    parser.add_argument("--n", type=int, default=30, help="samples of which the median is taken")
    parser.add_argument("--timeout-s", type=int, default=600, help="after so many seconds all is ended")
    parser.add_argument("--dry-run-cpu", type=int, metavar="RANKS", help="try the program on a CPU; measures no link")
    options = parser.parse_args()
    cpu = options.dry_run_cpu is not None
    count = options.dry_run_cpu if cpu else torch.cuda.device_count()
    devices = [torch.device("cpu") if cpu else torch.device("cuda", i) for i in range(count)]
    if count < 2 or options.n < 1:
        torches = f"torch {torch.__version__} in {sys.executable}"
        sys.exit(f"error: {torches} sees {count} CUDA devices, n={options.n}: links need two, a median one sample")
    signal.alarm(options.timeout_s)
    large_us = _time_copies(devices, LARGE, LARGE_BATCH, options.n)
    found = {
        "uuids": [f"cpu-{i}" if cpu else f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)],
        "bandwidth_gb_s": [[LARGE / us / 1e3 if us else None for us in row] for row in large_us],
        "latency_us": _time_copies(devices, SMALL, BATCH, options.n),
        "all_reduce_us": _time_all_reduces(devices, options.n, options.timeout_s),
        "device": devices[0].type,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "n": options.n,
    }
    sys.stdout.write(json.dumps(found, indent=None if options.json else 1) + "\n")


def _time_copies(devices: list[torch.device], size: int, batch: int, n: int) -> Matrix:
    times: Matrix = [[None] * len(devices) for _ in devices]
    for i, j in permutations(range(len(devices)), 2):
        source = torch.randint(256, (size,), dtype=torch.uint8, device=devices[i])
        target = torch.zeros(size, dtype=torch.uint8, device=devices[j])
        times[i][j] = _median_us(functools.partial(target.copy_, source, non_blocking=True), devices[i], batch, n)
        if not torch.equal(target.cpu(), source.cpu()):
            sys.exit(f"error: a copy from GPU {i} to {j} arrived changed. Peer-to-peer is broken (IOMMU, PCIe ACS)")
    return times


def _time_all_reduces(devices: list[torch.device], n: int, timeout_s: int) -> Matrix:
    times: Matrix = [[None] * len(devices) for _ in devices]
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_run_rank, args=(devices, n, timeout_s, folder), nprocs=len(devices))  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as error:
            sys.exit(f"error: an all-reduce failed: {str(error).strip().splitlines()[-1]}")
        for file in Path(folder).glob("*.json"):
            for i, j, us in json.loads(file.read_text()):
                times[i][j] = times[j][i] = max(us, times[i][j] or 0.0)  # the slower rank's
    return times


def _run_rank(rank: int, devices: list[torch.device], n: int, timeout_s: int, folder: str) -> None:
    """Each pair in turn, in a group of its own, while the other ranks wait on the CPU."""
    signal.alarm(timeout_s)
    os.dup2(2, 1)  # NCCL logs to stdout, which is for the JSON
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device, found = devices[rank], []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(devices))
    for pair in combinations(range(len(devices)), 2):
        group = dist.new_group(list(pair), backend="nccl" if device.type == "cuda" else "gloo")
        if rank in pair:
            rows = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16, device=device)
            dist.all_reduce(rows, group=group)
            if not torch.all(rows == 2):
                raise RuntimeError(f"the sum of GPUs {pair[0]} and {pair[1]} is wrong")
            work = functools.partial(dist.all_reduce, rows.zero_(), group=group)
            found.append((*pair, _median_us(work, device, BATCH, n)))
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _median_us(work: Callable[[], object], device: torch.device, batch: int, n: int) -> float:
    """Of one operation, over `n` samples of `batch` each."""
    return statistics.median([_sample_us(work, device, batch) / batch for _ in range(WARMUPS + n)][WARMUPS:])


def _sample_us(work: Callable[[], object], device: torch.device, batch: int) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(batch):
            work()
        return 1e6 * (time.perf_counter() - began)
    with cuda.device(device):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        cuda._sleep(HEAD_START)
        work()  # not timed: two ranks leave it together
        start.record()
        for _ in range(batch):
            work()
        end.record()
        end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
