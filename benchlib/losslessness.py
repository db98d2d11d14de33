"""Is a speculative output the target's own? Greedy outputs are held against auto's, token by token.

Equality alone decides nothing: other kernels sum in another order, and a tie in the target's own logits may fall either
way. So where an output parts from auto's, auto's own gap there (`gaps`) is looked up: a near tie is numerics, a clear
gap a fault. Two floors stand beside it: auto over restarts, and the same drafter's chain, which has a verification's
kernels and no tree.

Near is what the arithmetic rounds (`NEAR_TIE`), or twice the floors' largest gap: the largest of a few falls short. An
auto that leaves its own output at more than `OWN_DOUBT` near ties is no measure: then nothing that differs is judged. A
tree whose divergences are all near ties must not part more often or earlier than the chain either: a permutation test
on each prompt's first divergence, never being last. Starts and repeats of one prompt are no further evidence.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchlib.errors import LosslessnessError, RecordError
from benchlib.gaps import PromptGaps, load_gaps
from benchlib.metrics import repetition_share
from benchlib.record import RequestRecord, RunRecord, load_record, load_requests

__all__ = [
    *("FALSE_ALARM", "NEAR_TIE", "Check", "Divergence", "Validation", "Verdict", "first_divergence"),
    *("not_lossless", "unjudged_runs", "validate_campaign", "validate_loaded"),
]

Verdict = Literal["lossless", "within numeric noise", "cannot tell", "NOT lossless"]
WORST: tuple[Verdict, ...] = ("lossless", "within numeric noise", "cannot tell", "NOT lossless")
# Nats, by the server's dtype. Logits of a half-precision model lie around 16 to 32, where neighbours are 0.125 apart,
# and each of the two candidates may move by one.
NEAR_TIE = {"float32": 1e-3, "half": 0.25}
OWN_DOUBT = 2
FALSE_ALARM, PERMUTATIONS = 0.02, 9999
# What two runs share that decode the same text; of several such, one alike in PLACED too is preferred.
SAME = ("engine", "model_path", "weights", "seed", "tp_size")
PLACED = ("nccl_profile", "numa_policy", "variant")
Key = tuple[str, int, int]  # prompt digest, max_new_tokens, concurrency


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where one output parts from another. `gap`: how far (nats) `got` lay behind auto's best; None: it was not asked.

    `beyond`: `got` is none of the best that were asked for, and lies at least as far behind as the last of them.
    """

    run: str
    prompt: str
    max_new_tokens: int
    concurrency: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None
    beyond: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One condition's outputs beside another's, and what is said of them; `near_tie` is what counted as one (nats).

    `firsts` has each prompt's median first divergence, None for never; positions count from 0.
    """

    condition: str
    against: str
    outputs: int = 0
    identical: int = 0
    firsts: tuple[int | None, ...] = ()
    divergences: tuple[Divergence, ...] = field(default=(), repr=False)
    repetition: float | None = None
    verdict: Verdict = "cannot tell"
    reason: str = ""
    near_tie: float | None = None

    def row(self) -> dict[str, Any]:
        """Its figures as one flat row; None where there is none."""
        parted = self.divergences
        return {
            **{name: getattr(self, name) for name in ("condition", "against", "verdict", "outputs", "identical")},
            "share_identical": self.identical / self.outputs if self.outputs else None,
            "first_divergence": min((d.position for d in parted), default=None),
            "largest_gap": max((d.gap for d in parted if d.gap is not None), default=None),
            "near_tie": self.near_tie,
            "repetition": self.repetition,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """A campaign's speculative conditions judged, the floors beside them, its budgets held against one another."""

    campaign: str
    methods: tuple[Check, ...]
    floors: tuple[Check, ...]
    budgets: tuple[Check, ...]
    runs: Mapping[str, str] = field(repr=False)  # name of each finished run: its condition

    def require(self, unjudged: Mapping[str, str] | None = None) -> None:
        """The gate: LosslessnessError that names what is NOT lossless, or was not judged (`unjudged_runs`), and why."""
        if bad := [f"{check.condition}: {check.reason}" for check in self.methods if check.verdict == "NOT lossless"]:
            raise LosslessnessError(f"{self.campaign} is NOT lossless, its speedups are struck: {'; '.join(bad)}")
        if unjudged:
            runs = "; ".join(f"{name}: {reason}" for name, reason in unjudged.items())
            raise LosslessnessError(f"{len(unjudged)} runs of {self.campaign} were not judged: {runs}")

    @property
    def verdict(self) -> Verdict:
        """The worst of all; a campaign without a speculative method cannot tell."""
        return max((check.verdict for check in self.methods), key=WORST.index, default="cannot tell")

    def to_json(self) -> dict[str, Any]:
        """Plain types; floors and budgets are comparisons without a verdict."""
        methods = [{**c.row(), "divergences": [asdict(d) for d in c.divergences]} for c in self.methods]
        silent = ("verdict", "reason", "near_tie")
        others = {
            name: [{k: v for k, v in c.row().items() if k not in silent} for c in getattr(self, name)]
            for name in ("floors", "budgets")
        }
        return {"campaign": self.campaign, "verdict": self.verdict, "methods": methods, **others}


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    record: RunRecord
    requests: Sequence[RequestRecord]
    gaps: Mapping[str, PromptGaps]

    @property
    def condition(self) -> str:
        return self.record.spec.condition_name

    @property
    def method(self) -> str:
        return self.record.spec.method

    def is_like(self, other: _Run, *fields: str) -> bool:
        return all(getattr(self.record.spec, f) == getattr(other.record.spec, f) for f in fields)

    def outputs(self) -> Iterator[tuple[Key, RequestRecord, tuple[int, ...]]]:
        """Its whole timed ones."""
        digests = {cell.prompt: cell.prompt_sha256 for cell in self.record.cells}
        for r in self.requests:
            if r.output_ids and not r.warmup and not r.error and r.prompt in digests:
                yield (digests[r.prompt], r.max_new_tokens, r.concurrency), r, r.output_ids


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, an early end included; None: they are equal."""
    return next((i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def validate_campaign(folder: Path | str) -> Validation:
    """Judge every speculative condition of `results/<campaign>/`. RecordError where no run is finished."""
    if not (runs := list(_load(Path(folder)))):
        raise RecordError(f"{folder} holds no finished run: give results/<campaign>, or run its sweep first")
    return _validate(Path(folder).resolve().name, runs)


def _validate(campaign: str, runs: Sequence[_Run]) -> Validation:
    checks: dict[str, Check] = {}
    floors: dict[str, Check] = {}
    # Chains first: trees are held against them.
    for run in sorted(runs, key=lambda r: r.method != "linear"):
        if run.method != "auto" and run.condition not in checks:
            checks[run.condition] = _judge(run, runs, checks, floors)
    chains = {r.condition for r in runs if r.method == "linear"}
    floors |= {name: check for name, check in checks.items() if name in chains and check.outputs}
    trees = {r.condition: r for r in runs if r.method == "ddtree" and not _untold(r)}
    budgets = [
        _compare(_of(b, runs), _of(a, runs), {})
        for a, b in itertools.combinations(trees.values(), 2)
        if a.is_like(b, *SAME, *PLACED)
    ]
    names = {run.name: run.condition for run in runs}
    return Validation(campaign, (*checks.values(),), (*floors.values(),), tuple(budgets), names)


def validate_loaded(folder: Path | str, loaded: Iterable[tuple[str, RunRecord, Sequence[RequestRecord]]]) -> Validation:
    """As `validate_campaign`, of runs (name, record, requests) that were read already; of none, an empty one."""
    folder = Path(folder)
    runs = [_Run(n, record, rs, _known_gaps(folder / n)) for n, record, rs in loaded if record.status == "ok"]
    return _validate(folder.name, runs)


def not_lossless(found: Validation) -> dict[str, str]:
    """Why speedups are struck, by run name: every start of every condition that is NOT lossless; empty for none."""
    bad = {check.condition: check.reason for check in found.methods if check.verdict == "NOT lossless"}
    return {name: bad[condition] for name, condition in found.runs.items() if condition in bad}


def _known_gaps(folder: Path) -> dict[str, PromptGaps]:
    """None where the file is broken: the figures stand without it, and `validate` says what is wrong with it."""
    try:
        return load_gaps(folder)
    except RecordError:
        return {}


def unjudged_runs(folder: Path | str) -> dict[str, str]:
    """Runs of a campaign that nothing can be said of, failed, cut or unreadable, with the reason of each."""
    found = {}
    for path in sorted(Path(folder).glob("*/")):
        try:
            record = load_record(path)
            if record.status != "ok":
                found[path.name] = f"failed: {record.error}"
        except RecordError as error:
            if any((path / mark).exists() for mark in ("record.json", "requests.jsonl", "server.log")):
                found[path.name] = str(error)
    return found


def _load(folder: Path) -> Iterator[_Run]:
    for path in sorted(folder.glob("*/record.json")):
        try:
            record = load_record(path.parent)
            requests = load_requests(path.parent) if record.status == "ok" else None
        except RecordError:  # the campaign's tables name every run that cannot be read
            continue
        if requests is not None:
            yield _Run(path.parent.name, record, requests, load_gaps(path.parent))


def _of(run: _Run, runs: Sequence[_Run]) -> list[_Run]:
    return [r for r in runs if r.condition == run.condition]


def _untold(run: _Run) -> str:
    """Why its outputs say nothing of losslessness; empty where they do."""
    spec, server = run.record.spec, run.record.server
    flags = [*spec.server_args, *spec.server_env, *(server.env if server else {})]
    if any("SIMULATE_ACC" in flag.upper().replace("-", "_") for flag in flags):
        return "acceptance was forced"
    return "outputs are sampled: compare their distribution" if spec.workload.temperature > 0 else ""


def _nearest(run: _Run, runs: Sequence[_Run], method: str, *fields: str) -> list[_Run]:
    """All starts of the other method's condition that decodes the same and is placed most alike."""
    alike = [r for r in runs if r.method == method and r.is_like(run, *SAME, *fields) and not _untold(r)]
    best = next((r for r in alike if r.is_like(run, *PLACED)), alike[0] if alike else None)
    return _of(best, alike) if best else []


