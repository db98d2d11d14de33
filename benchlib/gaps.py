"""Auto's own doubt: how far apart its two best tokens lie at each position, asked of its server after the timed rounds.

Speculative servers refuse logprobs, so only an auto run can say whether a token that another method chose differently
was a near tie. The answers lie in the run's folder as `gaps.json`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from benchlib.errors import RecordError, RequestError
from benchlib.prompts import Prompt
from benchlib.record import write_atomic
from benchlib.spec import Frozen
from benchlib.stream import read_reason

__all__ = ["PromptGaps", "load_gaps", "measure_gaps", "post_json", "save_gaps"]

GAPS_FILE = "gaps.json"


class PromptGaps(Frozen):
    """Auto's greedy tokens of one prompt; beside each, its second choice and how far (nats) that lay behind."""

    output_ids: tuple[int, ...]
    second_ids: tuple[int, ...]
    gaps: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if not len(self.output_ids) == len(self.second_ids) == len(self.gaps):
            raise ValueError(f"{len(self.output_ids)} tokens, {len(self.second_ids)} seconds, {len(self.gaps)} gaps")
        return self


def measure_gaps(
    url: str, prompts: Iterable[Prompt], new_tokens: int, *, ignore_eos: bool = True, timeout_s: float = 600.0
) -> dict[str, PromptGaps]:
    """One untimed greedy output a prompt with its two best logprobs a token, by the prompt's digest.

    RequestError where the server refuses: speculative ones do.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
    asked = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    found = {}
    for prompt in prompts:
        answer = post_json(f"{url}/generate", {**prompt.payload, **asked}, timeout_s=timeout_s)
        top = answer.get("meta_info", {}).get("output_top_logprobs") or [()]
        if any(len(pair) != 2 for pair in top):
            raise RequestError(f"{url}: two output_top_logprobs a token were asked for {prompt.name} and did not come")
        try:
            found[prompt.sha256] = PromptGaps(
                output_ids=tuple(answer.get("output_ids") or (best[1] for best, _ in top)),
                second_ids=tuple(second[1] for _, second in top),
                gaps=tuple(best[0] - second[0] for best, second in top),
            )
        except (ValueError, TypeError) as error:
            raise RequestError(f"{url}: the logprobs of {prompt.name} make no sense: {error}") from error
    return found


def post_json(url: str, body: dict[str, Any], *, timeout_s: float) -> Any:
    """The JSON that a server answers; RequestError for no answer or a status other than 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"POST {url}: no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    if response.status != 200:
        raise RequestError(f"POST {url}: HTTP {response.status}: {read_reason(data)}")
    try:
        return json.loads(data)
    except ValueError as error:
        raise RequestError(f"POST {url}: not JSON: {error}") from error


def save_gaps(folder: Path, gaps: Mapping[str, PromptGaps]) -> None:
    """Write them beside a run's record."""
    plain = {digest: found.model_dump() for digest, found in gaps.items()}
    write_atomic(folder / GAPS_FILE, json.dumps({"schema_version": 1, "prompts": plain}).encode() + b"\n")


def load_gaps(folder: Path) -> dict[str, PromptGaps]:
    """Those of a run, by the prompt's digest; empty where none were asked. RecordError for a broken file."""
    path = folder / GAPS_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["prompts"]
        return {digest: PromptGaps.model_validate(value) for digest, value in found.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RecordError(f"{path} is broken ({type(error).__name__}): remove it, or run its sweep again") from None
