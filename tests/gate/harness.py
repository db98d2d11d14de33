"""Campaigns of real servers, some wrong on purpose, measured and judged as any other campaign is.

Nothing here looks inside the engine: a fault is asked for by the server's environment, and found by its tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchlib.losslessness import Check, validate_campaign
from benchlib.measure import measure_run, save_measurement
from benchlib.server import Server, Starting
from benchlib.spec import RunSpec

FAULTS = ("flat-scan", "flat-window", "commit-by-count")
BUDGETS = (16, 32, 64)
CLEAN_RUNS = 50
CLEAN_BUDGETS = (15, 32, 16, 64)
# As the laptop campaign has them; a third of its rounds, since the engine decodes the same each time.
OPENINGS: dict[str, Any] = {"prompts": ["fib", "qsort", "arith", "json"], "max_new_tokens": [96]}
# Other prompts in every clean run: the same ones again would prove nothing new.
RANDOM: dict[str, Any] = {"prompts": ["a", "b", "c", "d"], "prompt_set": "random-ids", "max_new_tokens": [64]}


def make_spec(method: str, budget: int | None = None, fault: str = "", **workload: Any) -> RunSpec:
    """One condition, quickly measured; `fault` is planted in its server."""
    env = {"BENCHLIB_PLANT": fault} if fault else {}
    own = {"method": method, "tree_budget": budget, "server_env": env, "campaign": "gate"}
    return RunSpec.from_parameters({"warmups": 0, "repeats": 1, **own, **workload})


@contextmanager
def serving(*specs: RunSpec) -> Iterator[list[tuple[RunSpec, Server]]]:
    """A server of each, started side by side, each with a log of its own."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in specs]
        servers = [stack.enter_context(Starting(s, folder=f)) for s, f in zip(specs, folders, strict=True)]
        while not all([server.poll() for server in servers]):
            time.sleep(0.1)
        yield list(zip(specs, servers, strict=True))


def measure(campaign: Path, spec: RunSpec, server: Server) -> None:
    """One run of a campaign."""
    folder, record = campaign / spec.run_name, server.record.model_copy(update={"log": ""})
    found = measure_run(spec, record)
    save_measurement(folder, spec, environment={}, server=record, measurement=found)


def judge(*measured: tuple[RunSpec, Server]) -> dict[str, Check]:
    """Measure a campaign of these conditions; the speculative ones' verdicts by name."""
    with tempfile.TemporaryDirectory() as campaign:
        for spec, server in measured:
            measure(Path(campaign), spec, server)
        return {check.condition: check for check in validate_campaign(campaign).methods}


def _judge_trees(
    yardsticks: Sequence[Server], budgets: Sequence[int], fault: str, workload: dict[str, Any]
) -> list[Check]:
    """Those of DDTree servers started for it beside the running auto and chain; the chain's verdict comes last."""
    beside = [(make_spec(m, **workload), s) for m, s in zip(("auto", "linear"), yardsticks, strict=True)]
    with serving(*(make_spec("ddtree", budget, fault, **workload) for budget in budgets)) as trees:
        found = judge(*beside, *trees)
    return [*(found[f"tp1-b{budget}"] for budget in budgets), found["tp1-linear"]]


def planted_runs(yardsticks: Sequence[Server]) -> Iterator[tuple[str, int, Check]]:
    """Each leak at each budget, on the default prompts."""
    for fault in FAULTS:
        for budget, check in zip(BUDGETS, _judge_trees(yardsticks, BUDGETS, fault, OPENINGS), strict=False):
            yield fault, budget, check


def clean_runs(yardsticks: Sequence[Server], count: int = CLEAN_RUNS) -> Iterator[tuple[int, Check, Check]]:
    """(budget, its check, the chain's) of servers without a fault: two a campaign, whose prompts no other has."""
    for seed in range(count // 2):
        budgets = CLEAN_BUDGETS[2 * (seed % 2) :][:2]
        *trees, chain = _judge_trees(yardsticks, budgets, "", {**RANDOM, "seed": seed})
        yield from ((budget, tree, chain) for budget, tree in zip(budgets, trees, strict=True))
