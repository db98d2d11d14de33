"""Host tuning, read and explained: what is set, what a benchmark wants, the lines that change it and change it back.

Nothing here changes anything: a setting belongs to whoever owns the host, and inside a container most lines must be
run outside of it. A register is only ever changed through a mask, since its other bits belong to somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from benchlib.errors import SpecError

__all__ = [
    "DeviceControl", "Setting", "compare_devctl", "format_devctl", "format_tuning", "parse_register",
    "plan_read_request", "read_tuning", "tuning_facts",
]  # fmt: skip

SIZES = tuple(128 << code for code in range(6))  # 6 and 7 are reserved
READ_REQUEST_BIT, READ_REQUEST_MASK = 12, 0x7000
WANTED_READ_REQUEST = 4096
NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"
# In PCI configuration space: status (bit 4: there is a list), first capability, the PCI Express capability's id.
STATUS, HAS_LIST, FIRST_CAPABILITY, EXPRESS = 0x06, 0x10, 0x34, 0x10
UNPRIVILEGED_BYTES = 64
MAX_CAPABILITIES = 48  # a device that fell off the bus reads as all ones, a list without end
GOVERNORS = "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the host. `value` None: unreadable, and `why` ends with the reason.

    `change` and `restore`, to the value seen now, are shell lines for root; None where there is nothing to change.
    """

    name: str
    value: str | None
    wanted: str
    why: str
    change: str | None
    restore: str | None


def read_tuning(root: Path = Path("/")) -> tuple[Setting, ...]:
    """Every setting of the host whose file system is at `root`; takes milliseconds and needs no privilege."""
    why = "moving pages between nodes stalls a server whose memory is placed already"
    numa = _sysctl(root, "kernel.numa_balancing", why)
    watchdog = _sysctl(root, "kernel.nmi_watchdog", "its interrupts add jitter and hold a performance counter")
    mode = re.search(r"\[(\w+)\]", _read(root / HUGE_PAGES) or "")
    why = "under `always` the kernel compacts memory behind allocations that never asked for huge pages"
    pages = _setting("transparent_hugepage", mode and mode[1], "madvise", why, f"echo {{}} > /{HUGE_PAGES}")
    gpus = [d for d in sorted(root.glob("sys/bus/pci/devices/*")) if _read(d / "vendor") == NVIDIA]
    gpus = [gpu for gpu in gpus if (_read(gpu / "class") or "").startswith(DISPLAY_CLASS)]
    return (numa, watchdog, _read_governor(root), pages, *map(_read_request, gpus))


def tuning_facts(settings: Sequence[Setting]) -> dict[str, str | None]:
    """Name -> value seen, for the environment record; None where it could not be read."""
    return {setting.name: setting.value for setting in settings}


def format_tuning(settings: Sequence[Setting]) -> str:
    """The settings for a terminal: each with its reason, and where it differs the lines that change and restore it."""
    lines = []
    for each in settings:
        mark = "ok" if each.value == each.wanted else "??" if each.value is None else "->"
        seen = "unknown" if each.value is None else each.value
        lines += [f"{mark} {each.name} = {seen} (wanted {each.wanted}): {each.why}"]
        lines += [f"     change:  {each.change}", f"     restore: {each.restore}"] if each.change else []
    return "\n".join([*lines, "Nothing was changed. The lines are for root, on the host where this is a container."])


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return None


def _setting(name: str, value: str | None, wanted: str, why: str, line: str) -> Setting:
    if value is None:
        return Setting(name, None, wanted, f"{why}; not readable here (absent, or hidden by a container)", None, None)
    change, restore = (None, None) if value == wanted else (line.format(wanted), line.format(value))
    return Setting(name, value, wanted, why, change, restore)


def _sysctl(root: Path, name: str, why: str) -> Setting:
    return _setting(name, _read(root / "proc/sys" / name.replace(".", "/")), "0", why, f"sysctl -w {name}={{}}")


def _read_governor(root: Path) -> Setting:
    """One setting for all CPUs; where they differ, the value counts them and the restoring line lists them."""
    name, wanted, why = "cpu_governor", "performance", "a core that clocks up late delays each launch of a kernel"
    seen: dict[str, list[int]] = {}
    for path in root.glob(GOVERNORS):
        if governor := _read(path):
            seen.setdefault(governor, []).append(int(path.parts[-3].removeprefix("cpu")))
    line = f"for file in /{GOVERNORS}; do echo {{}} > $file; done"
    if len(seen) < 2:
        return _setting(name, next(iter(seen), None), wanted, why, line)
    restore = "; ".join(
        f"for n in {' '.join(map(str, sorted(cpus)))}; do echo {governor} > /{GOVERNORS.replace('*', '$n')}; done"
        for governor, cpus in sorted(seen.items())
        if governor != wanted
    )
    value = ", ".join(f"{governor} on {len(cpus)} CPUs" for governor, cpus in sorted(seen.items()))
    return Setting(name, value, wanted, why, line.format(wanted), restore)


def _read_request(device: Path) -> Setting:
    name, wanted = f"pcie_max_read_request {device.name}", str(WANTED_READ_REQUEST)
    why = "larger reads mean fewer requests where GPUs exchange data over PCIe"
    config = b""
    with suppress(OSError):
        config = (device / "config").read_bytes()
    if (value := _find_devctl(config)) is None:
        hidden = f"reading it needs root on the host: setpci -s {device.name} CAP_EXP+8.w"
        cause = hidden if len(config) <= UNPRIVILEGED_BYTES else "the device shows no PCI Express capability"
        return Setting(name, None, wanted, f"{why}; {cause}", None, None)
    seen = str(DeviceControl.decode(value).max_read_request_size)
    _, change = plan_read_request(value, WANTED_READ_REQUEST, device=device.name)
    lines = (None, None) if seen == wanted else (change, _masked_line(value, device.name))
    return Setting(name, seen, wanted, why, *lines)


