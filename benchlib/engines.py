"""How each engine is started: RunSpec -> argv and environment, and what an engine cannot do.

Both engines take SGLang's flags, so one builder serves both; they differ in the argv prefix and in the flags they
know. A flag that only holds conditions equal is dropped where the engine has none like it; one that the run is about
is never dropped: without it the run is unavailable.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchlib.errors import ServerError, SpecError, UnavailableError
from benchlib.spec import Engine, RunSpec

__all__ = [
    "ALGORITHMS",
    "Launch",
    "build_launch",
    "check_server_info",
    "engine_version",
    "server_python",
    "verify_tokens",
]

ALGORITHMS = {"auto": None, "linear": "DFLASH", "ddtree": "DDTREE"}
MODULES: dict[Engine, str] = {
    "reference": "benchlib.reference_engine.server",
    "sglang": "sglang.launch_server",
}
# What the embedded engine's command line knows; SGLang's is asked.
REFERENCE_FLAGS = frozenset(
    (
        *("--model-path", "--host", "--port", "--tp-size", "--threads", "--random-seed"),
        *("--max-running-requests", "--enable-metrics", "--disable-radix-cache"),
        *("--speculative-algorithm", "--speculative-draft-model-path"),
        *("--speculative-num-draft-tokens", "--speculative-ddtree-budget"),
    )
)
PYTHON_VARIABLE = "BENCHLIB_SGLANG_PYTHON"
PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and the variables it is given beyond the inherited ones."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    values: tuple[str, ...] = ()
    required: bool = False


def server_python(spec: RunSpec) -> str:
    """The interpreter that starts the engine: the spec's, the environment variable's (sglang), or this one."""
    named = os.environ.get(PYTHON_VARIABLE, "") if spec.engine == "sglang" else ""
    return spec.server_python or named or sys.executable


def build_launch(spec: RunSpec, *, host: str, port: int) -> Launch:
    """The command that starts the server of `spec`. UnavailableError when the engine cannot do what it asks for."""
    python = server_python(spec)
    known = _known_flags(spec.engine, python)
    _check_available(spec, known, python)
    argv = [python, "-m", MODULES[spec.engine]]
    for flag in _flags(spec, host, port):
        given = flag.name in spec.server_args
        if flag.name in known and not given:
            argv += [flag.name, *flag.values]
        elif flag.required and not given:
            raise UnavailableError(f"{_named(spec.engine, python)} has no {flag.name}, which {spec.run_name} needs")
    return Launch((*argv, *spec.server_args), dict(spec.server_env))


def _flags(spec: RunSpec, host: str, port: int) -> Iterator[_Flag]:
    if spec.model_path:
        yield _Flag("--model-path", (spec.model_path,), required=True)
    elif spec.engine == "sglang":
        raise SpecError("engine sglang has no default model: set model_path in [engines.sglang]")
    yield _Flag("--host", (host,), required=True)
    yield _Flag("--port", (str(port),), required=True)
    yield _Flag("--tp-size", (str(spec.tp_size),), required=True)
    yield _Flag("--random-seed", (str(spec.seed),), required=True)
    yield _Flag("--max-running-requests", (str(spec.max_running_requests),), required=True)
    # Conditions that would otherwise differ between methods or leak from one request into the next.
    yield _Flag("--enable-metrics")
    yield _Flag("--disable-radix-cache")
    yield _Flag("--disable-flashinfer-autotune")
    yield _Flag("--min-free-slots-delay", ("1",))
    if algorithm := ALGORITHMS[spec.method]:
        yield _Flag("--speculative-algorithm", (algorithm,), required=True)
        if spec.draft_model_path:
            yield _Flag("--speculative-draft-model-path", (spec.draft_model_path,), required=True)
        yield _Flag("--speculative-num-draft-tokens", (str(spec.block_size),), required=True)
    if spec.tree_budget is not None:
        yield _Flag("--speculative-ddtree-budget", (str(spec.tree_budget),), required=True)


def _check_available(spec: RunSpec, known: frozenset[str], python: str) -> None:
    engine = _named(spec.engine, python)
    if spec.method == "ddtree" and "--speculative-ddtree-budget" not in known:
        raise UnavailableError(
            f"method ddtree is unavailable in {engine}: its command line has no --speculative-ddtree-budget. "
            "Use a build or a plug-in that registers DDTREE, or leave tree_budgets out"
        )
    if spec.engine != "sglang" or spec.method == "auto":
        return
    if _device(spec.server_args) == "cpu":
        raise UnavailableError(
            f"method {spec.method} is unavailable in {engine} on device cpu: it refuses speculation there. "
            "Run it on a GPU, or use engine reference"
        )
    if not spec.draft_model_path:
        raise SpecError(f"method {spec.method} on sglang needs draft_model_path in [engines.sglang]")


def _device(server_args: tuple[str, ...]) -> str | None:
    for index, argument in enumerate(server_args):
        if argument == "--device" and index + 1 < len(server_args):
            return server_args[index + 1]
        if argument.startswith("--device="):
            return argument.partition("=")[2]
    return None


def _named(engine: Engine, python: str) -> str:
    version = engine_version(engine, python)
    return f"{engine} {version}" if version else engine


@functools.cache
def engine_version(engine: Engine, python: str) -> str | None:
    """Version of the engine that `python` would start; None where it has none. Asked once a process."""
    package = "benchlib" if engine == "reference" else engine
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


@functools.cache
def _known_flags(engine: Engine, python: str) -> frozenset[str]:
    """Flags of the installed engine: declared for the embedded one, read from `--help` for SGLang (seconds)."""
    if engine == "reference":
        return REFERENCE_FLAGS
    advice = f"Install sglang there, or set server_python or {PYTHON_VARIABLE} to an interpreter that has it"
    try:
        result = subprocess.run(
            [python, "-m", MODULES[engine], "--help"],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"cannot ask {python} for SGLang's flags: {error}. {advice}") from error
    flags = frozenset(re.findall(r"--[a-z0-9][a-z0-9-]+", result.stdout))
    if result.returncode or "--model-path" not in flags:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"engine sglang is unavailable in {python}: {last}. {advice}")
    return flags


def verify_tokens(info: dict[str, Any]) -> int | None:
    """Tokens of one verify forward, 1 + nodes, as /server_info tells it; None when autoregressive."""
    algorithm = info.get("speculative_algorithm")
    if algorithm == "DDTREE" and isinstance(budget := info.get("speculative_ddtree_budget"), int):
        return 1 + budget
    block = info.get("speculative_num_draft_tokens")
    return block if algorithm and isinstance(block, int) else None


def check_server_info(spec: RunSpec, info: dict[str, Any]) -> None:
    """ServerError when the server is not the one `spec` plans: every difference named, unreported keys passed over."""
    planned: dict[str, Any] = {
        "tp_size": spec.tp_size,
        "speculative_algorithm": ALGORITHMS[spec.method],
        "speculative_ddtree_budget": spec.tree_budget,
    }
    if spec.method == "linear":
        planned["speculative_num_draft_tokens"] = spec.block_size
    if spec.model_path:
        planned["model_path"] = spec.model_path
    wrong = [
        f"{key} is {info[key]!r}, planned {value!r}"
        for key, value in planned.items()
        if key in info and info[key] != value
    ]
    if spec.tree_budget is not None and "speculative_ddtree_budget" not in info:
        wrong.append(f"speculative_ddtree_budget is not reported, planned {spec.tree_budget}")
    if wrong:
        raise ServerError(f"the server is not the one planned for {spec.run_name}: {'; '.join(wrong)}")