def _judge(run: _Run, runs: Sequence[_Run], checks: Mapping[str, Check], floors: dict[str, Check]) -> Check:
    autos = sorted(_nearest(run, runs, "auto"), key=lambda r: not r.gaps)  # the one that was asked comes first
    if why := _untold(run) or ("" if autos else f"no auto run of the same model at TP {run.record.spec.tp_size}"):
        return Check(run.condition, "auto", reason=why)
    auto = autos[0]
    if autos[1:] and auto.condition not in floors:
        floors[auto.condition] = _compare(autos[1:], [auto], auto.gaps)
    chain = None
    if run.method == "ddtree":
        near = _nearest(run, runs, "linear", "draft_model_path", "block_size")
        # What is wrong itself is no yardstick.
        chain = next((c for r in near if (c := checks[r.condition]).outputs and c.verdict != "NOT lossless"), None)
    own = floors.get(auto.condition)
    dtype = str((auto.record.server.info if auto.record.server else {}).get("dtype"))
    tie = NEAR_TIE.get(dtype, NEAR_TIE["half"])
    exact = [d.gap for floor in (own, chain) if floor for d in floor.divergences if d.gap is not None and not d.beyond]
    limit = max([tie, *(2 * gap for gap in exact if gap <= OWN_DOUBT * tie)])
    check = _compare(_of(run, runs), [auto], auto.gaps)
    verdict, reason = _verdict(check, chain, limit)
    if check.divergences and own and (doubt := _own_doubt(own, OWN_DOUBT * tie)):
        verdict, reason = "cannot tell", doubt
    return replace(check, verdict=verdict, reason=reason, near_tie=limit)


