"""The prompts that ship, and seeded random ids."""

from __future__ import annotations

import hashlib

import pytest

from benchlib.errors import SpecError
from benchlib.prompts import RANDOM_PROMPT_TOKENS, build_prompts, load_prompts

NAMES = ["fib", "qsort", "arith", "json"]


@pytest.mark.parametrize("prompt_set", ["instructions", "openings"])
def test_both_sets_have_the_four_names(prompt_set: str) -> None:
    texts = load_prompts(prompt_set)
    assert set(NAMES) <= set(texts)
    assert all(text.strip() for text in texts.values())
    assert len(set(texts.values())) == len(texts)


def test_a_prompt_is_sent_as_text_and_hashed_as_sent() -> None:
    (prompt,) = build_prompts("instructions", ["fib"])
    text = load_prompts("instructions")["fib"]
    assert prompt.payload == {"text": text}
    assert prompt.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_random_ids_are_a_prompts_own_and_seeded() -> None:
    def draw(seed: int) -> list[list[int]]:
        prompts = build_prompts("random-ids", NAMES, seed=seed, vocab_size=300)
        return [prompt.payload["input_ids"] for prompt in prompts]

    ids = draw(1)
    assert ids == draw(1)
    assert ids != draw(2)
    assert len({tuple(row) for row in ids}) == len(NAMES)
    assert all(len(row) == RANDOM_PROMPT_TOKENS and 0 <= min(row) <= max(row) < 300 for row in ids)
    assert len({p.sha256 for p in build_prompts("random-ids", NAMES, vocab_size=300)}) == len(NAMES)


def test_unknown_names_and_sets_are_refused() -> None:
    with pytest.raises(SpecError, match=r"has no \['nope'\]; it has \['arith'"):
        build_prompts("instructions", ["fib", "nope"])
    with pytest.raises(SpecError, match='no prompt set "haiku"'):
        load_prompts("haiku")
    with pytest.raises(SpecError, match="vocabulary's size"):
        build_prompts("random-ids", NAMES)
