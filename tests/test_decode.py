"""Decoding is lossless: chains and trees give what the target alone would, greedily to the token, sampled in law.

The checks are functions in `tests.engine`; `TestPlantedFaults` runs them on engines that are wrong on purpose, where
each has to fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from benchlib.reference_engine import decode
from benchlib.reference_engine.decode import Decoder, Generation, Method, Request, StageTimes
from benchlib.reference_engine.drafter import Drafter
from benchlib.reference_engine.model import Cache
from benchlib.reference_engine.tree import DraftTree, accepted_path
from tests.engine import (
    BLOCK,
    BUDGETS,
    FAULTS,
    Job,
    Pair,
    Scripted,
    check_commit,
    check_counters,
    check_greedy,
    check_lossless,
    check_node_logits,
    check_same,
    check_state,
    check_untouched,
    generate,
    make_jobs,
    node_path,
    packaged_folder,
    random_drafter_weights,
    random_prompt,
    random_tree,
    scripted_drafters,
    small_config,
    small_drafter_config,
    tables,
    verify,
)

SCRIPTS = ("oracle", "second_best", "second_first", "repeat", "uniform", "noisy")
DRAFTERS = ("random", *SCRIPTS)


@cache
def pair_of(name: str) -> Pair:
    """A model by name: `small`, `deep`, `packaged`."""
    if name == "packaged":
        return Pair.load(packaged_folder())
    if name == "deep":
        return Pair.random(3, layers=8, num_attention_heads=2, num_key_value_heads=2)
    return Pair.random(1)


@cache
def jobs_of(name: str, key: str) -> list[Job]:
    """Jobs by name; computing what auto answers is half the work."""
    pair = pair_of(name)
    if key == "one":
        return make_jobs(pair, [37], [60])
    if key == "short":
        return make_jobs(pair, [37], [40])
    if key == "limit":
        limit = pair.target.context_length
        return make_jobs(pair, [limit - 20, limit - 1, 1], [20, 1, 25], seed=31)
    if key == "few":
        return make_jobs(pair, [1, 64, 65], [12, 24, 20], seed=70, stagger=1)
    if key == "eight":
        lengths, new = [1, 64, 65, 128, 17, 3, 90, 40], [40, 20, 30, 17, 48, 1, 2, 33]
        return make_jobs(pair, lengths, new, seed=100, stagger=2)
    # more requests than slots, so that slots are used again
    lengths, new = [5, 66, 20, 1, 33, 48, 2, 70, 12], [12, 26, 18, 22, 1, 9, 20, 7, 3]
    return make_jobs(pair, lengths, new, seed=200, stagger=1)


def drafter_of(pair: Pair, name: str) -> Any:
    """A drafter by name; scripted ones keep state, so each is new."""
    return pair.drafter if name in ("random", "trained") else scripted_drafters(pair)[name]()


# --- greedy --------------------------------------------------------------------------------------------------------


class TestAuto:
    @pytest.mark.parametrize("name", ["small", "deep"])
    def test_is_greedy(self, name: str) -> None:
        """The baseline itself, against the reference."""
        pair = pair_of(name)
        for job in jobs_of(name, "eight"):
            check_greedy(pair, job.request.input_ids, job.expected)

    def test_batch_is_single(self) -> None:
        pair = pair_of("small")
        check_lossless(pair, None, "auto", 0, jobs_of("small", "eight"))
        check_lossless(pair, None, "auto", 0, jobs_of("small", "reuse"), slots=3, order=[0, 2, 1])

    def test_outputs_do_not_merely_repeat(self) -> None:
        """Lossless means little on a text of one token."""
        assert len(set(jobs_of("small", "one")[0].expected)) > 10


class TestGreedy:
    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("budget", [16, 64])
    def test_tree(self, drafter: str, budget: int) -> None:
        pair = pair_of("small")
        key = "one" if budget == 16 else "short"
        check_lossless(pair, drafter_of(pair, drafter), "ddtree", budget, jobs_of("small", key))

    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_chain(self, drafter: str) -> None:
        pair = pair_of("small")
        check_lossless(pair, drafter_of(pair, drafter), "linear", 0, jobs_of("small", "one"))

    @pytest.mark.parametrize(
        ("drafter", "method", "budget"),
        [
            ("second_first", "ddtree", 32),
            ("noisy", "ddtree", 15),
            ("random", "ddtree", 7),
            ("noisy", "linear", 0),
            ("oracle", "linear", 0),
        ],
    )
    def test_eight_at_once(self, drafter: str, method: Method, budget: int) -> None:
        """Prompts of 1, 64, 65 and 128 tokens and others; starts staggered, ends where they fall."""
        pair = pair_of("small")
        check_lossless(pair, drafter_of(pair, drafter), method, budget, jobs_of("small", "eight"))

    @pytest.mark.parametrize(("drafter", "method"), [("noisy", "ddtree"), ("second_first", "linear")])
    def test_slots_apart_and_used_again(self, drafter: str, method: Method) -> None:
        """Nine requests over the slots 0, 2 and 5 of six, two of the others left empty."""
        pair = pair_of("deep")
        jobs = jobs_of("deep", "reuse")
        check_lossless(pair, drafter_of(pair, drafter), method, 16, jobs, slots=6, order=[5, 0, 2])

    @pytest.mark.parametrize(("method", "budget"), [("linear", 0), ("ddtree", 15), ("ddtree", 64)])
    def test_trained(self, method: Method, budget: int) -> None:
        pair = pair_of("packaged")
        key = "few" if budget == 15 else "short"
        check_lossless(pair, pair.drafter, method, budget, jobs_of("packaged", key))

    def test_output_does_not_depend_on_the_budget(self) -> None:
        pair = pair_of("small")
        job = jobs_of("small", "short")[0]
        rounds = {}
        for budget in BUDGETS:
            drafter = drafter_of(pair, "second_first")
            (g,) = check_lossless(pair, drafter, "ddtree", budget, [job])
            rounds[budget] = g.verify_ct
        assert rounds[64] < rounds[16] < rounds[1], f"a larger tree must save rounds: {rounds}"

    def test_whole_blocks(self) -> None:
        """A perfect drafter: every block is accepted whole, and its bonus with it."""
        pair = pair_of("small")
        (job,) = make_jobs(pair, [20], [1 + 4 * BLOCK], seed=7)
        for method, budget in (("linear", 0), ("ddtree", 15), ("ddtree", 64)):
            (g,) = check_lossless(pair, drafter_of(pair, "oracle"), method, budget, [job])
            assert g.verify_ct == 4
            assert g.histogram == [0] * (BLOCK - 1) + [4]

    def test_useless_drafts(self) -> None:
        """Drafts that are never right cost rounds and nothing else."""
        pair = pair_of("small")
        for method in ("linear", "ddtree"):
            drafter = drafter_of(pair, "second_best")
            (g,) = check_lossless(pair, drafter, method, 1, jobs_of("small", "short"))
            assert g.correct_drafts == 0
            assert g.verify_ct == 39

    @pytest.mark.parametrize("method", ["auto", "linear", "ddtree"])
    @pytest.mark.parametrize("drafter", ["oracle", "random"])
    def test_up_to_the_context_limit(self, method: Method, drafter: str) -> None:
        """The last round drafts past the end of the context; the prompt alone fills all but one place."""
        pair = pair_of("small")
        jobs = jobs_of("small", "limit")
        own = drafter_of(pair, drafter) if method != "auto" else None
        check_lossless(pair, own, method, 64, jobs, slots=3)

    def test_a_budget_beyond_all_there_is_to_draft(self) -> None:
        """A block of two over 16 tokens has 16 prefixes; the tree ends there."""
        pair = Pair.random(5, vocab_size=16, layers=4)
        config = small_drafter_config(pair.config, block_size=2)
        drafter = Drafter(config, random_drafter_weights(config, 2), pair.target)
        jobs = make_jobs(pair, [9, 30], [20, 20])
        decoder = Decoder(pair.target, drafter, method="ddtree", budget=64)
        for job, g in zip(jobs, generate(decoder, jobs), strict=True):
            check_same(pair, job.request.input_ids, g.output_ids, job.expected)
            assert g.correct_drafts == g.verify_ct or len(g.output_ids) == 20  # all tokens are drafted

    def test_small_vocabulary_full_of_ties(self) -> None:
        pair = Pair.random(6, vocab_size=16)
        jobs = make_jobs(pair, [9, 30, 2], [30, 20, 25])
        for budget in (7, 64):
            uniform = Scripted(16, lambda known, i: torch.zeros(16))
            check_lossless(pair, uniform, "ddtree", budget, jobs)

    def test_a_very_small_temperature_is_greedy(self) -> None:
        pair = pair_of("small")
        job = jobs_of("small", "short")[0]
        for method in ("auto", "linear", "ddtree"):
            request = Request(job.request.input_ids, 40, temperature=1e-4, ignore_eos=True, seed=3)
            drafter = drafter_of(pair, "noisy")
            decoder = Decoder(pair.target, drafter, method=method, budget=16)
            (g,) = generate(decoder, [Job(request, expected=job.expected)])
            check_same(pair, request.input_ids, g.output_ids, job.expected)


# --- verification and commit ---------------------------------------------------------------------------------------


def drafted_trees(pair: Pair, prompts: Sequence[Sequence[int]], budget: int) -> list[DraftTree]:
    """Trees as a decoder drafts them below each prompt's first token."""
    decoder = Decoder(pair.target, pair.drafter, method="ddtree", budget=budget)
    with torch.inference_mode():
        sequences = [decoder.prefill(Request(tuple(p), 9), i) for i, p in enumerate(prompts)]
        drafts = decoder._draft(sequences, list(range(len(prompts))))
    return decoder._trees(sequences, drafts)[0]