def _own_doubt(own: Check, most: float) -> str:
    """Why auto is no measure: a restart of it left its own output where that was no near tie; empty where none did."""
    for d in own.divergences:
        if _ended_apart(d) or (d.gap is not None and d.gap > most):
            how = "its output ended elsewhere" if _ended_apart(d) else f"for a token {d.gap:.2g} nats behind"
            return f"auto is not its own: {d.run} left auto's first output at token {d.position} of {d.prompt}, {how}"
    return ""


def _ended_apart(d: Divergence) -> bool:
    """One of the two is the other's beginning: no choice of a token explains it."""
    return d.got is None or d.expected is None


def _compare(runs: Sequence[_Run], others: Sequence[_Run], gaps: Mapping[str, PromptGaps]) -> Check:
    """A condition's runs beside another's, of whose outputs of a cell the most frequent one counts."""
    held: dict[Key, Counter[tuple[int, ...]]] = {}
    for key, _, ids in (output for other in others for output in other.outputs()):
        held.setdefault(key, Counter())[ids] += 1
    count, parted, shares = 0, [], []
    firsts: dict[str, list[float]] = {}
    for run in runs:
        for key, request, ids in (output for output in run.outputs() if output[0] in held):
            expected = held[key].most_common(1)[0][0]
            position = first_divergence(expected, ids)
            count += 1
            shares.append(repetition_share(ids))
            firsts.setdefault(key[0], []).append(math.inf if position is None else position)
            if position is not None:
                parted.append(_divergence(run, request, position, expected, ids, gaps.get(key[0])))
    medians = [statistics.median_low(positions) for positions in firsts.values()]
    return Check(
        runs[0].condition,
        others[0].condition,
        outputs=count,
        identical=count - len(parted),
        firsts=tuple(None if m == math.inf else int(m) for m in medians),
        divergences=tuple(parted),
        repetition=max((share for share in shares if share is not None), default=None),
    )


