"""What this machine shows of itself to a preflight: its GPUs' states, device nodes, first CUDA call, limits.

Everything is read through a `Machine`, so that a saved one can be checked like this one. Unknown is None. Nothing
needs root, nothing is changed, and a wedged driver hangs nobody.
"""

from __future__ import annotations

import functools
import glob
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchlib.errors import PlacementError
from benchlib.topology import nvml_session

__all__ = [
    "CUDA_NO_ANSWER", "LIMITS", "Device", "GpuState", "Machine", "busy_gpus", "decode_throttle", "read_gpu_states",
]  # fmt: skip

MIB, GIB = 2**20, 2**30
CUDA_TIMEOUT_S, CUDA_NO_ANSWER = 15.0, -1
CUDA_PROBE = """
import ctypes
try:
    print(ctypes.CDLL("libcuda.so.1").cuInit(0))
except OSError:
    print("none")
"""
# Finds without importing: importing torch takes seconds.
PYTHON_PROBE = """
import importlib.util, json, pathlib, re, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
torch = found.get("torch")
text = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
cuda = re.search(r"^cuda\\b.*= *'([0-9.]+)'", text, re.M)
print(json.dumps({"packages": [n for n in found if found[n]], "torch_cuda": cuda and cuda[1]}))
"""
LIMITS = ("nofile", "memlock")
DEVICES = ("/dev/nvidia*", "/dev/nvidia-caps/*")
# Bits of NVML's clocks event reasons (nvml.h).
THROTTLE = {
    0x1: "idle", 0x2: "application-clocks", 0x4: "sw-power-cap", 0x8: "hw-slowdown", 0x10: "sync-boost",
    0x20: "sw-thermal", 0x40: "hw-thermal", 0x80: "hw-power-brake", 0x100: "display-clocks", 0x200: "board-limit",
    0x400: "reliability",
}  # fmt: skip
MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
P2P = ("ok", *(f"{what} not supported" for what in ("chipset", "GPU", "topology")), "disabled", "not supported", "?")
PLAIN = {
    "uuid": "UUID", "name": "Name", "pcie_gen": "CurrPcieLinkGeneration", "pcie_gen_max": "MaxPcieLinkGeneration",
    "pcie_width": "CurrPcieLinkWidth", "pcie_width_max": "MaxPcieLinkWidth",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU at one moment, as NVML tells it; None: it does not. `index` is its PCI-ordered number."""

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    memory_used_bytes: int | None = None  # without what the driver reserves
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: int | None = None
    processes: tuple[tuple[int, str | None, int | None], ...] = ()  # (pid, name, bytes) of compute processes
    throttle_reasons: tuple[str, ...] | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_max_limit_w: float | None = None
    temperature_c: int | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    persistence: bool | None = None
    compute_mode: str | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    mig: bool | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    p2p_off: tuple[tuple[int, str], ...] = ()  # (other GPU, why no peer access)


def decode_throttle(mask: int) -> tuple[str, ...]:
    """Words for NVML's bit mask of clocks event (throttle) reasons."""
    return tuple(word for bit, word in THROTTLE.items() if mask & bit)


def read_gpu_states() -> tuple[GpuState, ...]:
    """Every GPU of this machine in PCI order; empty where there is no usable driver."""
    try:
        return _read_states()
    except PlacementError:
        return ()


def _read_states() -> tuple[GpuState, ...]:
    with nvml_session() as nvml:
        handles: dict[int, Any] = {}
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handles[index] = None
                with suppress(nvml.NVMLError):  # a GPU that fell off the bus stays without
                    handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            raise PlacementError(f"NVML cannot list the GPUs: {error}") from error
        return tuple(_read_state(nvml, index, handles) for index in handles)


def _read_state(nvml: Any, index: int, handles: Mapping[int, Any]) -> GpuState:
    def ask(name: str, *arguments: Any) -> Any:
        with suppress(nvml.NVMLError):  # this GPU or driver does not have it
            return getattr(nvml, f"nvml{name}")(*arguments)
        return None

    def get(name: str, *arguments: Any) -> Any:
        return None if handles[index] is None else ask(f"DeviceGet{name}", handles[index], *arguments)

    # The first version counts what the driver reserves as used: 615 MiB on an idle H200.
    memory = get("MemoryInfo", nvml.nvmlMemory_v2) or get("MemoryInfo")
    usage, pci, mask, mode = (
        get(n) for n in ("UtilizationRates", "PciInfo", "CurrentClocksThrottleReasons", "ComputeMode")
    )
    watts, limit, limits = (get(f"Power{n}") for n in ("Usage", "ManagementLimit", "ManagementLimitConstraints"))
    ecc, mig, persistence = get("EccMode"), get("MigMode"), get("PersistenceMode")
    version, processes = ask("SystemGetCudaDriverVersion"), get("ComputeRunningProcesses") or ()
    peers = {i: get("P2PStatus", other, 0) for i, other in handles.items() if i != index and other is not None}
    return GpuState(
        index=index,
        pci_bus_id=pci and pci.busId,
        memory_used_bytes=memory and memory.used,
        memory_free_bytes=memory and memory.free,
        memory_total_bytes=memory and memory.total,
        utilization_percent=usage and usage.gpu,
        processes=tuple((p.pid, _command(ask("SystemGetProcessName", p.pid)), p.usedGpuMemory) for p in processes),
        throttle_reasons=None if mask is None else decode_throttle(mask),
        power_w=None if watts is None else watts / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        power_max_limit_w=limits and limits[1] / 1000,
        temperature_c=get("Temperature", 0),
        ecc=ecc and bool(ecc[0]),
        ecc_uncorrected=get("TotalEccErrors", 1, 0),
        persistence=None if persistence is None else bool(persistence),
        compute_mode=None if mode is None else MODES[mode],
        mig=mig and bool(mig[0]),
        driver=ask("SystemGetDriverVersion"),
        cuda_driver=version and f"{version // 1000}.{version % 1000 // 10}",
        p2p_off=tuple((i, P2P[min(status, 6)]) for i, status in peers.items() if status),
        **{name: get(call) for name, call in PLAIN.items()},
    )


def _command(line: str | None) -> str | None:
    return Path(line.split()[0]).name if line and line.strip() else None


def busy_gpus(
    states: tuple[GpuState, ...], *, threshold_mib: int = 500, own: frozenset[int] = frozenset()
) -> dict[int, str]:
    """Index -> who holds it, of each GPU with more memory in use than that or with a compute process not in `own`."""
    found = {}
    for gpu in states:
        foreign = [process for process in gpu.processes if process[0] not in own]
        if foreign:
            found[gpu.index] = ", ".join(map(_holder, foreign))
        elif gpu.uuid is None and gpu.memory_used_bytes is None:
            found[gpu.index] = "does not answer the driver"
        elif (mib := (gpu.memory_used_bytes or 0) / MIB) > threshold_mib and not gpu.processes:
            found[gpu.index] = f"{mib:.0f} MiB in use by no visible process"
    return found


def _holder(process: tuple[int, str | None, int | None]) -> str:
    pid, name, size = process
    return f"PID {pid} {name or '(name hidden)'}" + ("" if size is None else f" holds {size / GIB:.1f} GiB")


@dataclass(frozen=True, slots=True)
class Device:
    """A device node and the errno of opening it; None: it opens."""

    major: int
    minor: int
    errno: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a check looks at: texts below `root` (proc, sys) and what no file holds."""

    root: Path
    devices: Callable[[], Mapping[str, Device]]  # /dev/nvidia*, each opened
    cuda_init: Callable[[], int | None]  # result of cuInit(0); None: no libcuda.so.1
    gpu_states: Callable[[], tuple[GpuState, ...]]  # PlacementError, in the driver's words
    # (interpreter, packages, its variables) -> those of the packages it has, and torch's CUDA; empty: no answer
    python: Callable[[str, tuple[str, ...], tuple[tuple[str, str], ...]], Mapping[str, Any]]
    which: Callable[[str], str | None]
    limits: Mapping[str, int]  # soft; -1: unlimited
    shm_bytes: tuple[int, int] | None  # size, free
    env: Mapping[str, str]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0] for name in LIMITS}
        root, shm = Path("/"), None
        with suppress(OSError):
            disk = os.statvfs("/dev/shm")
            shm = (disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
        return cls(root, _open_devices, _cuda_init, _read_states, _ask_python, shutil.which, limits, shm, os.environ)

    @classmethod
    def saved(cls, folder: Path) -> Machine:
        """One saved as `proc/`, `sys/` and `machine.json`."""
        data = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        states = TypeAdapter(tuple[GpuState, ...]).validate_python([{**data["gpu"], **own} for own in data["gpus"]])

        def gpu_states() -> tuple[GpuState, ...]:
            if data["nvml"]:
                raise PlacementError(data["nvml"])
            return states

        return cls(
            folder, lambda: {path: Device(*node) for path, node in data["devices"].items()}, lambda: data["cuda_init"],
            gpu_states, lambda *_: data["python"], {name: name for name in data["tools"]}.get, data["limits"],
            tuple(data["shm_bytes"]), {},
        )  # fmt: skip

    def text(self, path: str) -> str | None:
        """A text below `root`; None where it cannot be read."""
        with suppress(OSError):
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        return None


def _open_devices() -> dict[str, Device]:
    found = {}
    for path in sorted(itertools.chain.from_iterable(map(glob.glob, DEVICES))):
        code, number = None, os.stat(path).st_rdev if Path(path).is_char_device() else None
        if number is None:
            continue
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            code = error.errno
        found[path] = Device(os.major(number), os.minor(number), code)
    return found


def _cuda_init() -> int | None:
    """In a child, which takes its context along when it ends, and which a wedged driver may hang without harm."""
    command = [sys.executable, "-I", "-S", "-c", CUDA_PROBE]
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            child.wait(CUDA_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # within the driver not even SIGKILL ends it
                child.wait(1)
        out.seek(0)
        answer = out.read().strip()
    return None if answer == "none" else int(answer) if answer.isdigit() else CUDA_NO_ANSWER


@functools.cache
def _ask_python(python: str, packages: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    command, variables = [python, "-c", PYTHON_PROBE, *packages], {**os.environ, **dict(env)}
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=variables)
        answer = json.loads(done.stdout)
        return answer if isinstance(answer, dict) else {}
    return {}
