"""The servers that the HTTP tests are put to, each started as a run starts it, once a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchlib.client import get_json
from benchlib.server import start_server
from benchlib.spec import RunSpec, load_sweep
from benchlib.sweep import select_runs

LAPTOP = Path(__file__).parents[2] / "notebooks" / "sweeps" / "laptop.toml"
RUNNING = os.environ.get("BENCHLIB_SGLANG_URL", "")
NEEDS_SGLANG = [
    pytest.mark.sglang,
    pytest.mark.skipif("BENCHLIB_SGLANG_PYTHON" not in os.environ, reason="BENCHLIB_SGLANG_PYTHON is not set"),
]
SERVERS = [
    *("reference-auto", "reference-linear", "reference-b32"),
    pytest.param("sglang-auto", marks=NEEDS_SGLANG),
    *["running"] * bool(RUNNING),
]


def sglang_spec() -> RunSpec:
    """The laptop sweep's only run of a stock SGLang on the CPU."""
    (spec,) = select_runs(load_sweep(LAPTOP, engine="sglang"), ["tp1-auto"])
    return spec


@pytest.fixture(scope="module", params=SERVERS)
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a ready server; `running` is the one at $BENCHLIB_SGLANG_URL, which is left as it is."""
    engine, _, method = request.param.partition("-")
    if not method:
        yield RUNNING.rstrip("/")
        return
    if engine == "sglang":
        spec = sglang_spec()
    else:
        (spec,) = select_runs(load_sweep(LAPTOP), [f"tp1-{method}"])
    with start_server(spec, folder=tmp_path_factory.mktemp(request.param)) as server:
        yield server.record.url


@pytest.fixture
def info(server_url: str) -> dict[str, Any]:
    """What the server says of itself."""
    return get_json(f"{server_url}/server_info")
