"""How each engine is started: RunSpec -> argv and environment, and what an engine cannot do.

Both engines take SGLang's flags, so one builder serves both; they differ in the argv prefix and in the flags they
know. A flag that only holds conditions equal is dropped where the engine has none like it; one that the run is about
is never dropped: without it the run is unavailable.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.errors import ServerError, SpecError, UnavailableError
from benchlib.nccl import load_profiles
from benchlib.placement import Placement, placement_env
from benchlib.prompts import build_prompts
from benchlib.spec import Engine, RunSpec

__all__ = [
    "ALGORITHMS",
    "EngineBuild",
    "Launch",
    "build_launch",
    "check_server_info",
    "engine_build",
    "engine_version",
    "flag_value",
    "nccl_variables",
    "needs_gpus",
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
# What a plan made without an SGLang takes for granted: stock 0.5.23's, and the DDTREE that some builds add.
SGLANG_FLAGS = REFERENCE_FLAGS - {"--threads"} | {
    *("--disable-flashinfer-autotune", "--min-free-slots-delay", "--page-size", "--mamba-ssm-dtype"),
    "--cuda-graph-bs-decode",
}
# Conditions that would otherwise differ between methods or leak from one request into the next.
MATCHED_FLAGS: dict[str, tuple[str, ...]] = {
    "--enable-metrics": (),
    "--disable-radix-cache": (),
    "--disable-flashinfer-autotune": (),
    "--min-free-slots-delay": ("1",),
}
# The same of GPUs alone. The attention backend depends on the GPU: what the server resolved must be equal instead.
MATCHED_GPU_FLAGS = {"--page-size": ("1",), "--mamba-ssm-dtype": ("float32",)}
PYTHON_VARIABLE = "BENCHLIB_SGLANG_PYTHON"
PROBE_TIMEOUT_S = 180.0
# Run by the engine's own Python: version, commit (PEP 610: of a package installed from a repository), plug-ins.
BUILD_PROBE = """
import json, sys
from importlib import metadata
package = metadata.distribution(sys.argv[1])
print(package.version)
print(json.loads(package.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id", ""))
for entry in metadata.entry_points(group=f"{package.name}.srt.plugins"):
    print(entry.name, entry.dist.version)
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and the variables it is given beyond the inherited ones."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """Which build of an engine an interpreter would start; None or empty where its installation does not tell."""

    version: str | None = None
    commit: str | None = None
    plugins: tuple[tuple[str, str], ...] = ()  # (name, version) of each that the engine would load


def server_python(spec: RunSpec) -> str:
    """The interpreter that starts the engine: the spec's, the environment variable's (sglang), or this one."""
    named = os.environ.get(PYTHON_VARIABLE, "") if spec.engine == "sglang" else ""
    return spec.server_python or named or sys.executable


def needs_gpus(spec: RunSpec) -> int:
    """GPUs of this host that the run's server takes: 0 for the embedded engine, a CPU or an attached server.

    Ranks of a server that spans hosts (`--nnodes`, `--pp-size` among its flags) are divided over them.
    """
    if spec.engine == "reference" or spec.attach or flag_value(spec, "--device") == "cpu":
        return 0
    stages, nodes = (_count(spec, name) for name in ("--pp-size", "--nnodes"))
    return max(1, spec.tp_size * stages // nodes)


def _count(spec: RunSpec, name: str) -> int:
    text = flag_value(spec, name) or "1"
    if not text.isdecimal() or not int(text):
        raise SpecError(f"{name} {text!r} in server_args is no count: give a number from 1")
    return int(text)


def flag_value(spec: RunSpec, name: str) -> str:
    """Value of a flag among the user's own, written `--name value` or `--name=value`; the last one holds, else ""."""
    words = [word for argument in spec.server_args for word in argument.split("=", 1)]
    found = [value for flag, value in itertools.pairwise(words) if flag == name]
    return found[-1] if found else ""


def build_launch(
    spec: RunSpec, *, host: str, port: int, placement: Placement | None = None, probe: bool = True
) -> Launch:
    """The command that starts the server of `spec`. UnavailableError when the engine cannot do what it asks for.

    SpecError for prompts that do not exist.

    Without `probe` the engine is not asked what it knows, and every flag is taken for granted: for planning elsewhere.
    """
    work, python, engine = spec.workload, server_python(spec), str(spec.engine)
    build_prompts(work.prompt_set, work.prompts, vocab_size=1)  # a name that is none fails before a server starts
    if not probe and spec.engine == "sglang":
        known = SGLANG_FLAGS
    else:
        known = _known_flags(spec.engine, python, _items(spec.server_env))
        version = engine_build(spec.engine, python, _items(spec.server_env)).version
        engine += f" {version}" if version else ""
    _check_available(spec, known, engine)
    given = {argument.partition("=")[0] for argument in spec.server_args}
    argv = [python, "-m", MODULES[spec.engine]]
    for flag, values in _matched_flags(spec).items():
        if flag in known - given:
            argv += [flag, *values]
    for flag, value in _needed_flags(spec, host, port).items():
        if flag not in known:
            raise UnavailableError(f"{engine} has no {flag}, which {spec.run_name} needs")
        if flag not in given:
            argv += [flag, str(value)]
    return Launch((*argv, *spec.server_args), _environment(spec, placement))


def nccl_variables(spec: RunSpec) -> dict[str, str]:
    """Those of the run's NCCL profile."""
    return dict(load_profiles(Path(spec.nccl_file) if spec.nccl_file else None)[spec.nccl_profile].variables)


def _environment(spec: RunSpec, placement: Placement | None) -> dict[str, str]:
    """Variables beyond the inherited ones; what the spec itself gives holds over what is derived."""
    own = placement_env(placement) if placement else {}
    if needs_gpus(spec) and spec.tp_size > 1:
        # INFO costs nothing once the communicators stand, and only the log says what NCCL did with its variables.
        own |= {"NCCL_DEBUG": "INFO", **nccl_variables(spec)}
    return own | spec.server_env


def _matched_flags(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    if not needs_gpus(spec):
        return MATCHED_FLAGS
    # Speculative and plain servers capture other batch sizes by default.
    sizes = sorted({2**n for n in range(spec.max_running_requests.bit_length())} | {spec.max_running_requests})
    return {**MATCHED_FLAGS, **MATCHED_GPU_FLAGS, "--cuda-graph-bs-decode": tuple(map(str, sizes))}


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
    if flag_value(spec, "--device") == "cpu":
        raise UnavailableError(
            f"method {spec.method} is unavailable in {engine} on device cpu: it refuses speculation there. "
            "Run it on a GPU, or use engine reference"
        )
    if not spec.draft_model_path:
        raise SpecError(f"method {spec.method} on sglang needs draft_model_path in [engines.sglang]")


Variables = tuple[tuple[str, str], ...]


def _items(env: Mapping[str, str]) -> Variables:
    return tuple(sorted(env.items()))


@functools.cache
def engine_build(engine: Engine, python: str, env: Variables = ()) -> EngineBuild:
    """The build of the engine that `python` would start. Asked once a process.

    `env`: the variables that its server gets, since they may say where it lies (PYTHONPATH).
    """
    package = "benchlib" if engine == "reference" else engine
    try:
        result = _ask([python, "-c", BUILD_PROBE, package], env, timeout_s=30)
    except (OSError, subprocess.TimeoutExpired):
        return EngineBuild()
    lines = result.stdout.splitlines()
    version, commit = [*lines, "", ""][:2]
    plugins = sorted((name, number) for name, _, number in (line.rpartition(" ") for line in lines[2:]))
    return EngineBuild(version or None, commit or None, tuple(plugins))


@functools.cache
def engine_version(engine: Engine, python: str, env: Variables = ()) -> str | None:
    """Version of the engine that `python` would start; None where it has none."""
    return engine_build(engine, python, env).version


@functools.cache
def _known_flags(engine: Engine, python: str, env: Variables) -> frozenset[str]:
    """Flags of the installed engine: declared for the embedded one, read from `--help` for SGLang (seconds)."""
    if engine == "reference":
        return REFERENCE_FLAGS
    command = [python, "-m", MODULES[engine], "--help"]
    advice = f"Install sglang there, or set server_python or {PYTHON_VARIABLE} to an interpreter that has it"
    try:
        result = _ask(command, env, timeout_s=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"cannot ask {python} for SGLang's flags: {error}. {advice}") from error
    flags = frozenset(re.findall(r"--[a-z0-9][a-z0-9-]+", result.stdout))
    if result.returncode or "--model-path" not in flags:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"engine sglang is unavailable in {python}: {last}. {advice}")
    return flags


def _ask(command: list[str], env: Variables, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **dict(env)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=variables)


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
