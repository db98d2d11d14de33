"""What the runs were made with, what they warned of and which failed: the report's fine print as DataFrames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from benchlib.frames import Campaign, LoadedRun, condition_of

__all__ = ["build_failures", "build_provenance", "build_warnings"]

Row = dict[str, Any]


def build_provenance(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """What the runs were made with, one row an item and distinct value: columns `item`, `value`, `runs`.

    Only the items listed here are shown: no host or user name, path, address or environment secret can slip in.
    """
    seen: dict[str, dict[str, int]] = {}
    for run in (run for campaign in campaigns for run in campaign.runs):
        for item, value in _provenance(run).items():
            if value is not None:
                values = seen.setdefault(item, {})
                values[str(value)] = values.get(str(value), 0) + 1
    rows = [(item, value, n) for item, values in seen.items() for value, n in values.items()]
    return pd.DataFrame(rows, columns=["item", "value", "runs"])


def _provenance(run: LoadedRun) -> Row:
    env, spec, condition = run.record.environment, run.record.spec, condition_of(run)
    git, packages = env.get("git") or {}, env.get("packages") or {}
    memory = env.get("memory_bytes")
    return {
        "engine": " ".join(filter(None, (spec.engine, condition["engine_version"]))),
        "model": condition["model"] or "the engine's own",
        "weights": "simulated acceptance" if condition["simulated"] else spec.weights,
        "prompts": f"{spec.workload.prompt_set}: {', '.join(spec.workload.prompts)}",
        "sampling": f"temperature {spec.workload.temperature:g}",
        "device": condition["devices"],
        "driver": next((gpu.get("driver") for gpu in env.get("gpus") or []), None),
        "cores": env.get("cores"),
        "memory": f"{memory / 2**30:.0f} GiB" if memory else None,
        "system": env.get("system"),
        "python": env.get("python"),
        "benchlib": packages.get("benchlib"),
        "torch": packages.get("torch"),
        "commit": f"{git['commit'][:12]}{' + changes' if git.get('dirty') else ''}" if git else None,
        "day": run.record.started_at[:10],
    }


def build_warnings(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Quality warnings, equal ones of several cells joined: columns `run`, `cells`, `warning`."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in (run for campaign in campaigns for run in campaign.runs):
        pairs = [("whole run", w) for w in run.record.warnings]
        pairs += [(_cell_name(c), w) for c in run.record.cells for w in c.warnings]
        for cell, warning in pairs:
            found.setdefault((run.name, warning), []).append(cell)
    rows = [{"run": r, "cells": ", ".join(cells), "warning": w} for (r, w), cells in found.items()]
    return pd.DataFrame(rows, columns=["run", "cells", "warning"])


def build_failures(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Failed and unreadable runs with the reason of each: columns `run`, `reason`."""
    rows = []
    for campaign in campaigns:
        rows += [(run.name, run.reason) for run in campaign.runs if not run.ok]
        rows += [(run.name, run.reason) for run in campaign.broken]
    return pd.DataFrame(rows, columns=["run", "reason"])


def _cell_name(cell: Any) -> str:
    return f"{cell.prompt} {cell.max_new_tokens} x{cell.concurrency}"
