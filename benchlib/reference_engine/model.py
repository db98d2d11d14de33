"""The target: a miniature of Qwen3.5 (gated DeltaNet and full attention, 3:1) that verifies whole trees in one forward.

Names and mathematics are those of `Qwen3_5ForCausalLM`; a test holds the two together to 1e-4. One forward takes `T`
tokens of each of `B` sequences. With a `Tree` the tokens need not be a chain: attention is masked to ancestors, the
short convolution reads each node's own ancestors, and the recurrence is solved on the ancestor-masked triangular
system, so that no node sees a sibling. Nothing is written to the recurrent state until `commit` names the last
accepted node.

Shapes: B sequences, T tokens, H hidden, C convolution channels, W its kernel, Hk key heads, R value heads a key head,
Dk and Dv their widths. With `S0` the state before the forward and G the log decay summed along a node's path,

    L = I + strict * (beta_i (k_i . k_j) e^(G_i - G_j))      U = L^-1 [beta_i (v_i - e^(G_i) S0' k_i)]
    o_i = e^(G_i) S0' q_i + sum_(j in anc(i)) e^(G_i - G_j) (q_i . k_j) u_j
    S_i = e^(G_i) S0 + sum_(j in anc(i)) e^(G_i - G_j) k_j u_j'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Cache",
    "Linear",
    "Shard",
    "Target",
    "TargetConfig",
    "Tree",
    "chain_tree",
    "load_weights",
    "rms_norm",
    "unit_norm",
]


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The fields of `Qwen3_5TextConfig` that the miniature uses."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[str, ...]
    eos_token_id: int
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    partial_rotary_factor: float = 0.25

    @classmethod
    def load(cls, folder: Path) -> TargetConfig:
        """Read a Hugging Face `config.json`."""
        data = json.loads((folder / "config.json").read_text())
        rope = data["rope_parameters"]
        known = {k: data[k] for k in cls.__dataclass_fields__ if k in data}
        known["layer_types"] = tuple(data["layer_types"])
        known["rope_theta"] = rope["rope_theta"]
        known["partial_rotary_factor"] = rope["partial_rotary_factor"]
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The `config.json` that `transformers` and SGLang read."""
        data = {k: getattr(self, k) for k in self.__dataclass_fields__}
        theta, factor = data.pop("rope_theta"), data.pop("partial_rotary_factor")
        rotary = int(self.head_dim * factor) // 2
        section = [rotary - 2 * (rotary // 4), rotary // 4, rotary // 4]
        return {
            **data,
            "layer_types": list(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "full_attention_interval": 4,
            "partial_rotary_factor": factor,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": factor,
                "mrope_interleaved": True,
                "mrope_section": section,
            },
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor-parallel rank: which heads and FFN columns are its own, and how partial sums are added up."""

    rank: int = 0
    world: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x

    def rows(self, weight: Tensor, *, groups: Sequence[int] | None = None) -> Tensor:
        """This rank's output rows; `groups` gives the sizes of blocks that are each split on their own."""
        blocks = weight.split_with_sizes(list(groups)) if groups else (weight,)
        return torch.cat([b.chunk(self.world)[self.rank] for b in blocks])

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's input columns: the result is a partial sum."""
        return weight.chunk(self.world, dim=1)[self.rank].contiguous()


class Linear:
    """`x @ weight.T`, with the weight packed once for oneDNN where this torch can and the processor gains by it.

    The packing operators are internal to torch: they are tried on construction against `F.linear`, and any doubt
    (missing operator, another result) falls back to it.
    """

    __slots__ = ("_call", "packed", "weight")

    def __init__(self, weight: Tensor, *, pack: bool = False) -> None:
        self.weight = weight.contiguous()
        self.packed = _pack(self.weight) if pack and weight.device.type == "cpu" else None
        self._call = torch.ops.mkldnn._linear_pointwise if self.packed is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._call is None:
            return F.linear(x, self.weight)
        out: Tensor = self._call(x, self.packed, None, "none", [], "")
        return out


def _pack(weight: Tensor) -> Tensor | None:
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        probe = torch.linspace(-1, 1, 3 * weight.shape[1]).view(3, -1)
        out = torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed if torch.allclose(out, F.linear(probe, weight), rtol=1e-4, atol=1e-4) else None


@dataclass(slots=True)
class Tree:
    """The tokens of one forward as trees in topological order: a parent always comes before its children.

    `ancestors` (B, T, T) is 1 where column j is row i or an ancestor of it. `conv` (B, T, W) indexes, for each node,
    its W last inputs among [W-1 inputs of history, T inputs of this forward], oldest first.
    """

    ancestors: Tensor
    conv: Tensor
    is_chain: bool = False
    strict: Tensor = field(init=False)  # proper ancestors alone

    def __post_init__(self) -> None:
        self.strict = self.ancestors - torch.eye(self.ancestors.shape[-1], device=self.ancestors.device)


_CHAINS: dict[tuple[int, int, int, torch.device], Tree] = {}


def chain_tree(batch: int, length: int, kernel: int, device: torch.device | str = "cpu") -> Tree:
    """The degenerate tree: each node's parent is the one before. Built once a shape."""
    key = (batch, length, kernel, torch.device(device))
    if key not in _CHAINS:
        ancestors = torch.ones(length, length, device=device).tril().expand(batch, -1, -1)
        index = torch.arange(length, device=device)[:, None] + torch.arange(kernel, device=device)
        _CHAINS[key] = Tree(ancestors, index.expand(batch, -1, -1), is_chain=True)
    return _CHAINS[key]


def fold_norm(weight: Tensor) -> Tensor:
    """A norm's weight for `rms_norm`, which sums where the definition takes the mean: one operator less a norm."""
    root: float = weight.shape[-1] ** 0.5
    return weight * root


def rms_norm(x: Tensor, folded: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, with a weight from `fold_norm`."""
    return unit_norm(x, eps) * folded


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """The norm without its weight, for use before a `Linear` into whose columns the weight was multiplied."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps * x.shape[-1])


class Cache:
    """State of up to `slots` sequences: K/V rows, recurrent states, the last inputs of each short convolution.

    `kv` is (attention layers, slots, 2, Hkv, rows, D); `recurrent` (GDN layers, slots, Hk, Dk, R, Dv); `conv` (GDN
    layers, slots, W-1, C); `lengths[slot]` counts committed tokens. Rows past a length are scratch.
    """

    def __init__(self, target: Target, slots: int, rows: int) -> None:
        c, n_gdn, n_attn = target.config, target.num_gdn, target.num_attention
        device = target.device
        self.rows = rows
        self.lengths = [0] * slots
        self.kv = torch.zeros(n_attn, slots, 2, target.kv_heads, rows, c.head_dim, device=device)
        self.recurrent = torch.zeros(
            n_gdn,
            slots,
            target.k_heads,
            c.linear_key_head_dim,
            target.ratio,
            c.linear_value_head_dim,
            device=device,
        )
        self.conv = torch.zeros(n_gdn, slots, c.linear_conv_kernel_dim - 1, target.conv_dim, device=device)

    def clear(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self.lengths[slot] = 0
        self.recurrent[:, slot] = 0
        self.conv[:, slot] = 0


Where = slice | list[int]


def _where(slots: list[int]) -> Where:
    """Neighbouring slots as a slice, so that indexing gives a view and not a copy."""
    first = slots[0]
    return slice(first, first + len(slots)) if slots == list(range(first, first + len(slots))) else slots


@dataclass(slots=True)
class Pending:
    """What one forward leaves for `commit`: the GDN layers' inputs and solutions, one entry a layer."""

    slots: list[int]
    where: Where
    tree: Tree
    conv: list[Tensor]  # (B, W-1+T, C) a layer
    keys: list[Tensor]  # (B, Hk, T, Dk)
    solved: list[Tensor]  # U: (B, Hk, R, T, Dv)
    decay: list[Tensor]  # G: (B, Hk, R, T)


@dataclass(slots=True)
class Output:
    """Hidden states after the final norm (B, T, H), tapped layer outputs (B, T, n_taps * H), and the pending commit."""

    hidden: Tensor
    taps: Tensor | None
    pending: Pending | None


class Target:
    """Inference over a `Cache`; float32. `taps` lists the layers whose outputs the drafter reads."""

    def __init__(
        self,
        config: TargetConfig,
        weights: dict[str, Tensor],
        *,
        taps: Sequence[int] = (),
        shard: Shard | None = None,
        device: str | torch.device = "cpu",
        pack: bool = False,
    ) -> None:
        self.config, self.taps, self.shard = config, tuple(taps), shard or Shard()
        self.device = torch.device(device)
        self.kernel = config.linear_conv_kernel_dim
        world = self.shard.world
        if any(
            n % world
            for n in (
                config.num_key_value_heads,
                config.linear_num_key_heads,
                config.intermediate_size,
            )
        ):
            raise ValueError(f"tp_size={world} does not divide the model's heads and FFN: use 1 or 2")
        self.heads = config.num_attention_heads // world
        self.kv_heads = config.num_key_value_heads // world
        self.k_heads = config.linear_num_key_heads // world
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        self.v_heads = self.k_heads * self.ratio
        self.conv_dim = 2 * self.k_heads * config.linear_key_head_dim + self.v_heads * config.linear_value_head_dim
        self.num_attention = config.layer_types.count("full_attention")
        self.num_gdn = len(config.layer_types) - self.num_attention
        w = {k: v.to(self.device, torch.float32) for k, v in weights.items()}
        self.embedding = w["model.embed_tokens.weight"]
        self.head = Linear(self.embedding, pack=pack)
        self.norm = fold_norm(1 + w["model.norm.weight"])
        self.layers: list[_Gdn | _Attention] = []
        for i, kind in enumerate(config.layer_types):
            own = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
            block = _Attention if kind == "full_attention" else _Gdn
            index = sum(t == kind for t in config.layer_types[:i])
            self.layers.append(block(self, own, index, pack))
        rotary = int(config.head_dim * config.partial_rotary_factor)
        inverse = config.rope_theta ** -(torch.arange(0, rotary, 2, device=self.device) / rotary)
        angles = torch.arange(config.max_position_embeddings + 128, device=self.device)[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()

    @property
    def context_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.config.max_position_embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of final hidden states."""
        return self.head(hidden)

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor,
        cache: Cache,
        slots: list[int],
        tree: Tree | None = None,
    ) -> Output:
        """Run `tokens` (B, T), at positions length + depth, on the sequences in `slots`.

        With `tree`, the caches' lengths and states stay as they are and the output's `pending` must be committed.
        Without, T is 1 and the token is committed at once: an autoregressive step.
        """
        lengths = [cache.lengths[s] for s in slots]
        positions = torch.tensor(lengths, device=self.device)[:, None] + depths
        rope = (self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        mask = _attention_mask(lengths, tokens.shape[1], tree, self.device)
        where = _where(slots)
        pending = Pending(slots, where, tree, [], [], [], []) if tree is not None else None
        x = F.embedding(tokens, self.embedding)
        taps = []
        for i, layer in enumerate(self.layers):
            x = layer.forward(x, cache, where, lengths, rope, mask, pending)
            if i in self.taps:
                taps.append(x)
        if pending is None:
            for s in slots:
                cache.lengths[s] += 1
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps)
        return Output(hidden, torch.cat(taps, -1) if taps else None, pending)

    def commit(self, cache: Cache, pending: Pending, paths: Sequence[Sequence[int]]) -> None:
        """Make the accepted nodes part of each sequence: `paths[b]` lists them from the root down.

        Recurrent and convolution states become those of the *last node of the path*, never of a count; K/V rows are
        moved together.
        """
        if self.num_gdn:
            self._commit_states(cache, pending, torch.tensor([p[-1] for p in paths], device=self.device))
        for slot, path in zip(pending.slots, paths, strict=True):
            self._commit_rows(cache, slot, path)

    def _commit_states(self, cache: Cache, pending: Pending, nodes: Tensor) -> None:
        """Install the state after each sequence's last accepted node, all GDN layers at once (n below)."""
        each = torch.arange(len(nodes), device=self.device)
        keys = torch.stack(pending.keys)  # (n, B, Hk, T, Dk)
        solved = torch.stack(pending.solved)  # (n, B, Hk, R, T, Dv)
        decay = torch.stack(pending.decay)  # (n, B, Hk, R, T)
        last = decay[:, each, :, :, nodes].permute(1, 0, 2, 3).unsqueeze(-1)  # (n, B, Hk, R, 1)
        own = pending.tree.ancestors[each, nodes][:, None, None]  # (B, 1, 1, T)
        weight = ((last - decay) * own).exp() * own
        added = keys.transpose(-1, -2).unsqueeze(3) @ (solved * weight.unsqueeze(-1))  # (n, B, Hk, R, Dk, Dv)
        grown = last.exp().unsqueeze(3)  # (n, B, Hk, 1, R, 1)
        cache.recurrent[:, pending.where] = cache.recurrent[:, pending.where] * grown + added.transpose(3, 4)
        index = pending.tree.conv[each, nodes, 1:]  # (B, W-1)
        cache.conv[:, pending.where] = torch.stack(pending.conv)[:, each[:, None], index]

    def _commit_rows(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        start = cache.lengths[slot]
        kept = len(path)
        if path[-1] != kept - 1:  # nodes 0..k in place already when the path is the chain
            rows = torch.tensor(path, device=self.device) + start
            cache.kv[:, slot, :, :, start : start + kept] = cache.kv[:, slot].index_select(3, rows)
        cache.lengths[slot] = start + kept


def _attention_mask(lengths: list[int], count: int, tree: Tree | None, device: torch.device) -> Tensor | None:
    """Additive (B, T, S) mask with S = longest past + T; None where every row may see everything."""
    longest = max(lengths)
    if tree is None and len(set(lengths)) == 1:
        return None
    mask = torch.full((len(lengths), count, longest + count), float("-inf"), device=device)
    for b, length in enumerate(lengths):
        mask[b, :, :length] = 0
        inside = mask[b, :, length : length + count]
        if tree is None:
            inside.fill_(0)
        else:
            inside.masked_fill_(tree.ancestors[b] > 0, 0)
    return mask


class _Mlp:
    """The gated FFN that closes every layer, with its residual."""

    def __init__(self, target: Target, w: dict[str, Tensor], pack: bool) -> None:
        self.target, self.eps = target, target.config.rms_norm_eps
        rows, columns = target.shard.rows, target.shard.columns
        norm = fold_norm(1 + w["post_attention_layernorm.weight"])
        up = torch.cat([rows(w["mlp.gate_proj.weight"]), rows(w["mlp.up_proj.weight"])])
        self.up = Linear(up * norm, pack=pack)
        self.down = Linear(columns(w["mlp.down_proj.weight"]), pack=pack)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(unit_norm(x, self.eps)).chunk(2, -1)
        return x + self.target.shard.all_reduce(self.down(F.silu(gate) * up))


class _Attention:
    """Full attention with an output gate; rows of K/V are written past each sequence's length."""

    def __init__(self, target: Target, w: dict[str, Tensor], index: int, pack: bool) -> None:
        c, shard = target.config, target.shard
        self.target, self.index, self.eps, self.scale = (
            target,
            index,
            c.rms_norm_eps,
            c.head_dim**-0.5,
        )
        norm = fold_norm(1 + w["input_layernorm.weight"])
        # q_proj interleaves each head's query and gate: sorted apart here, so that q and k are normed together
        query, gate = w["self_attn.q_proj.weight"].view(c.num_attention_heads, 2, c.head_dim, -1).unbind(1)
        parts = [
            query.flatten(0, 1),
            w["self_attn.k_proj.weight"],
            w["self_attn.v_proj.weight"],
            gate.flatten(0, 1),
        ]
        self.project = Linear(torch.cat([shard.rows(p) for p in parts]) * norm, pack=pack)
        self.qk_norm = torch.cat(
            [
                fold_norm(1 + w["self_attn.q_norm.weight"]).expand(target.heads, -1),
                fold_norm(1 + w["self_attn.k_norm.weight"]).expand(target.kv_heads, -1),
            ]
        )
        self.out = Linear(shard.columns(w["self_attn.o_proj.weight"]), pack=pack)
        self.mlp = _Mlp(target, w, pack)

    def forward(
        self,
        x: Tensor,
        cache: Cache,
        where: Where,
        lengths: list[int],
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        pending: Pending | None,
    ) -> Tensor:
        t = self.target
        batch, count, _ = x.shape
        d, hq, hkv = t.config.head_dim, t.heads, t.kv_heads
        projected = self.project(unit_norm(x, self.eps))
        qk, v, gate = projected.split_with_sizes([(hq + hkv) * d, hkv * d, hq * d], -1)
        qk = apply_rope(rms_norm(qk.view(batch, count, hq + hkv, d), self.qk_norm, self.eps), *rope)
        rows = torch.stack([qk[:, :, hq:], v.view(batch, count, hkv, d)], 1).transpose(2, 3)  # (B, 2, Hkv, T, D)
        kv, span = cache.kv[self.index], max(lengths) + count
        if isinstance(where, slice) and len(set(lengths)) == 1:
            kv[where, :, :, span - count : span] = rows
        else:
            slots = range(where.start, where.stop) if isinstance(where, slice) else where
            for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                kv[slot, :, :, length : length + count] = rows[b]
        past = kv[where]
        mixed = attend(qk[:, :, :hq], past[:, 0, :, :span], past[:, 1, :, :span], mask, self.scale)
        return self.mlp.forward(x + t.shard.all_reduce(self.out(mixed * torch.sigmoid(gate))))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of x (B, T, heads, D), half against half."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Grouped attention: query (B, T, Hq, D), keys and values (B, Hkv, S, D), mask (B, T, S) -> (B, T, Hq * D)."""
    batch, count, heads, d = query.shape
    groups = heads // keys.shape[1]
    q = query.view(batch, count, -1, groups, d).permute(0, 2, 3, 1, 4)  # (B, Hkv, groups, T, D)
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(batch, -1, groups, count, keys.shape[2]) * scale
    if mask is not None:
        scores = scores + mask[:, None, None]
    mixed = scores.softmax(-1).flatten(2, 3) @ values  # (B, Hkv, groups * T, D)
    return mixed.view(batch, -1, groups, count, d).permute(0, 3, 1, 2, 4).reshape(batch, count, heads * d)


class _Gdn:
    """Gated DeltaNet: a short causal convolution, then a delta-rule recurrence, on a tree or one step at a time."""

    def __init__(self, target: Target, w: dict[str, Tensor], index: int, pack: bool) -> None:
        c, shard = target.config, target.shard
        self.target, self.index, self.eps = target, index, c.rms_norm_eps
        key, value = (
            c.linear_num_key_heads * c.linear_key_head_dim,
            c.linear_num_value_heads * c.linear_value_head_dim,
        )
        groups = (key, key, value)
        norm = fold_norm(1 + w["input_layernorm.weight"])
        parts = [shard.rows(w["linear_attn.in_proj_qkv.weight"], groups=groups)]
        parts += [shard.rows(w[f"linear_attn.in_proj_{p}.weight"]) for p in "zba"]
        self.project = Linear(torch.cat(parts) * norm, pack=pack)
        self.conv = shard.rows(w["linear_attn.conv1d.weight"].squeeze(1), groups=groups).T.contiguous()  # (W, C)
        self.rate = -shard.rows(w["linear_attn.A_log"]).exp()
        self.dt_bias = shard.rows(w["linear_attn.dt_bias"])
        # both are normed to length 1; queries carry the attention scale too
        scale = torch.tensor([c.linear_key_head_dim**-0.5, 1.0], device=target.device)
        self.qk_scale = scale.repeat_interleave(target.k_heads)[:, None]
        out_norm = fold_norm(w["linear_attn.norm.weight"]).repeat(c.linear_num_value_heads)
        self.out = Linear(shard.columns(w["linear_attn.out_proj.weight"] * out_norm), pack=pack)
        self.mlp = _Mlp(target, w, pack)

    def forward(
        self,
        x: Tensor,
        cache: Cache,
        where: Where,
        lengths: list[int],
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        pending: Pending | None,
    ) -> Tensor:
        t = self.target
        batch, count, _ = x.shape
        value = t.v_heads * t.config.linear_value_head_dim
        projected = self.project(unit_norm(x, self.eps))
        qkv, z, b, a = projected.split_with_sizes([t.conv_dim, value, t.v_heads, t.v_heads], -1)
        gates = (torch.sigmoid(b), self.rate * F.softplus(a + self.dt_bias))  # beta, g: (B, T, Hv)
        if pending is None:
            mixed = self._step(qkv, gates, cache, where)  # (B, T, Hv, Dv)
        else:
            mixed = self._solve(qkv, gates, cache, where, pending)
        normed = unit_norm(mixed, self.eps).reshape(batch, count, value) * F.silu(z)
        return self.mlp.forward(x + t.shard.all_reduce(self.out(normed)))

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, T, C) into normed q, k (B, T, Hk, Dk) and v (B, T, Hk, R, Dv)."""
        t = self.target
        dk = t.config.linear_key_head_dim
        batch, count, _ = convolved.shape
        wide = 2 * t.k_heads * dk
        qk = convolved[..., :wide].view(batch, count, 2 * t.k_heads, dk)
        qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6) * self.qk_scale
        v = convolved[..., wide:].view(batch, count, t.k_heads, t.ratio, -1)
        return qk[:, :, : t.k_heads], qk[:, :, t.k_heads :], v

    def _step(self, qkv: Tensor, gates: tuple[Tensor, Tensor], cache: Cache, where: Where) -> Tensor:
        """One token a sequence, state updated in place."""
        t = self.target
        batch = qkv.shape[0]
        history, state = cache.conv[self.index][where], cache.recurrent[self.index][where]
        full = torch.cat([history, qkv], 1)  # (B, W, C)
        q, k, v = self._heads(F.silu((full * self.conv).sum(1, keepdim=True)))
        beta, g = (x.view(batch, t.k_heads, 1, t.ratio, 1) for x in gates)
        state.mul_(g.exp())
        flat = state.view(batch * t.k_heads, state.shape[2], -1)  # (B * Hk, Dk, R * Dv)
        key, v = k.reshape(batch * t.k_heads, 1, -1), v.reshape(batch, t.k_heads, 1, t.ratio, -1)
        delta = (v - torch.bmm(key, flat).view_as(v)) * beta
        flat.baddbmm_(key.transpose(1, 2), delta.view(batch * t.k_heads, 1, -1))
        mixed = torch.bmm(q.reshape(batch * t.k_heads, 1, -1), flat)
        if isinstance(where, slice):
            history.copy_(full[:, 1:])  # state was a view: written already
        else:
            cache.conv[self.index, where] = full[:, 1:]
            cache.recurrent[self.index, where] = state
        return mixed.view(batch, 1, t.v_heads, -1)

    def _solve(
        self,
        qkv: Tensor,
        gates: tuple[Tensor, Tensor],
        cache: Cache,
        where: Where,
        pending: Pending,
    ) -> Tensor:
        """A tree a sequence, by the ancestor-masked solve; state untouched until `commit`."""
        t, tree = self.target, pending.tree
        batch, count, _ = qkv.shape
        history, state = cache.conv[self.index][where], cache.recurrent[self.index][where]
        full = torch.cat([history, qkv], 1)  # (B, W-1+T, C)
        q, k, v = self._heads(F.silu(self._convolve(full, tree, count)))
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, Hk, T, Dk)
        v = v.permute(0, 2, 3, 1, 4)  # (B, Hk, R, T, Dv)
        beta, g = (x.view(batch, count, t.k_heads, t.ratio).permute(0, 2, 3, 1) for x in gates)  # (B, Hk, R, T)
        both = torch.cat([q, k], 2)  # (B, Hk, 2T, Dk)
        read = (both @ state.flatten(3)).view(batch, t.k_heads, 2 * count, t.ratio, -1).transpose(2, 3)
        inner = both @ k.transpose(-1, -2)  # (B, Hk, 2T, T)
        path = (g @ tree.ancestors[:, None].transpose(-1, -2)) if not tree.is_chain else g.cumsum(-1)  # G
        grown = path.exp().unsqueeze(-1)
        # masked before exp: a cousin's decay may be larger than one's own, and e^(G_i - G_j) would overflow
        decay = ((path.unsqueeze(-1) - path.unsqueeze(-2)) * tree.ancestors[:, None, None]).exp()
        lower = inner[:, :, None, count:] * decay * beta.unsqueeze(-1) * tree.strict[:, None, None]
        right = beta.unsqueeze(-1) * (v - grown * read[:, :, :, count:])
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        inside = inner[:, :, None, :count] * decay * tree.ancestors[:, None, None]
        mixed: Tensor = grown * read[:, :, :, :count] + inside @ solved  # (B, Hk, R, T, Dv)
        pending.conv.append(full)
        pending.keys.append(k)
        pending.solved.append(solved)
        pending.decay.append(path)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, count, t.v_heads, -1)

    def _convolve(self, full: Tensor, tree: Tree, count: int) -> Tensor:
        """Each node over its own ancestors' inputs: (B, W-1+T, C) -> (B, T, C)."""
        width = self.conv.shape[0]
        out = full[:, width - 1 :] * self.conv[width - 1]
        for i in range(width - 1):
            if tree.is_chain:
                taken = full[:, i : i + count]
            else:
                taken = torch.stack([full[b].index_select(0, tree.conv[b, :, i]) for b in range(full.shape[0])])
            out = torch.addcmul(out, taken, self.conv[i])
        return out


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of `model.safetensors` in a folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
