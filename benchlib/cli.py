"""The `benchlib` command. Thin: each command reads its options, calls one function and shows what it returned.

Exit codes: 0 ok, 1 a run failed or could not be made, 2 usage, 3 a gate failed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchlib import cli_bench, cli_compare, cli_machine, cli_validate
from benchlib.cli_machine import BusyOption, JsonOption, find_campaign, named_busy
from benchlib.errors import BenchlibError, SpecError

if TYPE_CHECKING:
    from benchlib.spec import Sweep
    from benchlib.sweep import Planned

__all__ = ["app", "main"]

app = typer.Typer(
    help="Measure speculative decoding of hybrid language models, and prove the numbers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_machine.app)
app.add_typer(cli_compare.app)
app.add_typer(cli_bench.app)
app.add_typer(cli_validate.app)

INTERRUPTED = 130
WANTED = (0.01, 0.02, 0.05)
PLAN_COLUMNS = (
    "run", "state", "engine", "gpus", "cross_numa", "worst_link", "nccl_profile", "estimate_s", "note",
)  # fmt: skip
RESULTS = Path("results")
# Those of a summary that fit a terminal; --json has them all.
SUMMARY_COLUMNS = (
    "run", "status", "engine", "prompt", "max_new_tokens", "concurrency", "n_requests", "decode_tok_s", "ttft_s",
    "accept_length", "step_ms", "speedup", "speedup_low", "speedup_high",
)  # fmt: skip
SET_HELP = "key=value replaces a key of the sweep; dotted for nested ones; values as in TOML"
ONLY_HELP = "run or condition to keep, such as tp1-b16; may be repeated"
SweepFile = Annotated[Path, typer.Argument(help="a sweep file, as in notebooks/sweeps/")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help=ONLY_HELP)]
ResultsOption = Annotated[Path, typer.Option("--results", help="folder of the campaigns")]


def main() -> None:
    """Entry point: one clear message on stderr for every error of ours, no traceback."""
    try:
        app()
    except BenchlibError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"cannot read or write {error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(1)


@app.command()
def plan(
    sweep: SweepFile,
    settings: SetOption = None,
    only: OnlyOption = None,
    results: ResultsOption = RESULTS,
    topology: Annotated[
        Path | None, typer.Option(help="plan for another machine: its saved nvidia-smi topo -m")
    ] = None,
    busy: BusyOption = "",
    commands: Annotated[bool, typer.Option("--commands", help="show each server's command line, too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every run of a sweep in measuring order, its state, GPUs, and for about how long. Starts nothing."""
    from benchlib.progress import format_duration
    from benchlib.sweep import plan_sweep, select_runs
    from benchlib.topology import load_topology

    loaded = _load(sweep, settings)
    machine = load_topology(topology) if topology else None
    assumed = loaded.assumed
    runs = select_runs(loaded, only or ())
    planned = plan_sweep(runs, results, topology=machine, busy=named_busy(busy), assumed=assumed)
    rows = [_plan_row(p) for p in planned]
    estimates = [p.estimate_s for p in planned if p.estimate_s is not None]
    total = f", about {format_duration(sum(estimates))}" if len(estimates) == len(planned) else ""
    title = f"{len(rows)} runs, {sum(p.state != 'finished' for p in planned)} to do{total}"
    _show(rows, as_json, title, PLAN_COLUMNS)
    if as_json:
        return
    if total and assumed and all(p.state == "new" for p in planned):
        typer.echo(
            f"Times are reckoned from the sweep's `assumed`: {assumed.decode_tok_s:g} tok/s, nobody's measurement."
        )
    if text := _starts_needed(results / loaded.name):
        typer.echo(text)
    for problem in dict.fromkeys(p.problem for p in planned if p.problem):
        typer.echo(f"cannot start {', '.join(p.spec.run_name for p in planned if p.problem == problem)}: {problem}")
    for row in rows if commands else ():
        typer.echo(f"\n# {row['run']}\n{row['command']}")


def _starts_needed(campaign: Path) -> str | None:
    """How many starts a difference needs by the campaign's own spread between starts; None before it has two of one."""
    if not any(campaign.glob("*/record.json")):
        return None
    from benchlib.compare import start_spreads
    from benchlib.verdicts import starts_needed

    lines = [
        f"{name}: {100 * sd:.2g}% between starts (sd, {df} degrees of freedom): a difference of "
        + ", ".join(f"{100 * d:g}% needs {starts_needed(sd, d)}" for d in WANTED)
        + " starts a side"
        for name, (sd, df) in start_spreads(campaign).items()
    ]
    return "\n".join(lines) or None


def _plan_row(planned: Planned) -> dict[str, Any]:
    spec, placement, launch = planned.spec, planned.placement, planned.launch
    fields = ("engine", "tp_size", "method", "tree_budget", "nccl_profile", "numa_policy", "variant", "start", "hash")
    return {
        "run": spec.run_name,
        "state": planned.state,
        **{name: getattr(spec, name) for name in fields},
        "gpus": placement and placement.label,
        "cross_numa": placement and placement.cross_numa,
        "worst_link": placement and placement.worst_link,
        "note": "; ".join([*planned.notes, *(["cannot start"] if planned.problem else [])]) or None,
        "estimate_s": planned.estimate_s,
        "problem": planned.problem,
        "env": launch and launch.env,
        "argv": launch and list(launch.argv),
        "command": launch and shlex.join([f"{k}={v}" for k, v in launch.env.items()] + list(launch.argv)),
    }


