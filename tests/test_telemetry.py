"""Sampling with a stand-in for the driver, and what windows of samples say, against numbers worked out by hand."""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchlib import telemetry as module
from benchlib.errors import PlacementError, RecordError, SpecError
from benchlib.telemetry import (
    MAX_THROTTLED_SHARE,
    Sample,
    Telemetry,
    clock_range,
    counter_energy_j,
    energy_j,
    load_telemetry,
    mean_power_w,
    save_telemetry,
    throttled_share,
)

CAPPED = Path(__file__).parent / "data" / "telemetry" / "h200_power_cap.csv"
LOAD = CAPPED.with_name("h200_load.csv")
IDLE, CAP, THERMAL = 0x1, 0x4, 0x20
EMPTY = Sample._make([None] * len(Sample._fields))


class FakeNvml:
    """Two GPUs. Handles are their indices; `broken` names calls that fail and how, `wait` delays the power's."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 1, 2, 0, 2
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, wait: Callable[[], object] = bool, **broken: Exception) -> None:
        self.broken, self.wait, self.threads = broken, wait, set[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
            "nvmlDeviceGetIndex": lambda handle: handle,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetClockInfo": lambda handle, clock: 1980 if clock == 1 else 3201,
            "nvmlDeviceGetPowerUsage": lambda handle: (self.wait(), 250_500)[1],
            "nvmlDeviceGetTemperature": lambda handle, sensor: 40 + handle,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: CAP,
            "nvmlDeviceGetMemoryInfo": lambda handle, version: SimpleNamespace(used=3 << 30),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=50),
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1234,
            "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000 - handle,
            "nvmlDeviceGetPcieThroughput": lambda handle, counter: 10 + counter,
        }
        self.threads.add(threading.current_thread().name)
        if name in self.broken:
            raise self.broken[name]
        return answers[name]


def sample_until(telemetry: Telemetry, n: int) -> Telemetry:
    """Run it until it has `n` samples or has ended."""
    until = time.monotonic() + 20
    with telemetry:
        while len(telemetry.samples) < n and telemetry.reason is None and time.monotonic() < until:
            time.sleep(0.005)
    return telemetry


def samples_of(*powers: float | None, reasons: int = 0, step_s: float = 0.2, gpu: int = 0) -> list[Sample]:
    """One GPU's samples, a step apart from 0 s on; its counter runs at 100 W, its clock falls by 10 MHz a sample."""
    return [
        Sample(
            i * step_s, gpu, 1980 - 10 * i, 3201, power, 40, reasons, 1, 9, round(i * step_s * 100_000), None, None, 0.0
        )
        for i, power in enumerate(powers)
    ]


def test_samples_carry_every_value_and_the_callers_clock() -> None:
    epoch = time.perf_counter() - 100
    fake = FakeNvml()
    done = sample_until(Telemetry([0, "GPU-1"], hz=20, epoch=epoch, pynvml=fake), 6)
    assert done.reason is None
    assert done.uuids == {0: "GPU-0", 1: "GPU-1"}
    assert done.build_record().power_limits_w == {0: 700.0, 1: 699.999}
    first, second = done.samples[:2]
    assert first[1:-1] == (0, 1980, 3201, 250.5, 40, CAP, 3072, 97, 1234, 10, 11)
    # Traffic is measured on one GPU a round, in turns.
    assert second[1:-1] == (1, 1980, 3201, 250.5, 41, CAP, 3072, 97, 1234, None, None)
    assert [sample.pcie_tx_kb_s for sample in done.samples[:4]] == [10, None, None, 10]
    assert 100 <= first.time_s < 110
    assert [s.time_s for s in done.samples] == sorted(s.time_s for s in done.samples)
    assert fake.threads == {"telemetry"}


