"""What the GPUs did beside a run: clocks, power, throttling, memory and energy, sampled from NVML in a thread.

It stays out of the measurement's way: whatever goes wrong in it is kept as a reason and raised nowhere. Samples carry
the measurement's own clock, so that any window of the run can be asked about afterwards; where the samples do not
cover that window, the answer is None.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError

from benchlib.errors import BenchlibError, RecordError, SpecError
from benchlib.record import RequestRecord, write_atomic
from benchlib.spec import Frozen
from benchlib.topology import nvml_session

__all__ = [
    "MAX_THROTTLED_SHARE", "Sample", "Telemetry", "TelemetryRecord", "clock_range", "counter_energy_j", "energy_j",
    "load_telemetry", "mean_power_w", "mean_share", "round_windows", "save_telemetry", "throttled_share",
]  # fmt: skip

TELEMETRY_FILE = "telemetry.json"
HZ, MIN_HZ, MAX_HZ = 5.0, 4.0, 20.0  # a sample takes 45 ms on an H200
# A point that was slowed down for more of its window is to be flagged.
MAX_THROTTLED_SHARE = 0.05
# Clock event reasons that slow a GPU below what its load asks for: software power cap, hardware slowdown, software
# thermal, hardware thermal, hardware power brake. Idle (0x1) and application clocks (0x2) are not among them.
SLOWING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
MAX_GAP_PERIODS = 3
TIMEOUT_S = 10.0  # for the driver to initialise, or to end a sample


class Sample(NamedTuple):
    """One GPU at one moment; what the device does not support is None."""

    time_s: float
    gpu: int
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    clock_event_reasons: int | None
    memory_used_mib: int | None
    utilisation_percent: int | None
    energy_mj: int | None
    pcie_tx_kb_s: int | None
    pcie_rx_kb_s: int | None
    sampling_s: float


UNITS = ("s", "NVML index", "MHz", "MHz", "W", "C", "bit mask", "MiB", "%", "mJ", "KB/s", "KB/s", "s")
COLUMNS = dict(zip(Sample._fields, UNITS, strict=True))


class TelemetryRecord(Frozen):
    """`telemetry.json`: the samples of one run, in the order they were taken."""

    schema_version: Literal[1] = 1
    hz: float = Field(description="samples a second that were tried")
    uuids: dict[int, str] = Field(description="of each sampled GPU, by the index its samples carry")
    power_limits_w: dict[int, float | None] = Field(
        default_factory=dict, description="power limit of each GPU when sampling began; None: not told"
    )
    reason: str | None = Field(description="why there are no samples, or no more of them; None: ended by the run")
    missed: int = Field(description="samples skipped because the one before took too long")
    columns: dict[str, str] = Field(COLUMNS, description="units of a sample's values, in their order")
    samples: tuple[Sample, ...] = Field(description="arrays of values, in the order of `columns`")


class Telemetry:
    """Samples `gpus` (NVML indices or UUIDs) from entering until leaving; inert, with a `reason`, where it cannot.

    `epoch` is the `time.perf_counter()` that times count from, by default the moment it is made. PCIe traffic takes
    the driver 42 ms a GPU to measure, so each round measures it on one GPU, in turns. `pynvml` stands in for the
    driver's module, initialised. SpecError for a rate outside 4 to 20 Hz.
    """

    def __init__(
        self, gpus: Sequence[int | str], *, hz: float = HZ, epoch: float | None = None, pynvml: Any = None
    ) -> None:
        if not MIN_HZ <= hz <= MAX_HZ:
            raise SpecError(f"telemetry at {hz:g} Hz is not possible: use {MIN_HZ:g} to {MAX_HZ:g} Hz")
        self.samples: list[Sample] = []
        self.uuids: dict[int, str] = {}
        self.power_limits_w: dict[int, float | None] = {}
        self.hz, self.missed = hz, 0
        self.reason: str | None = None if gpus else "no GPU was named"
        self._gpus, self._pynvml = tuple(gpus), pynvml
        self._epoch = time.perf_counter() if epoch is None else epoch
        self._started, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        if self._gpus:
            self._thread.start()
            # For a first sample, so that what is measured next is covered; a driver that hangs holds nobody up.
            self._started.wait(TIMEOUT_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        if self._gpus:
            self._thread.join(TIMEOUT_S)
            if self._thread.is_alive():
                self.reason = f"the driver gave no answer for {TIMEOUT_S:g} s when the run ended"

    def build_record(self) -> TelemetryRecord:
        """What was sampled so far."""
        samples = tuple(self.samples)
        return TelemetryRecord(
            hz=self.hz, uuids=self.uuids, power_limits_w=self.power_limits_w,
            reason=self.reason, missed=self.missed, samples=samples,
        )  # fmt: skip

    def _run(self) -> None:
        session: AbstractContextManager[Any] = nullcontext(self._pynvml) if self._pynvml else nvml_session()
        try:
            with session as nvml:
                self._sample(nvml)
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not end a measurement)
            ended = f"sampling ended after {len(self.samples)} samples: {type(error).__name__}: {error}"
            self.reason = str(error) if isinstance(error, BenchlibError) else ended
        finally:
            self._started.set()

    def _sample(self, nvml: Any) -> None:
        by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
        handles = [by_index(gpu) if isinstance(gpu, int) else by_uuid(gpu) for gpu in self._gpus]
        indices = [nvml.nvmlDeviceGetIndex(handle) for handle in handles]
        self.uuids = dict(zip(indices, map(nvml.nvmlDeviceGetUUID, handles), strict=True))
        self.power_limits_w = dict(zip(indices, (_power_limit_w(nvml, handle) for handle in handles), strict=True))
        began, due, turns, stopping = time.perf_counter(), 0, cycle(indices), False
        # One more round once it is stopping, so that what was measured last is covered too.
        while not stopping:
            stopping = self._stopping.wait(max(0.0, began + due / self.hz - time.perf_counter()))
            turn = next(turns)
            for index, handle in zip(indices, handles, strict=True):
                at = time.perf_counter()
                values = _read(nvml, handle, pcie=index == turn)
                self.samples.append(Sample._make((at - self._epoch, index, *values, time.perf_counter() - at)))
            self._started.set()
            passed = max(due, int((time.perf_counter() - began) * self.hz))
            self.missed, due = self.missed + passed - due, passed + 1


def _power_limit_w(nvml: Any, handle: Any) -> float | None:
    """None where the device does not tell, for whatever reason: a line in a figure is worth no sample."""
    try:
        return float(nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    except nvml.NVMLError:
        return None


def _read(nvml: Any, handle: Any, *, pcie: bool) -> tuple[Any, ...]:
    """A sample's values from `sm_clock_mhz` to `pcie_rx_kb_s`; None for each that the device does not support."""

    def ask(name: str, *arguments: Any, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        try:
            return convert(getattr(nvml, name)(handle, *arguments))
        except nvml.NVMLError_NotSupported:
            return None

    traffic = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return (
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        ask("nvmlDeviceGetPowerUsage", convert=lambda milliwatts: milliwatts / 1000),
        ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        ask("nvmlDeviceGetCurrentClocksThrottleReasons"),  # the name that older drivers know too
        ask("nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2, convert=lambda memory: memory.used >> 20),
        ask("nvmlDeviceGetUtilizationRates", convert=lambda rates: rates.gpu),
        ask("nvmlDeviceGetTotalEnergyConsumption"),
        *(ask("nvmlDeviceGetPcieThroughput", counter) if pcie else None for counter in traffic),
    )


def save_telemetry(folder: Path, telemetry: TelemetryRecord) -> None:
    """Write `telemetry.json` into a run's folder; one without samples too, for its reason."""
    write_atomic(folder / TELEMETRY_FILE, telemetry.model_dump_json().encode() + b"\n")


def load_telemetry(folder: Path | str) -> TelemetryRecord | None:
    """The telemetry of a run's folder; None where none was kept. RecordError for a broken or foreign file."""
    path = Path(folder) / TELEMETRY_FILE
    try:
        record = TelemetryRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RecordError(f"{path} is no telemetry: {error.errors()[0]['msg']}; delete it, or run again") from None
    if list(record.columns.items()) != list(COLUMNS.items()):
        raise RecordError(f"{path} has columns {record.columns}, not {COLUMNS}; delete it, or run again")
    return record


def energy_j(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float) -> float | None:
    """Joules of a GPU over a window, its power by the trapezoidal rule; None where samples leave part of it open.

    Recent GPUs report a mean over the last second: on an H200 this misses half the energy of a load's first second
    and 5% of its first eight. `counter_energy_j` misses nothing.
    """
    pieces = _cut(samples, gpu, start_s, end_s, "power_w")
    return None if pieces is None else sum(piece.seconds * piece.middle for piece in pieces)


def counter_energy_j(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float) -> float | None:
    """Joules of a GPU over a window by its own counter; None where that is open, unsupported, or was reset."""
    pieces = _cut(samples, gpu, start_s, end_s, "energy_mj")
    if pieces is None or any(piece.change < 0 for piece in pieces):
        return None
    return sum(piece.change for piece in pieces) / 1000


def mean_power_w(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float) -> float | None:
    """Mean watts of a GPU over a window, where `energy_j` knows its energy."""
    joules = energy_j(samples, gpu, start_s, end_s)
    return None if joules is None else joules / (end_s - start_s)


def throttled_share(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float) -> float | None:
    """Share of a window, 0 to 1, that a GPU spent slowed down; a sample's reasons hold until the next sample."""
    pieces = _cut(samples, gpu, start_s, end_s, "clock_event_reasons")
    if pieces is None:
        return None
    return sum(piece.seconds for piece in pieces if int(piece.first) & SLOWING_REASONS) / (end_s - start_s)


def mean_share(samples: Sequence[Sample], gpu: int, windows: Sequence[tuple[float, float]]) -> float | None:
    """`throttled_share` over several windows together, seconds by seconds; None where one of them is open."""
    shares = [throttled_share(samples, gpu, *window) for window in windows]
    if not shares or None in shares:
        return None
    lengths = [end - start for start, end in windows]
    return sum(s * n for s, n in zip(shares, lengths, strict=True) if s is not None) / sum(lengths)


def round_windows(requests: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(first sent, last token) of each round among a cell's whole requests, seconds from the run's epoch."""
    rounds: dict[int, list[RequestRecord]] = {}
    for request in requests:
        if request.error is None and request.ticks:
            rounds.setdefault(request.round, []).append(request)
    return [(min(r.sent_s for r in rs), max(r.sent_s + r.ticks[-1][0] for r in rs)) for rs in rounds.values()]


def clock_range(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float) -> tuple[int, int] | None:
    """Lowest and highest SM clock (MHz) among a GPU's samples inside a window; None without any, or with a gap."""
    clocks = [int(piece.first) for piece in (_cut(samples, gpu, start_s, end_s, "sm_clock_mhz") or ())[1:]]
    return (min(clocks), max(clocks)) if clocks else None


class _Piece(NamedTuple):
    """What lies in a window between one sample and the next: the first's value, the interpolated mean and change."""

    seconds: float
    first: float
    middle: float
    change: float


def _cut(samples: Sequence[Sample], gpu: int, start_s: float, end_s: float, column: str) -> list[_Piece] | None:
    """A window's pieces; None where no sample precedes or follows it, a value is unknown, or three periods lack one."""
    points = [(sample.time_s, getattr(sample, column)) for sample in samples if sample.gpu == gpu]
    times = [at for at, _ in points]
    first, last = bisect_right(times, start_s) - 1, bisect_left(times, end_s)
    if not (start_s < end_s and first >= 0 and last < len(points)):
        return None
    # The median of a few intervals may itself be a gap: never longer than the slowest rate's.
    period_s = min(1 / MIN_HZ, median_low(b - a for a, b in pairwise(times)))
    pieces = []
    for (a, p), (b, q) in pairwise(points[first : last + 1]):
        if p is None or q is None or b - a > MAX_GAP_PERIODS * period_s:
            return None
        begin, end, slope = max(a, start_s), min(b, end_s), (q - p) / (b - a)
        pieces.append(_Piece(end - begin, p, p + slope * ((begin + end) / 2 - a), slope * (end - begin)))
    return pieces
