"""Draft trees: best-first against brute force, the tables of a verify, and the accepted path."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from benchlib.reference_engine.tree import (
    DraftTree,
    accepted_path,
    ancestor_matrix,
    build_chain,
    build_tree,
    convolution_index,
)


def marginals(slots: int, vocab: int, seed: int, sharpness: float = 2.0) -> np.ndarray:
    """Log probabilities (slots, vocab)."""
    logits = np.random.default_rng(seed).normal(size=(slots, vocab)) * sharpness
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def top(log_probs: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Each slot's `width` best: log probabilities and tokens."""
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :width]
    return np.take_along_axis(log_probs, order, 1), order


def prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    """The drafts on the way to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def all_prefixes(log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Every prefix of drafts with its log probability."""
    slots, vocab = log_probs.shape
    return {
        p: sum(log_probs[d, t] for d, t in enumerate(p))
        for depth in range(1, slots + 1)
        for p in itertools.product(range(vocab), repeat=depth)
    }


def random_parents(size: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(n) for n in range(1, size))]


def check_form(tree: DraftTree, budget: int) -> None:
    """Topological order, depths, no twin siblings, falling probability."""
    count = len(tree.tokens)
    assert len(tree.parents) == len(tree.depths) == len(tree.log_probs) == count <= 1 + budget
    assert (tree.parents[0], tree.depths[0], tree.log_probs[0]) == (-1, 0, 0.0)
    for node in range(1, count):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.log_probs[node] <= tree.log_probs[parent] + 1e-12
        assert node == 1 or tree.log_probs[node] <= tree.log_probs[node - 1] + 1e-12
    found = prefixes(tree)
    assert len(set(found)) == count


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("slots", "vocab"), [(1, 5), (2, 4), (3, 3), (4, 3), (5, 2)])
def test_best_first_is_optimal(slots: int, vocab: int, seed: int) -> None:
    log_probs = marginals(slots, vocab, seed, sharpness=random.Random(seed).choice([0.3, 1, 3]))
    every = all_prefixes(log_probs)
    best = sorted(every.values(), reverse=True)
    for budget in {1, 2, 3, 7, 15, len(every) - 1, len(every), len(every) + 9} - {0}:
        tree = build_tree(99, *top(log_probs, min(budget, vocab)), budget)
        check_form(tree, budget)
        assert len(tree.tokens) == 1 + min(budget, len(every))
        np.testing.assert_allclose(tree.log_probs[1:], best[:budget], atol=1e-12)
        for prefix, score in zip(prefixes(tree)[1:], tree.log_probs[1:], strict=True):
            assert every[prefix] == pytest.approx(score, abs=1e-12)
        assert tree.forecast == pytest.approx(1 + np.exp(best[:budget]).sum())


@pytest.mark.parametrize("seed", range(6))
def test_forecast_is_the_expected_accept_length(seed: int) -> None:
    """Sum of node probabilities = expected depth that drafts drawn from the marginals reach, plus the bonus."""
    log_probs = marginals(4, 3, seed)
    tree = build_tree(0, *top(log_probs, 3), 9)
    children = set(prefixes(tree))
    expected = 0.0
    for full in itertools.product(range(3), repeat=4):
        depth = 0
        while depth < 4 and full[: depth + 1] in children:
            depth += 1
        expected += (1 + depth) * np.exp(sum(log_probs[d, t] for d, t in enumerate(full)))
    assert tree.forecast == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_tree_promises_more(seed: int) -> None:
    """Against every prefix-closed tree of the same size."""
    log_probs, budget = marginals(2, 3, seed, 0.7), 4
    every = all_prefixes(log_probs)
    best = max(
        sum(np.exp(every[p]) for p in chosen)
        for chosen in itertools.combinations(every, budget)
        if all(p[:-1] in chosen for p in chosen if len(p) > 1)
    )
    assert build_tree(0, *top(log_probs, 3), budget).forecast == pytest.approx(1 + best)


@pytest.mark.parametrize("budget", [1, 7, 15, 16, 32, 64, 1024])
def test_form_at_real_size(budget: int) -> None:
    log_probs = marginals(15, 300, budget, 3.0).astype(np.float32)
    tree = build_tree(5, *top(log_probs, min(budget, 300)), budget)
    check_form(tree, budget)
    assert len(tree.tokens) == 1 + budget
    assert max(tree.depths) <= 15
    wider = build_tree(5, *top(log_probs, 300), budget)  # width = budget is wide enough
    assert wider == tree


@pytest.mark.parametrize("budget", [2, 5, 15, 40])
def test_smaller_budget_is_a_prefix_of_a_larger_one(budget: int) -> None:
    ranked = top(marginals(15, 64, 3), 64)
    small, large = build_tree(1, *ranked, budget), build_tree(1, *ranked, 64)
    assert small.tokens == large.tokens[: budget + 1]
    assert small.parents == large.parents[: budget + 1]