def test_all_that_is_measured_meanwhile_is_covered() -> None:
    epoch = time.perf_counter()
    with Telemetry([0, 1], epoch=epoch, pynvml=FakeNvml()) as telemetry:
        start_s = time.perf_counter() - epoch
        assert telemetry.samples
        end_s = time.perf_counter() - epoch
    assert not telemetry._thread.is_alive()
    for gpu in (0, 1):
        assert mean_power_w(telemetry.samples, gpu, start_s, end_s) == pytest.approx(250.5)


def test_what_a_device_does_not_support_is_none() -> None:
    unsupported = FakeNvml.NVMLError_NotSupported()
    calls = ("TotalEnergyConsumption", "PowerUsage", "PowerManagementLimit")
    fake = FakeNvml(**{f"nvmlDeviceGet{name}": unsupported for name in calls})
    done = sample_until(Telemetry([0], hz=20, pynvml=fake), 2)
    assert done.power_limits_w == {0: None}
    assert (done.samples[1].energy_mj, done.samples[1].power_w, done.samples[1].sm_clock_mhz) == (None, None, 1980)
    assert done.reason is None


def test_missed_deadlines_and_the_samplers_own_time_are_noted() -> None:
    done = sample_until(Telemetry([0], hz=20, pynvml=FakeNvml(lambda: time.sleep(0.12))), 3)
    assert min(sample.sampling_s for sample in done.samples) >= 0.12
    # 120 ms a sample at 50 ms a period: of each three periods two are missed.
    assert done.missed >= 2 * (len(done.samples) - 1)


def test_a_failing_driver_ends_the_sampling_and_nothing_else() -> None:
    fake = FakeNvml()
    telemetry = Telemetry([0], hz=20, pynvml=fake)
    with telemetry:
        fake.broken["nvmlDeviceGetTemperature"] = FakeNvml.NVMLError("GPU is lost")
        telemetry._thread.join(10)
    assert telemetry.reason is not None
    assert telemetry.reason.endswith("samples: NVMLError: GPU is lost")
    assert telemetry.samples


def test_without_a_driver_it_is_inert_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def no_driver() -> Iterator[Any]:
        raise PlacementError("NVML cannot be used: driver not loaded")
        yield

    monkeypatch.setattr(module, "nvml_session", no_driver)
    with Telemetry([0]) as telemetry:
        pass
    assert telemetry.reason == "NVML cannot be used: driver not loaded"
    save_telemetry(tmp_path, telemetry.build_record())
    record = load_telemetry(tmp_path)
    assert record is not None
    assert (record.samples, record.reason) == ((), telemetry.reason)
    with Telemetry([]) as nothing:
        assert nothing.reason == "no GPU was named"


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    answer = threading.Event()
    with Telemetry([0], pynvml=FakeNvml(answer.wait)) as telemetry:
        assert telemetry.samples == []
    assert telemetry.reason == "the driver gave no answer for 0.05 s when the run ended"
    answer.set()
    telemetry._thread.join(10)
    assert not telemetry._thread.is_alive()


@pytest.mark.parametrize("hz", [0, 3.9, 21, float("nan")])
def test_rates_it_cannot_keep_are_refused(hz: float) -> None:
    with pytest.raises(SpecError, match="use 4 to 20 Hz"):
        Telemetry([0], hz=hz)


def test_the_file_holds_what_was_sampled(tmp_path: Path) -> None:
    assert load_telemetry(tmp_path) is None
    done = sample_until(Telemetry([0, 1], hz=20, pynvml=FakeNvml()), 4)
    save_telemetry(tmp_path, done.build_record())
    record = load_telemetry(tmp_path)
    assert record == done.build_record()
    assert record.uuids == {0: "GPU-0", 1: "GPU-1"}
    assert record.samples[0] == done.samples[0]
    text = (tmp_path / "telemetry.json").read_text()
    assert list(json.loads(text)["columns"].items())[2] == ("sm_clock_mhz", "MHz")
    for broken, why in (
        (text[:100], "is no telemetry"),
        (text.replace('"sm_clock_mhz":"MHz"', '"sm_clock_mhz":"GHz"'), "has columns"),
    ):
        (tmp_path / "telemetry.json").write_text(broken)
        with pytest.raises(RecordError, match=why):
            load_telemetry(tmp_path)


