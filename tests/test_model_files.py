"""Models that are whole, half copied or not there, in folders and in the hub's cache; and the memory that they need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchlib.model_files import download_command, is_hub_id, memory_need, read_model, shape_problems

GIB = 2**30
# Shape of Qwen3.6-27B as published: 48 linear layers and 16 of attention.
HYBRID: dict[str, Any] = {
    "text_config": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "num_hidden_layers": 64,
        "hidden_size": 5120, "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    }
}  # fmt: skip


def shard(path: Path, tensors: dict[str, int], *, cut: int = 0) -> None:
    """A safetensors file of these names and byte counts, without its last `cut` bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes((len(text).to_bytes(8, "little") + text + bytes(end))[: -cut or None])


def model(folder: Path, config: dict[str, Any] | None = None, *, shards: int = 3) -> Path:
    """A whole model of `shards` files of 100 bytes each."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"num_hidden_layers": 1}))
    names = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    for n, name in enumerate(names):
        shard(folder / name, {f"t{n}": 60, f"u{n}": 40})
    index = {f"{t}{n}": name for n, name in enumerate(names) for t in "tu"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def problems(folder: Path) -> tuple[str, ...]:
    found = read_model(str(folder), env={})
    assert found is not None
    assert (found.weight_bytes is None) == any("safetensors" in p and "aria2" not in p for p in found.problems)
    return found.problems


def test_a_whole_model(tmp_path: Path) -> None:
    found = read_model(str(model(tmp_path / "m")), env={})
    assert found is not None
    assert (found.problems, found.leftovers, found.weight_bytes, found.revision) == ((), (), 300, None)
    assert found.config == {"num_hidden_layers": 1}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shard(tmp_path / "model.safetensors", {"a": 7})
    assert problems(tmp_path) == ()


def test_a_copy_that_stopped_half_way(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model-00002-of-00003.safetensors").unlink()
    shard(folder / "model-00003-of-00003.safetensors", {"t2": 60, "u2": 40}, cut=30)
    missing, cut = problems(folder)
    assert missing == "model-00002-of-00003.safetensors: No such file or directory"
    size = (folder / "model-00003-of-00003.safetensors").stat().st_size
    assert cut == f"model-00003-of-00003.safetensors: cut, {size} bytes where its header says {size + 30}"


def test_shards_without_their_index(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    assert problems(folder) == ("model.safetensors.index.json: missing, while the weights are in several shards",)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: f.write_bytes(b""), "cut, its 0 bytes end within the header"),
        (lambda f: f.write_bytes(f.read_bytes()[:40]), "cut, its 40 bytes end within the header"),
        (lambda f: f.write_bytes(bytes(400)), "its header is not that of a safetensors file"),
        (lambda f: f.write_bytes((2).to_bytes(8, "little") + b"[]"), "its header is not that of a safetensors file"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "too long"),
        (lambda f: shard(f, {"t0": 60}), "lacks 1 tensors of the index, such as u0: of another revision?"),
    ],
)  # fmt: skip
def test_a_damaged_shard(tmp_path: Path, damage: Callable[[Path], object], told: str) -> None:
    folder = model(tmp_path / "m")
    damage(folder / "model-00001-of-00003.safetensors")
    (problem,) = problems(folder)
    assert problem.startswith("model-00001-of-00003.safetensors: ")
    assert told in problem


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "{}"])
def test_an_index_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    (problem,) = problems(folder)
    assert problem.startswith("model.safetensors.index.json cannot be read")


def test_no_config_and_no_weights(tmp_path: Path) -> None:
    assert problems(tmp_path) == (
        "no *.safetensors: the weights are missing, or of another format", "config.json: No such file or directory",
    )  # fmt: skip
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "config.json: Not a directory" in problems(file)


def test_random_weights_need_the_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = read_model(str(tmp_path), env={}, weights=False)
    assert found is not None
    assert (found.problems, found.weight_bytes) == ((), None)


def test_leftovers_are_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    hidden = folder / ".cache" / "huggingface" / "download"
    hidden.mkdir(parents=True)
    (hidden / "abc.incomplete").write_bytes(b"x")
    (hidden / "abc.lock").touch()  # the hub's own, always empty
    (folder / "tokenizer.json").touch()
    found = read_model(str(folder), env={})
    assert found is not None
    assert (found.problems, found.leftovers) == ((), ("abc.incomplete", "tokenizer.json"))
    (folder / "model-00001-of-00003.safetensors.aria2").write_bytes(b"x")
    assert problems(folder) == ("model-00001-of-00003.safetensors.aria2 marks a download that never ended",)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_hub_id_is_looked_up_in_the_cache(tmp_path: Path, variable: str) -> None:
    hub = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    cache, commit = tmp_path / hub / "models--Org--Name-1.5B", "9f3c" * 10
    model(cache / "snapshots" / commit)
    (cache / "blobs").mkdir()
    env = {variable: str(tmp_path)}
    assert read_model("Org/Name-1.5B", env=env) is None  # no reference names the snapshot
    by_commit = read_model("Org/Name-1.5B", env=env, revision=commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    (cache / "blobs" / "ab12.incomplete").write_bytes(b"x")
    found = read_model("Org/Name-1.5B", env=env)
    assert by_commit is not None
    assert found is not None
    assert found.revision == by_commit.revision == commit
    assert (found.problems, found.leftovers) == ((), ("ab12.incomplete",))
    assert read_model("Org/Name-1.5B", env=env, revision="v2") is None


def test_download_commands_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert download_command("Qwen/Qwen3.6-27B") == "hf download Qwen/Qwen3.6-27B --revision main"
    assert download_command("Qwen/Qwen3.6-27B", "abc") == "hf download Qwen/Qwen3.6-27B --revision abc"
    assert download_command("/m/x", "abc") == "hf download ORG/NAME --revision abc --local-dir /m/x"
    assert read_model("/m/x", env={}) is None
    assert not is_hub_id("./a/b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert is_hub_id("a/b")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("a/b")


def test_memory_is_what_a_server_reported() -> None:
    # SGLang 0.5.17 on one H200 logged of this shape, DFLASH of 16 tokens, eight requests: intermediate_ssm_state_cache
    # 20.25GB, intermediate_conv_window_cache 0.15GB; for 377431 tokens K and V of 11.52GB each; 41 state slots of
    # 5.77GB (with 0.11GB of convolution states), where nine are needed once its radix cache is off.
    need = memory_need(HYBRID, weight_bytes=None, tp_size=1, requests=8, tokens=1000, verify_tokens=16)
    assert need is not None
    assert need.weights is None
    assert need.verify_states / GIB == pytest.approx(20.25 + 0.15, abs=0.005)
    assert need.kv_cache / 8000 * 377431 / GIB == pytest.approx(2 * 11.52, abs=0.01)
    assert need.states / 9 * 41 / GIB == pytest.approx(5.77 + 0.11, abs=0.01)


def test_a_tree_keeps_a_window_for_each_token() -> None:
    sizes = {"weight_bytes": 52 * GIB, "requests": 1, "tokens": 100, "verify_tokens": 65}
    chain, tree, split, halved = (
        memory_need(HYBRID, **sizes, **more)
        for more in ({"tp_size": 1}, {"tp_size": 1, "tree": True}, {"tp_size": 8, "tree": True},
                     {"tp_size": 1, "state_dtype": "bfloat16"})
    )  # fmt: skip
    assert chain
    assert tree
    assert split
    assert halved
    # 48 layers x 2 slots x 10240 channels x 2 bytes: 65 windows of 3 taps, or 67 columns that they share.
    assert tree.verify_states - chain.verify_states == 48 * 2 * 10240 * 2 * (65 * 3 - 67)
    assert (split.weights, split.verify_states) == (52 * GIB // 8, tree.verify_states // 8)
    assert split.kv_cache == tree.kv_cache // 4  # four heads: two ranks share one
    assert chain.verify_states - halved.verify_states == 48 * 2 * 65 * 48 * 128 * 128 * 2


def test_layers_are_counted_where_they_are_not_listed() -> None:
    text = dict(HYBRID["text_config"])
    del text["layer_types"]
    sizes = {"weight_bytes": 1, "tp_size": 1, "requests": 2, "tokens": 10}
    assert memory_need({**text, "full_attention_interval": 4}, **sizes) == memory_need(HYBRID, **sizes)
    dense = memory_need({"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}, **sizes)
    assert dense is not None
    assert (dense.kv_cache, dense.states, dense.verify_states) == (8 * 2 * 1024 * 2 * 20, 0, 0)


@pytest.mark.parametrize(
    "config",
    [{}, {"num_hidden_layers": 2},
     {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 4, "kv_lora_rank": 1},
     {"layer_types": ["mamba"], "num_hidden_layers": 1}, {"num_hidden_layers": "2"}, {"text_config": 3},
     {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "num_attention_heads": 1, "head_dim": 1}],
)  # fmt: skip
def test_memory_of_an_unknown_architecture_is_unknown(config: dict[str, Any]) -> None:
    assert memory_need(config, weight_bytes=1, tp_size=1, requests=1, tokens=1) is None


@pytest.mark.parametrize(
    ("tp_size", "tokens", "context", "problems"),
    [
        (8, 4096, None, ()),
        (1, 10**9, None, ()),  # this config does not tell its length
        (3, 1, None, ("linear_num_key_heads is 16, which TP 3 does not divide",
                      "num_key_value_heads is 4: neither it nor TP 3 divides the other")),
        (16, 1, None, ("num_attention_heads is 24, which TP 16 does not divide",)),
        (1, 2048, 2048, ()),
        (1, 2049, 2048, ("the context is 2048 tokens, the longest output with its prompt needs at least 2049",)),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be_split_or_held(
    tp_size: int, tokens: int, context: int | None, problems: tuple[str, ...]
) -> None:
    assert shape_problems(HYBRID, tp_size=tp_size, tokens=tokens, context=context) == problems


@pytest.mark.parametrize("name", ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"])
def test_every_kind_of_head_must_be_divided(name: str) -> None:
    assert shape_problems({name: 6}, tp_size=4, tokens=1, context=None) == (f"{name} is 6, which TP 4 does not divide",)
    assert not shape_problems({name: 6}, tp_size=3, tokens=1, context=None)


@pytest.mark.parametrize(("heads", "tp_size", "fits"), [(2, 8, True), (8, 2, True), (6, 4, False), (4, 6, False)])
def test_ranks_may_share_a_key_value_head(heads: int, tp_size: int, fits: bool) -> None:
    assert (shape_problems({"num_key_value_heads": heads}, tp_size=tp_size, tokens=1, context=None) == ()) is fits


def test_the_models_own_context_counts() -> None:
    own = {"max_position_embeddings": 512}
    assert shape_problems(own, tp_size=1, tokens=513, context=None)
    assert not shape_problems(own, tp_size=1, tokens=512, context=None)
    assert not shape_problems(own, tp_size=1, tokens=513, context=1024)
    assert not shape_problems({}, tp_size=7, tokens=9, context=None)


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_parameters": {"factor": 4.0}},
     {"rope_parameters": {"full_attention": {"factor": 4.0}, "sliding_attention": {"rope_type": "default"}}}],
)  # fmt: skip
def test_a_context_that_may_be_stretched_is_not_judged(rope: dict[str, Any]) -> None:
    own = {"max_position_embeddings": 512, **rope}
    assert not shape_problems(own, tp_size=1, tokens=513, context=None)
    assert shape_problems(own, tp_size=1, tokens=513, context=512)


@pytest.mark.parametrize(
    "config",
    [{"text_config": "a name"}, {"text_config": [1]}, {"num_attention_heads": True}, {"num_key_value_heads": 0},
     {"linear_num_key_heads": "6"}, {"max_position_embeddings": True}, {"num_key_value_heads": None}],
)  # fmt: skip
def test_what_is_no_shape_says_nothing(config: dict[str, Any]) -> None:
    assert shape_problems(config, tp_size=4, tokens=9, context=None) == ()


@pytest.mark.parametrize("rope", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_rope_without_a_factor_stretches_nothing(rope: dict[str, Any]) -> None:
    assert shape_problems({"max_position_embeddings": 512, **rope}, tp_size=1, tokens=513, context=None)
