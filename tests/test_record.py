"""Records: whole or not there, and a damaged one is never taken for a good one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchlib.errors import RecordError
from benchlib.nccl import NcclLog
from benchlib.placement import place_gpus
from benchlib.record import (
    RequestRecord,
    RunRecord,
    ServerRecord,
    boot_of,
    load_record,
    load_requests,
    run_folder,
    run_identity,
    save_run,
    write_atomic,
)
from benchlib.spec import RunSpec
from benchlib.topology import load_topology

REQUEST = RequestRecord(
    prompt="fib", max_new_tokens=4, concurrency=1, round=0, sent_s=0.5,
    ticks=((0.1, 1), (0.2, 4)), end_s=0.2, output_ids=(1, 2, 3, 4),
)  # fmt: skip
RECORD = RunRecord(
    status="ok", spec=RunSpec(), identity="x", started_at="2030-01-01T00:00:00+00:00", duration_s=1.0,
    environment={},
)  # fmt: skip


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    failed = REQUEST.model_copy(update={"error": "HTTP 500", "end_s": None, "ticks": ()})
    saved = save_run(tmp_path / "run", RECORD, [REQUEST, failed])
    assert load_record(tmp_path / "run") == saved
    assert list(load_requests(tmp_path / "run")) == [REQUEST, failed]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["record.json", "requests.jsonl"]


def test_a_record_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="did not finish"):
        load_record(tmp_path)
    with pytest.raises(RecordError, match="is missing"):
        load_requests(tmp_path)


@pytest.mark.parametrize("name", ["record.json", "requests.jsonl"])
def test_a_truncated_file_is_found_out(tmp_path: Path, name: str) -> None:
    save_run(tmp_path, RECORD, [REQUEST])
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(RecordError, match=r"not a record of schema|was cut or changed"):
        load_record(tmp_path)
    if name == "requests.jsonl":
        with pytest.raises(RecordError, match="broken line"):
            load_requests(tmp_path)


def test_requests_that_vanished_are_found_out(tmp_path: Path) -> None:
    save_run(tmp_path, RECORD, [REQUEST])
    (tmp_path / "requests.jsonl").unlink()
    with pytest.raises(RecordError, match=r"requests\.jsonl is missing"):
        load_record(tmp_path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path, RECORD, [])
    path = tmp_path / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(RecordError, match="not a record of schema 2: schema_version"):
        load_record(tmp_path)


def test_writing_leaves_the_old_or_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_identity_is_of_spec_and_environment() -> None:
    spec = RunSpec()
    plain = run_identity(spec, {"identity": {"a": 1}, "load_average_1m": 3})
    assert plain == run_identity(spec, {"identity": {"a": 1}, "load_average_1m": 4})
    assert plain != run_identity(spec, {"identity": {"a": 2}})
    assert plain != run_identity(RunSpec(seed=1), {"identity": {"a": 1}})


def test_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(campaign="c", start=2)
    assert run_folder("results", spec) == Path("results/c/tp1-auto.2")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert run_folder("results", spec) == tmp_path / "results/c/tp1-auto.2"
    assert run_folder(tmp_path / "r", spec) == tmp_path / "r/c/tp1-auto.2"


SAMPLE = Path(__file__).parents[1] / "results" / "laptop-sample"


def test_the_sample_campaign_is_read() -> None:
    for folder in sorted(path.parent for path in SAMPLE.glob("*/record.json")):
        record = load_record(folder)
        assert (record.schema_version, record.spec.run_name) == (2, folder.name)
        assert len(load_requests(folder)) > 0


def test_a_record_of_the_first_schema_becomes_one_of_the_second(tmp_path: Path) -> None:
    save_run(tmp_path, RECORD, [REQUEST])
    path = tmp_path / "record.json"
    data = json.loads(path.read_text())
    old = {key: value for key, value in data.items() if key != "nccl"} | {"schema_version": 1, "placement": None}
    for name in ("nccl_profile", "nccl_file", "numa_policy", "variant", "measured_links", "stall_timeout_s"):
        del old["spec"][name]
    path.write_text(json.dumps(old))
    assert load_record(tmp_path) == RECORD.model_copy(update={"requests_sha256": data["requests_sha256"]})
    path.write_text(json.dumps(data | {"placement": None}))
    with pytest.raises(RecordError, match="schema 2: placement"):
        load_record(tmp_path)


def test_what_the_machine_was_comes_back(tmp_path: Path) -> None:
    machine = load_topology(Path(__file__).parent / "data" / "topology" / "seed_8x_pcie_two_sockets.txt")
    server = ServerRecord(url="x", placement=place_gpus(machine, 4), binding="by numactl", death="killed")
    nccl = NcclLog(nranks=4, variables={"NCCL_ALGO": "Ring"}, transports={"0->1": "SHM"}, warnings=("w",))
    saved = save_run(tmp_path, RECORD.model_copy(update={"server": server, "nccl": nccl}), [])
    assert load_record(tmp_path) == saved


def test_the_boot_of_a_campaign_is_that_of_its_first_readable_record(tmp_path: Path) -> None:
    assert boot_of(tmp_path / "none") is None
    for name, boot in (("b", "first"), ("c", "second")):
        save_run(tmp_path / name, RECORD.model_copy(update={"environment": {"boot_id": boot}}), [])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "record.json").write_text("{")
    assert boot_of(tmp_path) == "first"


def test_requests_may_be_kept_compressed(tmp_path: Path) -> None:
    saved = save_run(tmp_path, RECORD, [REQUEST])
    plain = tmp_path / "requests.jsonl"
    packed = gzip.compress(plain.read_bytes())
    plain.unlink()
    (tmp_path / "requests.jsonl.gz").write_bytes(packed)
    assert load_record(tmp_path) == saved
    assert list(load_requests(tmp_path)) == [REQUEST]
    plain.write_bytes(b"newer\n")
    with pytest.raises(RecordError, match=r"requests\.jsonl has SHA-256"):
        load_record(tmp_path)
    plain.unlink()
    for broken in (packed[:-9], packed[:20] + b"\0\0\0" + packed[23:], b"text"):
        (tmp_path / "requests.jsonl.gz").write_bytes(broken)
        with pytest.raises(RecordError, match=r"requests\.jsonl\.gz"):
            load_record(tmp_path)
