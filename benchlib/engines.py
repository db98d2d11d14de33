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
MODULES: dict[Engine, str] = {"reference": "benchlib.reference_engine.server", "sglang": "sglang.launch_server"}
# What the embedded engine's command line knows; SGLang's is asked.
REFERENCE_FLAGS = frozenset([
    "--model-path", "--host", "--port", "--tp-size", "--threads", "--random-seed", "--max-running-requests",
    "--enable-metrics", "--disable-radix-cache", "--speculative-algorithm", "--speculative-draft-model-path",
    "--speculative-num-draft-tokens", "--speculative-ddtree-budget",
])  # fmt: skip
# Conditions that would otherwise differ between methods or leak from one request into the next.
MATCHED_FLAGS = {
    "--enable-metrics": (),
    "--disable-radix-cache": (),
    "--disable-flashinfer-autotune": (),
    "--min-free-slots-delay": ("1",),
}
PYTHON_VARIABLE = "BENCHLIB_SGLANG_PYTHON"
PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and the variables it is given beyond the inherited ones."""

    argv: tuple[str, ...]
    env: dict[str, str]


def server_python(spec: RunSpec) -> str:
    """The interpreter that starts the engine: the spec's, the environment variable's (sglang), or this one."""
    named = os.environ.get(PYTHON_VARIABLE, "") if spec.engine == "sglang" else ""
    return spec.server_python or named or sys.executable


def build_launch(spec: RunSpec, *, host: str, port: int) -> Launch:
    """The command that starts the server of `spec`. UnavailableError when the engine cannot do what it asks for."""
    python = server_python(spec)
    known = _known_flags(spec.engine, python)
    version = engine_version(spec.engine, python)
    engine = f"{spec.engine} {version}" if version else spec.engine
    _check_available(spec, known, engine)
    given = {argument.partition("=")[0] for argument in spec.server_args}
    argv = [python, "-m", MODULES[spec.engine]]
    for flag, values in MATCHED_FLAGS.items():
        if flag in known - given:
            argv += [flag, *values]
    for flag, value in _needed_flags(spec, host, port).items():
        if flag not in known:
            raise UnavailableError(f"{engine} has no {flag}, which {spec.run_name} needs")
        if flag not in given:
            argv += [flag, str(value)]
    return Launch((*argv, *spec.server_args), dict(spec.server_env))


def _needed_flags(spec: RunSpec, host: str, port: int) -> dict[str, str | int]:
    flags: dict[str, str | int] = {"--model-path": spec.model_path} if spec.model_path else {}
    flags |= {"--host": host, "--port": port, "--tp-size": spec.tp_size, "--random-seed": spec.seed}
    flags["--max-running-requests"] = spec.max_running_requests
    if algorithm := ALGORITHMS[spec.method]:
        flags["--speculative-algorithm"] = algorithm
        flags["--speculative-num-draft-tokens"] = spec.block_size
        if spec.draft_model_path:
            flags["--speculative-draft-model-path"] = spec.draft_model_path
    if spec.tree_budget is not None:
        flags["--speculative-ddtree-budget"] = spec.tree_budget
    return flags


def _check_available(spec: RunSpec, known: frozenset[str], engine: str) -> None:
    if spec.engine == "sglang" and not spec.model_path:
        raise SpecError("engine sglang has no default model: set model_path in [engines.sglang]")
    if spec.method == "ddtree" and "--speculative-ddtree-budget" not in known:
        raise UnavailableError(
            f"method ddtree is unavailable in {engine}: its command line has no --speculative-ddtree-budget. "
            "Use a build or a plug-in that registers DDTREE, or leave tree_budgets out"
        )
    if spec.engine != "sglang" or spec.method == "auto":
        return
    if re.search(r"--device[ =]cpu\b", " ".join(spec.server_args)):
        raise UnavailableError(
            f"method {spec.method} is unavailable in {engine} on device cpu: it refuses speculation there. "
            "Run it on a GPU, or use engine reference"
        )
    if not spec.draft_model_path:
        raise SpecError(f"method {spec.method} on sglang needs draft_model_path in [engines.sglang]")


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
    command = [python, "-m", MODULES[engine], "--help"]
    advice = f"Install sglang there, or set server_python or {PYTHON_VARIABLE} to an interpreter that has it"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
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
        f"{key} is {info[key]!r}, planned {plan!r}" for key, plan in planned.items() if info.get(key, plan) != plan
    ]
    if spec.tree_budget is not None and "speculative_ddtree_budget" not in info:
        wrong.append(f"speculative_ddtree_budget is not reported, planned {spec.tree_budget}")
    if wrong:
        raise ServerError(f"the server is not the one planned for {spec.run_name}: {'; '.join(wrong)}")
