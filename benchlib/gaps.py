"""Auto's own doubt: how far its next best tokens lie behind at each position, asked after the timed rounds.

Speculative servers refuse logprobs, so only an auto run can say whether a token that another method chose differently
was a near tie. Two tokens are not enough: half precision ties three digits at once, and a server may pick either of two
equal ones. The answers lie in the run's folder as `gaps.json`:
schema 1  output_ids, second_ids, gaps (of the second).
schema 2  output_ids, best_ids, gaps: `BEST` of each token.
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
BEST = 5
Gap = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PromptGaps(Frozen):
    """Auto's greedy tokens of one prompt; at each, its best choices in order and how far (nats) each lay behind."""

    output_ids: tuple[int, ...] = Field(description="its greedy output")
    best_ids: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = Field(
        description="at each of them the likeliest tokens, the best first"
    )
    gaps: tuple[tuple[Gap, ...], ...] = Field(description="how far, nats, each of those lay behind the best")

    @model_validator(mode="before")
    @classmethod
    def _from_schema_1(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "second_ids" not in data:
            return data
        seconds, gaps = data["second_ids"], data["gaps"]
        pairs = list(zip(data["output_ids"], seconds, strict=True))
        return {"output_ids": data["output_ids"], "best_ids": pairs, "gaps": [(0.0, gap) for gap in gaps]}

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if len(self.output_ids) != len(self.gaps) or list(map(len, self.best_ids)) != list(map(len, self.gaps)):
            raise ValueError(f"{len(self.output_ids)} tokens, {len(self.best_ids)} lists of the best, {len(self.gaps)}")
        return self

    def behind(self, at: int, token: int | None) -> tuple[float, bool]:
        """How far (nats) a token lay behind auto's best at a position; False: farther, it is none of those asked."""
        found = dict(zip(self.best_ids[at], self.gaps[at], strict=True))
        return (found[token], True) if token in found else (self.gaps[at][-1], False)


def measure_gaps(
    url: str, prompts: Iterable[Prompt], new_tokens: int, *, ignore_eos: bool = True, timeout_s: float = 600.0
) -> dict[str, PromptGaps]:
    """One untimed greedy output a prompt with the `BEST` logprobs of each token, by the prompt's digest.

    RequestError where the server refuses: speculative ones do.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
    asked = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": BEST}
    found = {}
    for prompt in prompts:
        answer = post_json(f"{url}/generate", {**prompt.payload, **asked}, timeout_s=timeout_s)
        try:
            top = answer["meta_info"].get("output_top_logprobs") or [()]
            if any(len(best) != BEST for best in top):
                raise RequestError(
                    f"{url}: {BEST} output_top_logprobs a token were asked for {prompt.name} and did not come"
                )
            found[prompt.sha256] = PromptGaps(
                output_ids=tuple(answer.get("output_ids") or (best[0][1] for best in top)),
                best_ids=tuple(tuple(one[1] for one in best) for best in top),
                gaps=tuple(tuple(round(best[0][0] - one[0], 6) for one in best) for best in top),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
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
    write_atomic(folder / GAPS_FILE, json.dumps({"schema_version": 2, "prompts": plain}).encode() + b"\n")


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
