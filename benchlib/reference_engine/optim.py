"""How the pair is optimised: Muon on the matrices, AdamW on the rest, at a rate that falls as time runs out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

log = logging.getLogger("benchlib.train")


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024), matrices of one shape as one batch.

    The step is scaled by 0.2 * sqrt(longest side), so that a learning rate means what it means to AdamW.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(tuple(p.shape), []).append(p)
        super().__init__(
            [{"params": ps} for ps in groups.values()],
            {"lr": lr, "momentum": momentum, "decay": decay},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            state = self.state[parameters[0]]
            grads = torch.stack([p.grad for p in parameters])
            average = state.setdefault("average", torch.zeros_like(grads))
            average.lerp_(grads, 1 - group["momentum"])
            update = _orthogonal(grads.lerp(average, group["momentum"]))
            scale = group["lr"] * 0.2 * math.sqrt(max(update.shape[1:]))
            for p, u in zip(parameters, update.to(parameters[0].dtype).unbind(), strict=True):
                p.mul_(1 - group["lr"] * group["decay"]).add_(u, alpha=-scale)


def _orthogonal(m: Tensor) -> Tensor:
    x = m.bfloat16() if m.is_cuda else m
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


class Trainer:
    """Two optimisers, a schedule over the time allowed, and a log line now and then.

    However slow the machine, training goes on until `least_steps` are made.
    """

    def __init__(
        self, model: nn.Module, rate: float, minutes: float, *, warm_up: int = 100, least_steps: int = 0
    ) -> None:
        self.model, self.limit, self.started = model, 60 * minutes, time.monotonic()
        self.warm_up, self.least_steps = warm_up, least_steps
        self.step_count, self.loss = 0, torch.zeros(())
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and min(p.shape) > 16]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        self.optimisers: list[torch.optim.Optimizer] = [Muon(matrices, rate)]
        self.optimisers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
        self.rate = rate

    @property
    def progress(self) -> float:
        """Share of the allowed time that has passed, or of the steps that must be made where that is less."""
        passed = (time.monotonic() - self.started) / self.limit
        return min(passed, self.step_count / self.least_steps) if self.least_steps else passed

    def update(self, loss: Tensor) -> None:
        """One step: the rate rises over the first `warm_up` steps, holds to 40%, then falls linearly to 1%."""
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        fall = min(1.0, max(0.01, (1.0 - self.progress) / 0.6))
        rate = self.rate * min(1.0, (self.step_count + 1) / self.warm_up) * fall
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step_count += 1
        self.loss = loss.detach()
        if self.step_count % 200 == 0:
            log.info("step %d, %.0f%%, loss %.4f", self.step_count, 100 * self.progress, self.loss.item())
