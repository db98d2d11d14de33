"""`python -m tests.gate [FILE]`: plant every leak at every budget, run clean servers, keep what the gate said of each.

The file is `report/detection.json` unless named; the report's appendix shows it. A quarter hour on two cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchlib.environment import read_git
from benchlib.frames import DETECTION
from benchlib.losslessness import Check
from benchlib.record import write_atomic
from tests.gate.harness import CLEAN_BUDGETS, clean_runs, make_spec, planted_runs, serving


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DETECTION
    trials = []
    for trial in run_trials():
        print(trial, flush=True)  # noqa: T201
        trials.append(trial)
    git = read_git(Path(__file__).parent)
    made = {"made_at": datetime.now().astimezone().isoformat(timespec="seconds"), "git": git}
    write_atomic(out, json.dumps({**made, "trials": trials}, indent=1).encode() + b"\n")


def run_trials() -> Iterator[dict[str, Any]]:
    """One row a planted fault and budget, one a budget of the clean servers, one of the chains beside those."""
    with serving(make_spec("auto"), make_spec("linear")) as ((_, auto), (_, chain)):
        for fault, budget, check in planted_runs([auto, chain]):
            yield _trial(fault, f"b{budget}", [check])
        clean = list(clean_runs([auto, chain]))
    for budget in sorted(CLEAN_BUDGETS):
        yield _trial("nothing", f"b{budget}", [tree for b, tree, _ in clean if b == budget])
    yield _trial("nothing", "chain", [beside for *_, beside in clean[::2]])


def _trial(planted: str, method: str, checks: list[Check]) -> dict[str, Any]:
    parted = sorted((d for check in checks for d in check.divergences), key=lambda d: d.position)
    return {
        "planted": planted,
        "method": method,
        "campaigns": len(checks),
        "outputs": sum(check.outputs for check in checks),
        "identical": sum(check.identical for check in checks),
        "first_divergence": parted[0].position if parted else None,
        "gap_nats": parted[0].gap if parted else None,
        "verdicts": sorted({check.verdict for check in checks}),
    }


if __name__ == "__main__":
    main()
