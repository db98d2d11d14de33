"""Sampled outputs cannot be compared token by token, their distributions can: do two servers sample alike?

Short continuations of one prompt, seeded apart, are drawn from both. Their beginnings (the first token, the first two
jointly, ...) are counted, and a chi-square over the counts is judged by permutation: exact at any n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchlib.gaps import post_json
from benchlib.prompts import Prompt

__all__ = ["FALSE_ALARM", "SampleTest", "compare_samples", "draw_samples", "measure_sampling"]

Ids = tuple[int, ...]
FALSE_ALARM = 0.001
# A beginning that came less often than this on both sides together says little and costs power.
MIN_COUNT = 5
APART = 1_000_003  # seeds of the two sides: common ones would couple them, and generators may take 32 bits of a seed


@dataclass(frozen=True, slots=True)
class SampleTest:
    """`p_value` of the two sides' counts, were they one distribution; `n` samples a side, `outcomes` counted."""

    p_value: float
    n: tuple[int, int]
    outcomes: int

    @property
    def differ(self) -> bool:
        """Whether the servers sample differently, said wrongly once in 1 / FALSE_ALARM times."""
        return self.p_value <= FALSE_ALARM


def measure_sampling(
    auto_url: str,
    url: str,
    prompt: Prompt,
    *,
    count: int = 400,
    new_tokens: int = 3,
    temperature: float = 1.0,
    seed: int = 0,
) -> SampleTest:
    """Draw `count` short continuations from each server and compare them. RequestError where one refuses."""
    auto, other = (
        draw_samples(u, prompt, count, new_tokens=new_tokens, temperature=temperature, seed=seed + side * APART)
        for side, u in enumerate((auto_url, url))
    )
    return compare_samples(auto, other, seed=seed)


def draw_samples(url: str, prompt: Prompt, count: int, *, new_tokens: int, temperature: float, seed: int) -> list[Ids]:
    """`count` sampled continuations of one prompt, each with a seed of its own, counted from `seed`."""
    body = {name: [value] * count for name, value in prompt.payload.items()}
    own = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
    body["sampling_params"] = [own | {"sampling_seed": seed + i} for i in range(count)]
    return [tuple(answer["output_ids"]) for answer in post_json(f"{url}/generate", body, timeout_s=600.0)]


def compare_samples(a: Sequence[Ids], b: Sequence[Ids], *, rounds: int = 1999, seed: int = 0) -> SampleTest:
    """Whether two sets of continuations are of one distribution; `rounds` permutations of who drew what, seeded."""
    import numpy as np

    everything = Counter((*a, *b))
    seen = Counter(start for ids in everything.elements() for start in _beginnings(ids))
    kept = [start for start, n in seen.items() if n >= MIN_COUNT]
    total, share = np.array([seen[start] for start in kept]), len(a) / (len(a) + len(b))
    begins = np.array([[start == ids[: len(start)] for start in kept] for ids in everything], dtype=np.int64)

    def distance(counts: Any) -> Any:
        """Of sides drawn as (..., distinct continuations) counts."""
        return (((counts @ begins) - total * share) ** 2 / total).sum(-1)

    # To permute labels is to draw one side out of all continuations without putting back.
    draws = np.random.default_rng(seed).multivariate_hypergeometric([*everything.values()], len(a), size=rounds)
    mine = Counter(a)
    found = distance(np.array([mine[ids] for ids in everything]))
    as_far = int((distance(draws) >= found - 1e-9).sum())
    return SampleTest((1 + as_far) / (1 + rounds), (len(a), len(b)), len(kept))


def _beginnings(ids: Ids) -> list[Ids]:
    return [ids[: i + 1] for i in range(len(ids))]
