"""What a run leaves behind: `results/<campaign>/<run>/record.json` and `requests.jsonl`.

Schema history (`SCHEMA_VERSION`):
1  first version.
2  `server` gains placement, binding and devices; `nccl` what NCCL's log told. `placement`, always null, went. Requests
   gain `forecast_length`.

A record is written to a temporary name, fsynced and renamed, `requests.jsonl` before `record.json`, so a folder with a
`record.json` holds the whole run. Nothing in it is derived: rates, latencies and ratios are computed from the ticks by
`metrics`, each time.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from benchlib.errors import RecordError
from benchlib.nccl import NcclLog
from benchlib.placement import Placement
from benchlib.spec import Frozen, RunSpec, content_hash

__all__ = [
    "SCHEMA_VERSION", "CellRecord", "RequestRecord", "RunRecord", "ServerRecord", "boot_of", "load_record",
    "load_requests", "run_folder", "run_identity", "save_run", "write_atomic",
]  # fmt: skip

SCHEMA_VERSION = 2
Tick = tuple[float, int]


class RequestRecord(Frozen):
    """One request as the client saw it. Times are seconds after `sent_s`, which counts from the run's own epoch."""

    prompt: str = Field(description="its name in the prompt set")
    max_new_tokens: int = Field(description="asked for: of a warm-up 32 at most")
    concurrency: int = Field(description="requests sent at once in its round, this one among them")
    round: int = Field(description="which repeat of the cell; warm-ups count apart, from 0")
    stream: int = Field(0, description="which of the round's concurrent requests")
    warmup: bool = Field(False, description="kept, and counted in no figure")
    sent_s: float = Field(description="seconds from the run's epoch to the first byte sent")
    ticks: tuple[Tick, ...] = Field(
        description="(seconds after sent_s, completion tokens so far) of each streamed chunk that brought tokens"
    )
    end_s: float | None = Field(description="seconds after sent_s when the stream ended; None: it did not")
    prompt_tokens: int | None = Field(None, description="as the server counts them")
    completion_tokens: int | None = Field(None, description="the server's own count, never chunks")
    cached_tokens: int | None = Field(None, description="of the prompt, found in the prefix cache")
    finish_reason: str | None = Field(None, description='the server\'s: "length", "stop", ...')
    verify_ct: int | None = Field(None, description="target verify steps (spec_verify_ct); None: autoregressive")
    correct_drafts: int | None = Field(None, description="accepted drafts, bonus excluded (spec_num_correct_drafts)")
    proposed_drafts: int | None = Field(None, description="drafted nodes or tokens (spec_num_proposed_drafts)")
    drafts_histogram: tuple[int, ...] | None = Field(None, description="index: accepted drafts in a step; value: steps")
    forecast_length: float | None = Field(
        None,
        description="accept length that the drafter's own probabilities promised, mean over verify steps "
        "(1 + sum of the nodes' probabilities); None: the engine does not tell",
    )
    output_ids: tuple[int, ...] | None = Field(None, description="generated token ids; None: the server sends none")
    server_times: dict[str, float] = Field(default_factory=dict, description="the server's own; never used for a rate")
    error: str | None = Field(None, description="why it failed; None: it is whole")


class CellRecord(Frozen):
    """One prompt x max_new_tokens x concurrency, measured inside one start."""

    prompt: str
    max_new_tokens: int
    concurrency: int = Field(description="requests at once")
    rounds: int = Field(description="timed rounds that were made; 0: not measured, and a warning says why")
    prompt_sha256: str = Field(description="of the prompt's text or ids as sent")
    warnings: tuple[str, ...] = Field((), description="`code: text`, of the closed list in benchlib/warnings.py")


class ServerRecord(Frozen):
    """The server that was measured: how it was started and what it said of itself."""

    url: str
    attached: bool = Field(False, description="started by somebody else, and not stopped")
    argv: tuple[str, ...] = Field((), description="its command line, paths shortened; empty: attached")
    env: dict[str, str] = Field(default_factory=dict, description="variables beyond the inherited ones")
    pid: int | None = None
    startup_s: float | None = Field(
        None, description="seconds until it had generated a token; None: it never was ready"
    )
    version: str | None = Field(None, description="the engine's, from /server_info")
    verify_tokens: int | None = Field(None, description="of one verify forward: 1 + nodes; None: autoregressive")
    effective_max_running_requests: int | None = Field(
        None, description="requests it runs at once, by its own account: cells above are not measured"
    )
    info: dict[str, Any] = Field(default_factory=dict, description="/server_info, less what may hold secrets")
    log: str = Field("", description="the log's path inside the run's folder")
    placement: Placement | None = Field(None, description="the GPUs it was given; None: it was given none")
    binding: str = Field("", description="how it was bound to cores and memory, in words")
    devices: str = Field("", description="how the GPUs in use were found to be the planned ones")
    custom_all_reduce_expected: bool | None = Field(
        None, description="whether SGLang should use its own all-reduce on these GPUs; None: not known, or one GPU"
    )
    death: str | None = Field(None, description="why it ended by itself, from its exit code and log")
    links_disagree: tuple[str, ...] = Field((), description="where measured links are ordered otherwise than labelled")


