"""`python -m tests.gate`: the detection table as Markdown, for a report's appendix."""

from __future__ import annotations

import time
from collections import Counter

from benchlib.losslessness import Check
from tests.gate.harness import clean_runs, make_spec, planted_runs, serving


def _row(fault: str, budget: int, check: Check) -> str:
    figures = check.row()
    parted = [d for d in check.divergences if d.position == figures["first_divergence"]]
    gap = f"{parted[0].gap:.2g}" if parted and parted[0].gap is not None else ""
    cells = [fault, budget, f"{figures['identical']} of {figures['outputs']}", figures["first_divergence"], gap]
    largest = f"{figures['largest_gap']:.2g}" if figures["largest_gap"] is not None else ""
    return "| " + " | ".join(map(str, [*cells, largest, check.verdict])) + " |"


def main() -> None:
    """Plant every leak at every budget, then run clean servers; about a quarter hour on two cores."""
    began = time.monotonic()
    print("| planted | budget | identical | first divergence (token) | gap there (nats) | largest gap | verdict |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    with serving(make_spec("auto"), make_spec("linear")) as ((_, auto), (_, chain)):
        for fault, budget, check in planted_runs([auto, chain]):
            print(_row(fault, budget, check), flush=True)  # noqa: T201
        clean = list(clean_runs([auto, chain]))
    for budget in sorted({budget for budget, *_ in clean}):
        trees = [tree for b, tree, _ in clean if b == budget]
        same, outputs = sum(t.identical for t in trees), sum(t.outputs for t in trees)
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(t.verdict for t in trees).items())
        print(f"| none, {len(trees)} starts | {budget} | {same} of {outputs} | | | | {verdicts} |")  # noqa: T201
    chains = Counter(chain.verdict for *_, chain in clean)
    print(f"\nThe chain beside the clean starts: {dict(chains)}. {time.monotonic() - began:.0f} s in all.")  # noqa: T201


if __name__ == "__main__":
    main()