@app.command()
def sweep(
    sweep: SweepFile,
    settings: SetOption = None,
    only: OnlyOption = None,
    results: ResultsOption = RESULTS,
    force: Annotated[bool, typer.Option("--force", help="run finished ones again, too")] = False,
) -> None:
    """Run a sweep: one server start, one notebook, one record a run. Finished runs are skipped."""
    from benchlib.sweep import run_sweep, select_runs

    loaded = _load(sweep, settings)
    runs = select_runs(loaded, only or ())
    try:
        outcomes = run_sweep(runs, results=results, force=force, assumed=loaded.assumed)
    except KeyboardInterrupt:
        _say("interrupted: the server is ended, finished runs are kept", err=True)
        raise typer.Exit(INTERRUPTED) from None
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        _say(f"failed: {outcome.spec.run_name}: {outcome.error}", err=True)
    _say(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs ok in {results / runs[0].campaign}")
    raise typer.Exit(1 if failed else 0)


def _say(text: str, *, err: bool = False) -> None:
    """Say how a sweep ended; heard or not, its exit code is that of its runs."""
    with suppress(OSError, UnicodeError):
        typer.echo(text, err=err)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # what is left in it would fail again as Python ends, with an exit code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@app.command()
def summary(
    campaign: Annotated[str, typer.Argument(help="a campaign's folder, or its name under --results")],
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Show a campaign's figures: one line a condition and cell, empty where there is none."""
    folder = find_campaign(campaign, results)
    from benchlib.compare import build_summary

    rows = build_summary(folder)
    _show(rows, as_json, campaign, SUMMARY_COLUMNS)
    found = [(row["run"], row.get("error") or row.get("note")) for row in rows]
    notes = [f"{run}: {text}" for run, text in found if text]
    for text in () if as_json else dict.fromkeys(notes):
        typer.echo(text)


@app.command()
def report(
    campaigns: Annotated[list[str], typer.Argument(help="campaigns' folders, or names under --results")],
    out: Annotated[Path, typer.Option("--out", help="folder of the report")] = Path("report"),
    full_provenance: Annotated[
        bool, typer.Option("--full-provenance", help="also command lines, variables, paths, UUIDs: not for sharing")
    ] = False,
    results: ResultsOption = RESULTS,
) -> None:
    """Make the report of one or more campaigns: HTML, LaTeX tables, figures, and the PDF where LaTeX is installed."""
    folders = [find_campaign(name, results) for name in campaigns]
    from benchlib.report import build_report

    made = build_report(folders, out, full_provenance=full_provenance)
    typer.echo(f"HTML:    {made.html}")
    typer.echo(f"tables:  {out / 'tables'} ({len(made.tables)} files)")
    typer.echo(f"figures: {out / 'figures'} ({len(made.figures)} files)")
    typer.echo(f"PDF:     {made.pdf or f'none: {made.pdf_reason}'}")


@app.command()
def serve(
    engine: Annotated[str, typer.Option(help="reference or sglang")] = "reference",
    method: Annotated[str, typer.Option(help="auto, linear or ddtree")] = "auto",
    tree_budget: Annotated[int | None, typer.Option(help="nodes beside the root, with ddtree")] = None,
    tp_size: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 1,
    model_path: Annotated[str, typer.Option(help="empty: the engine's own default")] = "",
    draft_model_path: Annotated[str, typer.Option(help="empty: the engine's own default")] = "",
    port: Annotated[int | None, typer.Option(help="a free one when left out")] = None,
    log: Annotated[Path, typer.Option(help="folder of server.log")] = Path(),
) -> None:
    """Start a server in the foreground and print its address; Ctrl-C ends it."""
    given = {name: value for name, value in locals().items() if name not in ("port", "log")}
    from benchlib.server import start_server
    from benchlib.spec import RunSpec
    from benchlib.sweep import signals_raise

    spec = RunSpec.from_parameters(given)
    try:
        with signals_raise(), start_server(spec, folder=log, port=port) as server:
            typer.echo(server.record.url)
            while server.exit_code() is None:
                time.sleep(0.5)
    except KeyboardInterrupt:
        return
    raise server.failure("ended by itself")


def _load(path: Path, settings: list[str] | None) -> Sweep:
    from benchlib.spec import load_sweep

    lines = []
    for setting in settings or ():
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise SpecError(f"--set {setting!r} is not key=value")
        lines.append(f"{key} = {text if _is_toml(f'value = {text}') else json.dumps(text)}")
    try:
        overrides = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"--set cannot be read: {error}; given: {'; '.join(lines)}") from error
    return load_sweep(path, **overrides)


def _is_toml(line: str) -> bool:
    """What is not TOML is a string, so that names need no quotes."""
    try:
        return bool(tomllib.loads(line))
    except tomllib.TOMLDecodeError:
        return False


def _show(rows: list[dict[str, Any]], as_json: bool, title: str, columns: Sequence[str] = ()) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    given = columns or (list(rows[0]) if rows else [])
    full = [key for key in given if any(row.get(key) is not None for row in rows)]
    # What is the same in every row goes to the title: a terminal is narrow.
    same = [key for key in full if len(rows) > 1 and len({str(row.get(key)) for row in rows}) == 1]
    typer.echo(", ".join([title, *(f"{key} {_cell(rows[0][key])}" for key in same)]))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown = [key for key in full if key not in same]
    for key in shown:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        table.add_column(key, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in shown))
    Console(width=None if sys.stdout and sys.stdout.isatty() else 200).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