PROMPTS = (1, 30, 65)


def run_checks(
    pair: Pair,
    kind: str,
    size: int,
    wanted: frozenset[str],
    *,
    slots: Sequence[int] = (),
    lengths: Sequence[int] = PROMPTS,
) -> None:
    """The checks of one verify and commit, on trees of a kind, over sequences of unequal lengths."""
    prompts = [random_prompt(pair.config, n, size) for n in lengths]
    if kind == "drafted":
        trees = drafted_trees(pair, prompts, size - 1)
    else:
        trees = [random_tree(size, s, pair.config.vocab_size) for s in range(len(prompts))]
    v = verify(pair.target, prompts, trees, slots)
    if "node_logits" in wanted:
        check_node_logits(pair, v)
    if "untouched" in wanted:
        check_untouched(v)
    if "commit" in wanted:
        deepest = [max(range(size), key=t.depths.__getitem__) for t in trees]
        check_commit(v, [deepest[0], size - 1, random.Random(size).randrange(size)][: len(trees)])


ALL = frozenset({"node_logits", "untouched", "commit"})


class TestVerify:
    @pytest.mark.parametrize(("kind", "size"), [("random", 2), ("random", 33), ("drafted", 17), ("drafted", 65)])
    def test_small(self, kind: str, size: int) -> None:
        run_checks(pair_of("small"), kind, size, ALL)

    @pytest.mark.parametrize("slots", [(4, 0, 2)])
    def test_slots_apart(self, slots: tuple[int, ...]) -> None:
        run_checks(pair_of("deep"), "random", 17, ALL, slots=slots)

    def test_trained(self) -> None:
        run_checks(pair_of("packaged"), "drafted", 33, ALL, lengths=(1, 30))

    def test_every_node_can_be_committed(self) -> None:
        pair = pair_of("small")
        prompt = random_prompt(pair.config, 10, 3)
        tree = random_tree(12, 4, pair.config.vocab_size)
        for node in range(12):
            check_commit(verify(pair.target, [prompt], [tree]), [node])

    def test_a_committed_cache_goes_on_like_a_fresh_one(self) -> None:
        """Trees on top of committed trees, three deep."""
        pair = pair_of("deep")
        prompt = list(random_prompt(pair.config, 6, 8))
        v = verify(pair.target, [prompt], [random_tree(17, 0, pair.config.vocab_size)])
        for seed in (1, 2, 3):
            tree = v.trees[0]
            node = 16 - seed
            with torch.inference_mode():
                v.target.commit(v.cache, v.pending, [node_path(tree, node)])
                prompt += [tree.tokens[n] for n in node_path(tree, node)]
                following = random_tree(17, seed, pair.config.vocab_size)
                tokens, depths, tree_tables = tables([following], v.target.kernel)
                output = v.target.forward(tokens, depths, v.cache, [0], tree_tables)
                assert output.pending is not None
                v.pending, v.trees, v.prompts = output.pending, [following], [prompt]
                v.logits = v.target.logits(output.hidden)
            check_node_logits(pair, v)
        check_commit(v, [16])

    @pytest.mark.parametrize("method", ["linear", "ddtree"])
    def test_a_decoder_leaves_a_fresh_prefills_state(self, method: Method) -> None:
        """After many rounds: the cache is that of all tokens but the last; the drafter's context too."""
        pair = pair_of("small")
        job = jobs_of("small", "one")[0]
        decoder = Decoder(pair.target, pair.drafter, method=method, budget=32, slots=4)
        with torch.inference_mode():
            g = decoder.prefill(job.request, 2)
            while len(g.output_ids) < 40:
                decoder.step([g])
            tokens = [*job.request.input_ids, *g.output_ids]
            check_state(pair.target, decoder.cache, 2, tokens[:-1])
            other = Decoder(pair.target, pair.drafter, method=method, budget=32, slots=1)
            other.prefill(Request(tuple(tokens[:-1]), 1), 0)
        assert decoder.context is not None
        assert other.context is not None
        rows = len(tokens) - 1
        error = decoder.context[2, ..., :rows, :] - other.context[0, ..., :rows, :]
        assert error.abs().max() < 1e-4


