"""Shared by the embedded engine's tests: small models, drafters of every temper, checks, and planted faults.

A check is a function that raises AssertionError when the engine is wrong. The tests call it on the engine as it is,
and again on engines with a planted fault, where it has to raise: so the tests prove that they can fail.

The yardstick is `train.TrainTarget`, which shares neither cache, nor tree, nor recurrence with `model.Target`; a test
holds both to `transformers`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import benchlib.reference_engine
from benchlib.reference_engine import decode, model, train
from benchlib.reference_engine.decode import Decoder, Generation, Method, Request
from benchlib.reference_engine.drafter import Drafter, DrafterConfig
from benchlib.reference_engine.model import Cache, Shard, Target, TargetConfig, Tree, chain_tree
from benchlib.reference_engine.tree import DraftTree, ancestor_matrix, convolution_index

torch.set_num_threads(1)  # several processes share few cores, and two threads each slow one another

WEIGHTS = Path(benchlib.reference_engine.__file__).parent / "weights"
TOLERANCE = 1e-4
BUDGETS = (1, 7, 15, 16, 32, 64)
BLOCK = 16


# --- small models ------------------------------------------------------------------------------------------------


def small_config(**changes: Any) -> TargetConfig:
    """Four layers in the 3:1 pattern, two heads of everything."""
    layers = changes.pop("layers", 4)
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": (("linear_attention",) * 3 + ("full_attention",)) * (layers // 4),
        "eos_token_id": 0,
        "max_position_embeddings": 320,
    }
    return TargetConfig(**fields | changes)


def small_drafter_config(target: TargetConfig, **changes: Any) -> DrafterConfig:
    """One layer, taps on the first three target layers."""
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "num_target_layers": len(target.layer_types),
        "mask_token_id": 1,
        "target_layer_ids": (0, 1, 2),
        "block_size": BLOCK,
        "max_position_embeddings": target.max_position_embeddings,
    }
    return DrafterConfig(**fields | changes)


@torch.no_grad()
def random_weights(config: TargetConfig, seed: int = 0, scale: float = 2.5) -> dict[str, Tensor]:
    """A trainable target's first weights, grown so that logits have real gaps and no norm is at its default."""
    torch.manual_seed(seed)
    state = train.TrainTarget(config, (0,)).state_dict()
    for name, value in state.items():
        if "embed" in name:
            value.mul_(scale * 5)
        elif name.endswith(("dt_bias", "A_log")):
            value.add_(torch.randn_like(value) * 0.3)
        elif value.ndim == 1:
            value.add_(torch.randn_like(value) * 0.2)
        else:
            value.mul_(scale)
    return state


