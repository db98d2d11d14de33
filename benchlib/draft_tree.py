"""One real round's draft tree, as the engine under test drafted and verified it: `draft_tree.json` in a run's folder.

Asked of a server that says it can tell (`returns_draft_tree` in /server_info), after the timed rounds, to be drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from benchlib.errors import RecordError, RequestError
from benchlib.gaps import post_json
from benchlib.prompts import Prompt
from benchlib.record import write_atomic
from benchlib.spec import Frozen

__all__ = ["DraftTree", "Drafted", "Node", "load_draft_tree", "measure_draft_tree", "save_draft_tree"]

DRAFT_TREE_FILE = "draft_tree.json"
# The first steps follow the prompt closely and tell little; a short request still reaches the third.
TRACED_STEP, NEW_TOKENS = 2, 96


class Drafted(Frozen):
    """A token and its text by itself; a piece of a character shows as U+FFFD."""

    token_id: int
    text: str


class Node(Drafted):
    """A drafted token: `probability` is its whole path's, by the drafter; `accepted`: the target chose it, too."""

    parent: int = Field(ge=-1, description="index of its parent, lower than its own; -1: the root")
    probability: Annotated[float, Field(ge=0, le=1, description="of its whole path, by the drafter")]
    accepted: bool = Field(description="whether the target chose it, too")


class DraftTree(Frozen):
    """One verify step. Node 0 is the last token decided before it; `bonus` is what the target chose after the path."""

    schema_version: Literal[1] = 1
    prompt: str = Field(description="its name in the prompt set")
    step: int = Field(ge=0, description="number of the verify step, from 0")
    accept_length: int = Field(ge=1, description="tokens that the step gained, bonus included")
    nodes: Annotated[tuple[Node, ...], Field(min_length=1, description="the root, then each after its parent")]
    bonus: Drafted = Field(description="the token that the target chose after the accepted path")

    @model_validator(mode="after")
    def _is_tree(self) -> Self:
        if self.nodes[0].parent != -1 or any(not 0 <= n.parent < i for i, n in enumerate(self.nodes) if i):
            raise ValueError("node 0 is the root, every other one comes after its parent")
        return self


def measure_draft_tree(url: str, prompt: Prompt, *, timeout_s: float) -> DraftTree | None:
    """One untimed greedy request; None where it ended before the step. RequestError where the server refuses."""
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {**prompt.payload, "sampling_params": sampling, "return_draft_tree": TRACED_STEP}
    answer: Any = post_json(f"{url}/generate", body, timeout_s=timeout_s)
    try:
        found = answer["meta_info"].get("draft_tree")
        return None if found is None else DraftTree(prompt=prompt.name, **found)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RequestError(f"{url}: the draft tree of {prompt.name} makes no sense: {error}") from error


def save_draft_tree(folder: Path, tree: DraftTree) -> None:
    """Write it beside a run's record."""
    write_atomic(folder / DRAFT_TREE_FILE, json.dumps(tree.model_dump(), ensure_ascii=False).encode() + b"\n")


def load_draft_tree(folder: Path) -> DraftTree | None:
    """A run's; None where none was asked for. RecordError for a broken file."""
    path = folder / DRAFT_TREE_FILE
    if not path.is_file():
        return None
    try:
        return DraftTree.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordError(f"{path} is broken: {error.errors()[0]['msg']}. Remove it, or run its sweep again") from None
