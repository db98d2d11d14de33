"""The command `validate`: is each method's output the target's own? Exit 3 where one's is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchlib.cli_machine import GATE_FAILED, RESULTS, JsonOption, find_campaign

__all__ = ["app"]

app = typer.Typer()
COLUMNS = ("condition", "verdict", "against", "outputs", "identical", "first_divergence", "largest_gap", "repetition")


@app.command()
def validate(
    campaign: Annotated[str, typer.Argument(help="a campaign's folder, or its name under --results")],
    results: Annotated[Path, typer.Option("--results", help="folder of the campaigns")] = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Hold every method's outputs against auto's, token by token; exit 3 where one is NOT lossless or not judged.

    `cannot tell` is no alarm: it says that the evidence is missing, and which.
    """
    folder = find_campaign(campaign, results)
    from benchlib.losslessness import unjudged_runs, validate_campaign

    found = validate_campaign(folder).to_json() | {"not_judged": unjudged_runs(folder)}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{found['campaign']}: {found['verdict']}\n\n{_table(found['methods'], COLUMNS)}")
        apart = [row for row in found["budgets"] if row["identical"] < row["outputs"]]
        for title, rows in (("floors", found["floors"]), ("budgets that differ", apart)):
            if rows:
                typer.echo(f"\n{title}\n{_table(rows, [c for c in COLUMNS if c != 'verdict'])}")
        for row in (row for row in found["methods"] if row["reason"]):
            typer.echo(f"\n{row['condition']}: {row['verdict']}: {row['reason']}")
        for name, reason in found["not_judged"].items():
            typer.echo(f"\n{name} was not judged: {reason}")
    if found["not_judged"]:
        raise typer.Exit(GATE_FAILED)
    raise typer.Exit(GATE_FAILED if found["verdict"] == "NOT lossless" else 0)


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Columns two spaces apart; what is missing stays empty."""
    lines = [[c.replace("_", " ") for c in columns], *([_cell(row[c]) for c in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)
