"""Records to DataFrames: requests, rounds and cells, with what may be compared written beside every number.

- **requests**: one row a request, warm-ups and failed ones included, figures computed from its ticks.
- **rounds**: one row a timed round of a cell, plus rows `prompt="all"` that pool the same round over all prompts.
- **cells**: one row a condition and cell, pooled over its server starts.
- **provenance**, **warnings**, **failures**: the fine print, as texts.

A failed request makes its round incomplete: the round's other requests ran at a lower concurrency, so it is counted
in `n_failed` and enters no figure. Failed runs and unreadable folders are kept apart, each with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from benchlib import metrics
from benchlib.ceilings import Bandwidth, load_bandwidth
from benchlib.draft_tree import DraftTree, load_draft_tree
from benchlib.errors import RecordError
from benchlib.losslessness import Validation, not_lossless, validate_loaded
from benchlib.record import RequestRecord, RunRecord, load_record, load_requests
from benchlib.spec import RunSpec
from benchlib.telemetry import TelemetryRecord, counter_energy_j, energy_j, load_telemetry, throttled_share

__all__ = [
    *("ALL", "CELL_FIELDS", "CONDITION_FIELDS", "METHOD_FIELDS", "Campaign", "LoadedRun", "build_cells"),
    *("build_failures", "build_provenance", "build_requests", "build_rounds", "build_warnings", "condense_warnings"),
    "condition_of",
    *("condition_label", "device_label", "find_file", "find_folder", "grouped", "load_campaign", "load_campaigns"),
    *("DETECTION", "build_detection", "build_validation", "load_run", "method_label", "rows_of"),
]

ALL = "all"
ROOT = Path(__file__).resolve().parents[1]
DETECTION = ROOT / "report" / "detection.json"
Row = dict[str, Any]

# What the method is made of: the fields in which a method differs from its baseline.
METHOD_FIELDS = ("method", "tree_budget", "block_size", "verify_tokens", "draft_model")
# With the fields below they make a condition; runs that differ in one are never pooled.
CONDITION_FIELDS = (
    *("campaign", "engine", "engine_version", "engine_commit", "engine_digest", "packages", "variables", "devices"),
    *("model", "weights", "simulated", "tp_size", *METHOD_FIELDS, "nccl_profile", "numa_policy", "nccl", "serving"),
    *("max_running_requests", "server_args", "server_env", "prompt_set", "temperature", "ignore_eos", "seed"),
)
CELL_FIELDS = ("prompt", "max_new_tokens", "concurrency")
# What the server resolved by itself: it may differ between methods under equal flags.
_SERVING = (
    *("attention_backend", "page_size", "disable_overlap_schedule", "disable_radix_cache", "mamba_ssm_dtype"),
    *("kv_cache_dtype", "sampling_backend", "cuda_graph_bs_decode", "disable_custom_all_reduce"),
)
_KEPT = ("run", "start", "label", "variant", "all_reduce", "gpus", *CONDITION_FIELDS, *CELL_FIELDS, "prompt_sha256")
_SUMMED = (
    *("n_requests", "window_s", "completion_tokens", "prompt_tokens", "decode_s", "decode_tokens", "decode_steps"),
    *("verify_ct", "correct_drafts", "forecast_tokens", "energy_j", "throttled_s"),
)
_RUN_MARKS = ("record.json", "requests.jsonl", "notebook.ipynb", "server.log")


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One readable run of a campaign, finished or failed, under its folder's name."""

    campaign: str
    name: str
    record: RunRecord
    requests: Sequence[RequestRecord] = field(repr=False)
    telemetry: TelemetryRecord | None = field(default=None, repr=False)
    draft_tree: DraftTree | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether its numbers may be used."""
        return self.record.status == "ok"

    @property
    def reason(self) -> str:
        """Why it failed; empty for a finished run."""
        return "" if self.ok else (self.record.error or "no reason was recorded")


@dataclass(frozen=True, slots=True)
class Campaign:
    """All runs of one folder `results/<campaign>/`; `broken` says by name why a run's folder cannot be read."""

    name: str
    runs: tuple[LoadedRun, ...]
    broken: dict[str, str] = field(default_factory=dict)
    bandwidth: tuple[Bandwidth, ...] = ()
    not_lossless: dict[str, str] = field(default_factory=dict)
    validation: Validation | None = None