# --- planted faults ------------------------------------------------------------------------------------------------


def lossless_on_crossing_paths() -> None:
    """Greedy check with accepted paths that cross siblings and keep on for many rounds."""
    pair = pair_of("small")
    drafter = drafter_of(pair, "second_first")
    check_lossless(pair, drafter, "ddtree", 64, jobs_of("small", "one"))


CHECKS: dict[str, Callable[[], None]] = {
    "node_logits": lambda: run_checks(pair_of("small"), "random", 33, frozenset({"node_logits"})),
    "untouched": lambda: run_checks(pair_of("small"), "random", 33, frozenset({"untouched"})),
    "commit": lambda: run_checks(pair_of("small"), "random", 33, frozenset({"commit"})),
    "lossless": lossless_on_crossing_paths,
}


class TestPlantedFaults:
    @pytest.mark.parametrize("check", CHECKS)
    def test_checks_pass_without_one(self, check: str) -> None:
        CHECKS[check]()

    @pytest.mark.parametrize(("fault", "check"), [(f, c) for f, (_, checks) in FAULTS.items() for c in sorted(checks)])
    def test_is_caught(self, fault: str, check: str) -> None:
        jobs_of("small", "one")  # what auto answers is computed by the engine as it is
        with FAULTS[fault][0](), pytest.raises(AssertionError):
            CHECKS[check]()

    @pytest.mark.parametrize("fault", ["flat_scan", "flat_window", "commit_by_count"])
    def test_chains_hide_it(self, fault: str) -> None:
        """Why trees are needed to see them: on a chain these faults change nothing."""
        pair = pair_of("small")
        jobs = jobs_of("small", "short")
        with FAULTS[fault][0]():
            check_lossless(pair, drafter_of(pair, "oracle"), "linear", 0, jobs)
            check_lossless(pair, drafter_of(pair, "oracle"), "ddtree", 1, jobs)


