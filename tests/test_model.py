"""The target against transformers, in chunks, in batches, in halves, and with its weights packed."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchlib.reference_engine.model import (
    Cache,
    Linear,
    Target,
    TargetConfig,
    chain_tree,
    load_weights,
)
from tests.engine import (
    TOLERANCE,
    Meeting,
    Pair,
    Reference,
    check_commit,
    check_node_logits,
    check_untouched,
    feed,
    packaged_folder,
    random_prompt,
    random_tree,
    random_weights,
    small_config,
    verify,
)


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which may warn while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def packaged_weights() -> Path:
    """Skips while the package has no weights; fails where they are broken, or missing in CI."""
    return packaged_folder()


@cache
def models(name: str) -> tuple[TargetConfig, dict[str, Any], Target]:
    """Config, weights and target by name."""
    if name == "packaged":
        config = TargetConfig.load(packaged_folder() / "target")
        weights = load_weights(packaged_folder() / "target")
    else:
        changes: dict[str, dict[str, Any]] = {
            "small": {},
            "deep": {"layers": 8, "num_attention_heads": 2, "linear_num_value_heads": 2},
            "odd": {
                "head_dim": 48, "partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 3, "vocab_size": 301,
                "linear_key_head_dim": 16, "linear_value_head_dim": 24, "num_key_value_heads": 1,
                "linear_num_key_heads": 1, "linear_num_value_heads": 3, "rope_theta": 1e4,
            },
        }  # fmt: skip
        config = small_config(**changes[name])
        weights = random_weights(config, seed=len(name))
    return config, weights, Target(config, weights)


@cache
def official(transformers: Any, name: str) -> Any:
    """transformers' model with the same weights, in float32."""
    config, weights, _ = models(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = config.to_json()
        own = transformers.Qwen3_5TextConfig(**fields)
        model = transformers.Qwen3_5ForCausalLM(own).float().eval()
        tensors = {k: v.float() for k, v in weights.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


@torch.inference_mode()
def official_logits(transformers: Any, name: str, tokens: tuple[int, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return official(transformers, name)(torch.tensor([tokens]), use_cache=False).logits[0]


NAMES = ["small", "deep", "odd", "packaged"]
LENGTHS = [1, 3, 64, 65, 128, 150]


@torch.inference_mode()
def step_through(target: Target, tokens: tuple[int, ...]) -> Any:
    """Logits after each token, one autoregressive step a token."""
    cache, zero = Cache(target, 1, len(tokens)), torch.zeros(1, 1, dtype=torch.long)
    hidden = [target.forward(torch.tensor([[t]]), zero, cache, [0]).hidden[0] for t in tokens]
    assert cache.lengths == [len(tokens)]
    return target.logits(torch.cat(hidden))


@pytest.mark.parametrize("name", NAMES)
class TestAgainstTransformers:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_prefill(self, transformers: Any, name: str, length: int) -> None:
        """At once, in chunks of 64 (beyond 64 tokens: several) and in odd chunks."""
        config, _, target = models(name)
        # Seed 0 gives "odd" one token whose activations nearly vanish before a norm: rounding alone is 5e-4 there.
        tokens = random_prompt(config, length, 1)
        expected = official_logits(transformers, name, tokens)
        spread = expected.topk(2).values
        assert (spread[:, 0] - spread[:, 1]).median() > 0.02, "degenerate logits show nothing"
        for chunk in (length, 64, 13):
            cache = Cache(target, 3, length)
            logits = target.logits(feed(target, cache, 1, tokens, chunk))
            assert (logits - expected).abs().max() < TOLERANCE
            assert cache.lengths == [0, length, 0]

    def test_token_by_token(self, transformers: Any, name: str) -> None:
        config, _, target = models(name)
        tokens = random_prompt(config, 90, 1)
        error = step_through(target, tokens) - official_logits(transformers, name, tokens)
        assert error.abs().max() < TOLERANCE

    def test_reference(self, transformers: Any, name: str) -> None:
        """The yardstick of the other tests is itself measured."""
        config, weights, _ = models(name)
        if config.linear_key_head_dim != config.linear_value_head_dim:
            pytest.skip("the trainable target has keys and values of one width")
        tokens = random_prompt(config, 130, 2)
        error = Reference(config, weights).logits(tokens) - official_logits(transformers, name, tokens)
        assert error.abs().max() < TOLERANCE

    def test_greedy_generate(self, transformers: Any, name: str) -> None:
        """transformers' own cached generation, token for token."""
        config, _, target = models(name)
        prompt = random_prompt(config, 20, 3)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            out = official(transformers, name).generate(
                torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False,
                pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                eos_token_id=config.vocab_size + 7,
            )  # fmt: skip
        out = tuple(out[0].tolist())
        logits = step_through(target, out)[len(prompt) - 1 : -1]
        gaps = logits.topk(2).values.diff().abs()
        same = logits.argmax(-1) == torch.tensor(out[len(prompt) :])
        assert (same | (gaps[:, 0] < TOLERANCE)).all()


def test_config_survives_a_round_trip(tmp_path: Path) -> None:
    config = small_config(rope_theta=123.0, partial_rotary_factor=0.5, linear_conv_kernel_dim=3)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert TargetConfig.load(tmp_path) == config


def test_a_step_takes_sequences_of_unequal_lengths_in_any_slots() -> None:
    config, _, target = models("deep")
    lengths, slots = [1, 70, 33], [5, 0, 2]
    prompts = [random_prompt(config, n, 5) for n in lengths]
    following = [random_prompt(config, 6, 50 + n) for n in lengths]
    cache = Cache(target, 6, 100)
    for slot, prompt in zip(slots, prompts, strict=True):
        feed(target, cache, slot, prompt)
    hidden = []
    with torch.inference_mode():
        for i in range(6):
            ids = torch.tensor([[f[i]] for f in following])
            hidden.append(target.forward(ids, torch.zeros_like(ids), cache, slots).hidden)
    batch = torch.cat(hidden, 1)
    for b, (prompt, more) in enumerate(zip(prompts, following, strict=True)):
        alone = Cache(target, 1, 100)
        expected = feed(target, alone, 0, prompt + more)[len(prompt) :]
        assert (target.logits(batch[b]) - target.logits(expected)).abs().max() < TOLERANCE
        assert cache.lengths[slots[b]] == len(prompt) + 6
    assert [cache.lengths[s] for s in (1, 3, 4)] == [0, 0, 0]
    assert not cache.recurrent[:, [1, 3, 4]].any()
    assert not cache.conv[:, [1, 3, 4]].any()


def test_a_cleared_slot_is_as_new() -> None:
    config, _, target = models("small")
    cache, prompt = Cache(target, 2, 200), random_prompt(config, 70, 9)
    first = feed(target, cache, 1, prompt)
    for length in (1, 150, 70):
        cache.clear(1)
        hidden = feed(target, cache, 1, random_prompt(config, length, 9))
    assert torch.equal(hidden, first)


def test_a_chain_as_a_general_tree_is_the_chain() -> None:
    config, _, target = models("deep")
    prompts = [random_prompt(config, n, 4) for n in (12, 40)]
    with torch.inference_mode():
        trees = [random_tree(17, s, config.vocab_size, spread=1) for s in range(2)]
        v = verify(target, prompts, trees)
        assert not v.pending.tree.is_chain
        again = Cache(target, 2, 100)
        for slot, prompt in enumerate(prompts):
            feed(target, again, slot, prompt)
        tokens = torch.tensor([t.tokens for t in trees])
        depths = torch.arange(17).expand(2, -1)
        output = target.forward(tokens, depths, again, [0, 1], chain_tree(2, 17, target.kernel))
        assert (target.logits(output.hidden) - v.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["small", "packaged"])
def test_packed_weights_change_nothing(name: str) -> None:
    config, weights, target = models(name)
    packed = Target(config, weights, pack=True)
    tokens = random_prompt(config, 100, 6)
    plain, other = (t.logits(feed(t, Cache(t, 1, 100), 0, tokens, 64)) for t in (target, packed))
    assert (plain - other).abs().max() < TOLERANCE
    assert (step_through(packed, tokens) - plain).abs().max() < TOLERANCE


def test_packing_falls_back_where_torch_has_no_such_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(8, 16)

    class Nothing:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    layer = Linear(weight, pack=True)
    assert layer.packed is None
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), x @ weight.T)


class TestShards:
    """Two ranks in one process: partial sums added by a meeting of two threads."""

    @pytest.mark.parametrize("name", ["small", "deep", "packaged"])
    def test_two_halves_are_the_whole(self, name: str) -> None:
        config, weights, target = models(name)
        prompts = [random_prompt(config, n, 7) for n in (70, 5)]
        trees = [random_tree(16, s, config.vocab_size) for s in range(2)]
        deepest = [max(range(16), key=t.depths.__getitem__) for t in trees]

        @torch.inference_mode()
        def work(t: Target) -> list[Any]:
            v = verify(t, prompts, trees)
            check_untouched(v)
            check_commit(v, deepest)
            ids = torch.tensor([[9], [8]])
            hidden = t.forward(ids, torch.zeros_like(ids), v.cache, [0, 1]).hidden
            return [v.logits, t.logits(hidden)]

        whole = work(target)
        halves = Meeting(2).run(lambda shard: work(Target(config, weights, shard=shard)))
        for rank in halves:
            for expected, found in zip(whole, rank, strict=True):
                assert (expected - found).abs().max() < TOLERANCE
        for a, b in zip(*halves, strict=True):
            assert torch.equal(a, b), "ranks must agree to the bit, or they would part"

    def test_a_rank_holds_half(self) -> None:
        config, weights, target = models("small")
        meeting = Meeting(2)
        for rank in range(2):
            half = Target(config, weights, shard=meeting.shard(rank))
            for own, full in zip(half.layers, target.layers, strict=True):
                assert own.project.weight.shape[0] * 2 == full.project.weight.shape[0]
                assert own.out.weight.shape[1] * 2 == full.out.weight.shape[1]
                assert own.mlp.down.weight.shape[1] * 2 == full.mlp.down.weight.shape[1]
            assert Cache(half, 1, 8).kv.numel() * 2 == Cache(target, 1, 8).kv.numel()

    def test_a_world_that_does_not_divide_is_refused(self) -> None:
        config, weights, _ = models("small")
        with pytest.raises(ValueError, match="tp_size=4"):
            Target(config, weights, shard=Meeting(4).shard(0))


class TestPackaged:
    def test_files_fit(self, packaged_weights: Path) -> None:
        size = sum(f.stat().st_size for f in packaged_weights.rglob("*") if f.is_file())
        assert size <= 16 * 2**20

    def test_tensors_are_small_floats(self, packaged_weights: Path) -> None:
        for part in ("target", "drafter"):
            for name, tensor in load_weights(packaged_weights / part).items():
                wide = name.endswith(("A_log", "dt_bias"))
                assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
                assert torch.isfinite(tensor.float()).all(), name

    def test_trees(self, packaged_weights: Path) -> None:
        pair = Pair.load(packaged_weights)
        prompts = [random_prompt(pair.config, n, 8) for n in (64, 9)]
        trees = [random_tree(33, s, pair.config.vocab_size) for s in range(2)]
        v = verify(pair.target, prompts, trees)
        check_node_logits(pair, v)
        check_untouched(v)
        check_commit(v, [32, 20])