def find_folder(path: Path | str) -> Path:
    """`path` as given, else below the repository: notebooks run from their own folder. RecordError if neither is."""
    if (found := _find(path, Path.is_dir)) is None:
        raise RecordError(
            f"{path} is not a folder: give results/<campaign>, or run its sweep by `benchlib sweep` first"
        )
    return found


def find_file(path: Path | str) -> Path:
    """A file, as given or below the repository. RecordError if neither is."""
    if (found := _find(path, Path.is_file)) is None:
        raise RecordError(f"{path} is not a file, neither here nor below the repository: give another path")
    return found


def _find(path: Path | str, fits: Callable[[Path], bool]) -> Path | None:
    places = (Path(path), ROOT / path)
    return next((place.resolve() for place in places if fits(place)), None)


def load_campaign(path: Path | str) -> Campaign:
    """Read every run below `results/<campaign>/`; RecordError when it holds none at all."""
    folder = find_folder(path)
    runs: list[LoadedRun] = []
    broken: dict[str, str] = {}
    for child in sorted(folder.iterdir()):
        if child.name.startswith(".") or not any((child / mark).exists() for mark in _RUN_MARKS):
            continue
        try:
            runs.append(load_run(child))
        except RecordError as error:
            broken[child.name] = str(error)
    if not runs and not broken:
        raise RecordError(f"{path} holds no run: expected folders such as {folder.name}/tp1-auto/record.json")
    judged = validate_loaded(folder, ((run.name, run.record, run.requests) for run in runs))
    return Campaign(folder.name, tuple(runs), broken, load_bandwidth(folder), not_lossless(judged), judged)


def load_run(path: Path | str) -> LoadedRun:
    """Read one run's folder, `results/<campaign>/<run>`; RecordError when it cannot be read."""
    folder = find_folder(path)
    record = load_record(folder)
    requests = load_requests(folder) if record.requests_sha256 is not None else []
    return LoadedRun(folder.parent.name, folder.name, record, requests, load_telemetry(folder), _drawn_tree(folder))


def _drawn_tree(folder: Path) -> DraftTree | None:
    """None where it is broken, too: no figure of the run rests on this picture."""
    try:
        return load_draft_tree(folder)
    except RecordError:
        return None


