"""Named NCCL environments as data, and what NCCL really did, read from a server's log.

NCCL passes over what it does not understand, and an engine may pass over NCCL: while SGLang's custom all-reduce
carries decode's all-reduces, no NCCL variable changes what is measured. So a profile is checked before it is used,
and a log is asked which variables NCCL read and whether decode went through NCCL at all.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import re
import shlex
import textwrap
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchlib.errors import SpecError

__all__ = [
    "NcclLog", "Profile", "Variable", "format_nccl_log", "format_profile", "known_variables", "load_nccl_log",
    "load_profiles", "parse_nccl_log", "profile_env", "variables_differ",
]  # fmt: skip

LEGACY_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")  # what numbers mean in *_LEVEL; higher ones are SYS too
INTEGER = re.compile(r"-?(0x[0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,18})")
MAX_WARNINGS, MAX_CHARS = 20, 200
GZIP = b"\x1f\x8b"
# What a text holds next to none of. Zeros are none of it: a log that was cut while it was written to begins with some.
UNREADABLE = re.compile("[\x01-\x07\x0e-\x1a\x1c-\x1f\ufffd]")
MAX_UNREADABLE = 0.05  # of a file's characters

# A log is mostly lines without any of these: they are not looked at further.
SIGN_WORDS = ("server_args=", "educe", "graph addresses", "MSCCL++", "PCIe-IPC", "TorchSymmMem")
WORDS = ("NCCL ", "nccl==", *SIGN_WORDS)
# Where one rank's message begins; those of several ranks may share a line.
HEAD = re.compile(r"(?<![\w.-])([\w.-]{1,64}:\d+):\d+ \[-?\d+\] (?:[\w./]+:\d+ (?:\(\w+\) )?)?NCCL (INFO|WARN) ")
VERSION = re.compile(r"(?:NCCL version |using nccl==)(\d+\.\d+[\w.]*)")
COMMUNICATOR = re.compile(r"nranks (\d{1,6}) .*?(commId \w+|childCount \S+ color \S+|- ?Init )")
CHANNELS = re.compile(r"(\d{1,4}) coll channels, .*?(\d{1,4}) p2p channels,")
PATH = re.compile(r"Channel \S+ : (\d{1,6})\[\w+\] -> (\d{1,6})\[\w+\] (?:\[\w+\] )?via (\S+)")
ECHO = re.compile(r"(NCCL_\w+) set (?:by environment )?to (-?\d+(?=\.$)|.*\S)")
CHANGED = ("Invalid ", "User asked for ")  # not warnings to NCCL, but a value was not taken as given

# SGLang 0.5.17 (`tp_size=1`) to 0.5.23 (`'tp_size': 1`): what it was asked for, on one line, and what came of that.
ARGUMENTS = re.compile(
    r"\b(?:(?P<one>tp_size\W{1,3}1)|(?P<off>disable_custom_all_reduce\W{1,3}True)"
    r"|(?P<symm>enable_torch_symm_mem\W{1,3}True))\b"
)
SIGNS = re.compile(
    r"(?P<fused>FlashInfer AllReduce Fusion enabled and workspace initialized)"
    r"|(?P<unfused>Disabling flashinfer allreduce fusion permanently)"
    r"|(?P<mscclpp>Created MSCCL\+\+ communicator: .*allreduce_configs=[1-9])"
    r"|(?P<custom>All Reduce config: symmetric_memory = (?!.*pull = False)|Registering [1-9]\d* cuda graph addresses)"
    r"|(?P<failed>Setup Custom allreduce failed)"
    r"|(?P<refused>Custom ?[Aa]ll[rR]educe(?:V2)? is disabled (?:because|due to))"
    r"|(?P<pcie>FlashInfer PCIe-IPC workspace built)"
    r"|(?P<unsymm>TorchSymmMemCommunicator: )"
)
# A sign, what undoes it, and what it means, in the order in which SGLang's all_reduce tries its ways.
VERDICTS = (
    ("one", "", None), ("fused", "unfused", "other: flashinfer fusion"), ("mscclpp", "", "other: mscclpp"),
    ("custom", "failed", "custom"), ("pcie", "", "other: flashinfer pcie-ipc"),
    ("symm", "unsymm", "other: torch symmetric memory"), *((sign, "", "nccl") for sign in ("failed", "refused", "off")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variable:
    """An NCCL variable: what it may hold, why it would be set, and what that risks."""

    name: str
    reason: str
    risk: str = "none known"
    values: Sequence[str] = ()
    range: Sequence[int] = ()
    pattern: str = ""
    form: str = ""
    silent: str = ""

    def allows(self, value: str) -> bool:
        """Whether NCCL takes `value` as given."""
        if self.range:
            return bool(INTEGER.fullmatch(value)) and self.range[0] <= int(value, 0) <= self.range[1]
        return value in self.values or bool(self.pattern and re.fullmatch(self.pattern, value))


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of NCCL variables; every other variable is left to NCCL and the engine."""

    name: str
    variables: dict[str, str]
    description: str = ""


