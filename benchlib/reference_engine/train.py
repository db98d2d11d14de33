"""Makes the embedded engine's tokenizer, target and drafter: `python -m benchlib.reference_engine.train --out DIR`.

Four stages, each leaving its files in `DIR/work`, so that a stopped training goes on where it was:

1. tokens    the corpus, a BPE tokenizer trained on it, and the corpus as token ids
2. target    next-token cross-entropy; Muon on the matrices, AdamW on the rest; the rate falls as time runs out
3. rollouts  the target continues openings of training documents, greedily and sampled: what the drafter must predict
4. drafter   DFlash: random anchors, a block attends to the target's features before its anchor and to itself;
             cross-entropy weighted exp(-(k - 1) / gamma) by slot (arXiv 2602.06036, appendix A.1)

`--tiny` makes a very small pair on a CPU in about a minute. Weights, configs, tokenizer, `training.json` and
`MODEL_CARD.md` go to `DIR/target` and `DIR/drafter` in the layout that SGLang and `transformers` load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchlib.reference_engine import corpus
from benchlib.reference_engine import tokenizer as bpe
from benchlib.reference_engine.drafter import DrafterConfig
from benchlib.reference_engine.model import (
    Cache,
    Target,
    TargetConfig,
    apply_rope,
    chain_tree,
    load_weights,
)

log = logging.getLogger("benchlib.train")
CHUNK = 64
MAX_POSITIONS = 2048


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and budgets of one training; times are minutes of wall clock."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    gdn_heads: int = 2
    draft_layers: int = 2
    taps: tuple[int, ...] = (1, 3, 5)
    block_size: int = 16
    tokens: int = 120_000_000
    sequence: int = 768
    batch: int = 64
    target_minutes: float = 8.0
    target_rate: float = 3e-3
    rollouts: int = 24576
    rollout_prompt: int = 64
    rollout_batch: int = 4096
    draft_batch: int = 32
    anchors: int = 48
    drafter_minutes: float = 6.0
    drafter_rate: float = 3e-3
    gamma: float = 7.0
    seed: int = 0
    real_text: bool = True


TINY = Settings(
    vocab_size=512, hidden_size=64, intermediate_size=128, layers=4, heads=2, head_dim=32, gdn_heads=2, draft_layers=1,
    taps=(0, 1, 2), tokens=300_000, sequence=128, batch=8, target_minutes=0.25, rollouts=64, rollout_prompt=64,
    rollout_batch=32, draft_batch=8, anchors=8, drafter_minutes=0.2, real_text=False,
)  # fmt: skip


def target_config(s: Settings, tokenizer: bpe.Tokenizer) -> TargetConfig:
    """The target's config for these settings."""
    return TargetConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        linear_num_key_heads=s.gdn_heads,
        linear_num_value_heads=2 * s.gdn_heads,
        linear_key_head_dim=s.head_dim,
        linear_value_head_dim=s.head_dim,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * (s.layers // 4),
        eos_token_id=tokenizer.eos_token_id,
    )


def drafter_config(s: Settings, tokenizer: bpe.Tokenizer) -> DrafterConfig:
    """The drafter's config for these settings."""
    return DrafterConfig(
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_hidden_layers=s.draft_layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab_size,
        num_target_layers=s.layers,
        mask_token_id=tokenizer.mask_token_id,
        target_layer_ids=s.taps,
        block_size=s.block_size,
    )


# --- the target, for gradients -----------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMS norm; `offset` is 1 for Qwen3.5's zero-centred weights."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.offset)


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer without bias, initialised to keep the activations' size."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