def _divergence(
    run: _Run, r: RequestRecord, at: int, expected: Sequence[int], ids: Sequence[int], asked: PromptGaps | None
) -> Divergence:
    here, there = (tokens[at] if at < len(tokens) else None for tokens in (ids, expected))
    gap, beyond = None, False
    # What auto was asked holds here only while both have read the same tokens.
    if asked and at < len(asked.gaps) and asked.output_ids[:at] == tuple(ids[:at]):
        gap, among = asked.behind(at, here)
        beyond = not among
    return Divergence(run.name, r.prompt, r.max_new_tokens, r.concurrency, at, there, here, gap, beyond)


def _verdict(check: Check, chain: Check | None, limit: float) -> tuple[Verdict, str]:
    parted = check.divergences
    if not check.outputs:
        return "cannot tell", "auto has no output of the same prompt, length and concurrency"
    if not parted:
        return "lossless", ""
    of = f"{len(parted)} of {check.outputs} outputs differ from auto's"
    if clear := [d for d in parted if _ended_apart(d) or (d.gap is not None and d.gap > limit)]:
        d = max(clear, key=lambda d: (not _ended_apart(d), d.gap or 0.0))
        at = f"{d.run} left it at token {d.position} of {d.prompt}"
        if _ended_apart(d):
            how = "it ended and auto went on" if d.got is None else "it went on and auto had ended"
            return "NOT lossless", f"{of}: {at}, where {how}"
        least = "at least " * d.beyond
        return "NOT lossless", f"{of}: {at} for one {least}{d.gap:.2g} nats behind auto's (a tie: up to {limit:.2g})"
    theirs = f"of the chain's {len(chain.divergences)} of {chain.outputs}" if chain else "no chain stands beside"
    if chain and (p := _earlier(check, chain)) <= FALSE_ALARM:
        return "NOT lossless", f"{of}, {theirs}: more often or earlier (p = {p:.2g})"
    if unknown := sum(d.gap is None or d.beyond for d in parted):
        return "cannot tell", f"{of}, {theirs}; how far the token lay behind auto's is not known at {unknown} of these"
    return "within numeric noise", f"{of}, all at near ties (up to {limit:.2g} nats); {theirs}"


def _earlier(check: Check, chain: Check) -> float:
    """p of the check's first divergences being no earlier than the chain's, by permuted ranks; ties share theirs."""
    ours, theirs = ([math.inf if f is None else float(f) for f in c.firsts] for c in (check, chain))
    ordered, draw = sorted([*ours, *theirs]), random.Random(0)
    ranks = {value: ordered.index(value) + ordered.count(value) / 2 for value in ordered}
    seen, pooled, as_early = sum(ranks[f] for f in ours), [ranks[f] for f in ordered], 0
    for _ in range(PERMUTATIONS):
        draw.shuffle(pooled)
        as_early += sum(pooled[: len(ours)]) <= seen
    return (1 + as_early) / (1 + PERMUTATIONS)
