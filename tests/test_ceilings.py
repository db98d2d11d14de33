"""Bytes of a decode step against published models and a stored one; the bandwidth probe's plumbing on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchlib
from benchlib import bandwidth_probe
from benchlib.bandwidth_probe import Bandwidth
from benchlib.ceilings import floor_ms, floor_tok_s, measure_bandwidth, probe_devices, step_bytes
from benchlib.errors import UnavailableError

TARGET = Path(benchlib.__file__).parent / "reference_engine" / "weights" / "target"
# The shape of Qwen3.6-27B: three gated DeltaNet layers before each of full attention, with a vision tower.
TEXT_27B = {
    "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4,
    "head_dim": 256, "hidden_size": 5120, "intermediate_size": 17408, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 248320,
}  # fmt: skip
SHAPE_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": TEXT_27B,
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
}  # fmt: skip
SHAPE_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
ONE = {"tp_size": 1, "batch": 1, "context_tokens": 0}
FOUND = {
    "uuid": None,
    "n": 20,
    "copy_sd": 1.0,
    "read_gb_s": 4460.0,
    "read_sd": 1.0,
    "linear_gb_s": 3900.0,
    "linear_sd": 1.0,
}


def test_a_step_of_the_27b_shape() -> None:
    step = step_bytes(SHAPE_27B, **ONE)
    assert step.weights == pytest.approx(51.25e9, rel=0.0005)
    # 48 layers x 48 heads x 128 x 128 fp32 and 48 layers x 10240 channels x 3 bf16, each read and written.
    assert step.state == 2 * 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    assert step.kv == 0
    assert step.total == pytest.approx(51.55e9, rel=0.0005)
    assert floor_tok_s(step, 4300) == pytest.approx(83.4, abs=0.05)
    assert floor_ms(step, 4300) == pytest.approx(1e3 / 83.4, rel=0.001)


def test_the_layers_need_not_be_listed() -> None:
    listed = TEXT_27B | {"layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 16}
    assert step_bytes(SHAPE_27B | {"text_config": listed}, **ONE) == step_bytes(SHAPE_27B, **ONE)
    assert step_bytes(TEXT_27B, **ONE) == step_bytes(SHAPE_27B, **ONE)


def test_a_step_reads_each_stored_parameter_once() -> None:
    raw = (TARGET / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    stored = sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    config = json.loads((TARGET / "config.json").read_text())
    assert config["tie_word_embeddings"]  # the one table is the output head
    assert step_bytes(config, **ONE, weight_dtype_bytes=1).weights == stored


def test_a_step_of_a_dense_model() -> None:
    step = step_bytes(SHAPE_8B, tp_size=1, batch=2, context_tokens=1000)
    # Qwen3-8B has 6.95 G parameters beside its two tables, of which a step reads the output head.
    assert step.weights / 2 - 151936 * 4096 == pytest.approx(6.95e9, rel=0.001)
    assert step.state == 0
    assert step.kv == 36 * 2 * 1000 * 2 * 8 * 128 * 2
    assert step.total == step.weights + step.kv
    biased = step_bytes(SHAPE_8B | {"attention_bias": True}, **ONE, weight_dtype_bytes=1)
    assert biased.weights - step.weights // 2 == 36 * (6144 + 4096)


def test_ranks_share_all_but_the_norms_and_the_last_heads() -> None:
    one, two, eight = (step_bytes(SHAPE_27B, tp_size=n, batch=1, context_tokens=100) for n in (1, 2, 8))
    assert one.weights / 2 < two.weights < one.weights / 2 * 1.0001
    assert (two.state, two.kv) == (one.state // 2, one.kv // 2)
    # Four KV heads on eight ranks: two ranks hold each.
    assert eight.kv == one.kv // 4
    assert eight.weights - one.weights / 8 > 16 * 5120 * 256 * 2


def test_states_and_kv_grow_with_the_batch_and_their_types() -> None:
    one, four = (step_bytes(SHAPE_27B, tp_size=1, batch=n, context_tokens=4096) for n in (1, 4))
    assert (four.weights, four.state, four.kv) == (one.weights, 4 * one.state, 4 * one.kv)
    assert one.kv == 16 * 4096 * 2 * 4 * 256 * 2
    small = step_bytes(SHAPE_27B, tp_size=1, batch=1, context_tokens=4096, state_dtype_bytes=2, kv_dtype_bytes=1)
    assert small.kv == one.kv // 2
    assert one.state - small.state == 2 * 48 * 48 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("config", "tp_size", "said"),
    [
        (SHAPE_8B | {"model_type": "qwen3_moe"}, 1, "model_type 'qwen3_moe'.*with experts"),
        (SHAPE_27B | {"text_config": TEXT_27B | {"num_experts": 256}}, 1, "with experts"),
        (SHAPE_8B | {"architectures": ["DFlashDraftModel"]}, 1, "DFlashDraftModel.*known are"),
        ({}, 1, "model_type None"),
        (SHAPE_8B | {"quantization_config": {"quant_method": "fp8"}}, 1, "quantised"),
        (SHAPE_8B | {"layer_types": ["sliding_attention"] * 36}, 1, "sliding_attention"),
        (SHAPE_8B, 3, "tp_size=3 does not divide num_attention_heads=32"),
        (SHAPE_8B, 0, "tp_size=0"),
        ({"model_type": "qwen3"}, 1, "says too little.*hidden_size"),
    ],
)
def test_what_is_not_known_is_not_guessed(config: dict[str, Any], tp_size: int, said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        step_bytes(config, tp_size=tp_size, batch=1, context_tokens=0)


@given(st.sampled_from(sorted(TEXT_27B)), st.none() | st.integers(-2, 2) | st.text(max_size=2) | st.lists(st.none()))
def test_a_broken_config_is_unavailable(key: str, value: object) -> None:
    with suppress(UnavailableError):  # and nothing else
        assert step_bytes(TEXT_27B | {key: value}, **ONE).total


def fake(folder: Path, answer: str) -> str:
    """An interpreter that swallows the probe and does `answer` instead."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\ncat > /dev/null\n{answer}\n")
    script.chmod(0o755)
    return str(script)