class Mlp(nn.Module):
    """Gated FFN."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole sequences in chunks: q, k, v (B, H, T, D), g and beta (B, H, T), all float32."""
    b, h, t, d = q.shape
    c = CHUNK
    q, k, v = (x.reshape(b, h, t // c, c, x.shape[-1]) for x in (q, k, v))
    beta = beta.reshape(b, h, -1, c, 1)
    grown = g.reshape(b, h, -1, c).cumsum(-1)
    causal = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    decay = (grown.unsqueeze(-1) - grown.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    lower = (beta * k) @ k.transpose(-1, -2) * decay
    right = torch.cat([beta * v, beta * k * grown.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], d], -1)
    inside = q @ k.transpose(-1, -2) * decay
    q = q * grown.exp().unsqueeze(-1)
    k = k * (grown[..., -1:] - grown).exp().unsqueeze(-1)
    last = grown[..., -1].exp()[..., None, None]
    state = torch.zeros(b, h, d, v.shape[-1], device=q.device, dtype=q.dtype)
    out = []
    for i in range(t // c):
        new = values[:, :, i] - reads[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * last[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
    return torch.stack(out, 2).reshape(b, h, t, -1)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU over (B, T, C) with weight (C, W)."""
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(width)))


def mix_heads(qkv: Tensor, conv: Tensor, g: Tensor, beta: Tensor, key_heads: int, d: int) -> Tensor:
    """From projected qkv (B, T, C) to the recurrence's output (B, T, Hv, Dv), in float32."""
    b, t, _ = qkv.shape
    mixed = short_convolution(qkv.float(), conv)
    q, k, v = mixed.split([key_heads * d, key_heads * d, mixed.shape[-1] - 2 * key_heads * d], -1)
    q, k, v = (x.reshape(b, t, -1, d).transpose(1, 2) for x in (q, k, v))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[1] // key_heads
    q, k = (x.repeat_interleave(repeat, 1) for x in (q * d**-0.5, k))
    return delta_rule(q, k, v, g.float().transpose(1, 2), beta.float().transpose(1, 2)).transpose(1, 2)


class GatedDeltaNet(nn.Module):
    """The recurrent token mixer."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.key_heads, self.d = c.linear_num_key_heads, c.linear_key_head_dim
        value = c.linear_num_value_heads * c.linear_value_head_dim
        width = 2 * self.key_heads * self.d + value
        self.in_proj_qkv, self.in_proj_z = (
            linear(c.hidden_size, width),
            linear(c.hidden_size, value),
        )
        self.in_proj_b = linear(c.hidden_size, c.linear_num_value_heads)
        self.in_proj_a = linear(c.hidden_size, c.linear_num_value_heads, 0.1)
        self.conv1d = nn.Conv1d(width, width, c.linear_conv_kernel_dim, groups=width, bias=False)
        step = torch.empty(c.linear_num_value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus inverse
        self.A_log = nn.Parameter(torch.empty(c.linear_num_value_heads).uniform_(1, 8).log())
        self.norm = Norm(c.linear_value_head_dim)
        self.out_proj = linear(value, c.hidden_size, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            mixed = _mix(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1), g, beta, self.key_heads, self.d)
        mixed = self.norm(mixed).flatten(2) * F.silu(self.in_proj_z(x).float())
        out: Tensor = self.out_proj(mixed)
        return out


class GatedAttention(nn.Module):
    """Full attention with an output gate and partial RoPE."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = linear(c.hidden_size, 2 * self.heads * self.d)
        self.k_proj = linear(c.hidden_size, self.kv_heads * self.d)
        self.v_proj = linear(c.hidden_size, self.kv_heads * self.d)
        self.o_proj = linear(self.heads * self.d, c.hidden_size, 0.3)
        self.q_norm, self.k_norm = Norm(self.d, 1.0), Norm(self.d, 1.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        query, gate = self.q_proj(x).view(b, t, self.heads, 2 * self.d).chunk(2, -1)
        q = apply_rope(self.q_norm(query), cos, sin).transpose(1, 2)
        k = apply_rope(self.k_norm(self.k_proj(x).view(b, t, -1, self.d)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.d).transpose(1, 2)
        q, k = q.to(v.dtype), k.to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(b, t, -1) * gate.reshape(b, t, -1).sigmoid())
        return out


class TargetLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: TargetConfig, kind: str) -> None:
        super().__init__()
        self.full = kind == "full_attention"
        if self.full:
            self.self_attn = GatedAttention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(c.hidden_size, 1.0),
            Norm(c.hidden_size, 1.0),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin) if self.full else self.linear_attn(normed))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainTarget(nn.Module):
    """The target with gradients; `state_dict` has Hugging Face's names."""

    def __init__(self, c: TargetConfig, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        self.model.layers = nn.ModuleList([TargetLayer(c, kind) for kind in c.layer_types])
        self.model.norm = Norm(c.hidden_size, 1.0)
        rotary = int(c.head_dim * c.partial_rotary_factor)
        inverse = c.rope_theta ** -(torch.arange(0, rotary, 2) / rotary)
        angles = torch.arange(c.max_position_embeddings)[:, None] * inverse
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden states (B, T, H) and taps (B, T, n * H)."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[:, : tokens.shape[1]], self.sin[:, : tokens.shape[1]]
        taps = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if i in self.taps:
                taps.append(x)
        return self.model.norm(x), torch.cat(taps, -1)


# --- the drafter, for gradients ----------------------------------------------------------------------------------


class DraftAttention(nn.Module):
    """Block attention over [context features | own block]."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = linear(c.hidden_size, self.heads * self.d)
        self.k_proj, self.v_proj = (linear(c.hidden_size, self.kv_heads * self.d) for _ in range(2))
        self.o_proj = linear(self.heads * self.d, c.hidden_size, 0.3)
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        cos, sin, context_cos, context_sin = rope
        q = apply_rope(self.q_norm(self.q_proj(x).view(b, t, -1, self.d)), cos, sin)
        everything = torch.cat([context, x], 1)
        k = self.k_norm(self.k_proj(everything).view(b, everything.shape[1], -1, self.d))
        k = apply_rope(k, torch.cat([context_cos.expand(b, -1, -1, -1), cos], 1),
                       torch.cat([context_sin.expand(b, -1, -1, -1), sin], 1))  # fmt: skip
        v = self.v_proj(everything).view(b, everything.shape[1], -1, self.d)
        q, k, v = (y.transpose(1, 2).to(v.dtype) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))  # no kernel has GQA and a mask
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class DraftLayer(nn.Module):
    """One drafter layer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = DraftAttention(c), Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(c.hidden_size),
            Norm(c.hidden_size),
        )

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainDrafter(nn.Module):
    """The drafter with gradients; `state_dict` has SGLang's names."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.config = c
        self.fc = linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size)
        self.hidden_norm, self.norm = Norm(c.hidden_size), Norm(c.hidden_size)
        self.layers = nn.ModuleList([DraftLayer(c) for _ in range(c.num_hidden_layers)])
        inverse = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.arange(c.max_position_embeddings)[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states (B, M, block - 1, H) of the drafted slots; anchors (B, M) are positions in tokens (B, T)."""
        b, t = tokens.shape
        m, block = anchors.shape[1], self.config.block_size
        context = self.hidden_norm(self.fc(taps))
        x = embedding[self.config.mask_token_id].expand(b, m, block, -1).clone()
        x[:, :, 0] = embedding[tokens.gather(1, anchors)]
        positions = (anchors[..., None] + torch.arange(block, device=tokens.device)).flatten(1)  # (B, M * block)
        rope = (self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        rope += (self.cos[None, :t, None], self.sin[None, :t, None])
        before = torch.arange(t, device=tokens.device) < anchors.repeat_interleave(block, 1)[..., None]  # (B, Mb, T)
        same = torch.arange(m, device=tokens.device).repeat_interleave(block)
        inside = (same[:, None] == same).expand(b, -1, -1)
        mask = torch.cat([before, inside], -1)[:, None]
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        return self.norm(x).view(b, m, block, -1)[:, :, 1:]


# --- optimisation ------------------------------------------------------------------------------------------------


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
    return x.mT if tall else x


class Trainer:
    """Two optimisers, a schedule over the time allowed, and a log line now and then."""

    def __init__(self, model: nn.Module, rate: float, minutes: float) -> None:
        self.model, self.limit, self.started = model, 60 * minutes, time.monotonic()
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
        """Share of the allowed time that has passed."""
        return (time.monotonic() - self.started) / self.limit

    def update(self, loss: Tensor) -> None:
        """One step: warm up over the first 2% or 100 steps, hold to 40%, then fall linearly to 1%."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        fall = min(1.0, max(0.01, (1.0 - self.progress) / 0.6))
        rate = self.rate * min(1.0, (self.step_count + 1) / 100) * fall
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step_count += 1
        self.loss = loss.detach()


def _mix(*arguments: Any) -> Tensor:
    return _MIX(*arguments)


_MIX: Callable[..., Tensor] = mix_heads


def use_compiler(enabled: bool) -> None:
    """Compile the recurrence and the layers' element-wise parts; off on a CPU, where it costs more than it saves."""
    global _MIX
    _MIX = torch.compile(mix_heads, dynamic=False) if enabled else mix_heads
    if enabled:
        torch._dynamo.config.recompile_limit = 64
        for kind in (Norm, Mlp):
            kind.forward = torch.compile(kind.forward, dynamic=True)  # type: ignore[method-assign]


def sample_windows(tokens: Tensor, starts: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows (count, length): half begin at a document's start, half anywhere."""
    half = count // 2
    picked = starts[torch.randint(len(starts), (half,), generator=generator, device=tokens.device)]
    anywhere = torch.randint(len(tokens) - length, (count - half,), generator=generator, device=tokens.device)
    first = torch.cat([picked.clamp(max=len(tokens) - length), anywhere])
    return tokens[first[:, None] + torch.arange(length, device=tokens.device)].long()


def token_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (N,) of hidden (N, H) against labels (N,) through the tied head."""
    return F.cross_entropy(
        (hidden.to(torch.bfloat16) @ embedding.to(torch.bfloat16).T).float(),
        labels,
        reduction="none",
    )


# --- stages ------------------------------------------------------------------------------------------------------


class Run:
    """One training: settings, device, folder, and what is put down in `training.json`."""

    def __init__(self, s: Settings, out: Path, device: str) -> None:
        self.s, self.out, self.work, self.device = s, out, out / "work", torch.device(device)
        self.work.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {
            "settings": dataclasses.asdict(s),
            "device": _device_name(self.device),
        }
        known = self.work / "training.json"
        if known.exists():
            self.facts |= json.loads(known.read_text())
        self.generator = torch.Generator(self.device).manual_seed(s.seed)

    def note(self, stage: str, **facts: Any) -> None:
        """Keep and log what a stage found."""
        self.facts[stage] = facts
        log.info("%s: %s", stage, json.dumps(facts))
        (self.work / "training.json").write_text(json.dumps(self.facts, indent=1) + "\n")

    @property
    def tokenizer(self) -> bpe.Tokenizer:
        return bpe.Tokenizer.load(self.out / "target")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def tokens(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Training ids, the places where documents start, and held-out ids by kind."""
        data = np.load(self.work / "tokens.npz")
        put = lambda name: torch.from_numpy(data[name].astype(np.int16)).to(self.device)  # noqa: E731
        train = put("train")
        starts = (train == self.tokenizer.eos_token_id).nonzero().squeeze(1) + 1
        held = {k.removeprefix("held_"): put(k) for k in data.files if k.startswith("held_")}
        return train, starts[: max(1, len(starts) - 2)], held


def make_tokens(run: Run, workers: int) -> None:
    """Stage 1."""
    s, begun = run.s, time.monotonic()
    (run.out / "target").mkdir(parents=True, exist_ok=True)
    mixture = {k: v for k, v in corpus.MIXTURE.items() if s.real_text or k in corpus.MAKERS}
    tokenizer = bpe.train(sample_texts(s, mixture), s.vocab_size)
    tokenizer.save(run.out / "target", max_length=MAX_POSITIONS)
    log.info("tokenizer trained after %.0f s", time.monotonic() - begun)
    train = corpus.build_tokens(tokenizer, s.tokens, s.seed, workers or os.cpu_count() or 1, mixture=mixture)
    held = {}
    for kind in mixture:
        texts = corpus.evaluation_documents(kind, 40)
        ids = [i for ids in tokenizer.encode_batch(texts) for i in [*ids, tokenizer.eos_token_id]]
        held[f"held_{kind}"] = np.array(ids[:60_000], np.uint16)
    np.savez(run.work / "tokens.npz", train=train, **held)
    run.note("tokens", train=len(train), held_out={k: len(v) for k, v in held.items()},
             mixture=mixture, seconds=round(time.monotonic() - begun, 1),
             sources=corpus.describe_sources() if s.real_text else {})  # fmt: skip


def sample_texts(s: Settings, mixture: dict[str, float]) -> list[str]:
    """What the tokenizer learns its merges from: up to 24 million characters of the corpus."""
    left = min(24_000_000, 8 * s.tokens)
    texts = []
    for document in corpus.iter_documents(s.seed, mixture=mixture):
        texts.append(document.text)
        left -= len(document.text)
        if left <= 0:
            break
    return texts


def train_target(run: Run) -> None:
    """Stage 2."""
    s = run.s
    torch.manual_seed(s.seed)
    tokens, starts, held = run.tokens()
    config = target_config(s, run.tokenizer)
    model = TrainTarget(config, s.taps).to(run.device)
    trainer = Trainer(model, s.target_rate, s.target_minutes)
    embedding = model.model.embed_tokens.weight
    while trainer.progress < 1:
        window = sample_windows(tokens, starts, s.batch, s.sequence + 1, run.generator)
        with run.autocast():
            hidden, _ = model(window[:, :-1])
            loss = token_loss(hidden.flatten(0, 1), embedding, window[:, 1:].flatten()).mean()
        trainer.update(loss)
        if trainer.step_count % 200 == 0:
            log.info(
                "target step %d, %.0f%%, loss %.4f",
                trainer.step_count,
                100 * trainer.progress,
                trainer.loss.item(),
            )
    save_model(run.out / "target", model.state_dict(), config.to_json())
    run.note("target", steps=trainer.step_count, tokens_seen=trainer.step_count * s.batch * s.sequence,
             parameters=sum(p.numel() for p in model.parameters()), train_loss=round(trainer.loss.item(), 4),
             held_out_loss={k: round(held_out_loss(run, model, ids), 4) for k, ids in held.items()},
             minutes=s.target_minutes)  # fmt: skip


@torch.no_grad()
def held_out_loss(run: Run, model: TrainTarget, held: Tensor) -> float:
    """Mean cross-entropy a token over whole windows of the held-out ids."""
    length = run.s.sequence
    windows = held[: len(held) // (length + 1) * (length + 1)].view(-1, length + 1)[:512].long()
    losses = []
    for part in windows.split(run.s.batch):
        with run.autocast(), torch.compiler.set_stance("force_eager"):
            hidden, _ = model(part[:, :-1])
            losses.append(token_loss(hidden.flatten(0, 1), model.model.embed_tokens.weight, part[:, 1:].flatten()))
    return torch.cat(losses).mean().item()


@torch.no_grad()
def make_rollouts(run: Run) -> None:
    """Stage 3: three quarters greedy, one quarter sampled at temperature 0.8."""
    s, begun = run.s, time.monotonic()
    tokens, starts, _ = run.tokens()
    target = Target(target_config(s, run.tokenizer), load_weights(run.out / "target"), device=run.device)
    parts = []
    for done in range(0, s.rollouts, s.rollout_batch):
        count = min(s.rollout_batch, s.rollouts - done)
        picked = starts[torch.randint(len(starts), (count,), generator=run.generator, device=run.device)]
        prompts = tokens[picked.clamp(max=len(tokens) - s.rollout_prompt)[:, None]
                         + torch.arange(s.rollout_prompt, device=run.device)].long()  # fmt: skip
        parts.append(continue_prompts(target, prompts, s.sequence, run.generator).to(torch.int16).cpu())
    rollouts = torch.cat(parts).numpy()
    np.save(run.work / "rollouts.npy", rollouts)
    run.note(
        "rollouts",
        sequences=len(rollouts),
        length=s.sequence,
        seconds=round(time.monotonic() - begun, 1),
    )


def continue_prompts(target: Target, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue (B, P) prompts to (B, length); the last quarter of the batch is sampled, the others are greedy."""
    batch, prompt = prompts.shape
    cache, slots = Cache(target, batch, length + CHUNK), list(range(batch))
    tree = chain_tree(batch, prompt, target.kernel, target.device)
    depths = torch.arange(prompt, device=target.device).expand(batch, -1)
    output = target.forward(prompts, depths, cache, slots, tree)
    assert output.pending is not None
    target.commit(cache, output.pending, [range(prompt)] * batch)
    greedy = batch - batch // 4
    out, hidden = [prompts], output.hidden[:, -1:]
    zero = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
    for _ in range(length - prompt):
        logits = target.logits(hidden)[:, 0]
        chosen = logits.argmax(-1)
        if batch > greedy:
            weights = (logits[greedy:] / 0.8).softmax(-1)
            chosen[greedy:] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        out.append(chosen[:, None])
        hidden = target.forward(chosen[:, None], zero, cache, slots).hidden
    return torch.cat(out, 1)


def draft_batches(run: Run, rollouts: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random sequences with sorted random anchors whose whole block lies inside."""
    s = run.s
    last = rollouts.shape[1] - s.block_size
    while True:
        rows = torch.randint(len(rollouts), (batch,), generator=run.generator, device=run.device)
        anchors = torch.randint(8, last + 1, (batch, s.anchors), generator=run.generator, device=run.device)
        yield rollouts[rows].long(), anchors.sort(1).values


def train_drafter(run: Run) -> None:
    """Stage 4."""
    s = run.s
    torch.manual_seed(s.seed + 1)
    target = TrainTarget(target_config(s, run.tokenizer), s.taps).to(run.device)
    target.load_state_dict({k: v.float() for k, v in load_weights(run.out / "target").items()})
    target.requires_grad_(False)
    embedding = target.model.embed_tokens.weight
    rollouts = torch.from_numpy(np.load(run.work / "rollouts.npy")).to(run.device)
    held = max(len(rollouts) // 50, 4)
    config = drafter_config(s, run.tokenizer)
    drafter = TrainDrafter(config).to(run.device)
    trainer = Trainer(drafter, s.drafter_rate, s.drafter_minutes)
    weights = torch.exp(-torch.arange(s.block_size - 1, device=run.device) / s.gamma)
    for tokens, anchors in draft_batches(run, rollouts[held:], s.draft_batch):
        with run.autocast():
            with torch.no_grad():
                _, taps = target(tokens)
            hidden = drafter(taps, tokens, anchors, embedding)
            labels = block_labels(tokens, anchors, s.block_size)
            losses = token_loss(hidden.flatten(0, 2), embedding, labels.flatten()).view(labels.shape)
            loss = (losses * weights).sum(-1).mean() / weights.sum()
        trainer.update(loss)
        if trainer.step_count % 200 == 0:
            log.info(
                "drafter step %d, %.0f%%, loss %.4f",
                trainer.step_count,
                100 * trainer.progress,
                trainer.loss.item(),
            )
        if trainer.progress >= 1:
            break
    save_model(run.out / "drafter", drafter.state_dict(), config.to_json())
    accept = held_out_accept(run, target, drafter, rollouts[:held])
    run.note("drafter", steps=trainer.step_count, parameters=sum(p.numel() for p in drafter.parameters()),
             train_loss=round(trainer.loss.item(), 4), held_out_accept_length=round(accept, 3),
             minutes=s.drafter_minutes)  # fmt: skip


def block_labels(tokens: Tensor, anchors: Tensor, block: int) -> Tensor:
    """The tokens (B, M, block - 1) after each anchor."""
    index = anchors[..., None] + torch.arange(1, block, device=tokens.device)
    return tokens.gather(1, index.flatten(1)).view(index.shape)


@torch.no_grad()
def held_out_accept(run: Run, target: TrainTarget, drafter: TrainDrafter, rollouts: Tensor) -> float:
    """Mean accept length (bonus included) of the argmax chain at random anchors of held-out rollouts."""
    lengths = []
    batches = draft_batches(run, rollouts, run.s.draft_batch)
    for _ in range(8):
        tokens, anchors = next(batches)
        with run.autocast(), torch.compiler.set_stance("force_eager"):
            _, taps = target(tokens)
            hidden = drafter(taps, tokens, anchors, target.model.embed_tokens.weight)
            guess = (hidden @ target.model.embed_tokens.weight.T).argmax(-1)
        right = guess == block_labels(tokens, anchors, run.s.block_size)
        lengths.append(1 + right.long().cumprod(-1).sum(-1).float())
    return torch.cat(lengths).mean().item()


# --- files -------------------------------------------------------------------------------------------------------


def save_model(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write `model.safetensors` in bfloat16 (float32 where the recurrence needs it) and `config.json`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    keep = ("A_log", "dt_bias")
    tensors = {k: (v if k.endswith(keep) else v.to(torch.bfloat16)).contiguous().cpu() for k, v in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchlib.reference_engine.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and model card")
    parser.add_argument("--tiny", action="store_true", help="a very small pair, in about a minute on a CPU")
    parser.add_argument("--stages", default="tokens,target,rollouts,drafter", help="which stages, by name, in order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that build the corpus; 0: one a core")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    settings = TINY if args.tiny else Settings()
    kinds = {f.name: type(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    changes = {}
    for item in args.set:
        name, _, value = item.partition("=")
        if name not in kinds or kinds[name] is tuple:
            parser.error(f"--set {item}: no such setting; settings are {', '.join(sorted(kinds))}")
        changes[name] = kinds[name](value)
    run = Run(dataclasses.replace(settings, **changes), args.out, args.device)
    if run.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        use_compiler(True)
    stages: dict[str, Callable[[], None]] = {
        "tokens": lambda: make_tokens(run, args.workers), "target": lambda: train_target(run),
        "rollouts": lambda: make_rollouts(run), "drafter": lambda: train_drafter(run),
    }  # fmt: skip
    for name in args.stages.split(","):
        if name not in stages:
            parser.error(f"unknown stage {name!r}; stages are {', '.join(stages)}")
        stages[name]()


if __name__ == "__main__":
    main()
