"""Records to DataFrames: requests, rounds and cells, with what may be compared written beside every number.

- **requests**: one row a request, warm-ups and failed ones included, figures computed from its ticks.
- **rounds**: one row a timed round of a cell, plus rows `prompt="all"` that pool the same round over all prompts.
- **cells**: one row a condition and cell, pooled over its server starts.

A failed request makes its round incomplete: the round's other requests ran at a lower concurrency, so it is counted
in `n_failed` and enters no figure. Failed runs and unreadable folders are kept apart, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from benchlib import metrics
from benchlib.errors import RecordError
from benchlib.record import RequestRecord, RunRecord, load_record, load_requests

__all__ = [
    "ALL",
    "CELL_FIELDS",
    "CONDITION_FIELDS",
    "METHOD_FIELDS",
    "BrokenRun",
    "Campaign",
    "LoadedRun",
    "build_cells",
    "build_requests",
    "build_rounds",
    "condition_of",
    "device_label",
    "find_folder",
    "load_campaign",
    "load_campaigns",
    "method_label",
    "rows_of",
]

ALL = "all"
Row = dict[str, Any]

# What the method is made of: the fields in which a method differs from its baseline.
METHOD_FIELDS = ("method", "tree_budget", "block_size", "verify_tokens", "draft_model")
# With the fields below they make a condition; runs that differ in one are never pooled.
CONDITION_FIELDS = (
    "campaign",
    "engine",
    "engine_version",
    "engine_digest",
    "packages",
    "variables",
    "devices",
    "model",
    "weights",
    "simulated",
    "tp_size",
    *METHOD_FIELDS,
    "nccl_profile",
    "numa_policy",
    "max_running_requests",
    "server_args",
    "server_env",
    "prompt_set",
    "temperature",
    "ignore_eos",
    "seed",
)
CELL_FIELDS = ("prompt", "max_new_tokens", "concurrency")
_RUN_MARKS = ("record.json", "requests.jsonl", "notebook.ipynb", "server.log")


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One readable run of a campaign, finished or failed, under its folder's name."""

    campaign: str
    name: str
    record: RunRecord
    requests: Sequence[RequestRecord] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether its numbers may be used."""
        return self.record.status == "ok"

    @property
    def reason(self) -> str:
        """Why it failed; empty for a finished run."""
        return "" if self.ok else (self.record.error or "no reason was recorded")


@dataclass(frozen=True, slots=True)
class BrokenRun:
    """A run's folder that cannot be read, and why."""

    campaign: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Campaign:
    """All runs of one folder `results/<campaign>/`."""

    name: str
    runs: tuple[LoadedRun, ...]
    broken: tuple[BrokenRun, ...] = ()


def find_folder(path: Path | str) -> Path:
    """`path` as given, else below the repository: notebooks run from their own folder. RecordError if neither is."""
    repository = Path(__file__).resolve().parent.parent
    for candidate in (Path(path), repository / path):
        if candidate.is_dir():
            return candidate.resolve()
    raise RecordError(f"{path} is not a folder: give results/<campaign>, or run its sweep with `benchlib sweep` first")


def load_campaign(path: Path | str) -> Campaign:
    """Read every run below `results/<campaign>/`; RecordError when it holds none at all."""
    folder = find_folder(path)
    runs, broken = [], []
    for child in sorted(folder.iterdir()):
        if child.name.startswith(".") or not any((child / mark).exists() for mark in _RUN_MARKS):
            continue
        try:
            record = load_record(child)
            requests = load_requests(child) if record.requests_sha256 is not None else []
            runs.append(LoadedRun(folder.name, child.name, record, requests))
        except RecordError as error:
            broken.append(BrokenRun(folder.name, child.name, str(error)))
    if not runs and not broken:
        raise RecordError(f"{path} holds no run: expected folders such as {folder.name}/tp1-auto/record.json")
    return Campaign(folder.name, tuple(runs), tuple(broken))


def load_campaigns(paths: Iterable[Path | str]) -> list[Campaign]:
    """Read several campaign folders; RecordError when one is missing, empty or named as another is."""
    campaigns = [load_campaign(path) for path in paths]
    names = [campaign.name for campaign in campaigns]
    if len(set(names)) != len(names):
        raise RecordError(f"two campaigns have one name: {names}; rename a folder")
    return campaigns


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Rows as plain dicts in which missing is None."""
    plain = frame.astype(object)
    return [{str(k): v for k, v in row.items()} for row in plain.where(plain.notna(), None).to_dict("records")]


def build_requests(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """One row a request of every readable run, with its run's condition; times in seconds."""
    rows: list[Row] = []
    for run in (run for campaign in campaigns for run in campaign.runs):
        condition = condition_of(run)
        digests = {_cell(c): c.prompt_sha256 for c in run.record.cells}
        rows += [{**condition, **_request(r), "prompt_sha256": digests.get(_cell(r))} for r in run.requests]
    return pd.DataFrame(rows).convert_dtypes()


