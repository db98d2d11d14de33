"""Provenance: quick, without names of people or hosts, and an identity that changes with what matters."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchlib.environment import _engine_digest, collect_environment, list_gpus, read_git
from benchlib.record import run_identity
from benchlib.spec import RunSpec


def test_what_is_collected() -> None:
    collect_environment(RunSpec())
    began = time.perf_counter()
    found = collect_environment(RunSpec())
    assert time.perf_counter() - began < 1
    assert found["packages"]["benchlib"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1e8
    assert found["python"] == platform.python_version()
    text = json.dumps(found)
    assert platform.node() not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


def test_identity_changes_with_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(**parameters: Any) -> str:
        spec = RunSpec.from_parameters(parameters)
        return run_identity(spec, collect_environment(spec))

    plain = identity()
    assert identity() == plain
    assert identity(server_args=["--threads", "2"]) != plain
    assert identity(server_env={"A": "1"}) != plain
    monkeypatch.setenv("HOME_MADE", "1")
    assert identity() == plain
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert identity() != plain
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.setenv("SGLANG_API_KEY", "sesame")
    assert identity() == plain
    monkeypatch.setattr("benchlib.environment._engine_digest", lambda: "other weights")
    assert identity() != plain


def test_the_engines_digest_is_of_its_code_and_weights() -> None:
    assert len(_engine_digest()) == 16
    environment = collect_environment(RunSpec(engine="sglang", server_python=sys.executable))
    assert environment["identity"]["engine_digest"] is None


def test_git_only_where_the_folder_is_tracked(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    package = tmp_path / "lib"
    package.mkdir()
    (package / "a.py").write_text("1\n")
    assert read_git(package) is None
    git("init", "-q")
    assert read_git(package) is None
    git("add", ".")
    git("commit", "-q", "-m", "First")
    clean = read_git(package)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    (package / "a.py").write_text("2\n")
    assert read_git(package) == clean | {"dirty": True}
    assert read_git(tmp_path / "absent") is None


def test_gpus_are_listed_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def fail() -> None:
        raise NVMLError

    calls: list[str] = []
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: "H200",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"0000:0{handle}:00.0"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert [gpu["uuid"] for gpu in list_gpus()] == ["GPU-0", "GPU-1"]
    assert list_gpus()[1] == {
        "uuid": "GPU-1", "name": "H200", "pci_bus_id": "0000:01:00.0", "driver": "580.1",
    }  # fmt: skip
    assert calls == ["init", "shutdown"] * 2
    fake.nvmlInit = fail
    assert list_gpus() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpus() == []
