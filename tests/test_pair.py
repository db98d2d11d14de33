"""The pair that ships: its text goes somewhere, and trees over its drafter pay in the order that they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchlib.prompts import load_prompts
from benchlib.reference_engine.bench import METHODS
from benchlib.reference_engine.corpus import repeated_share
from benchlib.reference_engine.decode import Decoder, Generation, Request
from benchlib.reference_engine.tokenizer import Tokenizer
from tests.engine import WEIGHTS, Pair, packaged_folder

OPENINGS = load_prompts("openings")
DRAFTED = ("linear", "b16", "b32", "b64")
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Pair.load(packaged_folder())
    torch.set_num_threads(threads)


def generate(pair: Pair, method: str, opening: str, new_tokens: int) -> Generation:
    kind, budget = METHODS[method]
    decoder = Decoder(pair.target, pair.drafter if kind != "auto" else None, method=kind, budget=budget, slots=1)
    ids = tuple(Tokenizer.load(WEIGHTS / "target").encode(OPENINGS[opening]))
    with torch.inference_mode():
        generation = decoder.prefill(Request(ids, new_tokens, ignore_eos=True), 0)
        while generation.finish_reason is None:
            decoder.step([generation])
    return generation


@pytest.mark.parametrize("opening", OPENINGS)
def test_greedy_text_does_not_loop(pair: Pair, opening: str) -> None:
    """A loop would make drafts easy, and every accept length a fiction."""
    made = generate(pair, "auto", opening, 256).output_ids
    assert len(made) == 256
    assert repeated_share(made) < 0.2


@pytest.fixture(scope="module")
def generations(pair: Pair) -> dict[str, dict[str, Generation]]:
    """By method and opening."""
    return {m: {o: generate(pair, m, o, NEW_TOKENS) for o in OPENINGS} for m in DRAFTED}


def accept_length(made: list[Generation]) -> float:
    """Pooled over rounds, bonus included."""
    return 1 + sum(g.correct_drafts for g in made) / sum(g.verify_ct for g in made)


def test_larger_budgets_accept_more(generations: dict[str, dict[str, Generation]]) -> None:
    pooled = [accept_length(list(generations[m].values())) for m in DRAFTED]
    assert pooled == sorted(set(pooled)), dict(zip(DRAFTED, pooled, strict=True))


def test_drafts_are_worth_their_round(generations: dict[str, dict[str, Generation]]) -> None:
    lengths = {(m, o): accept_length([g]) for m, made in generations.items() for o, g in made.items()}
    assert min(lengths.values()) >= 2, lengths
    assert sum(lengths.values()) / len(lengths) >= 3, lengths


def test_whole_blocks_are_not_the_rule(generations: dict[str, dict[str, Generation]], pair: Pair) -> None:
    """Where most rounds accept a whole block, methods differ in nothing but cost."""
    assert pair.drafter is not None
    block = pair.drafter.config.block_size
    made = [g for by_opening in generations.values() for g in by_opening.values()]
    whole = sum(g.histogram[block - 1] for g in made if len(g.histogram) >= block)
    assert whole / sum(g.verify_ct for g in made) < 0.3