# --- sampled -------------------------------------------------------------------------------------------------------

VOCAB, TEMPERATURE, SLOTS = 16, 1.3, 64


@cache
def sampling_pair() -> Pair:
    return Pair.random(
        11, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, head_dim=16, num_attention_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@cache
def exact(temperature: float) -> np.ndarray:
    """P(t1, t2, t3 | prompt, root) at a temperature: (V, V, V)."""
    pair, first = sampling_pair(), [*sampling_prompt(), ROOT]
    ends = [[], *([a] for a in range(VOCAB)), *([a, b] for a in range(VOCAB) for b in range(VOCAB))]
    logits = pair.reference.last_logits([[*first, *e] for e in ends]).double()
    p = (logits / temperature).softmax(-1).numpy()
    one, two, three = p[0], p[1 : 1 + VOCAB], p[1 + VOCAB :].reshape(VOCAB, VOCAB, VOCAB)
    joint: np.ndarray = one[:, None, None] * two[:, :, None] * three
    return joint


ROOT = 5


def sampling_prompt() -> tuple[int, ...]:
    return (3, 9, 4, 12, 7, 2, 15)


@torch.inference_mode()
def sample(decoder: Decoder, temperature: float, repeats: int) -> np.ndarray:
    """Three tokens after the root, `repeats` times in each of 64 slots: (n, 3). The prompt is read once."""
    slots = range(SLOTS)
    for slot in slots:
        decoder.prefill(Request(sampling_prompt(), 1), slot)
        if isinstance(decoder.drafter, Scripted):
            decoder.drafter.known[slot] = []
    states = ("recurrent", "conv")
    kept = {name: getattr(decoder.cache, name).clone() for name in states}
    found = []
    for repeat in range(repeats):
        for name in states:
            getattr(decoder.cache, name).copy_(kept[name])
        decoder.cache.lengths = [len(sampling_prompt())] * SLOTS
        if isinstance(decoder.drafter, Scripted):
            decoder.drafter.rows = dict.fromkeys(slots, len(sampling_prompt()))
        running = []
        for slot in slots:
            request = Request(sampling_prompt(), 4, temperature, ignore_eos=True)
            g = Generation(request, slot, [ROOT])
            g.generator = torch.Generator().manual_seed(1 + repeat * SLOTS + slot)
            running.append(g)
        while left := [g for g in running if g.finish_reason is None]:
            decoder.step(left)
        found += [g.output_ids[1:] for g in running]
    return np.array(found)


def check_distribution(samples: np.ndarray, joint: np.ndarray) -> None:
    """Chi-square of each token, of both neighbouring pairs and of triples; rare cells are taken together."""
    for axes in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)):
        others = tuple(a for a in range(3) if a not in axes)
        expected = joint.sum(others).ravel() * len(samples)
        index = np.ravel_multi_index(tuple(samples[:, a] for a in axes), (VOCAB,) * len(axes))
        observed = np.bincount(index, minlength=len(expected)).astype(float)
        rare = expected < 5
        if expected[rare].sum() >= 5:
            observed = np.append(observed[~rare], observed[rare].sum())
            expected = np.append(expected[~rare], expected[rare].sum())
        else:
            observed, expected = observed[~rare], expected[~rare]
            expected *= observed.sum() / expected.sum()
        p = stats.chisquare(observed, expected).pvalue
        assert p > 1e-4, f"tokens {axes}: p = {p:.2g} over {len(expected)} cells"


