"""The default prompts, by set and name, and seeded random ids for servers without a tokenizer.

`openings` are texts that the embedded model continues; `instructions` ask a chat model for the same four things;
`random-ids` are token ids drawn by the run's seed, for models with random weights.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from benchlib.errors import SpecError

__all__ = ["RANDOM_PROMPT_TOKENS", "Prompt", "build_prompts", "load_prompts"]

RANDOM_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named prompt; `payload` is the part of a `/generate` body that carries it."""

    name: str
    payload: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Of the text, or of the ids joined by spaces, as sent."""
        ids = self.payload.get("input_ids")
        text = self.payload["text"] if ids is None else " ".join(map(str, ids))
        return hashlib.sha256(text.encode()).hexdigest()


def load_prompts(prompt_set: str) -> dict[str, str]:
    """Name to text of a set that ships with benchlib; SpecError when there is none of that name."""
    try:
        text = resources.files(__name__).joinpath(f"{prompt_set}.toml").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SpecError(f'no prompt set "{prompt_set}" ships with benchlib') from error
    return {name: table["text"] for name, table in tomllib.loads(text).items()}


def build_prompts(
    prompt_set: str, names: Sequence[str], *, seed: int = 0, vocab_size: int | None = None
) -> list[Prompt]:
    """The named prompts of a set; `random-ids` needs `vocab_size`, and draws each name's ids from `seed`."""
    if prompt_set == "random-ids":
        if vocab_size is None:
            raise SpecError(
                'prompt_set "random-ids" needs the vocabulary\'s size, and neither /server_info nor a config.json '
                "in model_path tells it: give model_path as a folder"
            )
        return [Prompt(name, {"input_ids": _random_ids(name, seed, vocab_size)}) for name in names]
    texts = load_prompts(prompt_set)
    if missing := [name for name in names if name not in texts]:
        raise SpecError(f"prompt set {prompt_set} has no {missing}; it has {sorted(texts)}")
    return [Prompt(name, {"text": texts[name]}) for name in names]


def _random_ids(name: str, seed: int, vocab_size: int) -> list[int]:
    draw = random.Random(f"{name}:{seed}")
    return [draw.randrange(vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)]