def build_rounds(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a timed round of finished runs; `prompt="all"` rows where every prompt's round is complete."""
    timed = [r for r in rows_of(requests) if r["run_ok"] and not r["warmup"]]
    rounds = [_round(group) for group in _grouped(timed, ("campaign", "run", *CELL_FIELDS, "round"))]
    pooled = [
        _pooled_round(group)
        for group in _grouped(rounds, ("campaign", "run", "max_new_tokens", "concurrency", "round"))
        if all(r["complete"] for r in group) and len(group) == group[0]["n_prompts"]
    ]
    return pd.DataFrame(rounds + pooled).convert_dtypes()


def build_cells(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row a condition and cell, pooled over starts; `tpot_starts` keeps each start's rounds for the intervals."""
    keys = (*CONDITION_FIELDS, *CELL_FIELDS)
    rows = [_cell_row(group) for group in _grouped(rows_of(rounds), keys)]
    return pd.DataFrame(rows).convert_dtypes()


def _grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _cell(row: Any) -> tuple[str, int, int]:
    return row.prompt, row.max_new_tokens, row.concurrency


def condition_of(run: LoadedRun) -> Row:
    """The fields of a run that say what was measured, as every row of its requests carries them."""
    spec, server = run.record.spec, run.record.server
    flags = [*spec.server_args, *spec.server_env, *(server.env if server else {})]
    identity = run.record.environment.get("identity") or {}
    return {
        **spec.model_dump(mode="json", include=set(CONDITION_FIELDS) - {"campaign"}),
        "campaign": run.campaign,
        "run": run.name,
        "run_ok": run.ok,
        "start": spec.start,
        "label": method_label(spec.method, spec.tree_budget),
        "engine_version": (server and server.version) or identity.get("engine_version"),
        "engine_digest": identity.get("engine_digest"),
        "packages": _joined(identity.get("packages")),
        "variables": _joined(identity.get("variables")),
        "devices": device_label(run.record),
        "model": PurePath(spec.model_path).name or None,
        "draft_model": PurePath(spec.draft_model_path).name or None,
        "simulated": any("SIMULATE_ACC" in f.upper().replace("-", "_") for f in flags),
        "verify_tokens": server.verify_tokens if server else None,
        "server_args": " ".join(spec.server_args),
        "server_env": _joined(spec.server_env),
        "n_prompts": len(spec.workload.prompts),
        "prompt_set": spec.workload.prompt_set,
        "temperature": spec.workload.temperature,
        "ignore_eos": spec.workload.ignore_eos,
    }


def method_label(method: str, tree_budget: int | None) -> str:
    """A method's name in tables and figures: `DDTree b16`."""
    names = {"auto": "autoregressive", "linear": "DFlash linear"}
    return names.get(method, f"DDTree b{tree_budget}")


def device_label(record: RunRecord) -> str:
    """Model names of the devices that the server used, from its record: `NVIDIA H200`; never typed in."""
    environment, server = record.environment, record.server
    on_cpu = str(server.info.get("device", "") if server else "").startswith("cpu")
    gpus = [] if on_cpu else environment.get("gpus") or []
    names = sorted({str(gpu["name"]) for gpu in gpus})
    return ", ".join(names) or str(environment.get("cpu_model") or "device not recorded")


def _joined(pairs: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(dict(pairs or {}).items()))


def _request(r: RequestRecord) -> Row:
    window = metrics.decode_window(r.ticks)
    last = r.ticks[-1] if r.ticks else (None, None)
    stop = r.end_s if r.end_s is not None else last[0]
    return {
        **{k: getattr(r, k) for k in (*CELL_FIELDS, "round", "stream", "warmup", "sent_s", "error")},
        "completion_tokens": r.completion_tokens if r.completion_tokens is not None else last[1],
        "stop_s": None if stop is None else r.sent_s + stop,
        "decode_s": window and window[0],
        "decode_tokens": window and window[1],
        "decode_steps": metrics.decode_steps(r.ticks, r.verify_ct),
        "ttft_s": metrics.ttft_s(r.ticks),
        "tpot_s": metrics.tpot_s(r.ticks),
        "decode_tok_s": metrics.decode_tok_s(r.ticks),
        "e2e_latency_s": metrics.e2e_latency_s(r.ticks, r.end_s),
        "verify_ct": r.verify_ct,
        "correct_drafts": r.correct_drafts,
        "drafts_histogram": r.drafts_histogram,
        "accept_length": metrics.accept_length([(r.correct_drafts, r.verify_ct)]),
        "finish_reason": r.finish_reason,
    }


def _round(group: list[Row]) -> Row:
    good = [r for r in group if r["error"] is None and r["stop_s"] is not None]
    spans = [(r["sent_s"], r["stop_s"], r["completion_tokens"] or 0) for r in good]
    steps = [(r["correct_drafts"], r["verify_ct"]) for r in good]
    return {
        **_shared(group[0]),
        "n_requests": len(good),
        "n_failed": len(group) - len(good),
        "complete": len(good) == len(group),
        "error": next((r["error"] for r in group if r["error"]), None),
        **{key: _sum(r[key] for r in good) for key in _SUMMED},
        "window_s": max(s[1] for s in spans) - min(s[0] for s in spans) if spans else None,
        "ttft_s": _mean(r["ttft_s"] for r in good),
        "accept_length_macro": metrics.accept_length_macro(steps),
        "drafts_histogram": metrics.add_histograms(r["drafts_histogram"] for r in good),
        "peak_concurrency": metrics.peak_concurrency(s[:2] for s in spans),
    }


def _pooled_round(group: list[Row]) -> Row:
    return {
        **_shared(group[0]),
        "prompt": ALL,
        "prompt_sha256": " ".join(sorted(str(r["prompt_sha256"]) for r in group)),
        "complete": True,
        "error": None,
        **{key: _sum(r[key] for r in group) for key in (*_SUMMED, "n_requests", "n_failed", "window_s")},
        "ttft_s": _mean(r["ttft_s"] for r in group),
        "accept_length_macro": _mean(r["accept_length_macro"] for r in group),
        "drafts_histogram": metrics.add_histograms(r["drafts_histogram"] for r in group),
        "peak_concurrency": max(r["peak_concurrency"] for r in group),
    }


_SUMMED = ("decode_s", "decode_tokens", "decode_steps", "completion_tokens", "verify_ct", "correct_drafts")


def _shared(row: Row) -> Row:
    keys = ("run", "label", "start", "n_prompts", *CONDITION_FIELDS, *CELL_FIELDS, "round", "prompt_sha256")
    return {key: row[key] for key in keys}


def _cell_row(group: list[Row]) -> Row:
    good = [r for r in group if r["complete"]]
    starts = [
        tuple((r["decode_s"], r["decode_tokens"]) for r in start if r["decode_tokens"])
        for start in _grouped(good, ("run",))
    ]
    length = metrics.accept_length((r["correct_drafts"], r["verify_ct"]) for r in good)
    histogram = metrics.add_histograms(r["drafts_histogram"] for r in good)
    tokens, window = _sum(r["completion_tokens"] for r in good), _sum(r["window_s"] for r in good)
    return {
        **{k: group[0][k] for k in ("run", "label", *CONDITION_FIELDS, *CELL_FIELDS, "prompt_sha256")},
        "n_starts": len({r["run"] for r in good}),
        "n_rounds": len(good),
        "n_requests": sum(r["n_requests"] for r in good),
        "n_failed": sum(r["n_failed"] for r in group),
        "error": next((r["error"] for r in group if r["error"]), None),
        "tpot_starts": tuple(s for s in starts if s),
        "ttft_s": _mean(r["ttft_s"] for r in good),
        "output_throughput_tok_s": tokens / window if tokens and window else None,
        "accept_length": length,
        "accept_length_macro": _mean(r["accept_length_macro"] for r in good),
        "drafts_histogram": histogram,
        "full_block_share": metrics.full_block_share(histogram, group[0]["block_size"]),
        "step_ms": metrics.step_ms(_sum(r["decode_s"] for r in good), _sum(r["decode_steps"] for r in good)),
        "budget_efficiency": metrics.budget_efficiency(length, group[0]["verify_tokens"]),
        "peak_concurrency": max((r["peak_concurrency"] for r in good), default=None),
    }


def _known(values: Iterable[float | None]) -> list[float] | None:
    rows = list(values)
    known = [v for v in rows if v is not None]
    return known if known and len(known) == len(rows) else None


def _reduced(values: Iterable[float | None], how: Callable[[list[float]], float]) -> float | None:
    known = _known(values)
    return how(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    return _reduced(values, sum)


def _mean(values: Iterable[float | None]) -> float | None:
    return _reduced(values, lambda known: sum(known) / len(known))