def sampling_drafter(name: str) -> Any:
    pair = sampling_pair()
    if name == "uniform":
        return Scripted(VOCAB, lambda known, i: torch.zeros(VOCAB))
    if name == "biased":  # puts tokens first that the target finds unlikely
        order = exact(TEMPERATURE).sum((1, 2)).argsort().copy()
        return Scripted(VOCAB, lambda known, i: torch.linspace(4, 0, VOCAB)[order.argsort()])
    return pair.drafter


METHODS: list[tuple[Method, int, str]] = [
    ("auto", 0, "random"),
    ("linear", 0, "random"),
    ("ddtree", 16, "random"),
    ("ddtree", 32, "biased"),
]
MORE_METHODS: list[tuple[Method, int, str]] = [
    ("ddtree", 40, "uniform"),
    ("ddtree", 7, "biased"),
    ("ddtree", 64, "random"),
    ("linear", 0, "biased"),
]


def draw(method: Method, budget: int, drafter: str, temperature: float, repeats: int = 10) -> np.ndarray:
    own = sampling_drafter(drafter)
    decoder = Decoder(sampling_pair().target, own, method=method, budget=budget, slots=SLOTS)
    return sample(decoder, temperature, repeats)


class TestSampled:
    @pytest.mark.parametrize(("method", "budget", "drafter"), METHODS)
    def test_distribution_is_the_targets(self, method: Method, budget: int, drafter: str) -> None:
        check_distribution(draw(method, budget, drafter, TEMPERATURE), exact(TEMPERATURE))

    @pytest.mark.parametrize(("method", "budget"), [("auto", 0), ("ddtree", 16)])
    def test_another_temperature_is_noticed(self, method: Method, budget: int) -> None:
        with pytest.raises(AssertionError, match="p ="):
            check_distribution(draw(method, budget, "random", 0.8), exact(TEMPERATURE))

    def test_leaning_to_the_drafts_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A walk that takes a draft now and then where the target chose another token: it gains accept length."""

        def lean(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
            for node, parent in enumerate(tree.parents[1:], 1):
                if chosen[parent] % 4 == 0:
                    chosen = [*chosen[:parent], tree.tokens[node], *chosen[parent + 1 :]]
            return accepted_path(tree, chosen)

        monkeypatch.setattr(decode, "accepted_path", lean)
        with pytest.raises(AssertionError, match="p ="):
            check_distribution(draw("ddtree", 16, "random", TEMPERATURE), exact(TEMPERATURE))

    def test_the_distribution_is_worth_testing(self) -> None:
        joint = exact(TEMPERATURE)
        assert joint.sum() == pytest.approx(1)
        one = joint.sum((1, 2))
        assert 1.0 < -(one * np.log(one)).sum() < np.log(VOCAB) - 0.05

    def test_first_token(self) -> None:
        """Prefill samples too."""
        pair = sampling_pair()
        decoder = Decoder(pair.target, method="auto", slots=1)
        with torch.inference_mode():
            first = [
                decoder.prefill(Request(sampling_prompt(), 1, TEMPERATURE, seed=s), 0).output_ids[0] for s in range(250)
            ]
        logits = pair.reference.logits(sampling_prompt())[-1]
        p = (logits / TEMPERATURE).softmax(-1).double().numpy()
        observed = np.bincount(first, minlength=VOCAB)
        assert stats.chisquare(observed, p / p.sum() * len(first)).pvalue > 1e-4

    @pytest.mark.parametrize("method", ["auto", "linear", "ddtree"])
    def test_a_seed_decides(self, method: Method) -> None:
        pair = pair_of("small")

        def run(seed: int) -> list[int]:
            decoder = Decoder(pair.target, pair.drafter, method=method, budget=16)
            request = Request(random_prompt(pair.config, 9, 1), 20, 1.0, ignore_eos=True, seed=seed)
            return generate(decoder, [Job(request)])[0].output_ids

        assert run(4) == run(4)
        assert run(4) != run(5)

    def test_greedy_and_sampled_share_a_batch(self) -> None:
        pair = pair_of("small")
        jobs = list(jobs_of("small", "eight"))[:3]
        for i in (1, 3):
            request = Request(random_prompt(pair.config, 30, i), 40, 1.0, ignore_eos=True, seed=i)
            jobs.insert(i, Job(request))
        decoder = Decoder(pair.target, pair.drafter, method="ddtree", budget=16)
        for job, g in zip(jobs, generate(decoder, jobs), strict=True):
            check_counters(g, 16)
            if job.expected:
                check_same(pair, job.request.input_ids, g.output_ids, job.expected)


# --- ends and counters ---------------------------------------------------------------------------------------------


class TestEnds:
    @pytest.mark.parametrize(("method", "budget"), [("auto", 0), ("linear", 0), ("ddtree", 7), ("ddtree", 32)])
    @pytest.mark.parametrize("new", [1, 2, 3, 16, 17, 18, 33])
    def test_max_new_tokens(self, method: Method, budget: int, new: int) -> None:
        pair = pair_of("small")
        job = jobs_of("small", "one")[0]
        cut = Job(Request(job.request.input_ids, new, ignore_eos=True), expected=job.expected)
        drafter = drafter_of(pair, "oracle") if method != "auto" else None
        decoder = Decoder(pair.target, drafter, method=method, budget=budget)
        (g,) = generate(decoder, [cut])
        assert g.output_ids == job.expected[:new]
        assert g.finish_reason == "length"
        check_counters(g, decoder.nodes)
        if method == "linear":  # 16 a round, the first token from prefill
            assert g.verify_ct == -(-(new - 1) // BLOCK)
            assert g.correct_drafts == new - 1 - (new - 1) // BLOCK

    @pytest.mark.parametrize(("method", "budget"), [("auto", 0), ("linear", 0), ("ddtree", 32)])
    @pytest.mark.parametrize("how", ["eos", "stop", "ignored"])
    @pytest.mark.parametrize("place", [0, 1, 9, 16, 20])
    def test_stop_tokens(self, method: Method, budget: int, how: str, place: int) -> None:
        """The output ends with the stop token; nothing behind it is kept or counted."""
        pair = pair_of("small")
        job = jobs_of("small", "one")[0]
        token = job.expected[place]
        first = job.expected.index(token)
        stops = (token,) if how == "stop" else ()
        request = Request(
            job.request.input_ids, 30, ignore_eos=how != "eos", stop_token_ids=stops
        )  # fmt: skip
        drafter = drafter_of(pair, "oracle") if method != "auto" else None
        decoder = Decoder(pair.target, drafter, method=method, budget=budget)
        kept = pair.target.config
        try:
            pair.target.config = small_config(eos_token_id=token)
            (g,) = generate(decoder, [Job(request, expected=job.expected)])
        finally:
            pair.target.config = kept
        check_counters(g, decoder.nodes)
        if how == "ignored":
            assert g.output_ids == job.expected[:30]
            assert g.finish_reason == "length"
        else:
            assert g.output_ids == job.expected[: first + 1]
            assert g.finish_reason == "stop"

    def test_a_stop_token_as_the_last_allowed_one_is_a_stop(self) -> None:
        pair = pair_of("small")
        job = jobs_of("small", "one")[0]
        first = job.expected.index(job.expected[9])
        request = Request(
            job.request.input_ids, first + 1, ignore_eos=True, stop_token_ids=(job.expected[9],)
        )  # fmt: skip
        (g,) = generate(Decoder(pair.target, method="auto"), [Job(request)])
        assert g.finish_reason == "stop"
        assert len(g.output_ids) == first + 1

    def test_histogram_counts_rounds_by_accepted_drafts(self) -> None:
        pair = pair_of("small")
        (g,) = check_lossless(pair, drafter_of(pair, "noisy"), "ddtree", 15, jobs_of("small", "one"))
        assert len([n for n in g.histogram if n]) > 2
        assert 0 < g.correct_drafts < g.proposed_drafts

    def test_auto_counts_no_rounds(self) -> None:
        pair = pair_of("small")
        (g,) = generate(Decoder(pair.target), jobs_of("small", "short"))
        assert (g.verify_ct, g.correct_drafts, g.proposed_drafts, g.histogram) == (0, 0, 0, [])

    def test_stages_are_timed_where_asked(self) -> None:
        pair = pair_of("small")
        decoder = Decoder(pair.target, pair.drafter, method="ddtree", budget=16)
        decoder.times = StageTimes()
        (g,) = generate(decoder, jobs_of("small", "short"))
        assert decoder.times.rounds == g.verify_ct
        stages = [
            decoder.times.draft,
            decoder.times.tree_build,
            decoder.times.verify,
            decoder.times.commit,
        ]
        assert all(s > 0 for s in stages)
        assert 0 < decoder.times.heap < decoder.times.tree_build

    def test_what_cannot_work_is_refused(self) -> None:
        pair = pair_of("small")
        for method in ("linear", "ddtree"):
            with pytest.raises(ValueError, match="needs a drafter"):
                Decoder(pair.target, method=method)
        for budget in (0, 1025, -1):
            with pytest.raises(ValueError, match=f"budget {budget} is outside"):
                Decoder(pair.target, pair.drafter, method="ddtree", budget=budget)

    @pytest.mark.parametrize(
        ("method", "budget", "tokens"),
        [
            ("auto", 15, 1),
            ("linear", 15, 16),
            ("linear", 64, 16),
            ("ddtree", 15, 16),
            ("ddtree", 64, 65),
        ],
    )
    def test_verify_tokens(self, method: Method, budget: int, tokens: int) -> None:
        pair = pair_of("small")
        decoder = Decoder(pair.target, pair.drafter, method=method, budget=budget)
        assert decoder.verify_tokens == tokens


# --- the full grid -------------------------------------------------------------------------------------------------


@pytest.mark.engine
class TestGrid:
    @pytest.mark.parametrize("key", ["one", "eight", "reuse"])
    @pytest.mark.parametrize("drafter", ["trained", *DRAFTERS])
    @pytest.mark.parametrize(("method", "budget"), [("linear", 0), *(("ddtree", b) for b in (*BUDGETS, 200))])
    @pytest.mark.parametrize("name", ["small", "deep", "packaged"])
    def test_lossless(self, name: str, method: Method, budget: int, drafter: str, key: str) -> None:
        pair = pair_of(name)
        if name in ("small", "deep") and drafter == "trained":
            pytest.skip("random targets have no trained drafter")
        if drafter == "random":
            assert pair.drafter is not None
            weights = random_drafter_weights(pair.drafter.config, 4)
            own: Any = Drafter(pair.drafter.config, weights, pair.target)
        else:
            own = drafter_of(pair, drafter)
        slots = 3 if key == "reuse" else 8
        check_lossless(pair, own, method, budget, jobs_of(name, key), slots=slots)

    @pytest.mark.parametrize("kind", ["random", "drafted"])
    @pytest.mark.parametrize("size", [1 + b for b in BUDGETS])
    @pytest.mark.parametrize("name", ["small", "deep", "packaged"])
    @pytest.mark.parametrize("slots", [(), (0, 2, 5)])
    def test_verify(self, name: str, size: int, kind: str, slots: tuple[int, ...]) -> None:
        run_checks(pair_of(name), kind, size, ALL, slots=slots)

    @pytest.mark.parametrize(("method", "budget", "drafter"), METHODS + MORE_METHODS)
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
    def test_sampled(self, method: Method, budget: int, drafter: str, temperature: float) -> None:
        check_distribution(draw(method, budget, drafter, temperature, 100), exact(temperature))


def test_cache_rows_hold_the_last_round() -> None:
    """Rows reach past the context for a whole verify, whatever the budget."""
    pair = pair_of("small")
    for budget in (1, 64, 300):
        decoder = Decoder(pair.target, pair.drafter, method="ddtree", budget=budget, slots=1)
        assert isinstance(decoder.cache, Cache)
        assert decoder.cache.rows >= pair.target.context_length + budget + 1