@torch.no_grad()
def random_drafter_weights(config: DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """A trainable drafter's first weights, grown likewise."""
    torch.manual_seed(seed)
    state = train.TrainDrafter(config).state_dict()
    for value in state.values():
        value.add_(torch.randn_like(value) * 0.2) if value.ndim == 1 else value.mul_(2)
    return state


class Reference:
    """Logits of whole sequences by the trainable target: no cache, no tree, another recurrence."""

    def __init__(self, config: TargetConfig, weights: dict[str, Tensor]) -> None:
        self.model = train.TrainTarget(config, (0,))
        self.model.load_state_dict({k: v.float() for k, v in weights.items()})
        self.embedding = self.model.model.embed_tokens.weight

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states (B, padded, H) of sequences of any lengths; what lies behind an end means nothing."""
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), -(-longest // train.CHUNK) * train.CHUNK, dtype=torch.long)
        for row, tokens in zip(ids, sequences, strict=True):
            row[: len(tokens)] = torch.tensor(list(tokens))
        return self.model(ids)[0]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits (T, V) after each token."""
        return self.hidden([tokens])[0, : len(tokens)] @ self.embedding.T.detach()

    def last_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, V) after each whole sequence."""
        hidden = self.hidden(sequences)
        ends = torch.tensor([len(s) - 1 for s in sequences])
        return hidden[torch.arange(len(sequences)), ends] @ self.embedding.T.detach()


@dataclass
class Pair:
    """A target, what it should compute, and perhaps a drafter."""

    config: TargetConfig
    weights: dict[str, Tensor]
    target: Target
    reference: Reference
    drafter: Drafter | None = None

    @classmethod
    def random(cls, seed: int = 0, **changes: Any) -> Pair:
        """A random target with a random drafter beside it."""
        config = small_config(**changes)
        own = small_drafter_config(config)
        weights = random_weights(config, seed)
        target = Target(config, weights, taps=own.target_layer_ids)
        drafter = Drafter(own, random_drafter_weights(own, seed), target)
        return cls(config, weights, target, Reference(config, weights), drafter)

    @classmethod
    def load(cls, folder: Path) -> Pair:
        """A trained pair: `folder/target` and `folder/drafter`."""
        config = TargetConfig.load(folder / "target")
        own = DrafterConfig.load(folder / "drafter")
        weights = model.load_weights(folder / "target")
        target = Target(config, weights, taps=own.target_layer_ids)
        drafter = Drafter(own, model.load_weights(folder / "drafter"), target)
        return cls(config, weights, target, Reference(config, weights), drafter)


def packaged_folder() -> Path:
    """The weights that ship in the package. Skips only where there are none and none are due."""
    there = (WEIGHTS / "target" / "model.safetensors").exists()
    if not there and not WEIGHTS.exists() and not os.environ.get("CI"):
        pytest.skip("no packaged weights: benchlib/reference_engine/weights is missing")
    needed = [
        "target/config.json", "target/model.safetensors", "target/tokenizer.json",
        "drafter/config.json", "drafter/model.safetensors",
    ]  # fmt: skip
    missing = [name for name in needed if not (WEIGHTS / name).exists()]
    assert not missing, f"packaged weights are broken: {', '.join(missing)} missing in {WEIGHTS}"
    return WEIGHTS


def random_prompt(config: TargetConfig, length: int, seed: int) -> tuple[int, ...]:
    """Token ids without specials."""
    rng = random.Random(f"{seed}/{length}")
    return tuple(rng.randrange(8, config.vocab_size) for _ in range(length))


# --- two tensor-parallel ranks in one process ----------------------------------------------------------------------


class Meeting:
    """An all-reduce between threads: everyone leaves a partial sum, waits, and takes the total in rank order."""

    def __init__(self, world: int) -> None:
        self.world, self.parts = world, [torch.zeros(0)] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def shard(self, rank: int) -> Shard:
        def all_reduce(x: Tensor) -> Tensor:
            self.parts[rank] = x
            self.barrier.wait()
            total = torch.stack(self.parts).sum(0)
            self.barrier.wait()
            return total

        return Shard(rank, self.world, all_reduce)

    def run(self, work: Callable[[Shard], Any]) -> list[Any]:
        """`work` on every rank at once; results by rank."""

        def one(rank: int) -> Any:
            torch.set_num_threads(1)  # counts for the calling thread alone
            try:
                with torch.inference_mode():
                    return work(self.shard(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.world)]
        errors = [e for e in (f.exception() for f in futures) if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error  # the cause, not that the others waited in vain
        return [f.result() for f in futures]


# --- drafters ------------------------------------------------------------------------------------------------------


class Scripted:
    """Stands where a `Drafter` stands and proposes from a script: `scores(known, position)` gives a slot's logits.

    `known` holds the prompt and auto's whole output of the sequence in that slot, so that a script can be right, wrong
    or in between on purpose.
    """

    def __init__(
        self,
        vocab: int,
        scores: Callable[[Sequence[int], int], Tensor],
        taps: int = 0,
        block: int = BLOCK,
    ) -> None:
        self.config = DrafterConfig(8, 8, 1, 1, 1, 8, vocab, 4, 1, (0,), block_size=block)
        self.vocab, self.scores = vocab, scores
        self.known: dict[int, Sequence[int]] = {}
        self.rows: dict[int, int] = {}

    def new_cache(self, slots: int, rows: int) -> Tensor:
        return torch.zeros(slots, rows)

    def append(self, cache: Tensor, slot: int, start: int, taps: Tensor) -> None:
        """Check on the way that the decoder hands over every row once and in order."""
        assert start in (0, self.rows.get(slot, 0)), f"context rows of slot {slot} are not in order"
        self.rows[slot] = start + len(taps)

    def draft(self, cache: Tensor, slots: list[int], lengths: list[int], anchors: Tensor) -> Tensor:
        out = []
        for slot, length, anchor in zip(slots, lengths, anchors.tolist(), strict=True):
            assert self.rows[slot] == length, f"slot {slot}: {self.rows[slot]} of {length} rows"
            known = self.known[slot]
            assert length >= len(known) or known[length] == anchor or self.vocab < 64
            first = length + 1
            out.append(torch.stack([self.scores(known, first + i) for i in range(self.config.block_size - 1)]))
        return torch.stack(out)


def _peaks(vocab: int, *ranked: int) -> Tensor:
    """Logits that rank the given tokens first, best first; the rest is a low slope without ties."""
    scores = torch.linspace(0, 0.5, vocab)
    for rank, token in reversed(list(enumerate(ranked))):
        scores[token] = 14.0 - 0.7 * rank
    return scores


def scripted_drafters(pair: Pair) -> dict[str, Callable[[], Scripted]]:
    """Adversaries and helpers, by name; each call makes a fresh one."""
    vocab = pair.config.vocab_size
    seconds: dict[tuple[int, ...], list[int]] = {}

    def truth(known: Sequence[int], i: int) -> int:
        return known[i] if i < len(known) else 7

    def second(known: Sequence[int], i: int) -> int:
        key = tuple(known)
        if key not in seconds:
            logits = pair.reference.logits(known)
            seconds[key] = [known[0], *logits.topk(2).indices[:, 1].tolist()]
        return seconds[key][i] if i < len(known) else 9

    def oracle(known: Sequence[int], i: int) -> Tensor:
        return _peaks(vocab, truth(known, i))

    def second_best(known: Sequence[int], i: int) -> Tensor:
        return _peaks(vocab, second(known, i))

    def second_first(known: Sequence[int], i: int) -> Tensor:
        # every third slot is wrong first: accepted paths leave the chain and cross siblings
        right, wrong = truth(known, i), second(known, i)
        return _peaks(vocab, wrong, right) if i % 3 == 0 else _peaks(vocab, right, wrong)

    def repeat(known: Sequence[int], i: int) -> Tensor:
        return _peaks(vocab, 11)

    def uniform(known: Sequence[int], i: int) -> Tensor:
        return torch.zeros(vocab)

    def noisy(known: Sequence[int], i: int) -> Tensor:
        rng = random.Random(f"{i}/{truth(known, i)}")
        ranked = [truth(known, i), rng.randrange(vocab), rng.randrange(vocab)]
        if rng.random() < 0.3:
            rng.shuffle(ranked)
        return _peaks(vocab, *dict.fromkeys(ranked))

    scripts = (oracle, second_best, second_first, repeat, uniform, noisy)
    return {s.__name__: (lambda s=s: Scripted(vocab, s)) for s in scripts}


# --- running a decoder ---------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One request, the round at which it arrives, and what auto answers to it."""

    request: Request
    arrives: int = 0
    expected: list[int] = field(default_factory=list)