def _find_devctl(config: bytes) -> int | None:
    """The Device Control register in a PCI configuration space; None where the bytes end before it or lack it."""
    if len(config) <= UNPRIVILEGED_BYTES or not config[STATUS] & HAS_LIST:
        return None
    offset = config[FIRST_CAPABILITY] & 0xFC
    for _ in range(MAX_CAPABILITIES):
        if not offset or offset + 10 > len(config):
            break
        if config[offset] == EXPRESS:
            return int.from_bytes(config[offset + 8 : offset + 10], "little")
        offset = config[offset + 1] & 0xFC
    return None


@dataclass(frozen=True, slots=True)
class DeviceControl:
    """PCI Express Device Control, decoded. The two sizes are in bytes; 8192 and 16384 are reserved encodings."""

    correctable_error_reporting: bool
    non_fatal_error_reporting: bool
    fatal_error_reporting: bool
    unsupported_request_reporting: bool
    relaxed_ordering: bool
    max_payload_size: int
    extended_tags: bool
    phantom_functions: bool
    aux_power_pm: bool
    no_snoop: bool
    max_read_request_size: int
    bridge_retry_or_flr: bool

    @classmethod
    def decode(cls, value: int) -> Self:
        """From the 16-bit register. SpecError outside 0..0xffff."""
        if not 0 <= value <= 0xFFFF:
            raise SpecError(f"{value:#x} is no Device Control register: give 0x0 to 0xffff, as setpci prints it")
        seen: list[Any] = [bool(value >> bit & 1) if n == 1 else 128 << (value >> bit & 7) for _, bit, n in LAYOUT]
        return cls(*seen)

    def encode(self) -> int:
        """The 16-bit register."""
        seen = ((getattr(self, name), bit) for name, bit, _ in LAYOUT)
        return sum((int(v) if isinstance(v, bool) else v.bit_length() - 8) << bit for v, bit in seen)


# (name, lowest bit, bits) of each field; the specification leaves no gap between them.
WIDTHS = {field.name: 3 if field.name.endswith("_size") else 1 for field in fields(DeviceControl)}
LAYOUT = tuple(zip(WIDTHS, accumulate(WIDTHS.values(), initial=0), WIDTHS.values(), strict=False))


def parse_register(text: str) -> int:
    """`0x2937` or, as setpci prints it, `2937` -> 10551; SpecError for what is no hexadecimal number of 16 bits."""
    if not re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,4}", text):
        raise SpecError(f"{text!r} is no register value of 16 bits: give hexadecimal digits such as 0x2937")
    return int(text, 16)


def plan_read_request(value: int, size: int, *, device: str = "<device>") -> tuple[int, str]:
    """The register with MaxReadReq set to `size` bytes and no other bit touched, and the setpci line that does it.

    SpecError for a size other than 128 to 4096 in powers of two, or a value outside 16 bits.
    """
    DeviceControl.decode(value)
    if size not in SIZES:
        raise SpecError(f"a max read request of {size} bytes cannot be set: use one of {', '.join(map(str, SIZES))}")
    new = value & ~READ_REQUEST_MASK | SIZES.index(size) << READ_REQUEST_BIT
    return new, _masked_line(new, device)


def _masked_line(value: int, device: str) -> str:
    return f"setpci -s {device} CAP_EXP+8.w={value & READ_REQUEST_MASK:04x}:{READ_REQUEST_MASK:04x}"


def compare_devctl(current: int, proposed: int) -> tuple[str, ...]:
    """Every field other than MaxReadReq that writing `proposed` over `current` would change, with both values."""
    before, after = _shown_fields(current), _shown_fields(proposed)
    others = [name for name in before if before[name] != after[name] and "read request" not in name]
    return tuple(f"{name}: {before[name]} -> {after[name]}" for name in others)


def format_devctl(value: int, *, size: int | None = None, against: int | None = None) -> str:
    """The register for a terminal: its fields, the masked change to `size` bytes, what writing `against` would do."""
    lines = [f"Device Control {value:#06x}", *(f"  {name}: {seen}" for name, seen in _shown_fields(value).items())]
    if size is not None:
        new, line = plan_read_request(value, size)
        lines += [f"max read request {size} bytes: {value:#06x} -> {new:#06x}", f"  {line}"]
    if against is not None:
        others = compare_devctl(value, against) or ("nothing",)
        read = _shown(DeviceControl.decode(against).max_read_request_size)
        lines += [f"Writing {against:#06x} whole gives max read request {read} and would also change:"]
        lines += [f"  {other}" for other in others]
    return "\n".join(lines)


def _shown_fields(value: int) -> dict[str, str]:
    control = DeviceControl.decode(value)
    places = {name: f"bit {bit}" if width == 1 else f"bits {bit + width - 1}:{bit}" for name, bit, width in LAYOUT}
    return {f"{name.replace('_', ' ')} ({at})": _shown(getattr(control, name)) for name, at in places.items()}


def _shown(value: bool | int) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value} bytes" if value in SIZES else f"{value} bytes (warning: a reserved encoding)"
