"""The command `bench`: a quick look at any running server, with the clock that sweeps use."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from benchlib.cli_machine import JsonOption
from benchlib.errors import RequestError, SpecError

__all__ = ["app"]

app = typer.Typer()

COUNTED = {
    "server": "tokens counted by the server, chunk by chunk",
    "usage": "tokens counted by the server at the end, and spread evenly over the chunks",
    "chunks": "tokens counted by chunks: the server does not say how many came",
}


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="address of a running SGLang or OpenAI-compatible server")],
    streams: Annotated[int, typer.Option(help="requests at any time")] = 8,
    requests: Annotated[int | None, typer.Option(help="requests in all; left out: four a stream")] = None,
    new_tokens: Annotated[int, typer.Option(help="tokens asked of each request")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Measure a running server in a closed loop, by its own token counts. Exit 1 when every request failed."""
    from benchlib.clock import run_bench

    asked = 4 * streams if requests is None else requests
    for name, value in (("--streams", streams), ("--requests", asked), ("--new-tokens", new_tokens)):
        if value < 1:
            raise SpecError(f"{name} {value} is too few: give a number from 1")
    if asked < streams:
        raise SpecError(f"--requests {asked} leaves streams idle: give at least --streams, {streams}")
    found = dataclasses.asdict(run_bench(url, streams=streams, requests=asked, new_tokens=new_tokens))
    limit = _server_limit(url)
    if limit is not None and streams > limit:
        found["note"] = f"the server runs {limit} requests at once: with {streams} streams this measured its queue"
    typer.echo(json.dumps(found, indent=1) if as_json else _format_bench(found))
    raise typer.Exit(1 if found["failed"] == found["requests"] else 0)


def _format_bench(found: dict[str, Any]) -> str:
    """A line a figure that there is, then sentences: a queue, who counted, the first failure."""
    words = {"note", "error", "tokens_counted_by"}
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in found.items()}
    lines = [f"{key:<24} {value}" for key, value in shown.items() if value is not None and key not in words]
    counted, error = found["tokens_counted_by"], found["error"]
    failed = error and f"{found['failed']} failed, the first with: {error}"
    return "\n".join([*lines, *filter(None, (found.get("note"), counted and COUNTED[counted], failed))])


def _server_limit(url: str) -> int | None:
    """How many requests an SGLang server runs at once; None where it does not tell."""
    from benchlib.client import get_json
    from benchlib.server import running_limit

    try:
        return running_limit(get_json(f"{url.rstrip('/')}/server_info"))
    except RequestError:
        return None
