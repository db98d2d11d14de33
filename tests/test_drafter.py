"""The drafter: inference against training, batches, contexts in pieces, and the files SGLang reads."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchlib.reference_engine import train
from benchlib.reference_engine.drafter import Drafter, DrafterConfig
from benchlib.reference_engine.model import Target, load_weights
from tests.engine import (
    BLOCK,
    TOLERANCE,
    packaged_folder,
    random_drafter_weights,
    random_prompt,
    random_weights,
    small_config,
    small_drafter_config,
)

NAMES = ["small", "two layers", "packaged"]


@cache
def models(name: str) -> tuple[Drafter, train.TrainDrafter, train.TrainTarget]:
    """Inference drafter (its target in `.target`), trainable drafter, trainable target: the same weights."""
    if name == "packaged":
        folder = packaged_folder()
        config = train.TargetConfig.load(folder / "target")
        own = DrafterConfig.load(folder / "drafter")
        weights, drafter_weights = (load_weights(folder / p) for p in ("target", "drafter"))
    else:
        config = small_config()
        changes: dict[str, Any] = {} if name == "small" else {
            "num_hidden_layers": 2, "target_layer_ids": (1, 3), "num_attention_heads": 2, "block_size": 8,
            "num_key_value_heads": 1, "head_dim": 48, "rope_theta": 1e4, "intermediate_size": 40,
        }  # fmt: skip
        own = small_drafter_config(config, **changes)
        weights = random_weights(config, 2)
        drafter_weights = random_drafter_weights(own, 2)
    target = Target(config, weights, taps=own.target_layer_ids)
    trainable = train.TrainDrafter(own)
    trainable.load_state_dict({k: v.float() for k, v in drafter_weights.items()})
    beside = train.TrainTarget(config, own.target_layer_ids)
    beside.load_state_dict({k: v.float() for k, v in weights.items()})
    return Drafter(own, drafter_weights, target), trainable, beside


@torch.no_grad()
def trained_logits(name: str, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The training forward: logits (B, M, block - 1, V) after each anchor, and the taps."""
    _, trainable, beside = models(name)
    _, taps = beside(tokens)
    embedding = beside.model.embed_tokens.weight
    return trainable(taps, tokens, anchors, embedding) @ embedding.T, taps


@pytest.mark.parametrize("name", NAMES)
class TestForward:
    def test_inference_is_what_was_trained(self, name: str) -> None:
        """From an anchor at the very front to one near the end, from the same taps."""
        drafter, _, _ = models(name)
        tokens = torch.tensor([random_prompt(drafter.target.config, 128, 1)])
        block = drafter.config.block_size
        anchors = torch.tensor([[1, 2, 17, 64, 65, 128 - block]])
        expected, taps = trained_logits(name, tokens, anchors)
        cache = drafter.new_cache(1, 160)
        drafter.append(cache, 0, 0, taps[0])
        for m, anchor in enumerate(anchors[0].tolist()):
            logits = drafter.draft(cache.clone(), [0], [anchor], tokens[0, anchor : anchor + 1])
            assert logits.shape == (1, block - 1, drafter.target.config.vocab_size)
            assert (logits[0] - expected[0, m]).abs().max() < TOLERANCE, f"anchor {anchor}"
        assert expected.std() > 0.05, "flat logits show nothing"

    def test_taps_are_the_targets(self, name: str) -> None:
        """What a prefill taps is what training taps."""
        drafter, _, beside = models(name)
        tokens = torch.tensor([random_prompt(drafter.target.config, 64, 2)])
        from benchlib.reference_engine.model import Cache, chain_tree

        with torch.inference_mode():
            _, expected = beside(tokens)
            tree = chain_tree(1, 64, drafter.target.kernel)
            cache = Cache(drafter.target, 1, 64)
            taps = drafter.target.forward(tokens, torch.arange(64)[None], cache, [0], tree).taps
        assert taps is not None
        assert (taps - expected).abs().max() < TOLERANCE

    def test_eight_are_one(self, name: str) -> None:
        """Eight contexts of unequal lengths, none included, in slots out of order."""
        drafter, _, _ = models(name)
        tokens = torch.tensor([random_prompt(drafter.target.config, 64, s) for s in range(8)])
        _, taps = trained_logits(name, tokens, torch.ones(8, 1, dtype=torch.long))
        lengths, slots = [64, 1, 17, 16, 40, 2, 63, 0], [9, 0, 4, 3, 7, 1, 8, 2]
        cache = drafter.new_cache(10, 64 + BLOCK)
        cache.uniform_(-3, 3)  # what others left behind must not matter
        for b, slot in enumerate(slots):
            drafter.append(cache, slot, 0, taps[b, : lengths[b]])
        anchors = torch.arange(20, 28)
        together = drafter.draft(cache, slots, lengths, anchors)
        for b, length in enumerate(lengths):
            alone = drafter.new_cache(1, 64 + BLOCK)
            drafter.append(alone, 0, 0, taps[b, :length])
            logits = drafter.draft(alone, [0], [length], anchors[b : b + 1])
            assert (together[b] - logits[0]).abs().max() < TOLERANCE

    def test_eight_of_one_length(self, name: str) -> None:
        drafter, _, _ = models(name)
        tokens = torch.tensor([random_prompt(drafter.target.config, 64, s) for s in range(3)])
        _, taps = trained_logits(name, tokens, torch.ones(3, 1, dtype=torch.long))
        cache, anchors = drafter.new_cache(3, 64 + BLOCK), torch.tensor([9, 10, 11])
        for slot in range(3):
            drafter.append(cache, slot, 0, taps[slot, :30])
        together = drafter.draft(cache, [0, 1, 2], [30] * 3, anchors)
        for slot in range(3):
            alone = drafter.draft(cache, [slot], [30], anchors[slot : slot + 1])
            assert (together[slot] - alone[0]).abs().max() < TOLERANCE

    def test_context_in_pieces(self, name: str) -> None:
        """Appended at once or in pieces with drafts between, whose rows are written over."""
        drafter, _, _ = models(name)
        tokens = torch.tensor([random_prompt(drafter.target.config, 64, 3)])
        _, taps = trained_logits(name, tokens, torch.tensor([[1]]))
        whole, pieces = drafter.new_cache(2, 64 + BLOCK), drafter.new_cache(2, 64 + BLOCK)
        drafter.append(whole, 1, 0, taps[0])
        start = 0
        for count in (1, 5, 16, 2, 40):
            drafter.append(pieces, 1, start, taps[0, start : start + count])
            start += count
            drafter.draft(pieces, [1], [start], torch.tensor([9]))
        assert start == 64
        assert (whole[1, ..., :64, :] - pieces[1, ..., :64, :]).abs().max() < TOLERANCE
        a, b = (drafter.draft(c, [1], [64], torch.tensor([7])) for c in (whole, pieces))
        assert (a - b).abs().max() < TOLERANCE
        assert not pieces[0].any()

    def test_packed_weights_change_nothing(self, name: str) -> None:
        drafter, trainable, _ = models(name)
        packed = Drafter(drafter.config, trainable.state_dict(), drafter.target, pack=True)
        tokens = torch.tensor([random_prompt(drafter.target.config, 64, 4)])
        _, taps = trained_logits(name, tokens, torch.tensor([[1]]))
        out = []
        for d in (drafter, packed):
            cache = d.new_cache(1, 64 + BLOCK)
            d.append(cache, 0, 0, taps[0, :50])
            out.append(d.draft(cache, [0], [50], torch.tensor([12])))
        assert (out[0] - out[1]).abs().max() < TOLERANCE


