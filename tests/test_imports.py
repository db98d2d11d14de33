"""Who may import whom, and what `import benchlib` costs."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchlib

PACKAGE = Path(benchlib.__file__).parent
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")} | {"prompts": PACKAGE / "prompts" / "__init__.py"}
COLLECTING = {
    "errors": set(),
    "nccl": {"errors"},
    "tuning": {"errors"},
    "topology": {"errors"},
    "links": {"errors", "topology"},
    "placement": {"errors", "links", "topology"},
    "binding": {"errors", "placement", "topology"},
    "spec": {"errors", "nccl"},
    "record": {"errors", "nccl", "placement", "spec"},
    "progress": {"spec"},
    "prompts": {"errors"},
    "stream": {"record"},
    "client": {"errors", "stream"},
    "engines": {"errors", "nccl", "placement", "prompts", "spec"},
    "environment": {"engines", "model_files", "spec", "tuning"},
    "probe": {"errors", "topology"},
    "model_files": set(),
    "server_log": {"errors"},
    "host": {"engines", "errors", "model_files", "probe", "prompts", "spec"},
    "machine": {"binding", "engines", "errors", "host", "links", "placement", "spec", "topology"},
    "telemetry": {"errors", "record", "spec", "topology"},
    "gaps": {"errors", "prompts", "record", "spec", "stream"},
    "draft_tree": {"errors", "gaps", "prompts", "record", "spec"},
    "sampling": {"gaps", "prompts"},
    "supervisor": set(),
    "paced_server": {"errors"},
    "clock": {"client", "errors", "metrics", "paced_server", "stream"},
    "server": {"client", "engines", "errors", "host", "machine", "record", "server_log", "spec", "stream"},
    "warnings": {"metrics", "nccl", "placement", "record", "server_log", "spec", "telemetry"},
    "measure": {
        *(
            "client",
            "draft_tree",
            "errors",
            "gaps",
            "nccl",
            "progress",
            "prompts",
            "record",
            "server_log",
            "spec",
            "stream",
            "telemetry",
        ),
        *("verdicts", "warnings"),
    },
    "notebook": set(),
    "sweep": {
        *("clock", "engines", "environment", "errors", "host", "machine", "measure", "notebook", "placement"),
        *("progress", "prompts", "record", "server", "spec", "topology", "warnings"),
    },
}
ANALYSING = {
    *("metrics", "frames", "compare", "tables", "drawing", "panels", "figures", "headline", "optimum", "scenes"),
}
SHARED = {
    "errors",
    "spec",
    "record",
    "telemetry",
    "gaps",
    "draft_tree",
    "metrics",
    "verdicts",
    "warnings",
}  # files of their own, definitions
SHOWN = {"scenes": {"placement", "topology"}}  # whose objects it draws
CONFINED = {
    "pandas": {"frames", "compare", "tables", "figures", "headline"},
    "matplotlib": {"drawing", "figures", "panels", "scenes"},
    "seaborn": {"drawing"},
    "papermill": {"notebook"},
    "nbclient": {"notebook"},
    "uvloop": {"client"},
    "pynvml": {"topology", "host", "environment"},
    "aiohttp": set(),
    "torch": {"link_probe", "bandwidth_probe"},  # scripts that the engine's interpreter runs
    "sglang": set(),
}
HEAVY = {"torch", "pandas", "matplotlib", "seaborn", "papermill", "scipy", "numpy", "uvloop", "IPython"}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def ours(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(path))
    return {parts[1] for parts in names if parts[0] == "benchlib" and len(parts) > 1} & set(MODULES)


@pytest.mark.parametrize("module", COLLECTING)
def test_collecting_modules_import_what_they_may(module: str) -> None:
    assert ours(MODULES[module]) <= COLLECTING[module]


@pytest.mark.parametrize("module", sorted(ANALYSING & set(MODULES)))
def test_analysing_imports_nothing_that_collects(module: str) -> None:
    assert not ours(MODULES[module]) & (set(COLLECTING) - SHARED - SHOWN.get(module, set()))


@pytest.mark.parametrize("package", CONFINED)
def test_heavy_packages_are_confined(package: str) -> None:
    users = {name for name, path in MODULES.items() if package in {i.split(".")[0] for i in imports(path)}}
    assert users <= CONFINED[package]


def test_the_embedded_engine_is_launched_and_not_imported() -> None:
    for name, path in MODULES.items():
        assert not [i for i in imports(path) if i.startswith("benchlib.reference_engine")], name
    for path in (PACKAGE / "reference_engine").glob("*.py"):
        allowed = ("benchlib.reference_engine", "benchlib.errors")
        assert all(i.startswith(allowed) for i in imports(path) if i.startswith("benchlib.")), path


def test_importing_benchlib_is_light() -> None:
    names = "print(*{name.split('.')[0] for name in sys.modules})"
    script = f"import sys, benchlib; {names}; import benchlib.cli; from benchlib import *; {names}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    package, everything = (set(line.split()) for line in done.stdout.splitlines())
    assert not package & (HEAVY | {"pydantic", "psutil"})
    assert not everything & HEAVY


def test_help_is_quick() -> None:
    code = "import sys; sys.argv = ['benchlib', '--help']; from benchlib.cli import main; main()"
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    # Its own seconds: other work on the machine slows the clock on the wall down.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1
    for command in (
        "plan",
        "sweep",
        "summary",
        "report",
        "serve",
        "topology",
        "place",
        "nccl",
        "doctor",
        "tune",
        "compare",
        "bench",
    ):
        assert command in done.stdout


def test_public_names_are_exact() -> None:
    for name in benchlib.__all__:
        assert getattr(benchlib, name).__module__.startswith("benchlib.")
    assert set(benchlib.__all__) <= set(dir(benchlib))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = benchlib.nonsense
