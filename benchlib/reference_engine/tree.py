"""Draft trees from a block drafter's marginals: best-first search, tables for verification, and the accepted path.

Pure: numpy in, arrays out. A node is a prefix of drafts, its probability the product of its slots' marginals. The
`budget` most probable prefixes are prefix-closed (no prefix is less probable than its extension), so popping a heap
gives the tree that maximises the expected number of accepted drafts under those marginals (arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DraftTree",
    "accepted_path",
    "ancestor_matrix",
    "build_chain",
    "build_tree",
    "convolution_index",
]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in topological order; node 0 is the root, the last token already decided.

    `tokens`, `parents` (-1 for the root) and `depths` have 1 + nodes entries; `log_probs` is each node's log
    probability under the drafter, 0 for the root.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]

    @property
    def forecast(self) -> float:
        """Accept length (bonus included) that the drafter's own marginals promise: 1 + the nodes' probabilities."""
        return 1.0 + float(np.exp(self.log_probs[1:]).sum())


def build_tree(anchor: int, log_probs: NDArray[np.floating], tokens: NDArray[np.integer], budget: int) -> DraftTree:
    """The `budget` most probable prefixes of the slots' candidates, below `anchor`.

    `log_probs` and `tokens` are (slots, K), each row sorted by falling probability; the tree is exactly best-first
    when K is at least the budget. Ties go to the node that was seen first.
    """
    scores: list[list[float]] = log_probs.tolist()
    candidates: list[list[int]] = tokens.tolist()
    slots, width = len(scores), len(scores[0])
    tree = DraftTree([anchor], [-1], [0], [0.0])
    out_tokens, parents, depths, sums = tree.tokens, tree.parents, tree.depths, tree.log_probs
    heap = [(-scores[0][0], 0, 0, 1, 0)]  # (cost, order, parent, depth, rank)
    order = 0
    push, pop = heapq.heappush, heapq.heappop
    for node in range(1, budget + 1):
        if not heap:
            break
        cost, _, parent, depth, rank = pop(heap)
        row = scores[depth - 1]
        out_tokens.append(candidates[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        sums.append(-cost)
        if rank + 1 < width:
            order += 1
            push(heap, (cost + row[rank] - row[rank + 1], order, parent, depth, rank + 1))
        if depth < slots:
            order += 1
            push(heap, (cost - scores[depth][0], order, node, depth + 1, 0))
    return tree


def build_chain(anchor: int, log_probs: NDArray[np.floating], tokens: NDArray[np.integer]) -> DraftTree:
    """The first candidate of every slot, one below the other: DFlash without branches. Arrays are (slots, >=1)."""
    drafted: list[int] = tokens[:, 0].tolist()
    count = len(drafted) + 1
    sums: list[float] = np.cumsum(log_probs[:, 0]).tolist()
    return DraftTree([anchor, *drafted], list(range(-1, count - 1)), list(range(count)), [0.0, *sums])


def ancestor_matrix(parents: Sequence[int]) -> NDArray[np.float32]:
    """(T, T): 1 where column j is node i or one of its ancestors."""
    matrix = np.eye(len(parents), dtype=np.float32)
    for node, parent in enumerate(parents):
        if parent >= 0:
            matrix[node] += matrix[parent]
    return matrix


def convolution_index(parents: Sequence[int], kernel: int) -> NDArray[np.int64]:
    """(T, kernel): where each node's last `kernel` inputs lie, oldest first, along its own ancestors.

    Indices count over [kernel - 1 inputs of history, T inputs of this forward].
    """
    history = kernel - 1
    above = np.concatenate([np.maximum(np.arange(-1, history - 1), 0), np.asarray(parents) + history])
    columns = [np.arange(len(parents)) + history]
    for _ in range(history):
        columns.append(above[columns[-1]])
    return np.stack(columns[::-1], axis=1)


def accepted_path(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target: (nodes from the root down to the last accepted one, the token it chose after that).

    `chosen[i]` is what the target picked, greedily or by sampling, after node i.
    """
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path = [0]
    while (following := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(following)
    return path, chosen[path[-1]]
