"""From folders to a decoder: configs and tensors are checked against the plan, the pair and each other.

Whatever is wrong is a `LoadError` of one line that names the file and the field, raised before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchlib.reference_engine.decode import Decoder, Method
from benchlib.reference_engine.drafter import Drafter, DrafterConfig
from benchlib.reference_engine.model import Shard, Target, TargetConfig, load_weights

__all__ = [
    "LoadError",
    "ModelPlan",
    "build_decoder",
    "drafter_shapes",
    "load_decoder",
    "load_models",
    "read_configs",
    "target_shapes",
    "tree_budget",
]

Shape = tuple[int, ...]
C = TypeVar("C", TargetConfig, DrafterConfig)


class LoadError(ValueError):
    """The model cannot be served as asked; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What every rank builds."""

    target: Path
    drafter: Path | None = None
    method: Method = "auto"
    budget: int | None = None
    block_size: int | None = None
    slots: int = 8
    tp_size: int = 1
    threads: int = 1
    custom_all_reduce: bool = True
    context_length: int | None = None
    pack: bool = True
    dummy: bool = False
    seed: int = 0


def read_configs(plan: ModelPlan) -> tuple[TargetConfig, DrafterConfig | None]:
    """The configs of a plan, checked against it and against each other. LoadError names what does not fit."""
    target = _config(TargetConfig, plan.target, "target")
    if wrong := [name for name, n in _sharded(target).items() if n % plan.tp_size]:
        raise LoadError(
            f"tp size {plan.tp_size} does not divide the target's {', '.join(wrong)}; "
            f"they are {', '.join(str(_sharded(target)[name]) for name in wrong)}"
        )
    if plan.context_length is not None:
        longest = target.max_position_embeddings
        if not 1 <= plan.context_length <= longest:
            raise LoadError(f"context length {plan.context_length} is outside 1..{longest}")
        target = replace(target, max_position_embeddings=plan.context_length)
    if plan.method == "auto":
        return target, None
    if plan.drafter is None:
        raise LoadError(f"method {plan.method} needs a drafter: --speculative-draft-model-path")
    drafter = _config(DrafterConfig, plan.drafter, "drafter")
    _check_pair(target, drafter, plan)
    return target, drafter


def _config(kind: type[C], folder: Path, name: str) -> C:
    if not (folder / "config.json").is_file():
        raise LoadError(f"no {name} at {folder}: it has no config.json")
    try:
        return kind.load(folder)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LoadError(
            f"{folder / 'config.json'} is not the config of a {name}: {type(error).__name__}: {error}"
        ) from error


def _sharded(config: TargetConfig) -> dict[str, int]:
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "linear_num_key_heads": config.linear_num_key_heads,
        "intermediate_size": config.intermediate_size,
    }


def _check_pair(target: TargetConfig, drafter: DrafterConfig, plan: ModelPlan) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter, name), getattr(target, name)
        if ours != theirs:
            raise LoadError(f"the drafter's {name} is {ours}, the target's {theirs}")
    if drafter.mask_token_id >= target.vocab_size:
        raise LoadError(f"the drafter's mask_token_id {drafter.mask_token_id} is no token")
    layers = len(target.layer_types)
    if wrong := [i for i in drafter.target_layer_ids if not 0 <= i < layers]:
        raise LoadError(f"the drafter reads target layers {wrong}; the target has {layers}")
    if plan.block_size not in (None, drafter.block_size):
        raise LoadError(
            f"--speculative-num-draft-tokens {plan.block_size} differs from the drafter's block size "
            f"{drafter.block_size}"
        )
    if plan.budget is not None and not 1 <= plan.budget <= 1024:
        raise LoadError(f"--speculative-ddtree-budget {plan.budget} is outside 1..1024")


def load_decoder(plan: ModelPlan) -> Decoder:
    """A decoder of the whole model, in this process. LoadError when the files do not hold it."""
    return build_decoder(plan, Shard())


def build_decoder(plan: ModelPlan, shard: Shard) -> Decoder:
    """One rank's decoder."""
    target, drafter = load_models(plan, shard)
    budget = tree_budget(plan, drafter)
    return Decoder(target, drafter, method=plan.method, budget=budget, slots=plan.slots)


