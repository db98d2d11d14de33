"""benchlib measures speculative decoding of hybrid language models and proves its numbers.

The names below are the public ones. Each is imported when first used, so that `import benchlib` is light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchlib.environment import collect_environment
    from benchlib.errors import BenchlibError
    from benchlib.measure import Measurement, format_requests, measure_run, save_measurement
    from benchlib.record import (
        RequestRecord,
        RunRecord,
        ServerRecord,
        load_record,
        load_requests,
        run_folder,
    )
    from benchlib.server import Server, open_server
    from benchlib.spec import RunSpec, Sweep, Workload, load_sweep
    from benchlib.sweep import run_sweep

__all__ = [
    "BenchlibError",
    "Measurement",
    "RequestRecord",
    "RunRecord",
    "RunSpec",
    "Server",
    "ServerRecord",
    "Sweep",
    "Workload",
    "collect_environment",
    "format_requests",
    "load_record",
    "load_requests",
    "load_sweep",
    "measure_run",
    "open_server",
    "run_folder",
    "run_sweep",
    "save_measurement",
]

_MODULES = {
    "environment": ("collect_environment",),
    "errors": ("BenchlibError",),
    "measure": ("Measurement", "format_requests", "measure_run", "save_measurement"),
    "record": (
        "RequestRecord",
        "RunRecord",
        "ServerRecord",
        "load_record",
        "load_requests",
        "run_folder",
    ),
    "server": ("Server", "open_server"),
    "spec": ("RunSpec", "Sweep", "Workload", "load_sweep"),
    "sweep": ("run_sweep",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'benchlib' has no attribute {name!r}")
    return getattr(import_module(f"benchlib.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
