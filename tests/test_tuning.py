"""Host tuning read from saved trees, and the PCIe Device Control register, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchlib.errors import SpecError
from benchlib.tuning import (
    DeviceControl,
    Setting,
    compare_devctl,
    format_devctl,
    format_tuning,
    plan_read_request,
    read_tuning,
    tuning_facts,
)

REGISTERS = st.integers(0, 0xFFFF)
GPU = "0000:c1:00.0"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def write_device(root: Path, config: bytes, *, name: str = GPU, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = root / "sys/bus/pci/devices" / name
    write(folder, "vendor", vendor)
    write(folder, "class", kind)
    (folder / "config").write_bytes(config)


def config_space(devctl: int, *, size: int = 4096) -> bytes:
    """Power management at 0x60, then MSI at 0x68, then PCI Express at 0x78; the register lies 8 bytes into the last."""
    space = bytearray(size)
    space[0x06], space[0x34] = 0x10, 0x60
    space[0x60:0x62], space[0x68:0x6A] = bytes([0x01, 0x68]), bytes([0x05, 0x78])
    space[0x78:0x7A], space[0x80:0x82] = bytes([0x10, 0x00]), devctl.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """An untuned host of four CPUs and one GPU."""
    write(tmp_path, "proc/sys/kernel/numa_balancing", "1")
    write(tmp_path, "proc/sys/kernel/nmi_watchdog", "1")
    for n in range(4):
        write(tmp_path, f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor", "powersave")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never")
    write_device(tmp_path, config_space(0x2937))
    return tmp_path


def read(root: Path) -> dict[str, Setting]:
    return {setting.name: setting for setting in read_tuning(root)}


def test_an_untuned_host(host: Path) -> None:
    found = read(host)
    governors = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    pages = "/sys/kernel/mm/transparent_hugepage/enabled"
    assert {name: (s.value, s.wanted, s.change, s.restore) for name, s in found.items()} == {
        "kernel.numa_balancing": (
            "1", "0", "sysctl -w kernel.numa_balancing=0", "sysctl -w kernel.numa_balancing=1",
        ),
        "kernel.nmi_watchdog": ("1", "0", "sysctl -w kernel.nmi_watchdog=0", "sysctl -w kernel.nmi_watchdog=1"),
        "cpu_governor": (
            "powersave", "performance",
            f"for file in {governors}; do echo performance > $file; done",
            f"for file in {governors}; do echo powersave > $file; done",
        ),
        "transparent_hugepage": ("always", "madvise", f"echo madvise > {pages}", f"echo always > {pages}"),
        f"pcie_max_read_request {GPU}": (
            "512", "4096", f"setpci -s {GPU} CAP_EXP+8.w=5000:7000", f"setpci -s {GPU} CAP_EXP+8.w=2000:7000",
        ),
    }  # fmt: skip
    assert tuning_facts(tuple(found.values())) == {
        "kernel.numa_balancing": "1",
        "kernel.nmi_watchdog": "1",
        "cpu_governor": "powersave",
        "transparent_hugepage": "always",
        f"pcie_max_read_request {GPU}": "512",
    }


def test_what_is_as_wanted_has_no_lines(host: Path) -> None:
    for path in host.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"):
        path.write_text("performance\n")
    for name in ("numa_balancing", "nmi_watchdog"):
        write(host, f"proc/sys/kernel/{name}", "0")
    write(host, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write_device(host, config_space(0x5937))
    settings = read_tuning(host)
    assert len(settings) == 5
    assert all(s.value == s.wanted and s.change is None and s.restore is None for s in settings)
    text = format_tuning(settings)
    assert text.count("ok ") == 5
    assert "change:" not in text


def test_an_empty_host_is_unknown_and_never_as_wanted(tmp_path: Path) -> None:
    settings = read_tuning(tmp_path)
    assert set(tuning_facts(settings).values()) == {None}
    assert len(settings) == 4
    assert all(s.change is None and s.restore is None and "not readable here" in s.why for s in settings)
    assert format_tuning(settings).count("= unknown (wanted ") == 4


def test_mixed_governors_are_shown_and_each_is_restored(host: Path) -> None:
    write(host, "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "performance")
    write(host, "sys/devices/system/cpu/cpu10/cpufreq/scaling_governor", "schedutil")
    governor = read(host)["cpu_governor"]
    path = "/sys/devices/system/cpu/cpu$n/cpufreq/scaling_governor"
    assert governor.value == "performance on 1 CPUs, powersave on 3 CPUs, schedutil on 1 CPUs"
    assert governor.change is not None
    assert "echo performance" in governor.change
    assert governor.restore == (
        f"for n in 0 1 3; do echo powersave > {path}; done; for n in 10; do echo schedutil > {path}; done"
    )


def test_an_unprivileged_reader_is_told_what_to_run_as_root(host: Path) -> None:
    write_device(host, config_space(0x2937)[:64])
    setting = read(host)[f"pcie_max_read_request {GPU}"]
    assert (setting.value, setting.change, setting.restore) == (None, None, None)
    assert setting.why.endswith(f"reading it needs root on the host: setpci -s {GPU} CAP_EXP+8.w")


def test_the_configuration_space_of_an_h200(host: Path) -> None:
    # Its first 112 bytes: power management at 0x40, MSI at 0x48, PCI Express at 0x60 with register 0x5134.
    rows = """
        de 10 35 23 46 05 10 00 a1 00 02 03 00 00 00 00  0c 00 00 02 40 10 00 00 0c 00 00 00 00 10 00 00
        0c 00 00 00 40 10 00 00 00 00 00 00 de 10 bf 18  00 00 00 00 40 00 00 00 00 00 00 00 ff 01 00 00
        01 48 13 00 08 00 00 00 05 60 88 03 00 00 00 00  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
        10 b0 02 00 21 80 2c 11 34 51 00 00 05 79 45 00"""
    write_device(host, bytes.fromhex(rows))
    assert read(host)[f"pcie_max_read_request {GPU}"].value == "4096"


@pytest.mark.parametrize(
    "config",
    [
        b"\xff" * 4096,  # fell off the bus: a list without end
        bytes(256),  # no list
        config_space(0x2937, size=256)[:0x7F],  # ends before the register
        bytes([0, 0, 0, 0, 0, 0, 0x10]).ljust(0x34, b"\0") + bytes([0x40]) + bytes(0x0B) + b"\x05\0" + bytes(190),
    ],
)
def test_a_device_without_the_capability_is_unknown(host: Path, config: bytes) -> None:
    write_device(host, config)
    setting = read(host)[f"pcie_max_read_request {GPU}"]
    assert setting.value is None
    assert setting.why.endswith("the device shows no PCI Express capability")


def test_only_nvidia_gpus_are_read_in_the_order_of_their_addresses(host: Path) -> None:
    write_device(host, config_space(0x5937), name="0000:01:00.0", kind="0x030000")
    write_device(host, config_space(0x2937), name="0000:01:00.1", kind="0x040300")  # its sound function
    write_device(host, config_space(0x2937), name="0000:02:00.0", vendor="0x8086")
    assert list(read(host))[4:] == ["pcie_max_read_request 0000:01:00.0", f"pcie_max_read_request {GPU}"]


def test_the_register_of_the_story() -> None:
    control = DeviceControl.decode(0x2937)
    assert (control.max_read_request_size, control.max_payload_size) == (512, 256)
    assert control.no_snoop
    assert control.extended_tags
    assert control.relaxed_ordering
    assert control.correctable_error_reporting
    assert not control.unsupported_request_reporting
    assert plan_read_request(0x2937, 4096) == (0x5937, "setpci -s <device> CAP_EXP+8.w=5000:7000")
    assert compare_devctl(0x2937, 0x5036) == (
        "correctable error reporting (bit 0): on -> off",
        "extended tags (bit 8): on -> off",
        "no snoop (bit 11): on -> off",
    )
    assert compare_devctl(0x2937, 0x5937) == ()


def test_the_register_for_a_terminal() -> None:
    text = format_devctl(0x2937, size=4096, against=0x5036)
    for line in (
        "Device Control 0x2937",
        "  max payload size (bits 7:5): 256 bytes",
        "  max read request size (bits 14:12): 512 bytes",
        "max read request 4096 bytes: 0x2937 -> 0x5937",
        "  setpci -s <device> CAP_EXP+8.w=5000:7000",
        "Writing 0x5036 whole gives max read request 4096 bytes and would also change:",
        "  no snoop (bit 11): on -> off",
    ):
        assert line in text.splitlines()
    assert format_devctl(0x2937, against=0x5937).endswith("would also change:\n  nothing")
    assert "reserved" not in text
    assert "->" not in format_devctl(0x2937)


@pytest.mark.parametrize(("value", "size"), [(0x6000, 8192), (0x7000, 16384)])
def test_reserved_encodings_are_warned_about(value: int, size: int) -> None:
    warning = f"{size} bytes (warning: a reserved encoding)"
    assert f"max read request size (bits 14:12): {warning}" in format_devctl(value)
    assert f"max payload size (bits 7:5): {warning}" in format_devctl(value >> 7)
    assert f"gives max read request {warning}" in format_devctl(0x2937, against=value)


@pytest.mark.parametrize("size", [0, 64, 127, 3000, 8192, -4096])
def test_sizes_that_cannot_be_set_are_refused(size: int) -> None:
    with pytest.raises(SpecError, match="use one of 128, 256, 512, 1024, 2048, 4096"):
        plan_read_request(0x2937, size)


@pytest.mark.parametrize("value", [-1, 0x10000])
def test_registers_are_of_16_bits(value: int) -> None:
    for ask in (DeviceControl.decode, format_devctl):
        with pytest.raises(SpecError, match="give 0x0 to 0xffff"):
            ask(value)
    with pytest.raises(SpecError, match="give 0x0 to 0xffff"):
        plan_read_request(value, 512)


def test_every_register_survives_decoding() -> None:
    assert [value for value in range(0x10000) if DeviceControl.decode(value).encode() != value] == []


@given(REGISTERS, st.integers(0, 5))
def test_a_read_request_alters_no_other_bit(value: int, code: int) -> None:
    new, line = plan_read_request(value, 128 << code)
    assert (new ^ value) & ~0x7000 == 0
    assert new >> 12 & 7 == code
    assert compare_devctl(value, new) == ()
    # What setpci does with `value:mask`.
    bits, mask = (int(part, 16) for part in line.rpartition("=")[2].split(":"))
    assert value & ~mask | bits == new
    assert DeviceControl.decode(new).max_read_request_size == 128 << code


@given(REGISTERS, st.sampled_from([0, 1, 2, 3, 4, 8, 9, 10, 11, 15]))
def test_a_flipped_flag_is_named_alone(value: int, bit: int) -> None:
    (named,) = compare_devctl(value, value ^ 1 << bit)
    assert f"(bit {bit})" in named