@torch.inference_mode()
def generate(decoder: Decoder, jobs: Sequence[Job], order: Sequence[int] = ()) -> list[Generation]:
    """Decode all jobs, each from its arrival on, in whatever slots are free (`order`: the first choices).

    Sequences leave as they finish, so that batches shrink, grow and skip slots; a job waits where no slot is free.
    """
    free = list(order) or list(range(len(decoder.cache.lengths)))
    waiting = sorted(range(len(jobs)), key=lambda j: jobs[j].arrives)
    done: dict[int, Generation] = {}
    active: dict[int, Generation] = {}
    now = 0
    while waiting or active:
        while waiting and free and jobs[waiting[0]].arrives <= now:
            j = waiting.pop(0)
            slot = free.pop(0)
            if isinstance(decoder.drafter, Scripted):
                decoder.drafter.known[slot] = [*jobs[j].request.input_ids, *jobs[j].expected]
                decoder.drafter.rows[slot] = 0
            active[j] = decoder.prefill(jobs[j].request, slot)
        if running := [g for g in active.values() if g.finish_reason is None]:
            decoder.step(running)
        for j in [j for j, g in active.items() if g.finish_reason is not None]:
            done[j] = active.pop(j)
            free.append(done[j].slot)
        now += 1
    return [done[j] for j in range(len(jobs))]


def make_jobs(pair: Pair, lengths: Sequence[int], new: Sequence[int], *, seed: int = 0, stagger: int = 0) -> list[Job]:
    """Greedy jobs with auto's answers, each decoded alone."""
    jobs = []
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        prompt = random_prompt(pair.config, length, seed + i)
        jobs.append(Job(Request(prompt, count, ignore_eos=True), arrives=i * stagger))
    decoder = Decoder(pair.target, method="auto", slots=1)
    for job in jobs:
        job.expected = generate(decoder, [job])[0].output_ids
    return jobs


