"""What several tests need: an interpreter that starts the fake server, and specs small enough to be quick."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchlib import cli
from benchlib.binding import Binding
from benchlib.clock import ClockCheck
from benchlib.errors import PlacementError
from benchlib.host import GpuState, Machine
from benchlib.spec import RunSpec
from benchlib.topology import Topology, load_topology
from tests import fake_server

HERE = Path(__file__).parent
NO_CHECK = ClockCheck(0.1, 0.0, 0.1, 10.0, 0.1, 1, 1)
DATA = HERE / "data"


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """Path of an executable that starts the fake server whatever module it is asked for."""
    script = tmp_path / "fake-python"
    # Asked for its version, it answers; started, it needs the standard library alone (-I -S).
    version = 'if [ "$1" = "-c" ]; then echo 0.0.1; exit; fi'
    script.write_text(f'#!/bin/sh\n{version}\nexec "{sys.executable}" -I -S "{HERE / "fake_server.py"}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def make_spec(fake_python: str) -> Callable[..., RunSpec]:
    """A quick run of the fake server; keywords are flat parameters, `mode` the fault it shows."""

    def make(mode: str = "good", **parameters: Any) -> RunSpec:
        flags = ["--mode", mode, *parameters.pop("server_args", [])]
        quick = {
            "prompts": ["fib", "qsort"],
            "prompt_set": "random-ids",
            "max_new_tokens": [16],
            "warmups": 1,
            "repeats": 2,
            "startup_timeout_s": 20.0,
            "request_timeout_s": 5.0,
            "server_python": fake_python,
            "server_args": flags,
        }
        return RunSpec.from_parameters(quick | parameters)

    return make


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start the fake server inside this process: `serve("--mode", "cut")` gives its address."""
    servers: list[fake_server.FakeServer] = []

    def start(*argv: str) -> str:
        servers.append(fake_server.serve_in_thread(*argv))
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Command lines of the living processes that this test started, directly or not: they inherit a mark."""
    monkeypatch.setenv("FAKE_MARK", str(tmp_path))

    def find() -> list[list[str]]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("FAKE_MARK") == str(tmp_path):
                    found.append(process.cmdline())
        return found

    return find


@pytest.fixture
def write_notebook(tmp_path: Path) -> Callable[..., Path]:
    """Write a notebook of code cells below a parameters cell: `write_notebook("print(x)")` gives its path."""
    import nbformat

    def write(*cells: str, parameters: str = "x: int = 1  # x") -> Path:
        new = nbformat.v4.new_code_cell
        body = nbformat.v4.new_notebook(
            cells=[new(parameters, metadata={"tags": ["parameters"]}), *map(new, cells)],
            metadata={"kernelspec": {"name": "elsewhere", "language": "python", "display_name": "x"}},
        )
        nbformat.write(body, tmp_path / "source.ipynb")
        return tmp_path / "source.ipynb"

    return write


@pytest.fixture(autouse=True)
def no_clock_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep's self-check takes three seconds: here it is not made, but where a test is marked for it."""
    if "clock_check" not in request.keywords:
        monkeypatch.setattr("benchlib.sweep.self_check", lambda *_, **__: NO_CHECK)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["benchlib", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GpuState, ...]]:
    """Let this machine be a saved one, its GPUs linked as on a box of 8 with two sockets; gives their states.

    `pretend("healthy_8", {1: {"memory_used_bytes": 2**31}})` changes what a GPU shows.
    """

    def show(host: str = "healthy_8", gpus: dict[int, dict[str, Any]] | None = None) -> tuple[GpuState, ...]:
        machine = Machine.saved(DATA / "hosts" / host)
        states: tuple[GpuState, ...] = ()
        with suppress(PlacementError):
            states = tuple(dataclasses.replace(g, **(gpus or {}).get(g.index, {})) for g in machine.gpu_states())
        linked = load_topology(DATA / "topology" / "seed_8x_pcie_two_sockets.txt")
        named = [dataclasses.replace(g, uuid=s.uuid, name=s.name) for g, s in zip(linked.gpus, states, strict=False)]

        def read_topology() -> Topology:
            if not states:
                raise PlacementError("no NVIDIA GPU here")
            return dataclasses.replace(linked, gpus=tuple(named))

        shown = dataclasses.replace(machine, **({"gpu_states": lambda: states} if states else {}))
        monkeypatch.setattr(Machine, "here", lambda: shown)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for module in ("machine", "sweep", "server", "host"):
            monkeypatch.setattr(f"benchlib.{module}.read_gpu_states", lambda: states)
        for module in ("machine", "sweep", "topology"):
            monkeypatch.setattr(f"benchlib.{module}.read_topology", read_topology)
        # What this machine's own nodes would allow is another's test.
        monkeypatch.setattr("benchlib.machine.plan_binding", lambda p: Binding((), None, f"to node {p.memory_node}"))
        return states

    return show