# --- files ---------------------------------------------------------------------------------------------------------


def expected_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """SGLang's tensors of a DFlash draft checkpoint: it ignores unknown names and does not report missing ones."""
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(c.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(c.num_hidden_layers):
        layer = {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (c.head_dim,),
            "self_attn.k_norm": (c.head_dim,),
            "mlp.gate_proj": (c.intermediate_size, h),
            "mlp.up_proj": (c.intermediate_size, h),
            "mlp.down_proj": (h, c.intermediate_size),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_config(data: dict[str, Any]) -> None:
    """The fields that SGLang reads, with values it takes."""
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert data["hidden_act"] == "silu"
    assert data["attention_bias"] is False
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "num_target_layers", "block_size", "max_position_embeddings",
    ):  # fmt: skip
        assert isinstance(data[name], int), name
        assert data[name] > 0, name
    assert data["rms_norm_eps"] > 0
    assert data["rope_theta"] > 0
    assert data["layer_types"] == ["full_attention"] * data["num_hidden_layers"]
    own = data["dflash_config"]
    assert 0 <= own["mask_token_id"] < data["vocab_size"]
    taps = own["target_layer_ids"]
    assert taps == sorted(set(taps))
    assert all(0 <= t < data["num_target_layers"] for t in taps)
    assert data["num_attention_heads"] % 2 == data["num_key_value_heads"] % 2 == 0, "tp 2 must divide"


class TestFiles:
    def test_tensors(self) -> None:
        config = small_drafter_config(small_config(), num_hidden_layers=2)
        found = {k: tuple(v.shape) for k, v in train.TrainDrafter(config).state_dict().items()}
        assert found == expected_shapes(config)

    def test_config(self, tmp_path: Path) -> None:
        config = small_drafter_config(small_config(), num_hidden_layers=2, rope_theta=5e5)
        check_config(config.to_json())
        (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
        assert DrafterConfig.load(tmp_path) == config

    def test_prefixed_tensors_are_read_too(self) -> None:
        drafter, trainable, _ = models("small")
        weights = {f"model.{k}": v for k, v in trainable.state_dict().items()}
        again = Drafter(drafter.config, weights, drafter.target)
        assert torch.equal(again.context_kv.weight, drafter.context_kv.weight)

    def test_a_drafter_of_another_target_is_refused(self) -> None:
        drafter, trainable, _ = models("small")
        weights = trainable.state_dict()
        for changes, reason in (
            ({"hidden_size": 32}, "hidden_size 32"),
            ({"mask_token_id": 512}, "512"),
        ):
            config = small_drafter_config(drafter.target.config, **changes)
            with pytest.raises(ValueError, match=reason):
                Drafter(config, weights, drafter.target)

    def test_packaged(self) -> None:
        folder = packaged_folder() / "drafter"
        check_config(json.loads((folder / "config.json").read_text()))
        found = {k: tuple(v.shape) for k, v in load_weights(folder).items()}
        assert found == expected_shapes(DrafterConfig.load(folder))
        target = train.TargetConfig.load(packaged_folder() / "target")
        own = DrafterConfig.load(folder)
        assert own.num_target_layers == len(target.layer_types)
        assert (own.hidden_size, own.vocab_size) == (target.hidden_size, target.vocab_size)
