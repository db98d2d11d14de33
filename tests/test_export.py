"""The exported folders hold the same pair: transformers computes what the engine does, and no name is lost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchlib.prompts import load_prompts
from benchlib.reference_engine.decode import Decoder, Request
from benchlib.reference_engine.export import export_pair, main
from benchlib.reference_engine.loading import ModelPlan, load_decoder
from benchlib.reference_engine.model import Cache, load_weights
from benchlib.reference_engine.tokenizer import Tokenizer
from tests.engine import TOLERANCE, WEIGHTS, feed, packaged_folder

OPENINGS = load_prompts("openings")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    export_pair(packaged_folder(), out)
    return out


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(ModelPlan(packaged_folder() / "target", slots=1, pack=False))


@contextmanager
def quiet() -> Iterator[None]:
    """transformers may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def transformers() -> Any:
    with quiet():
        return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def official(transformers: Any, exported: Path) -> Any:
    """transformers' multimodal model, from the folder alone, in the engine's precision."""
    with quiet():
        model, loading = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
            exported / "target", dtype=torch.float32, output_loading_info=True
        )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model.eval()


def ids_of(opening: str) -> tuple[int, ...]:
    return tuple(Tokenizer.load(WEIGHTS / "target").encode(OPENINGS[opening]))


@pytest.mark.parametrize("opening", OPENINGS)
def test_logits_of_text_are_the_engines(official: Any, decoder: Decoder, opening: str) -> None:
    ids = ids_of(opening)
    with quiet(), torch.inference_mode():
        theirs = official(torch.tensor([ids]), use_cache=False).logits[0]
        ours = decoder.target.logits(feed(decoder.target, Cache(decoder.target, 1, len(ids)), 0, ids))
    assert (ours - theirs).abs().max() < TOLERANCE


def test_greedy_tokens_are_the_engines(official: Any, decoder: Decoder) -> None:
    ids = ids_of("arith")
    with quiet(), torch.inference_mode():
        generation = decoder.prefill(Request(ids, NEW_TOKENS, ignore_eos=True), 0)
        while generation.finish_reason is None:
            decoder.step([generation])
        prompt = torch.tensor([ids])
        out = official.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
                                min_new_tokens=NEW_TOKENS, do_sample=False)  # fmt: skip
    assert out[0, len(ids) :].tolist() == list(generation.output_ids)


def test_tokenizer_encodes_as_the_engines(transformers: Any, exported: Path) -> None:
    """Found through the folder's config, whose model type has a tokenizer class of its own with other rules."""
    theirs = transformers.AutoTokenizer.from_pretrained(exported / "target")
    for opening, text in OPENINGS.items():
        assert tuple(theirs.encode(text)) == ids_of(opening)
    message = {"role": "user", "content": "def f"}
    assert theirs.apply_chat_template([message], tokenize=False) == "def f"
    assert theirs.eos_token_id == Tokenizer.load(WEIGHTS / "target").eos_token_id


def test_drafter_has_sglangs_names_and_nothing_else(exported: Path) -> None:
    """SGLang loads a drafter without a word about tensors that are missing."""
    config = json.loads((exported / "drafter" / "config.json").read_text())
    attention = [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    norms = ["input_layernorm", "post_attention_layernorm"]
    layer = [*attention, *norms, *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))]
    names = [f"layers.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in layer]
    tensors, source = load_weights(exported / "drafter"), load_weights(WEIGHTS / "drafter")
    assert sorted(tensors) == sorted(["fc.weight", "hidden_norm.weight", "norm.weight", *names])
    assert all(torch.equal(value, source[name]) for name, value in tensors.items())
    taps = config["dflash_config"]["target_layer_ids"]
    assert tensors["fc.weight"].shape == (config["hidden_size"], len(taps) * config["hidden_size"])


def test_drafter_config_agrees_with_the_target(exported: Path) -> None:
    target, drafter = (json.loads((exported / d / "config.json").read_text()) for d in ("target", "drafter"))
    text, own = target["text_config"], drafter["dflash_config"]
    assert drafter["architectures"] == ["DFlashDraftModel"]
    assert (drafter["hidden_size"], drafter["vocab_size"]) == (text["hidden_size"], text["vocab_size"])
    assert drafter["num_target_layers"] == text["num_hidden_layers"] > max(own["target_layer_ids"]) + 1
    assert set(drafter["layer_types"]) == {"full_attention"}, "any other would make SGLang draft causally"
    assert own["mask_token_id"] == Tokenizer.load(exported / "target").mask_token_id


def test_tensors_keep_their_precision(exported: Path) -> None:
    tensors, source = load_weights(exported / "target"), load_weights(WEIGHTS / "target")
    text = {k.replace("model.language_model.", "model."): v for k, v in tensors.items() if "visual" not in k}
    assert sorted(text) == sorted(source)
    assert all(value.dtype == source[k].dtype and torch.equal(value, source[k]) for k, value in text.items())
    assert sum(file.stat().st_size for file in exported.rglob("*") if file.is_file()) < 40e6


def test_existing_folders_are_left_alone(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (exported / "target" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(SystemExit):
        main([str(exported)])
    assert "exist already: name another folder" in capsys.readouterr().err
    assert (exported / "target" / "model.safetensors").stat().st_mtime_ns == before


def test_incomplete_pair_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "--weights", str(tmp_path)])
    assert "no target at" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
