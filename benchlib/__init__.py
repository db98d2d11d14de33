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
    from benchlib.record import RequestRecord, RunRecord, ServerRecord, load_record, load_requests, run_folder
    from benchlib.server import Server, open_server
    from benchlib.spec import RunSpec, Sweep, Workload, load_sweep
    from benchlib.sweep import run_sweep

__all__ = [
    "BenchlibError", "Measurement", "RequestRecord", "RunRecord", "RunSpec", "Server", "ServerRecord", "Sweep",
    "Workload", "collect_environment", "format_requests", "load_record", "load_requests", "load_sweep",
    "measure_run", "open_server", "run_folder", "run_sweep", "save_measurement",
]  # fmt: skip
_MODULES = ("errors", "spec", "record", "environment", "server", "measure", "sweep")  # the lightest first


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        if name in (home := import_module(f"benchlib.{module}")).__all__:
            return getattr(home, name)
    raise AttributeError(f"module 'benchlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
