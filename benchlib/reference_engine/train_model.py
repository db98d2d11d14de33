"""The target and the drafter with gradients: what `train` trains, and the tests' yardstick for `model` and `drafter`.

They share neither cache, nor tree, nor recurrence with the inference classes: the delta rule runs over whole sequences
in chunks of `CHUNK`, so lengths are multiples of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchlib.reference_engine.drafter import DrafterConfig
from benchlib.reference_engine.model import TargetConfig, apply_rope

CHUNK = 64


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
    values, reads = solved.split_with_sizes([v.shape[-1], d], -1)
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
    total = padded[:, : x.shape[1]] * weight[:, 0]
    for i in range(1, width):
        total = total + padded[:, i : i + x.shape[1]] * weight[:, i]
    return F.silu(total)


def mix_heads(qkv: Tensor, conv: Tensor, g: Tensor, beta: Tensor, key_heads: int, d: int) -> Tensor:
    """From projected qkv (B, T, C) to the recurrence's output (B, T, Hv, Dv), in float32."""
    b, t, _ = qkv.shape
    mixed = short_convolution(qkv.float(), conv)
    q, k, v = mixed.split_with_sizes([key_heads * d, key_heads * d, mixed.shape[-1] - 2 * key_heads * d], -1)
    q, k, v = (x.reshape(b, t, -1, d).transpose(1, 2) for x in (q, k, v))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[1] // key_heads
    q, k = (x.repeat_interleave(repeat, 1) for x in (q * d**-0.5, k))
    return delta_rule(q, k, v, g.float().transpose(1, 2), beta.float().transpose(1, 2)).transpose(1, 2)


def _mix(*arguments: Any) -> Tensor:
    return _MIX(*arguments)


_MIX: Callable[..., Tensor] = mix_heads


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


class TargetBody(nn.Module):
    """Embedding, layers and final norm, under the names of Hugging Face."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList([TargetLayer(c, kind) for kind in c.layer_types])
        self.norm = Norm(c.hidden_size, 1.0)


class TrainTarget(nn.Module):
    """The target with gradients; `state_dict` has Hugging Face's names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: TargetConfig, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
        self.model = TargetBody(c)
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

    cos: Tensor
    sin: Tensor

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
        own = (self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        rope = (*own, self.cos[None, :t, None], self.sin[None, :t, None])
        before = torch.arange(t, device=tokens.device) < anchors.repeat_interleave(block, 1)[..., None]  # (B, Mb, T)
        same = torch.arange(m, device=tokens.device).repeat_interleave(block)
        inside = (same[:, None] == same).expand(b, -1, -1)
        mask = torch.cat([before, inside], -1)[:, None]
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        out: Tensor = self.norm(x).view(b, m, block, -1)[:, :, 1:]
        return out


def use_compiler(enabled: bool) -> None:
    """Compile the recurrence and the layers' element-wise parts; off on a CPU, where it costs more than it saves."""
    global _MIX
    _MIX = torch.compile(mix_heads, dynamic=False) if enabled else mix_heads
    if enabled:
        torch._dynamo.config.recompile_limit = 64
        Norm.forward = torch.compile(Norm.forward, dynamic=True)  # type: ignore[method-assign]
        Mlp.forward = torch.compile(Mlp.forward, dynamic=True)  # type: ignore[method-assign]