def tree_budget(plan: ModelPlan, drafter: Drafter | None) -> int:
    """The budget asked for, or as many nodes as a chain has."""
    return plan.budget or (drafter.config.block_size - 1 if drafter else 1)


def load_models(plan: ModelPlan, shard: Shard) -> tuple[Target, Drafter | None]:
    """One rank's part of the target, and the drafter where the method needs one."""
    config, draft_config = read_configs(plan)
    taps = draft_config.target_layer_ids if draft_config else ()
    weights = _weights(plan, plan.target, config)
    target = Target(config, weights, taps=taps, shard=shard, pack=plan.pack)
    if draft_config is None or plan.drafter is None:
        return target, None
    weights = _weights(plan, plan.drafter, draft_config)
    return target, Drafter(draft_config, weights, target, pack=plan.pack)


def _weights(plan: ModelPlan, folder: Path, config: TargetConfig | DrafterConfig) -> dict[str, Tensor]:
    """Tensors of a checkpoint, or random ones of the same shapes; the same on every rank."""
    from safetensors import SafetensorError

    target = isinstance(config, TargetConfig)
    expected = target_shapes(config) if isinstance(config, TargetConfig) else drafter_shapes(config)
    if plan.dummy:
        generator = torch.Generator().manual_seed(plan.seed)
        return {name: _random(name, shape, generator, centred=target) for name, shape in expected.items()}
    file = folder / "model.safetensors"
    try:
        weights = load_weights(folder)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"cannot read {file}: {error}") from error
    if not target:  # drafters are written with and without the prefix
        weights = {name.removeprefix("model."): value for name, value in weights.items()}
    for name, shape in expected.items():
        have = tuple(weights[name].shape) if name in weights else None
        if have != shape:
            what = "is missing" if have is None else f"has shape {have}"
            raise LoadError(f"{file}: {name} {what}; config.json makes it {shape}")
    return weights


def _random(name: str, shape: Shape, generator: torch.Generator, *, centred: bool) -> Tensor:
    """A tensor that keeps activations of order one. The target's norms are kept around zero (`1 + weight`)."""
    if name.endswith(("A_log", "dt_bias")):
        return torch.rand(shape, generator=generator)
    if len(shape) == 1:
        return torch.zeros(shape) if centred and "linear_attn" not in name else torch.ones(shape)
    spread: float = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * spread


def target_shapes(c: TargetConfig) -> dict[str, Shape]:
    """Names and shapes in the target's checkpoint."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for i, kind in enumerate(c.layer_types):
        full = kind == "full_attention"
        own = _mlp_shapes(c) | (_attention_shapes(c, gated=True) if full else _gdn_shapes(c))
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def drafter_shapes(c: DrafterConfig) -> dict[str, Shape]:
    """Names and shapes in the drafter's checkpoint."""
    shapes: dict[str, Shape] = {
        "fc.weight": (c.hidden_size, len(c.target_layer_ids) * c.hidden_size),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_hidden_layers):
        own = _mlp_shapes(c) | _attention_shapes(c, gated=False)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def _mlp_shapes(c: TargetConfig | DrafterConfig) -> dict[str, Shape]:
    return {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }


def _attention_shapes(c: TargetConfig | DrafterConfig, *, gated: bool) -> dict[str, Shape]:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "self_attn.q_proj.weight": (queries * (2 if gated else 1), c.hidden_size),
        "self_attn.k_proj.weight": (keys, c.hidden_size),
        "self_attn.v_proj.weight": (keys, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, queries),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }


def _gdn_shapes(c: TargetConfig) -> dict[str, Shape]:
    heads, value = c.linear_num_value_heads, c.linear_num_value_heads * c.linear_value_head_dim
    channels = 2 * c.linear_num_key_heads * c.linear_key_head_dim + value
    return {
        "linear_attn.in_proj_qkv.weight": (channels, c.hidden_size),
        "linear_attn.in_proj_z.weight": (value, c.hidden_size),
        "linear_attn.in_proj_b.weight": (heads, c.hidden_size),
        "linear_attn.in_proj_a.weight": (heads, c.hidden_size),
        "linear_attn.conv1d.weight": (channels, 1, c.linear_conv_kernel_dim),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (c.hidden_size, value),
    }