def test_energy_by_hand() -> None:
    samples = samples_of(100, 200, 200, 400)
    # 0.2 s each at means of 150, 200 and 300 W.
    assert energy_j(samples, 0, 0.0, 0.6) == pytest.approx(0.2 * (150 + 200 + 300))
    assert mean_power_w(samples, 0, 0.0, 0.6) == pytest.approx(650 / 3)
    # From 150 W in the middle of the first step to 300 W in the middle of the last.
    assert energy_j(samples, 0, 0.1, 0.5) == pytest.approx(0.1 * 175 + 0.2 * 200 + 0.1 * 250)
    # Inside one step.
    assert energy_j(samples, 0, 0.45, 0.55) == pytest.approx(0.1 * 300)
    assert counter_energy_j(samples, 0, 0.1, 0.5) == pytest.approx(40.0)


def test_windows_that_samples_leave_open_are_unknown() -> None:
    samples = samples_of(100, 100, 100, 100, 100)
    for start_s, end_s in ((-0.1, 0.4), (0.4, 0.9), (0.4, 0.4), (0.4, 0.2)):
        for ask in (energy_j, mean_power_w, counter_energy_j, throttled_share, clock_range):
            assert ask(samples, 0, start_s, end_s) is None
    assert energy_j(samples, 1, 0.0, 0.4) is None
    assert energy_j([], 0, 0.0, 0.4) is None
    assert energy_j(samples_of(100, None, 100), 0, 0.0, 0.4) is None
    # Two samples apart by more than three periods of the slowest rate are a gap, whatever their median.
    assert energy_j(samples_of(100, 100, step_s=0.8), 0, 0.0, 0.8) is None


def test_a_gap_spoils_the_windows_that_touch_it_alone() -> None:
    whole = samples_of(*[100.0] * 20)
    samples = whole[:6] + whole[9:]  # 0.8 s from 1.0 to 1.8: four periods
    assert energy_j(samples, 0, 0.0, 1.0) == pytest.approx(100.0)
    assert energy_j(samples, 0, 0.0, 1.1) is None
    assert energy_j(samples, 0, 1.7, 3.0) is None
    assert energy_j(samples, 0, 1.8, 3.8) == pytest.approx(200.0)
    assert energy_j(whole[:6] + whole[7:], 0, 0.0, 3.8) == pytest.approx(380.0)


def test_a_counter_that_was_reset_is_unknown() -> None:
    samples = samples_of(1, 1, 1)
    samples[2] = samples[2]._replace(energy_mj=5)
    assert counter_energy_j(samples, 0, 0.0, 0.4) is None
    assert counter_energy_j(samples, 0, 0.0, 0.2) == pytest.approx(20.0)


def test_throttling_counts_the_reasons_that_slow() -> None:
    reasons = (IDLE, CAP, THERMAL | IDLE, 0x2, 0x10, 0)
    samples = [s._replace(clock_event_reasons=r) for s, r in zip(samples_of(*[1.0] * 6), reasons, strict=True)]
    # A reason holds until the next sample: slowed from 0.2 to 0.6 s.
    assert throttled_share(samples, 0, 0.0, 1.0) == pytest.approx(0.4)
    assert throttled_share(samples, 0, 0.1, 0.3) == pytest.approx(0.5)
    assert throttled_share(samples, 0, 0.6, 1.0) == pytest.approx(0, abs=1e-9)
    for bit in (0x4, 0x8, 0x20, 0x40, 0x80):
        assert throttled_share(samples_of(1, 1, reasons=bit), 0, 0.0, 0.2) == pytest.approx(1)


