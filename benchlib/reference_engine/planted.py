"""Known state leaks of tree verification, planted on purpose: what a validation has to find through HTTP alone.

`BENCHLIB_PLANT=flat-scan` in a server's environment makes that server wrong. It says so at each start, in its log and
as `planted_fault` of /server_info, so that it cannot be on unnoticed. On a chain none of them changes anything.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchlib.reference_engine import model
from benchlib.reference_engine.loading import LoadError

__all__ = ["FAULTS", "VARIABLE", "plant_fault"]

VARIABLE = "BENCHLIB_PLANT"


def _flat_scan(solve: Any) -> Any:
    """The recurrence takes the tree's nodes as one chain; attention and convolution stay right."""

    def flat(self: Any, qkv: Tensor, gates: Any, cache: Any, where: Any, pending: Any) -> Tensor:
        ancestors = torch.ones_like(pending.tree.ancestors).tril()
        tree = model.Tree(ancestors, pending.tree.conv)
        mixed: Tensor = solve(self, qkv, gates, cache, where, dataclasses.replace(pending, tree=tree))
        return mixed

    return flat


def _flat_window(convolve: Any) -> Any:
    """A node's short convolution reads the nodes just before it in the batch, across branches."""

    def flat(self: Any, full: Tensor, tree: model.Tree, count: int) -> Tensor:
        out: Tensor = convolve(self, full, dataclasses.replace(tree, is_chain=True), count)
        return out

    return flat


def _commit_by_count(_: Any) -> Any:
    """The state that is kept is that of node number `accepted`, not of the last accepted node."""

    def commit(self: Any, cache: Any, pending: Any, paths: Sequence[Sequence[int]]) -> None:
        self._commit_states(cache, pending, torch.tensor([len(path) - 1 for path in paths]))
        for slot, path in zip(pending.slots, paths, strict=True):
            self._commit_rows(cache, slot, path)

    return commit


# name: (class, method, what makes the faulty method of the right one)
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "flat-scan": (model._Gdn, "_solve", _flat_scan),
    "flat-window": (model._Gdn, "_convolve", _flat_window),
    "commit-by-count": (model.Target, "commit", _commit_by_count),
}


@functools.cache
def plant_fault() -> str | None:
    """Make this process wrong as its environment asks; the fault's name, None where it asks for nothing.

    LoadError for a name that there is not.
    """
    name = os.environ.get(VARIABLE) or None
    if name is None:
        return None
    if name not in FAULTS:
        raise LoadError(f"{VARIABLE}={name!r} is no fault: there are {', '.join(FAULTS)}")
    owner, method, make = FAULTS[name]
    setattr(owner, method, make(getattr(owner, method)))
    return name