@dataclass(frozen=True, slots=True)
class NcclLog:
    """What a log says of NCCL, None where it says nothing; `dataclasses.asdict` makes JSON of it.

    Of several communicators the first of the most ranks is told: the tensor-parallel one. `variables` are as NCCL
    echoed them, `transports` by pair of ranks, `{"0->1": "P2P/IPC"}`; several values are joined by ` | `.
    `decode_all_reduce` is "custom", "nccl", "other: NAME", or None: one rank, or the log does not say.
    """

    version: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    nranks: int | None = None
    coll_channels: int | None = None
    p2p_channels: int | None = None
    transports: dict[str, str] = field(default_factory=dict)
    rings_connected: bool | None = None
    trees_connected: bool | None = None
    warnings: tuple[str, ...] = ()
    decode_all_reduce: str | None = None
    decode_all_reduce_evidence: str | None = None


@functools.cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(resources.files("benchlib").joinpath("nccl_profiles.toml").read_text(encoding="utf-8"))


@functools.cache
def known_variables() -> dict[str, Variable]:
    """The NCCL variables that a profile may set, by name."""
    return {name: Variable(name, **table) for name, table in _shipped()["variables"].items()}


def load_profiles(path: Path | None = None) -> dict[str, Profile]:
    """The profiles that ship with benchlib, and over them those of a TOML file of `[profiles.NAME]` tables.

    SpecError names every unknown variable, with the nearest known one, and every value that NCCL would not take.
    """
    shipped = _checked(_shipped()["profiles"], "nccl_profiles.toml")
    if path is None:
        return shipped
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read the NCCL profiles {path}: {error}") from error
    tables = data.get("profiles")
    if set(data) != {"profiles"} or not isinstance(tables, dict) or "none" in tables:
        raise SpecError(f'{path} may hold [profiles.NAME] tables alone, NAME not "none"; it holds {data!r:.200}')
    return shipped | _checked(tables, str(path))


def _checked(tables: Mapping[str, Any], where: str) -> dict[str, Profile]:
    profiles, problems = {}, []
    for name, table in tables.items():
        if not re.fullmatch(r"[\w.-]+", name) or not isinstance(table, dict):
            problems.append(f"  {name!r:.60}: a profile is a table named by letters, digits, '.', '_' and '-'")
            continue
        given = {key: value for key, value in table.items() if key != "description"}
        wrong = [f"  {name}: {problem}" for key, value in given.items() if (problem := _problem(key, value))]
        problems += wrong or _contradictions(name, given)
        description = " ".join(str(table.get("description", "")).split())  # one line: it becomes a shell comment
        profiles[name] = Profile(name, {key: str(value) for key, value in given.items()}, description)
    if problems:
        raise SpecError(f"{where} has {len(problems)} problem(s):\n" + "\n".join(problems))
    return profiles


def _contradictions(profile: str, given: Mapping[str, Any]) -> list[str]:
    pairs = [(f"NCCL_MIN_{what}", f"NCCL_MAX_{what}") for what in ("NCHANNELS", "CTAS")]
    return [
        f"  {profile}: {low}={given[low]} is above {high}={given[high]}"
        for low, high in pairs
        if low in given and high in given and int(given[low]) > int(given[high])
    ]


def _problem(name: str, value: object) -> str:
    variable = known_variables().get(name)
    if variable is None:
        nearest = difflib.get_close_matches(name.upper(), known_variables(), n=1, cutoff=0.0)[0]
        return f"{name!r:.60} is no NCCL variable known here; did you mean {nearest}?"
    if type(value) in (str, int) and variable.allows(str(value)):
        return ""
    allowed = variable.form or ", ".join(variable.values) or "{} to {}".format(*variable.range)
    return f"{name}={value!r:.60} is not what NCCL takes; allowed: {allowed}"


def profile_env(name: str, profiles: Mapping[str, Profile] | None = None) -> dict[str, str]:
    """The variables of a profile, of the shipped ones unless others are given; SpecError where there is none such."""
    known = load_profiles() if profiles is None else profiles
    if name not in known:
        raise SpecError(f'there is no NCCL profile "{name}"; there are {", ".join(sorted(known))}')
    return dict(known[name].variables)


def format_profile(profile: Profile) -> str:
    """The profile as shell text: an `export` line for each variable, its reason and risk in comments above it."""
    lines = [f"# {profile.name}: {profile.description}"]
    for name, value in profile.variables.items():
        text = "{0.reason}. Risk: {0.risk}.".format(known_variables()[name])
        lines += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines) + "\n"


def load_nccl_log(path: Path) -> NcclLog:
    """`parse_nccl_log` of a file, also where `gzip` packed it; SpecError where it cannot be read or is no text."""
    try:
        data = path.read_bytes()
        packed = data.startswith(GZIP)
        text = (gzip.decompress(data) if packed else data).decode(errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"cannot read the log {path}: {reason}") from error
    if len(UNREADABLE.findall(text)) > MAX_UNREADABLE * len(text):
        what = "what gzip packed in it" if packed else f"it begins with {data[:8]!r} and"
        raise SpecError(f"cannot read the log {path}: {what} is no text. Give a server's log, as it is or gzip'd")
    return parse_nccl_log(text)