class RunRecord(Frozen):
    """One run, whole: a finished one or a failed one with its reason."""

    schema_version: Literal[2] = 2
    status: Literal["ok", "failed"]
    error: str | None = Field(None, description="why the run failed")
    spec: RunSpec = Field(description="what was asked for, fully resolved")
    identity: str = Field(description="hash of spec, variables, package versions and devices: what resuming compares")
    started_at: str = Field(description="wall-clock time, ISO 8601 with zone")
    duration_s: float = Field(description="of measuring, without the server's start; of a failed start, its whole time")
    environment: dict[str, Any] = Field(description="provenance, from benchlib.environment")
    server: ServerRecord | None = Field(None, description="None: it failed before there was one")
    nccl: NcclLog | None = Field(None, description="what NCCL did, from the server's log; None: one rank, or no log")
    cells: tuple[CellRecord, ...] = ()
    warnings: tuple[str, ...] = Field((), description="of the run as a whole; those of a cell are there")
    requests_sha256: str | None = Field(None, description="of requests.jsonl: a truncated one is found out")

    @model_validator(mode="before")
    @classmethod
    def _from_schema_1(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("schema_version") == 1:
            return {k: v for k, v in data.items() if k != "placement"} | {"schema_version": 2}
        return data


def run_identity(spec: RunSpec, environment: dict[str, Any]) -> str:
    """Hash of everything that makes two runs the same run; `environment["identity"]` is its volatile part."""
    return content_hash({"spec": spec.model_dump(mode="json"), "environment": environment.get("identity", {})})


def run_folder(results: Path | str, spec: RunSpec) -> Path:
    """`results/<campaign>/<run>`; in a notebook opened in `notebooks/`, a relative `results` is the project's."""
    here = Path.cwd()
    project = here.parent if here.name == "notebooks" else Path()
    return project / results / spec.campaign / spec.run_name


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside `path`, fsync, rename: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_run(folder: Path, record: RunRecord, requests: Iterable[RequestRecord]) -> RunRecord:
    """Write both files of a run, requests first; returns the record with their checksum."""
    lines = b"".join(r.model_dump_json(exclude_defaults=True).encode() + b"\n" for r in requests)
    record = record.model_copy(update={"requests_sha256": hashlib.sha256(lines).hexdigest()})
    write_atomic(folder / "requests.jsonl", lines)
    write_atomic(folder / "record.json", record.model_dump_json(indent=1).encode() + b"\n")
    return record


def load_record(folder: Path | str) -> RunRecord:
    """Read and verify `record.json`; RecordError when missing, partial, of another schema, or without its requests."""
    folder = Path(folder)
    path = folder / "record.json"
    try:
        record = RunRecord.model_validate_json(_read(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise RecordError(
            f"{path} is not a record of schema {SCHEMA_VERSION}: {where}: {first['msg']}; "
            "move it away and run its sweep again"
        ) from None
    if (expected := record.requests_sha256) is not None:
        requests, data = _read_requests(folder)
        seen = hashlib.sha256(data).hexdigest()
        if seen != expected:
            raise RecordError(
                f"{requests} has SHA-256 {seen[:12]}..., its record says {expected[:12]}...: "
                "it was cut or changed; run the sweep again"
            )
    return record


def boot_of(campaign: Path) -> str | None:
    """The boot id that a campaign's first readable record was made under; None where it has none yet."""
    for path in sorted(campaign.glob("*/record.json")):
        with suppress(RecordError):
            if boot_id := load_record(path.parent).environment.get("boot_id"):
                return str(boot_id)
    return None


def load_requests(folder: Path | str) -> Sequence[RequestRecord]:
    """Every request of a run, warm-ups and failed ones included, in the order they were sent."""
    path, data = _read_requests(Path(folder))
    try:
        return [RequestRecord.model_validate_json(line) for line in data.splitlines()]
    except ValidationError as error:
        raise RecordError(f"{path} has a broken line: {error.errors()[0]['msg']}; run its sweep again") from None


def _read_requests(folder: Path) -> tuple[Path, bytes]:
    """The lines, also where they were compressed to be kept: by `gzip`, a tenth of their size."""
    path = folder / "requests.jsonl"
    packed = folder / "requests.jsonl.gz"
    if path.exists() or not packed.exists():
        return path, _read(path)
    try:
        return packed, gzip.decompress(_read(packed))
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{packed} cannot be unpacked: {error}; restore it, or run its sweep again") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RecordError(f"{path} is missing: the run did not finish; run its sweep again") from error
    except NotADirectoryError as error:
        raise RecordError(f"{path.parent} is not a folder: move it away and run its sweep again") from error