def load_campaigns(paths: Iterable[Path | str]) -> list[Campaign]:
    """Read several campaign folders; RecordError when one is missing, empty or named as another is."""
    campaigns = [load_campaign(path) for path in paths]
    names = [campaign.name for campaign in campaigns]
    if len(set(names)) != len(names):
        raise RecordError(f"two campaigns have one name: {names}; rename a folder")
    return campaigns


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Rows as plain dicts in which missing is None."""
    # Column by column: `to_dict` would look at each of a campaign's million values for its type.
    columns = [series.astype(object).where(series.notna(), None).tolist() for _, series in frame.items()]
    names = [str(name) for name in frame.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def grouped(rows: Iterable[Row], key: Callable[[Row], Any] | Sequence[str]) -> list[list[Row]]:
    """Rows that share a key (a function's value, or these fields) together, in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row) if callable(key) else tuple(row[k] for k in key), []).append(row)
    return list(groups.values())


def build_requests(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """One row a request of every readable run, with its run's condition; times in seconds."""
    rows: list[Row] = []
    for run in (run for campaign in campaigns for run in campaign.runs):
        condition = condition_of(run)
        digests = {_cell_of(c): c.prompt_sha256 for c in run.record.cells}
        mine = [{**condition, **_request(r), "prompt_sha256": digests.get(_cell_of(r))} for r in run.requests]
        for group in grouped(mine, (*CELL_FIELDS, "round", "warmup")) if run.telemetry else ():
            power = _power(group, run.telemetry)
            for row in group:
                row |= power
        rows += mine
    return pd.DataFrame(rows).convert_dtypes()


def build_rounds(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a timed round of finished runs; `prompt="all"` rows where every prompt's round is complete."""
    timed = [r for r in rows_of(requests) if r["run_ok"] and not r["warmup"]]
    rounds = [_round(group) for group in grouped(timed, ("campaign", "run", *CELL_FIELDS, "round"))]
    pooled = [
        {**group[0], **_pool(group), "prompt": ALL, "prompt_sha256": " ".join(sorted(_texts(group, "prompt_sha256")))}
        for group in grouped(rounds, ("campaign", "run", "max_new_tokens", "concurrency", "round"))
        if all(r["complete"] for r in group) and len(group) == group[0]["n_prompts"]
    ]
    return pd.DataFrame(rounds + pooled).convert_dtypes()


def build_cells(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row a condition and cell, pooled over starts; `tpot_starts` keeps each start's rounds for the intervals."""
    groups = grouped(rows_of(rounds), (*CONDITION_FIELDS, *CELL_FIELDS))
    return pd.DataFrame([_cell(group) for group in groups]).convert_dtypes()


def build_provenance(campaigns: Iterable[Campaign], *, full: bool = False) -> pd.DataFrame:
    """What the runs were made with, one row an item and distinct value: columns `item`, `value`, `runs`.

    Only the items listed here are shown: no host or user name, path, address or environment secret can slip in.
    `full` adds command lines, variables, paths and UUIDs: for oneself, and for whoever is to do it again.
    """
    runs = [run for campaign in campaigns for run in campaign.runs]
    items = pd.DataFrame([_provenance(run) | (_whole_provenance(run) if full else {}) for run in runs])
    texts = items.melt(var_name="item", value_name="value").dropna().astype(str)
    return texts.groupby(["item", "value"], sort=False).size().reset_index(name="runs")


def build_warnings(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Quality warnings, equal ones of several cells joined: columns `run`, `cells`, `warning`."""
    rows = []
    for run in (run for campaign in campaigns for run in campaign.runs):
        rows += [(run.name, warning, "whole run") for warning in run.record.warnings]
        rows += [(run.name, w, "{} {} x{}".format(*_cell_of(cell))) for cell in run.record.cells for w in cell.warnings]
    found = pd.DataFrame(rows, columns=["run", "warning", "cells"]).groupby(["run", "warning"], sort=False)
    return found["cells"].agg(", ".join).reset_index()[["run", "cells", "warning"]]


def condense_warnings(found: pd.DataFrame) -> pd.DataFrame:
    """One row a kind: columns `warning` (its code), `where`, `text`; of several texts the first, as an example."""
    rows = []
    for kind in grouped(rows_of(found), lambda row: row["warning"].partition(":")[0]):
        runs, texts = (list(dict.fromkeys(row[key] for row in kind)) for key in ("run", "warning"))
        code, _, text = texts[0].partition(": ")
        example = f"{runs[0]}, {kind[0]['cells']}: {text}" if len(texts) > 1 else text
        rows.append((code, runs[0] if len(runs) == 1 else f"{len(runs)} runs", example))
    return pd.DataFrame(rows, columns=["warning", "where", "text"])


def build_failures(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Failed and unreadable runs with the reason of each: columns `run`, `reason`."""
    rows: list[tuple[str, str]] = []
    for campaign in campaigns:
        rows += [*((run.name, run.reason) for run in campaign.runs if not run.ok), *campaign.broken.items()]
    return pd.DataFrame(rows, columns=["run", "reason"])


def build_validation(campaigns: Iterable[Campaign]) -> pd.DataFrame:
    """Each method's outputs held against auto's, token by token, one row a condition; texts."""
    rows = [
        (
            check.condition,
            check.verdict,
            f"{check.identical} of {check.outputs}",
            check.against,
            check.reason or "all outputs are auto's own",
        )
        for campaign in campaigns
        if campaign.validation
        for check in campaign.validation.methods
    ]
    return pd.DataFrame(rows, columns=["condition", "verdict", "identical outputs", "against", "why"])


def build_detection(path: Path = DETECTION) -> pd.DataFrame:
    """What the losslessness gate said of planted faults and of clean servers, one row a trial; texts.

    Empty without the file; RecordError where it is not one of `python -m tests.gate`.
    """
    columns = ["planted", "method", "identical outputs", "first divergence", "gap there (nats, at least)", "verdict"]
    if not path.exists():
        return pd.DataFrame(columns=columns)
    try:
        trials = json.loads(path.read_bytes())["trials"]
        rows = [
            (
                trial["planted"],
                trial["method"],
                f"{trial['identical']} of {trial['outputs']}",
                "never" if trial["first_divergence"] is None else f"token {trial['first_divergence']}",
                None if trial["gap_nats"] is None else f"{trial['gap_nats']:.2g}",
                ", ".join(trial["verdicts"]) + (f" ({trial['campaigns']} campaigns)" * (trial["campaigns"] > 1)),
            )
            for trial in trials
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no detection table: {error!r}. Make it with `python -m tests.gate`") from error
    return pd.DataFrame(rows, columns=columns)


def condition_of(run: LoadedRun) -> Row:
    """The fields of a run that say what was measured, as every row of its requests carries them."""
    spec, server = run.record.spec, run.record.server
    flags = [*spec.server_args, *spec.server_env, *(server.env if server else {})]
    identity = run.record.environment.get("identity") or {}
    return {
        **spec.model_dump(mode="json", include=set(CONDITION_FIELDS)),
        **spec.workload.model_dump(include=set(CONDITION_FIELDS)),
        "campaign": run.campaign,
        "run": run.name,
        "run_ok": run.ok,
        "label": condition_label(spec),
        "start": spec.start,
        "variant": spec.variant,
        "all_reduce": run.record.nccl.decode_all_reduce if run.record.nccl else None,
        "gpus": placement.label if (placement := server and server.placement) else None,
        "nccl": identity.get("nccl"),
        "engine_version": (server and server.version) or identity.get("engine_version"),
        "engine_commit": identity.get("engine_commit"),
        "engine_digest": identity.get("engine_digest"),
        "packages": _joined(identity.get("packages")),
        "variables": _joined(identity.get("variables")),
        "devices": device_label(run.record),
        "model": PurePath(spec.model_path).name or None,
        "draft_model": PurePath(spec.draft_model_path).name or None,
        "simulated": any("SIMULATE_ACC" in f.upper().replace("-", "_") for f in flags),
        "verify_tokens": server.verify_tokens if server else None,
        "serving": _joined({key: server.info[key] for key in _SERVING if server and key in server.info}),
        "server_args": " ".join(spec.server_args),
        "server_env": _joined(spec.server_env),
        "n_prompts": len(spec.workload.prompts),
    }


def method_label(method: str, tree_budget: int | None) -> str:
    """A method's name in tables and figures: `DDTree b16`."""
    return {"auto": "autoregressive", "linear": "DFlash linear"}.get(method, f"DDTree b{tree_budget}")


def condition_label(spec: RunSpec) -> str:
    """The method's name with what else sets the condition apart: `DFlash linear, NCCL pcie`, `DDTree b16, spread`."""
    parts = [method_label(spec.method, spec.tree_budget)]
    parts += [f"NCCL {spec.nccl_profile}"] * (spec.nccl_profile != "none")
    parts += [spec.numa_policy] * (spec.numa_policy != "pack") + [spec.variant] * bool(spec.variant)
    return ", ".join(parts)


def device_label(record: RunRecord) -> str:
    """Model names of the devices that the server used, from its record: `NVIDIA H200`, `AMD EPYC (CPU)`."""
    if record.server and record.server.placement:
        return ", ".join(sorted({str(name) for name in record.server.placement.names}))
    names = {str(gpu["name"]) for gpu in _gpus(record)}
    cpu = str(record.environment.get("cpu_model") or "")
    if names or not cpu or (record.environment.get("gpus") and not _device(record)):
        return ", ".join(sorted(names)) or "device not recorded"
    return cpu if "CPU" in cpu else f"{cpu} (CPU)"


def _device(record: RunRecord) -> str:
    """What the server says it runs on: `cuda`, `cpu`; empty where it never said."""
    return str((record.server and record.server.info.get("device")) or "")


def _gpus(record: RunRecord) -> list[Row]:
    """The GPUs in use: a machine may have some beside an engine on the CPU, or a server that died before it said."""
    in_use = (_device(record) or "cuda" * (record.status == "ok")).startswith("cuda")
    return record.environment.get("gpus") or [] if in_use else []


def _provenance(run: LoadedRun) -> Row:
    env, spec, condition = run.record.environment, run.record.spec, condition_of(run)
    git, packages, memory = env.get("git") or {}, env.get("packages") or {}, env.get("memory_bytes")
    return {
        "engine": " ".join(filter(None, (spec.engine, condition["engine_version"]))),
        "model": condition["model"] or "the engine's own",
        "weights": "simulated acceptance" if condition["simulated"] else spec.weights,
        "prompts": f"{spec.workload.prompt_set}: {', '.join(spec.workload.prompts)}; no chat template",
        "sampling": f"temperature {spec.workload.temperature:g}",
        "device": condition["devices"],
        "GPUs": f"TP {spec.tp_size}: {condition['gpus']}" if condition["gpus"] else None,
        "driver": next((gpu.get("driver") for gpu in _gpus(run.record)), None),
        "cores": f"{env['cores']}" if env.get("cores") else None,
        "memory": f"{memory / 2**30:.0f} GiB" if memory else None,
        "system": env.get("system"),
        "python": env.get("python"),
        "benchlib": packages.get("benchlib"),
        "torch": packages.get("torch"),
        "commit": f"{git['commit'][:12]}{' + changes' if git.get('dirty') else ''}" if git else None,
        "day": run.record.started_at[:10],
    }


def _whole_provenance(run: LoadedRun) -> Row:
    env, spec, server = run.record.environment, run.record.spec, run.record.server
    identity = env.get("identity") or {}
    return {
        "model path": spec.model_path or None,
        "draft model path": spec.draft_model_path or None,
        "command": " ".join(server.argv) if server and server.argv else None,
        "server's variables": _joined(server.env) if server else None,
        "variables": _joined(identity.get("variables")),
        "NCCL's variables": _joined(run.record.nccl.variables) if run.record.nccl else None,
        "binding": server and server.binding,
        "GPU UUIDs": ", ".join(filter(None, server.placement.uuids)) if server and server.placement else None,
        "packages": _joined(env.get("packages")),
        "tuning": _joined(env.get("tuning")),
        "boot": env.get("boot_id"),
    }


def _request(r: RequestRecord) -> Row:
    window = metrics.decode_window(r.ticks)
    last_t, last_n = r.ticks[-1] if r.ticks else (None, None)
    stop = r.end_s if r.end_s is not None else last_t
    same = (
        "round",
        "stream",
        "warmup",
        "sent_s",
        "error",
        "verify_ct",
        "correct_drafts",
        "drafts_histogram",
        "prompt_tokens",
    )
    return {
        **{k: getattr(r, k) for k in (*CELL_FIELDS, *same, "finish_reason")},
        "n_requests": 1,
        "completion_tokens": r.completion_tokens if r.completion_tokens is not None else last_n,
        "stop_s": None if stop is None else r.sent_s + stop,
        "decode_s": window and window[0],
        "decode_tokens": window and window[1],
        "decode_steps": metrics.decode_steps(r.ticks, r.verify_ct),
        "forecast_tokens": None if r.forecast_length is None else r.forecast_length * (r.verify_ct or 0),
        "ttft_s": metrics.ttft_s(r.ticks),
        "tpot_s": metrics.tpot_s(r.ticks),
        "decode_tok_s": metrics.decode_tok_s(r.ticks),
        "e2e_latency_s": metrics.e2e_latency_s(r.ticks, r.end_s),
        "accept_length": metrics.accept_length([(r.correct_drafts, r.verify_ct)]),
    }


def _power(group: list[Row], telemetry: TelemetryRecord | None) -> Row:
    """Joules of all GPUs over a round, and seconds in which the slowest of them was slowed down; None where open."""
    good = [r for r in group if r["error"] is None and r["stop_s"] is not None]
    if telemetry is None or not good:
        return {}
    window = min(r["sent_s"] for r in good), max(r["stop_s"] for r in good)
    joules, shares = [], []
    for gpu in telemetry.uuids:
        counted = counter_energy_j(telemetry.samples, gpu, *window)
        joules.append(counted if counted is not None else energy_j(telemetry.samples, gpu, *window))
        shares.append(throttled_share(telemetry.samples, gpu, *window))
    slowed = None if None in shares else max(share or 0.0 for share in shares) * (window[1] - window[0])
    return {"round_energy_j": None if None in joules else sum(j or 0.0 for j in joules), "round_throttled_s": slowed}


def _round(group: list[Row]) -> Row:
    good = [r for r in group if r["error"] is None and r["stop_s"] is not None]
    spans = [(r["sent_s"], r["stop_s"]) for r in good]
    window = max(stop for _, stop in spans) - min(start for start, _ in spans) if spans else None
    nothing = {"energy_j": None, "throttled_s": None}
    rows = [
        {**r, **nothing, "window_s": None, "peak_concurrency": None, "accept_length_macro": r["accept_length"]}
        for r in good
    ]
    return {
        **{key: group[0][key] for key in (*_KEPT, "n_prompts", "round")},
        **_pool(rows),
        "n_failed": len(group) - len(good),
        "complete": len(good) == len(group),
        "error": next(iter(_texts(group, "error")), None),
        "window_s": window,
        "energy_j": group[0].get("round_energy_j"),
        "throttled_s": group[0].get("round_throttled_s"),
        "peak_concurrency": metrics.peak_concurrency(spans),
    }


def _cell(group: list[Row]) -> Row:
    good = [r for r in group if r["complete"]]
    starts = grouped(good, ("run",))
    rounds = [[(r["decode_s"], r["decode_tokens"]) for r in s if r["decode_tokens"]] for s in starts]
    steps = [[(r["decode_s"], r["decode_steps"]) for r in s if r["decode_steps"]] for s in starts]
    pooled = _pool(good)
    length = metrics.accept_length((r["correct_drafts"], r["verify_ct"]) for r in good)
    tokens, window = pooled["completion_tokens"], pooled["window_s"]
    return {
        **{key: group[0][key] for key in _KEPT},
        **pooled,
        "n_starts": len({r["run"] for r in good}),
        "n_rounds": len(good),
        "n_failed": sum(r["n_failed"] for r in group),
        "error": next(iter(_texts(group, "error")), None),
        "tpot_starts": tuple(tuple(start) for start in rounds if start),
        "start_runs": tuple(s[0]["run"] for s, kept in zip(starts, rounds, strict=True) if kept),
        "start_numbers": tuple(s[0]["start"] for s, kept in zip(starts, rounds, strict=True) if kept),
        "step_starts": tuple(tuple(start) for start in steps if start),
        "energy_per_token_j": _per(pooled["energy_j"], tokens),
        "power_w": _per(pooled["energy_j"], window),
        "throttled_share": _per(pooled["throttled_s"], window),
        "output_throughput_tok_s": _per(tokens, window),
        "accept_length": length,
        "forecast_length": _per(pooled["forecast_tokens"], pooled["verify_ct"]),
        "full_block_share": metrics.full_block_share(pooled["drafts_histogram"], group[0]["block_size"]),
        "step_ms": metrics.step_ms(pooled["decode_s"], pooled["decode_steps"]),
        "budget_efficiency": metrics.budget_efficiency(length, group[0]["verify_tokens"]),
    }


def _pool(rows: Sequence[Row]) -> Row:
    """Requests to a round, rounds to one of all prompts or to a cell. A sum or mean that lacks a part is None."""
    return {
        **{key: _reduced(rows, key, sum) for key in _SUMMED},
        **{key: _reduced(rows, key, lambda v: sum(v) / len(v)) for key in ("ttft_s", "accept_length_macro")},
        "n_requests": sum(r["n_requests"] for r in rows),
        "drafts_histogram": metrics.add_histograms(r["drafts_histogram"] for r in rows),
        "peak_concurrency": _reduced(rows, "peak_concurrency", max),
    }


def _per(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _reduced(rows: Sequence[Row], key: str, how: Callable[[list[float]], float]) -> float | None:
    values = [r[key] for r in rows]
    return how(values) if values and None not in values else None


def _texts(rows: Iterable[Row], key: str) -> list[str]:
    return [str(r[key]) for r in rows if r[key]]


def _cell_of(row: Any) -> tuple[str, int, int]:
    return row.prompt, row.max_new_tokens, row.concurrency


def _joined(pairs: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(dict(pairs or {}).items()))