def parse_nccl_log(text: str) -> NcclLog:
    """What NCCL did, from a server's log with NCCL_DEBUG=INFO; empty fields where the log is not such. Never raises."""
    lines = [line for line in text.replace("\0", "").splitlines() if any(word in line for word in WORDS)]
    said = list(_messages(lines))
    chosen = max((communicator for communicator, _, _ in said), key=itemgetter(0), default=(0, ""))
    told = [message for communicator, _, message in said if communicator == chosen]
    nranks = chosen[0] or None
    version = next(filter(None, map(VERSION.search, lines)), None)
    channels = next(filter(None, map(CHANNELS.match, told)), None)
    changed = [message[:MAX_CHARS] for _, level, message in said if level == "WARN" or message.startswith(CHANGED)]
    way, evidence = _decode_all_reduce(lines)
    return NcclLog(
        version=version[1] if version else None,
        variables=_joined((m[1], m[2]) for _, _, message in said if (m := ECHO.match(message))),
        nranks=nranks,
        coll_channels=int(channels[1]) if channels else None,
        p2p_channels=int(channels[2]) if channels else None,
        transports=_joined((f"{int(m[1])}->{int(m[2])}", m[3]) for message in told if (m := PATH.match(message))),
        rings_connected=any(m.startswith("Connected all rings") for m in told) if nranks else None,
        trees_connected=any(m.startswith("Connected all trees") for m in told) if nranks else None,
        warnings=tuple(dict.fromkeys(changed))[:MAX_WARNINGS],
        decode_all_reduce=way,
        decode_all_reduce_evidence=evidence,
    )


def _messages(lines: Sequence[str]) -> Iterator[tuple[tuple[int, str], str, str]]:
    """Each message with its level and its communicator (ranks, name): the one that its process set up last."""
    current: dict[str, tuple[int, str]] = {}
    for line in lines:
        parts = HEAD.split(line) if "NCCL " in line else []
        for process, level, message in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            if "Init " in message and (m := COMMUNICATOR.search(message)):
                current[process] = (int(m[1]), m[2])
            yield current.get(process, (0, "")), level, message.strip()


def _joined(pairs: Iterator[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for key, value in pairs:
        found.setdefault(key, {})[value] = None
    return {key: " | ".join(values) for key, values in sorted(found.items())}


def _decode_all_reduce(lines: Sequence[str]) -> tuple[str | None, str | None]:
    signs: dict[str | None, str] = {}
    for line in (line for line in lines if any(word in line for word in SIGN_WORDS)):
        for match in (ARGUMENTS if "server_args=" in line else SIGNS).finditer(line):
            shown = line.strip() if len(line) <= MAX_CHARS else f"{line[:45]} ... {match[0]}"
            signs.setdefault(match.lastgroup, shown[:MAX_CHARS])
    for sign, undone_by, way in VERDICTS:
        if sign in signs and undone_by not in signs:
            return way, signs[sign] if way else f"one rank: {signs[sign]}"[:MAX_CHARS]
    return None, None


def format_nccl_log(log: NcclLog) -> str:
    """The same for a terminal: a line a fact, `not said` where the log is silent."""
    way, evidence = log.decode_all_reduce or "not said", log.decode_all_reduce_evidence or "no line tells"
    connected = [name for name, on in (("rings", log.rings_connected), ("trees", log.trees_connected)) if on]
    facts = {
        "NCCL": log.version,
        "ranks": log.nranks,
        "channels": log.coll_channels and f"{log.coll_channels} collective, {log.p2p_channels} point to point",
        "connected": ", ".join(connected),
        **{f"rank {pair}": transport for pair, transport in log.transports.items()},
        **log.variables,
    }
    lines = [f"{name:24} {value or 'not said'}" for name, value in facts.items()]
    return "\n".join([f"{'decode all-reduce':24} {way} ({evidence})", *lines, *(f"changed: {w}" for w in log.warnings)])


def variables_differ(asked: Mapping[str, str], log: NcclLog) -> tuple[str, ...]:
    """Sentences on asked-for NCCL variables that NCCL read otherwise or did not name, where its log echoes any.

    SGLang sets two itself: a log that echoes none was kept from it (NCCL_DEBUG, NCCL_DEBUG_SUBSYS) and tells nothing.
    """
    found = []
    for name, value in asked.items() if log.variables else ():
        read, variable = log.variables.get(name), known_variables().get(name)
        if read is not None and _plain(name, read) != _plain(name, value):
            found.append(f"{name}={value} was asked for, but NCCL read {read}")
        elif read is None and variable and not re.fullmatch(variable.silent, value):
            found.append(f"{name}={value} was asked for, but NCCL's log does not name it: not passed on, or not needed")
    return tuple(found)


def _plain(name: str, value: str) -> str:
    """One spelling for values that mean the same to NCCL."""
    number = int(value, 0) if INTEGER.fullmatch(value) else -1
    if number < 0:
        return value.upper()
    return LEGACY_LEVELS[min(number, 4)] if name.endswith("_LEVEL") else str(number)