def test_ties_are_settled_the_same_way_every_time() -> None:
    log_probs = np.full((4, 6), -np.log(6))
    ranked = top(log_probs, 6)
    tree = build_tree(3, *ranked, 20)
    check_form(tree, 20)
    assert all(build_tree(3, *ranked, 20) == tree for _ in range(5))
    assert tree.depths[1:7] == [1] * 6  # a prefix ties with no extension, but siblings tie: first seen first
    assert tree.tokens[1:7] == [0, 1, 2, 3, 4, 5]
    even = build_tree(0, np.zeros((3, 2)), np.array([[0, 1]] * 3), 14)  # extensions tie with prefixes too
    check_form(even, 14)
    assert len(even.tokens) == 15


def test_budget_of_one_is_the_first_draft() -> None:
    log_probs = marginals(15, 50, 1)
    tree = build_tree(8, *top(log_probs, 1), 1)
    assert (tree.tokens, tree.parents) == ([8, int(log_probs[0].argmax())], [-1, 0])


def test_sure_drafts_make_a_chain() -> None:
    """With one token near certain in every slot, the first nodes are build_chain's."""
    log_probs = np.full((15, 20), np.log(1e-6 / 19))
    log_probs[:, 4] = np.log(1 - 1e-6)
    ranked = top(log_probs, 15)
    tree, chain = build_tree(2, *ranked, 15), build_chain(2, *ranked)
    assert tree.parents == chain.parents == list(range(-1, 15))
    assert tree.tokens == chain.tokens == [2] + [4] * 15
    assert tree.depths == chain.depths
    np.testing.assert_allclose(tree.log_probs, chain.log_probs, atol=1e-12)


def test_chain_takes_the_first_candidates() -> None:
    log_probs = marginals(15, 30, 2)
    chain = build_chain(7, *top(log_probs, 1))
    assert chain.tokens == [7, *log_probs.argmax(1)]
    assert chain.parents == list(range(-1, 15))
    check_form(DraftTree(chain.tokens, chain.parents, chain.depths, chain.log_probs), 15)
    assert chain.log_probs[-1] == pytest.approx(log_probs.max(1).sum())


@pytest.mark.parametrize("seed", range(8))
def test_ancestor_matrix(seed: int) -> None:
    parents = random_parents(1 + seed * 7, seed)
    matrix = ancestor_matrix(parents)
    assert matrix.dtype == np.float32
    for node in range(len(parents)):
        line, up = set(), node
        while up >= 0:
            line.add(up)
            up = parents[up]
        assert set(np.flatnonzero(matrix[node]).tolist()) == line
        assert set(np.unique(matrix[node])) <= {0.0, 1.0}


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_convolution_index(seed: int, kernel: int) -> None:
    parents = random_parents(1 + seed * 9, seed)
    index = convolution_index(parents, kernel)
    assert index.shape == (len(parents), kernel)
    for node in range(len(parents)):
        window, up = [], node
        while up >= 0 and len(window) < kernel:
            window.append(up + kernel - 1)
            up = parents[up]
        older = kernel - 2  # the newest input of history
        while len(window) < kernel:
            window.append(older)
            older -= 1
        assert index[node].tolist() == window[::-1]


def test_convolution_index_of_a_chain_is_a_sliding_window() -> None:
    expected = np.arange(9)[:, None] + np.arange(4)
    np.testing.assert_array_equal(convolution_index(list(range(-1, 8)), 4), expected)


#        0
#      1   2      tokens: 1 -> 11, 2 -> 12, 3 (below 2) -> 11, 4 (below 1) -> 13, 5 (below 3) -> 14
FORK = DraftTree([10, 11, 12, 11, 13, 14], [-1, 0, 0, 2, 1, 3], [0, 1, 1, 2, 2, 3], [0.0] * 6)


@pytest.mark.parametrize(
    ("chosen", "path", "bonus"),
    [
        ([9, 0, 0, 0, 0, 0], [0], 9),
        ([11, 9, 0, 0, 0, 0], [0, 1], 9),
        ([11, 13, 0, 0, 8, 0], [0, 1, 4], 8),
        ([12, 0, 11, 14, 0, 6], [0, 2, 3, 5], 6),
        ([12, 0, 13, 14, 0, 6], [0, 2], 13),  # 13 is a child of node 1, not of 2
        ([13, 0, 0, 0, 0, 0], [0], 13),
        ([11, 11, 0, 0, 0, 0], [0, 1], 11),  # the same token again is below node 2 only
    ],
)
def test_accepted_path(chosen: list[int], path: list[int], bonus: int) -> None:
    assert accepted_path(FORK, chosen) == (path, bonus)


@pytest.mark.parametrize("seed", range(5))
def test_accepted_path_is_the_longest_that_agrees(seed: int) -> None:
    rng = random.Random(seed)
    tree = build_tree(0, *top(marginals(6, 3, seed, 0.5), 3), 40)
    chosen = [rng.randrange(3) for _ in tree.tokens]
    path, bonus = accepted_path(tree, chosen)
    assert [tree.parents[n] for n in path] == [-1, *path[:-1]]
    assert all(tree.tokens[n] == chosen[tree.parents[n]] for n in path[1:])
    assert bonus == chosen[path[-1]]
    assert not any(p == path[-1] and t == bonus for p, t in zip(tree.parents, tree.tokens, strict=True))
