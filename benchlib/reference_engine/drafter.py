"""The DFlash drafter: one forward proposes a whole block from the target's own intermediate layers.

Names, tensors and config are those SGLang reads for `DFlashDraftModel`. The outputs of a few target layers (`taps`) of
every committed token are projected to `ctx = hidden_norm(fc(taps))`; each draft layer puts K/V of `ctx` in front of
the block's own. The block is [anchor, MASK, ...]: slot j predicts the token *at* its position, and all slots see one
another. Embedding and head are the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchlib.reference_engine.model import Linear, Target, apply_rope, attend, fold_norm, rms_norm, unit_norm

__all__ = ["Drafter", "DrafterConfig"]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The fields of a DFlash draft checkpoint that matter here."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    block_size: int = 16
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    @classmethod
    def load(cls, folder: Path) -> DrafterConfig:
        """Read a DFlash `config.json`."""
        data = json.loads((folder / "config.json").read_text())
        own = data["dflash_config"]
        known = {k: data[k] for k in cls.__dataclass_fields__ if k in data}
        return cls(
            **{
                **known,
                "mask_token_id": own["mask_token_id"],
                "target_layer_ids": tuple(own["target_layer_ids"]),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The `config.json` that SGLang reads."""
        data = {k: getattr(self, k) for k in self.__dataclass_fields__}
        own = {k: data.pop(k) for k in ("mask_token_id", "target_layer_ids")}
        own["target_layer_ids"] = list(own["target_layer_ids"])
        return {
            **data,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "dflash_config": own,
            "torch_dtype": "bfloat16",
        }


@dataclass(slots=True)
class _Layer:
    qkv: Linear
    qk_norm: Tensor
    out: Linear
    up: Linear
    down: Linear