def test_gpus_are_told_apart() -> None:
    pairs = zip(samples_of(100, 100, 100), samples_of(300, 300, 300, gpu=1, reasons=CAP), strict=True)
    samples = [sample for pair in pairs for sample in pair]
    assert [energy_j(samples, gpu, 0.0, 0.4) for gpu in (0, 1)] == pytest.approx([40, 120])
    assert [throttled_share(samples, gpu, 0.0, 0.4) for gpu in (0, 1)] == pytest.approx([0, 1])


def test_clocks_are_those_inside_the_window() -> None:
    assert clock_range(samples_of(*[1.0] * 6), 0, 0.1, 0.9) == (1940, 1970)
    assert clock_range(samples_of(*[1.0] * 6), 0, 0.25, 0.35) is None


@given(st.lists(st.floats(0, 1000), min_size=3, max_size=30), st.floats(0.05, 0.95))
def test_energy_of_a_window_is_that_of_its_parts(powers: list[float], share: float) -> None:
    samples, end_s = samples_of(*powers), 0.2 * (len(powers) - 1)
    parts = [energy_j(samples, 0, 0.0, share * end_s), energy_j(samples, 0, share * end_s, end_s)]
    assert sum(part for part in parts if part is not None) == pytest.approx(energy_j(samples, 0, 0.0, end_s), abs=1e-6)


def test_a_power_capped_phase_on_an_h200() -> None:
    """What nvidia-smi noted at 4 Hz around a phase that was power-capped from 14:58:42.047 to 14:59:13.832."""
    with CAPPED.open(newline="") as file:
        rows = list(csv.reader(file, skipinitialspace=True))[1:]
    day = datetime(2026, 11, 29, 14, 58)
    samples = [
        EMPTY._replace(
            time_s=(datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f") - day).total_seconds(),
            gpu=0,
            sm_clock_mhz=int(clock.removesuffix(" MHz")),
            power_w=float(power.removesuffix(" W")),
            clock_event_reasons=int(reasons, 16),
        )
        for at, clock, power, reasons in rows
    ]
    assert sum(sample.clock_event_reasons == CAP for sample in samples) == 124
    # Uncapped in between: 0.250 s from 59:01.068, 0.251 s from 59:08.826, 0.250 s from 59:09.327.
    share = throttled_share(samples, 0, 42.047, 73.832)
    assert share == pytest.approx((31.785 - 0.751) / 31.785)
    assert share > MAX_THROTTLED_SHARE
    assert throttled_share(samples, 0, 41.046, 42.047) == 0
    # Summed apart, with awk, over the same rows.
    assert energy_j(samples, 0, 42.047, 73.832) == pytest.approx(21570.320, abs=1e-3)
    # (530.42 + 527.27) / 2 * 0.251 + (527.27 + 510.95) / 2 * 0.250
    assert energy_j(samples, 0, 41.046, 41.547) == pytest.approx(262.517595)
    assert clock_range(samples, 0, 42.0, 74.0) == (1665, 1980)
    assert counter_energy_j(samples, 0, 42.047, 73.832) is None


def test_power_lags_a_second_behind_the_counter_on_an_h200() -> None:
    """Sampled at 20 Hz: an idle GPU is given matrix products, 3.99 s into the file's clock, and is power-capped."""
    with LOAD.open(newline="") as file:
        samples = [
            EMPTY._replace(
                time_s=float(row["time_s"]), gpu=0, power_w=float(row["power_w"]), energy_mj=int(row["energy_mj"])
            )
            for row in csv.DictReader(file)
        ]
    steady, counted = energy_j(samples, 0, 7.0, 10.0), counter_energy_j(samples, 0, 7.0, 10.0)
    assert steady == pytest.approx(counted, rel=0.003)
    start, counted = energy_j(samples, 0, 4.0, 5.0), counter_energy_j(samples, 0, 4.0, 5.0)
    assert start is not None
    assert counted is not None
    assert 0.45 < start / counted < 0.6
