"""Rounds of decoding over up to `slots` sequences at once: autoregressive, DFlash chain, DDTree; greedy or sampled.

A round drafts a block, verifies a chain or a tree in one forward of the target, follows the target's own choices from
the root, and commits the accepted nodes. Each node's logits are conditional on its own ancestors alone, so following
one sample a node down the tree is ancestral sampling from the target: exact at any temperature, for any tree.

Between rounds a sequence's cache holds all its tokens but the last, which is the next round's root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchlib.reference_engine.drafter import Drafter
from benchlib.reference_engine.model import Cache, Target, Tree, chain_tree
from benchlib.reference_engine.tree import (
    DraftTree,
    accepted_path,
    ancestor_matrix,
    build_chain,
    build_tree,
    convolution_index,
)

__all__ = ["Decoder", "Generation", "Method", "Request", "StageTimes", "Trace"]

Method = Literal["auto", "linear", "ddtree"]
PREFILL_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    traced_step: int | None = None  # the verify step, from 0, whose draft tree is kept


@dataclass(frozen=True, slots=True)
class Trace:
    """One verify step: the tree, the accepted nodes from the root down, and the token the target chose after them."""

    step: int
    tree: DraftTree
    path: list[int]
    bonus: int


@dataclass(slots=True)
class Generation:
    """A request being decoded, with SGLang's counters: `correct_drafts` leaves the bonus out.

    Drafts beyond `max_new_tokens` or behind a stop token are not counted, as they are not kept.
    """

    request: Request
    slot: int
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    verify_ct: int = 0
    correct_drafts: int = 0
    proposed_drafts: int = 0
    histogram: list[int] = field(default_factory=list)
    forecast: float = 0.0  # accept length that the drafter promised, summed over the steps
    trace: Trace | None = None
    generator: torch.Generator | None = None

    @property
    def root(self) -> int:
        """The last token, not yet in the cache."""
        return self.output_ids[-1]


@dataclass(slots=True)
class StageTimes:
    """Seconds spent in each stage, summed over rounds; filled only where a `Decoder` is given one.

    Timing each stage costs a little: compare totals from an uninstrumented run.
    """

    draft: float = 0.0
    tree_build: float = 0.0
    heap: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    rounds: int = 0


class Decoder:
    """Decodes with one method for all its sequences."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        method: Method = "auto",
        budget: int = 15,
        slots: int = 8,
    ) -> None:
        if method != "auto" and drafter is None:
            raise ValueError(f"method {method!r} needs a drafter")
        if method == "ddtree" and not 1 <= budget <= 1024:
            raise ValueError(f"tree budget {budget} is outside 1..1024")
        self.target, self.drafter, self.method, self.budget = target, drafter, method, budget
        block = drafter.config.block_size if drafter else 1
        self.nodes = {"auto": 0, "linear": block - 1, "ddtree": budget}[method]
        self.width = min(budget, target.config.vocab_size) if method == "ddtree" else 1
        rows = target.context_length + max(self.nodes + 1, block, PREFILL_CHUNK)
        self.cache = Cache(target, slots, rows)
        self.context = drafter.new_cache(slots, rows) if drafter else None
        self.times: StageTimes | None = None
        # Called with a sequence, logits (T, V) after T of its nodes, and what was picked after each.
        self.record_logits: Callable[[Generation, Tensor, list[int]], None] | None = None

    @property
    def verify_tokens(self) -> int:
        """Tokens of one forward of the target: the root and the drafted nodes."""
        return 1 + self.nodes

    def prefill(self, request: Request, slot: int) -> Generation:
        """Read the prompt and choose the first token; the slot must be free."""
        sequence = Generation(request, slot)
        if request.temperature > 0:
            sequence.generator = torch.Generator().manual_seed(request.seed)
        self.cache.clear(slot)
        ids = torch.tensor([request.input_ids], device=self.target.device)
        hidden = None
        for part in torch.split(ids, PREFILL_CHUNK, 1):
            count = part.shape[1]
            start = self.cache.lengths[slot]
            tree = chain_tree(1, count, self.target.kernel, self.target.device)
            output = self.target.forward(part, torch.arange(count, device=part.device)[None], self.cache, [slot], tree)
            assert output.pending is not None
            self.target.commit(self.cache, output.pending, [range(count)])
            if self.drafter is not None and self.context is not None and output.taps is not None:
                self.drafter.append(self.context, slot, start, output.taps[0])
            hidden = output.hidden[:, -1:]
        assert hidden is not None
        self._keep(sequence, self._choose(self.target.logits(hidden)[0], sequence)[:1])
        return sequence

    def step(self, sequences: Sequence[Generation]) -> None:
        """One round for every sequence given: each gains at least one token."""
        if self.method == "auto":
            self._step_auto(sequences)
        else:
            self._step_draft(sequences)

    def _step_auto(self, sequences: Sequence[Generation]) -> None:
        roots = torch.tensor([[s.root] for s in sequences], device=self.target.device)
        output = self.target.forward(roots, torch.zeros_like(roots), self.cache, [s.slot for s in sequences])
        logits = self.target.logits(output.hidden)
        for b, sequence in enumerate(sequences):
            self._keep(sequence, self._choose(logits[b], sequence))

    def _step_draft(self, sequences: Sequence[Generation]) -> None:
        marks = [time.perf_counter()]
        slots = [s.slot for s in sequences]
        candidates = self._draft(sequences, slots)
        marks.append(time.perf_counter())
        trees, heap = self._trees(sequences, candidates)
        tokens, depths, tables = self._tables(trees)
        marks.append(time.perf_counter())
        output = self.target.forward(tokens, depths, self.cache, slots, tables)
        logits = self.target.logits(output.hidden)
        chosen = [self._choose(logits[b], s) for b, s in enumerate(sequences)]
        marks.append(time.perf_counter())
        accepted = [accepted_path(tree, picks) for tree, picks in zip(trees, chosen, strict=True)]
        assert output.pending is not None
        assert output.taps is not None
        assert self.drafter is not None
        assert self.context is not None
        starts = [self.cache.lengths[s] for s in slots]
        self.target.commit(self.cache, output.pending, [path for path, _ in accepted])
        for b, (sequence, tree, (path, bonus)) in enumerate(zip(sequences, trees, accepted, strict=True)):
            whole = path[-1] == len(path) - 1
            taps = output.taps[b, : len(path)] if whole else output.taps[b, path]
            self.drafter.append(self.context, slots[b], starts[b], taps)
            sequence.forecast += tree.forecast
            if sequence.verify_ct == sequence.request.traced_step:
                sequence.trace = Trace(sequence.verify_ct, tree, path, bonus)
            self._count(sequence, [*(tree.tokens[n] for n in path[1:]), bonus])
        if self.times is not None:
            self._time(marks, heap)

    def _draft(self, sequences: Sequence[Generation], slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Candidates of every slot, best first: log probabilities and tokens, each (B, block - 1, K)."""
        assert self.drafter is not None
        assert self.context is not None
        roots = torch.tensor([s.root for s in sequences], device=self.target.device)
        logits = self.drafter.draft(self.context, slots, [self.cache.lengths[s] for s in slots], roots)
        top = logits.topk(self.width, -1) if self.width > 1 else logits.max(-1, keepdim=True)
        return (top.values - logits.logsumexp(-1, keepdim=True)).cpu().numpy(), top.indices.cpu().numpy()

    def _trees(
        self, sequences: Sequence[Generation], candidates: tuple[np.ndarray, np.ndarray]
    ) -> tuple[list[DraftTree], float]:
        begun = time.perf_counter()
        log_probs, tokens = candidates
        if self.method == "linear":
            trees = [build_chain(s.root, log_probs[b], tokens[b]) for b, s in enumerate(sequences)]
        else:
            trees = [build_tree(s.root, log_probs[b], tokens[b], self.budget) for b, s in enumerate(sequences)]
        return trees, time.perf_counter() - begun

    def _tables(self, trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor, Tree]:
        device, kernel = self.target.device, self.target.kernel
        tokens = torch.tensor([t.tokens for t in trees], device=device)
        depths = torch.tensor([t.depths for t in trees], device=device)
        if self.method == "linear":
            return tokens, depths, chain_tree(len(trees), tokens.shape[1], kernel, device)
        ancestors = torch.from_numpy(np.stack([ancestor_matrix(t.parents) for t in trees]))
        index = torch.from_numpy(np.stack([convolution_index(t.parents, kernel) for t in trees]))
        return tokens, depths, Tree(ancestors.to(device), index.to(device))

    def _choose(self, logits: Tensor, sequence: Generation) -> list[int]:
        """What the target picks after each row of logits (T, V)."""
        picks: list[int]
        if sequence.generator is None:
            picks = logits.argmax(-1).tolist()
        else:
            weights = (logits / sequence.request.temperature).softmax(-1).cpu()
            picks = torch.multinomial(weights, 1, generator=sequence.generator).squeeze(1).tolist()
        if self.record_logits is not None:
            self.record_logits(sequence, logits, picks)
        return picks

    def _count(self, sequence: Generation, tokens: list[int]) -> None:
        """Keep a round's tokens and count its drafts."""
        kept = self._keep(sequence, tokens)
        drafts = min(kept, len(tokens) - 1)
        sequence.verify_ct += 1
        sequence.correct_drafts += drafts
        sequence.proposed_drafts += self.nodes
        sequence.histogram += [0] * (drafts + 1 - len(sequence.histogram))
        sequence.histogram[drafts] += 1

    def _keep(self, sequence: Generation, tokens: list[int]) -> int:
        """Append until the request is finished; returns how many were kept."""
        request = sequence.request
        stops = set(request.stop_token_ids)
        if not request.ignore_eos:
            stops.add(self.target.config.eos_token_id)
        for kept, token in enumerate(tokens, 1):
            sequence.output_ids.append(token)
            if token in stops:
                sequence.finish_reason = "stop"
                return kept
            if len(sequence.output_ids) >= request.max_new_tokens:
                sequence.finish_reason = "length"
                return kept
        return len(tokens)

    def _time(self, marks: list[float], heap: float) -> None:
        times = self.times
        assert times is not None
        times.draft += marks[1] - marks[0]
        times.tree_build += marks[2] - marks[1]
        times.heap += heap
        times.verify += marks[3] - marks[2]
        times.commit += time.perf_counter() - marks[3]
        times.rounds += 1