class Drafter:
    """Inference of the drafter beside a target; every tensor-parallel rank holds all of it.

    It is two layers small: an all-reduce would cost more than the half it saves.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: dict[str, Tensor],
        target: Target,
        *,
        pack: bool = False,
    ) -> None:
        if config.hidden_size != target.config.hidden_size:
            raise ValueError(
                f"drafter hidden_size {config.hidden_size} differs from target's {target.config.hidden_size}"
            )
        if config.mask_token_id >= target.config.vocab_size:
            raise ValueError(f"mask_token_id {config.mask_token_id} is outside vocabulary {target.config.vocab_size}")
        self.config, self.target, self.device = config, target, target.device
        w = {k.removeprefix("model."): v.to(self.device, torch.float32) for k, v in weights.items()}
        self.fc, self.norm = Linear(w["fc.weight"], pack=pack), fold_norm(w["norm.weight"])
        self.layers = [self._layer(w, f"layers.{i}.", pack) for i in range(config.num_hidden_layers)]
        # ctx is the same for all layers, so one projection serves them all: (layer, k | v)
        kv = [w[f"layers.{i}.self_attn.{p}_proj.weight"] for i in range(config.num_hidden_layers) for p in "kv"]
        self.context_kv = Linear(torch.cat(kv) * fold_norm(w["hidden_norm.weight"]), pack=pack)
        self.context_norm = torch.stack([layer.qk_norm[-1] for layer in self.layers])[:, None]
        inverse = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, device=self.device) / config.head_dim)
        angles = torch.arange(target.context_length + 128, device=self.device)[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()
        masks = torch.full((config.block_size,), config.mask_token_id, device=self.device)
        self.block_embedding = F.embedding(masks, target.embedding)
        self.offsets = torch.arange(config.block_size, device=self.device)

    def _layer(self, w: dict[str, Tensor], prefix: str, pack: bool) -> _Layer:
        c = self.config
        qkv = torch.cat([w[f"{prefix}self_attn.{p}_proj.weight"] for p in "qkv"])
        up = torch.cat([w[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up")])
        norms = [fold_norm(w[f"{prefix}self_attn.q_norm.weight"]).expand(c.num_attention_heads, -1)]
        norms.append(fold_norm(w[f"{prefix}self_attn.k_norm.weight"]).expand(c.num_key_value_heads, -1))
        return _Layer(
            Linear(qkv * fold_norm(w[f"{prefix}input_layernorm.weight"]), pack=pack),
            torch.cat(norms),
            Linear(w[f"{prefix}self_attn.o_proj.weight"], pack=pack),
            Linear(up * fold_norm(w[f"{prefix}post_attention_layernorm.weight"]), pack=pack),
            Linear(w[f"{prefix}mlp.down_proj.weight"], pack=pack),
        )

    def new_cache(self, slots: int, rows: int) -> Tensor:
        """K/V of context rows: (slots, layers, 2, Hkv, rows, D)."""
        c = self.config
        shape = (slots, c.num_hidden_layers, 2, c.num_key_value_heads, rows, c.head_dim)
        return torch.zeros(shape, device=self.device)

    def append(self, cache: Tensor, slot: int, start: int, taps: Tensor) -> None:
        """Project the taps (T, n_taps * H) of committed tokens and store them at rows start .. start + T."""
        c, count = self.config, taps.shape[0]
        ctx = unit_norm(self.fc(taps), c.rms_norm_eps)
        kv = self.context_kv(ctx).view(count, c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim)
        keys = rms_norm(kv[:, :, 0], self.context_norm, c.rms_norm_eps)  # (T, layers, Hkv, D)
        span = slice(start, start + count)
        keys = apply_rope(keys, self.cos[span][:, None, None], self.sin[span][:, None, None])
        cache[slot, :, 0, :, span] = keys.permute(1, 2, 0, 3)
        cache[slot, :, 1, :, span] = kv[:, :, 1].permute(1, 2, 0, 3)

    def draft(self, cache: Tensor, slots: list[int], lengths: list[int], anchors: Tensor) -> Tensor:
        """Logits (B, block_size - 1, V) of the slots after each anchor; `lengths` are the context rows of each slot.

        The block's own K/V are written past the context and overwritten by the next `append`.
        """
        c, batch, block = self.config, len(slots), self.config.block_size
        x = self.block_embedding.repeat(batch, 1, 1)
        x[:, 0] = F.embedding(anchors, self.target.embedding)
        positions = torch.tensor(lengths, device=self.device)[:, None] + self.offsets
        rope = (self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        span = max(lengths) + block
        mask = self._mask(lengths, span) if len(set(lengths)) > 1 else None
        for i, layer in enumerate(self.layers):
            x = self._forward(layer, x, cache[:, i], slots, lengths, rope, mask, span)
        hidden = rms_norm(x[:, 1:], self.norm, c.rms_norm_eps)
        return self.target.logits(hidden)

    def _mask(self, lengths: list[int], span: int) -> Tensor:
        """(B, 1, S): each sequence sees its own context and block, nothing beyond."""
        end = torch.tensor(lengths, device=self.device)[:, None, None] + self.config.block_size
        seen = torch.arange(span, device=self.device) < end
        return torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, float("-inf"))

    def _forward(
        self,
        layer: _Layer,
        x: Tensor,
        cache: Tensor,
        slots: list[int],
        lengths: list[int],
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        span: int,
    ) -> Tensor:
        c, (batch, block, _) = self.config, x.shape
        hq, hkv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qkv = layer.qkv(unit_norm(x, c.rms_norm_eps)).view(batch, block, hq + 2 * hkv, d)
        qk = apply_rope(rms_norm(qkv[:, :, : hq + hkv], layer.qk_norm, c.rms_norm_eps), *rope)
        rows = torch.stack([qk[:, :, hq:], qkv[:, :, hq + hkv :]], 1).transpose(2, 3)  # (B, 2, Hkv, block, D)
        for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            cache[slot, :, :, length : length + block] = rows[b]
        kv = cache[slots[0] : slots[0] + 1] if batch == 1 else cache[slots]
        mixed = attend(qk[:, :, :hq], kv[:, 0, :, :span], kv[:, 1, :, :span], mask, d**-0.5)
        x = x + layer.out(mixed)
        gate, up = layer.up(unit_norm(x, c.rms_norm_eps)).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)
