"""Where and with what a run was made: provenance for the record, and the part of it that makes two runs the same run.

No host or user name is kept, and nothing about the machine is typed in. Collecting takes well under a second.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchlib.engines import engine_build, nccl_variables, server_python
from benchlib.model_files import read_model
from benchlib.spec import RunSpec, content_hash
from benchlib.tuning import read_tuning, tuning_facts

__all__ = ["collect_environment", "list_gpus", "read_git"]

PACKAGES = ("benchlib", "ipykernel", "nvidia-ml-py", "papermill", "pydantic", "torch", "uvloop")
# Versions whose change makes an old measurement another measurement.
IDENTITY_PACKAGES = ("benchlib", "torch", "uvloop")
VARIABLE_PREFIXES = ("NCCL_", "CUDA_", "SGLANG_", "OMP_", "MKL_", "TORCH_")
SECRETS = ("KEY", "TOKEN", "PASSWORD", "SECRET")
ENGINE_FILES = (".py", ".safetensors", ".json")


def collect_environment(spec: RunSpec) -> dict[str, Any]:
    """Provenance of a run about to start; `identity` is what resuming compares. Unknown values are None."""
    versions = {name: _version(name) for name in PACKAGES}
    build = engine_build(spec.engine, server_python(spec), tuple(sorted(spec.server_env.items())))
    engine = {
        "engine_version": build.version,
        "engine_commit": build.commit,
        "engine_plugins": dict(build.plugins),
    }
    gpus = list_gpus()
    cpu = _line("/proc/cpuinfo", "model name") or platform.processor() or None
    return {
        "python": platform.python_version(),
        "packages": versions,
        **engine,
        "git": read_git(Path(__file__).parent),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_model": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "boot_id": _line("/proc/sys/kernel/random/boot_id"),
        "load_average_1m": psutil.getloadavg()[0],
        "gpus": gpus,
        "model_config": _model_config(spec),
        "tuning": tuning_facts(read_tuning()),
        "identity": {
            "packages": {name: versions[name] for name in IDENTITY_PACKAGES},
            **engine,
            "engine_digest": _engine_digest() if spec.engine == "reference" else None,
            "variables": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(VARIABLE_PREFIXES) and not any(word in name for word in SECRETS)
            },
            # By content: a profile of the user's own may change under its name.
            "nccl": content_hash(variables) if (variables := nccl_variables(spec)) else None,
            "gpus": [gpu["uuid"] for gpu in gpus],
            "cpu_model": cpu,
        },
    }


def _model_config(spec: RunSpec) -> dict[str, Any] | None:
    """The target's config.json, by which the bytes of a step are counted; None where there is none here."""
    files = read_model(spec.model_path, env=os.environ, weights=False) if spec.model_path else None
    if files is None or files.config is None:
        return None
    return {key: value for key, value in files.config.items() if key != "vision_config"}


def list_gpus() -> list[dict[str, Any]]:
    """UUID, name, PCI bus and driver of each NVIDIA GPU; empty where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            {
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "name": pynvml.nvmlDeviceGetName(handle),
                "pci_bus_id": pynvml.nvmlDeviceGetPciInfo(handle).busId,
                "driver": driver,
            }
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def read_git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it, of the repository that tracks `folder`; None without one."""
    # A package installed inside somebody's repository is not part of that repository.
    if not _git(folder, "ls-files", "."):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)} if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _line(path: str, key: str = "") -> str | None:
    """The first line of a file in /proc that begins with `key`: what follows its colon, or all of it without a key."""
    with suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return (line.partition(":")[2] if key else line).strip()
    return None


@functools.cache
def _engine_digest() -> str:
    """Of the embedded engine's code and weights: a retrained model is another system under test."""
    folder = Path(__file__).with_name("reference_engine")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in ENGINE_FILES and path.is_file():
            digest.update(f"{path.relative_to(folder)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