# --- checks --------------------------------------------------------------------------------------------------------


def check_greedy(pair: Pair, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the reference's most probable one after all before it, or within a tie of 1e-4 of it."""
    logits = pair.reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
    short = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    worst = int(short.argmax())
    assert short[worst] < TOLERANCE, f"token {worst} is {short[worst]:.2g} below the best"


def check_same(pair: Pair, prompt: Sequence[int], output: Sequence[int], auto: Sequence[int]) -> None:
    """Token for token what auto gives. The one excuse: auto's own two best logits lie within 1e-4 where they part.

    Logits of one and of several tokens a forward differ by some 1e-6, so that such a tie may fall either way; what
    follows a tie is another text, and is only held to be greedy itself.
    """
    assert len(output) == len(auto), f"{len(output)} tokens, auto {len(auto)}"
    parted = next((i for i, (a, b) in enumerate(zip(output, auto, strict=True)) if a != b), None)
    if parted is not None:
        best = pair.reference.logits([*prompt, *auto[:parted]])[-1].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < TOLERANCE, f"differs from auto at token {parted}, where auto's gap is {gap:.3g}"
    check_greedy(pair, prompt, output)


def check_counters(generation: Generation, nodes: int) -> None:
    """The identities between the counters and the output."""
    g, request = generation, generation.request
    assert sum(g.histogram) == g.verify_ct
    assert sum(i * n for i, n in enumerate(g.histogram)) == g.correct_drafts
    assert not g.histogram or g.histogram[-1] > 0
    assert g.proposed_drafts == nodes * g.verify_ct
    assert len(g.output_ids) <= request.max_new_tokens
    if nodes:
        # the first token is prefill's; every round adds its drafts and a bonus, unless it is cut before the bonus
        missing = 1 + g.verify_ct + g.correct_drafts - len(g.output_ids)
        assert missing in (0, 1), f"{missing} tokens are unaccounted for"
        assert missing == 0 or g.verify_ct > 0
    else:
        assert g.verify_ct == g.correct_drafts == 0
    if g.finish_reason == "length":
        assert len(g.output_ids) == request.max_new_tokens


def check_lossless(
    pair: Pair,
    drafter: Any,
    method: Method,
    budget: int,
    jobs: Sequence[Job],
    *,
    slots: int = 8,
    order: Sequence[int] = (),
) -> list[Generation]:
    """Greedy output of a method is auto's, and the counters add up."""
    decoder = Decoder(pair.target, drafter, method=method, budget=budget, slots=slots)
    generations = generate(decoder, jobs, order)
    for job, g in zip(jobs, generations, strict=True):
        check_same(pair, job.request.input_ids, g.output_ids, job.expected)
        check_counters(g, decoder.nodes)
    return generations


def random_tree(size: int, seed: int, vocab: int, spread: int = 6) -> DraftTree:
    """A tree of `size` nodes with siblings and cousins interleaved; siblings differ in token."""
    rng = random.Random(seed)
    tokens, parents, depths = [rng.randrange(8, vocab)], [-1], [0]
    used: dict[int, set[int]] = {}
    for node in range(1, size):
        parent = rng.randrange(max(0, node - spread), node)
        token = rng.choice([t for t in range(8, vocab) if t not in used.get(parent, ())])
        used.setdefault(parent, set()).add(token)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree(tokens, parents, depths, [0.0] * size)


def node_path(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def tables(trees: Sequence[DraftTree], kernel: int) -> tuple[Tensor, Tensor, Tree]:
    """What a decoder makes of drafted trees before it verifies them."""
    ancestors = torch.from_numpy(np.stack([ancestor_matrix(t.parents) for t in trees]))
    index = torch.from_numpy(np.stack([convolution_index(t.parents, kernel) for t in trees]))
    tokens, depths = ([getattr(t, name) for t in trees] for name in ("tokens", "depths"))
    return torch.tensor(tokens), torch.tensor(depths), Tree(ancestors, index)


@torch.inference_mode()
def feed(target: Target, cache: Cache, slot: int, tokens: Sequence[int], chunk: int = 64) -> Tensor:
    """Append tokens to a slot in chunks, as a prefill does; the final hidden states (T, H)."""
    out = []
    for part in torch.tensor(list(tokens)).split(chunk):
        depths = torch.arange(len(part))[None]
        tree = chain_tree(1, len(part), target.kernel)
        output = target.forward(part[None], depths, cache, [slot], tree)
        assert output.pending is not None
        target.commit(cache, output.pending, [range(len(part))])
        out.append(output.hidden[0])
    return torch.cat(out)


@dataclass
class Verified:
    """Prompts in a cache, trees below them, one forward over the trees, and what was in the cache before it."""

    target: Target
    cache: Cache
    prompts: Sequence[Sequence[int]]
    slots: list[int]
    trees: Sequence[DraftTree]
    logits: Tensor
    pending: model.Pending
    before: dict[str, Tensor]
    lengths: list[int]


@torch.inference_mode()
def verify(
    target: Target,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[DraftTree],
    slots: Sequence[int] = (),
) -> Verified:
    """Read the prompts, then verify one tree below each."""
    where = list(slots) or list(range(len(prompts)))
    size = len(trees[0].tokens)
    cache = Cache(target, max(where) + 1, target.context_length + max(64, size))
    for slot, prompt in zip(where, prompts, strict=True):
        feed(target, cache, slot, prompt)
    before = {name: getattr(cache, name).clone() for name in ("kv", "recurrent", "conv")}
    lengths = list(cache.lengths)
    tokens, depths, tree = tables(trees, target.kernel)
    output = target.forward(tokens, depths, cache, where, tree)
    assert output.pending is not None
    logits = target.logits(output.hidden)
    return Verified(target, cache, prompts, where, trees, logits, output.pending, before, lengths)


def check_node_logits(pair: Pair, v: Verified) -> None:
    """Each node's logits are those of a fresh forward over the prompt and the node's own path."""
    for b, (prompt, tree) in enumerate(zip(v.prompts, v.trees, strict=True)):
        inner = set(tree.parents)
        leaves = [node_path(tree, n) for n in range(len(tree.tokens)) if n not in inner]
        fresh = torch.empty_like(v.logits[b])
        hidden = pair.reference.hidden([[*prompt, *(tree.tokens[n] for n in p)] for p in leaves])
        for row, path in zip(hidden, leaves, strict=True):  # causal: a leaf's path serves all nodes on it
            fresh[path] = row[len(prompt) : len(prompt) + len(path)] @ pair.reference.embedding.T.detach()
        error = (v.logits[b] - fresh).abs().amax(-1)
        worst = int(error.argmax())
        assert error[worst] < TOLERANCE, (
            f"sequence {b}: logits of node {worst} (path {node_path(tree, worst)}) are {error[worst]:.2g} off"
        )


def check_untouched(v: Verified) -> None:
    """A verify leaves the committed part of the cache as it was, to the bit."""
    assert v.cache.lengths == v.lengths
    for name in ("recurrent", "conv"):
        assert torch.equal(getattr(v.cache, name), v.before[name]), f"verify changed {name} state"
    for slot, length in enumerate(v.lengths):
        kept, was = v.cache.kv[:, slot, :, :, :length], v.before["kv"][:, slot, :, :, :length]
        assert torch.equal(kept, was), f"verify changed committed K/V rows of slot {slot}"


@torch.inference_mode()
def check_commit(v: Verified, nodes: Sequence[int]) -> None:
    """After a commit of the paths to `nodes`, each layer's state is what a fresh read of the same tokens leaves."""
    paths = [node_path(t, n) for t, n in zip(v.trees, nodes, strict=True)]
    v.target.commit(v.cache, v.pending, paths)
    for prompt, tree, slot, path in zip(v.prompts, v.trees, v.slots, paths, strict=True):
        tokens = [*prompt, *(tree.tokens[n] for n in path)]
        check_state(v.target, v.cache, slot, tokens)


@torch.inference_mode()
def check_state(target: Target, cache: Cache, slot: int, tokens: Sequence[int]) -> None:
    """A slot's recurrent state, convolution window and K/V rows, layer by layer, against a fresh read."""
    fresh = Cache(target, 1, len(tokens) + 64)
    feed(target, fresh, 0, tokens, chunk=1)
    assert cache.lengths[slot] == len(tokens)
    rows = slice(0, len(tokens))
    for name, own, other in (
        ("recurrent", cache.recurrent[:, slot], fresh.recurrent[:, 0]),
        ("conv", cache.conv[:, slot], fresh.conv[:, 0]),
        ("kv", cache.kv[:, slot, :, :, rows], fresh.kv[:, 0, :, :, rows]),
    ):
        for layer, (a, b) in enumerate(zip(own, other, strict=True)):
            error = float((a - b).abs().max())
            assert error < TOLERANCE, f"{name} of layer {layer} of its kind is {error:.2g} off"


# --- planted faults ------------------------------------------------------------------------------------------------


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


def flat_scan() -> Any:
    """The recurrence takes the tree's nodes as one chain; attention and convolution stay right."""

    def make(solve: Any) -> Any:
        def flat(self: Any, qkv: Tensor, gates: Any, cache: Cache, where: Any, pending: Any) -> Tensor:
            ancestors = torch.ones_like(pending.tree.ancestors).tril()
            tree = Tree(ancestors, pending.tree.conv)
            return solve(self, qkv, gates, cache, where, dataclasses.replace(pending, tree=tree))

        return flat

    return _patched(model._Gdn, "_solve", make)


def commit_by_count() -> Any:
    """The committed state is that of node number `accepted`, not that of the last accepted node."""

    def make(commit: Any) -> Any:
        def wrong(self: Any, cache: Cache, pending: Any, paths: Sequence[Sequence[int]]) -> None:
            self._commit_states(cache, pending, torch.tensor([len(p) - 1 for p in paths]))
            for slot, path in zip(pending.slots, paths, strict=True):
                self._commit_rows(cache, slot, path)

        return wrong

    return _patched(Target, "commit", make)


def flat_window() -> Any:
    """The short convolution of a node reads the nodes just before it in the batch, whoever their parents are."""

    def make(convolve: Any) -> Any:
        def flat(self: Any, full: Tensor, tree: Tree, count: int) -> Tensor:
            return convolve(self, full, dataclasses.replace(tree, is_chain=True), count)

        return flat

    return _patched(model._Gdn, "_convolve", make)


def flat_window_commit() -> Any:
    """The committed convolution window ends at the right node but does not follow its parents."""

    def make(commit: Any) -> Any:
        def wrong(self: Any, cache: Cache, pending: Any, nodes: Tensor) -> None:
            count = pending.tree.conv.shape[1]
            flat = torch.arange(count)[:, None] + torch.arange(self.kernel)
            tree = Tree(pending.tree.ancestors, flat.expand(len(nodes), -1, -1))
            commit(self, cache, dataclasses.replace(pending, tree=tree), nodes)

        return wrong

    return _patched(Target, "_commit_states", make)


def rows_in_place() -> Any:
    """K/V rows of the accepted path stay where the tree's nodes were."""

    def make(commit: Any) -> Any:
        def wrong(self: Any, cache: Cache, slot: int, path: Sequence[int]) -> None:
            commit(self, cache, slot, range(len(path)))

        return wrong

    return _patched(Target, "_commit_rows", make)


def eager_state() -> Any:
    """A verify writes its last node's state at once."""

    def make(solve: Any) -> Any:
        def wrong(self: Any, qkv: Tensor, gates: Any, cache: Cache, where: Any, pending: Any) -> Tensor:
            out: Tensor = solve(self, qkv, gates, cache, where, pending)
            if not pending.tree.is_chain:
                cache.recurrent[self.index][where] *= pending.decay[-1][..., -1].exp()[:, :, None, :, None]
                cache.conv[self.index][where] = pending.conv[-1][:, -cache.conv.shape[2] :]
            return out

        return wrong

    return _patched(model._Gdn, "_solve", make)


def stale_anchor() -> Any:
    """The token after the accepted path is taken from the root's logits."""

    def make(accepted: Any) -> Any:
        def wrong(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
            return accepted(tree, chosen)[0], chosen[0]

        return wrong

    return _patched(decode, "accepted_path", make)


FAULTS: dict[str, tuple[Callable[[], Any], frozenset[str]]] = {
    # name: (plant it, the checks that must notice)
    "flat_scan": (flat_scan, frozenset({"node_logits", "commit", "lossless"})),
    "commit_by_count": (commit_by_count, frozenset({"commit", "lossless"})),
    "flat_window": (flat_window, frozenset({"node_logits", "commit", "lossless"})),
    "flat_window_commit": (flat_window_commit, frozenset({"commit", "lossless"})),
    "rows_in_place": (rows_in_place, frozenset({"commit", "lossless"})),
    "eager_state": (eager_state, frozenset({"untouched", "commit", "lossless"})),
    "stale_anchor": (stale_anchor, frozenset({"lossless"})),
}