def test_the_slowest_gpu_is_the_bandwidth(tmp_path: Path) -> None:
    found = [FOUND | {"device": "NVIDIA H200", "copy_gb_s": rate} for rate in (4300.0, 4200.0)]
    python = fake(tmp_path, f"echo a warning; test \"$NAME\" = value && echo '{json.dumps(found)}'")
    assert [one.copy_gb_s for one in probe_devices(python, env={"NAME": "value"})] == [4300.0, 4200.0]
    slowest = measure_bandwidth(python, env={"NAME": "value"})
    assert json.loads(json.dumps(dataclasses.asdict(slowest))) == found[1]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo first >&2; echo 'no torch there' >&2; exit 1", ": no torch there$"),
        ("exit 3", "exit code 3"),
        ("echo nothing", "cannot measure"),
        ("echo '[{}]'", "missing 9 required"),
        ("true", "cannot measure"),
        ("exec sleep 9", "timed out after 0.5 seconds"),
    ],
)
def test_a_probe_that_fails_says_why(tmp_path: Path, answer: str, said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        measure_bandwidth(fake(tmp_path, answer), timeout_s=0.5 if "sleep" in answer else 30)


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="cannot measure memory bandwidth with /nowhere/python"):
        measure_bandwidth("/nowhere/python")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the probe needs torch")
def test_the_probe_itself() -> None:
    (found,) = probe_devices(sys.executable, cpu=True)
    assert (found.device, found.uuid, found.n) == ("cpu", None, 20)
    assert min(found.copy_gb_s, found.read_gb_s, found.linear_gb_s) > 0
    assert min(found.copy_sd, found.read_sd, found.linear_sd) >= 0


def test_without_torch_or_cuda_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "has no torch: " in str(bandwidth_probe.main([]))
    blind = SimpleNamespace(__version__="2.0", cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", blind)
    assert str(bandwidth_probe.main([])).startswith("torch 2.0 sees no CUDA device; ")


def test_products_timed_where_they_did_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a second GPU whose graph ran on the first: nothing is 48 times as fast as the memory it reads."""
    pytest.importorskip("torch")
    found = Bandwidth("NVIDIA H200", "GPU-2", 20, 4220.0, 22.0, 4452.0, 20.0, 213227.0, 32319.0)
    monkeypatch.setattr(bandwidth_probe, "_probe", lambda *_: found)
    assert "products on GPU-2 read 213227 GB/s, its memory 4452" in str(bandwidth_probe.main(["--cpu"]))
