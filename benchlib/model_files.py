"""Is a model there and whole, and how much memory does it need: read from its folder, without loading anything.

A copy that stopped half way has the right file names; only the safetensors headers tell how long each file must be.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MemoryNeed", "ModelFiles", "download_command", "is_hub_id", "memory_need", "read_model", "shape_problems"]

LAYERS = ("full_attention", "linear_attention", "sliding_attention")
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
INDEX = "model.safetensors.index.json"
COPYING = (".incomplete", ".aria2", ".part")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder as found. `problems` stop a server from loading it, `leftovers` only tell of a broken copy."""

    folder: Path
    revision: str | None  # commit of a hub snapshot
    config: dict[str, Any] | None
    weight_bytes: int | None  # tensor data of all shards; None: not known
    problems: tuple[str, ...]
    leftovers: tuple[str, ...]


def is_hub_id(path: str) -> bool:
    """Whether `path` means `ORG/NAME` on the hub: what exists here is a folder."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)) and not os.path.exists(path)


def download_command(path: str, revision: str | None = None) -> str:
    """The command that puts the model where `path` looks for it, at a pinned revision."""
    if is_hub_id(path):
        return f"hf download {path} --revision {revision or 'main'}"
    return f"hf download ORG/NAME --revision {revision or 'COMMIT'} --local-dir {path}"


def read_model(path: str, *, env: Mapping[str, str], revision: str = "main", weights: bool = True) -> ModelFiles | None:
    """The folder `path`, or the hub cache's snapshot of it, read through; None where there is neither.

    `env` names the cache (HF_HUB_CACHE, HF_HOME); without `weights`, config.json is all that is asked for.
    """
    commit, folder = None, Path(path).expanduser()
    blobs = folder
    if is_hub_id(path):
        home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        cache = Path(env.get("HF_HUB_CACHE") or f"{home}/hub").expanduser() / f"models--{path.replace('/', '--')}"
        commit = revision  # unless it names a reference, as `main` does
        with suppress(OSError):
            commit = (cache / "refs" / revision).read_text(encoding="utf-8").strip()
        folder, blobs = cache / "snapshots" / commit, cache / "blobs"
    if not os.path.exists(folder):  # where a Path's own method would raise for a folder that may not be searched
        return None
    config, (size, faults) = None, _read_shards(folder) if weights else (None, [])
    try:
        config = _read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        faults.append(_told("config.json", error))
    files = (*blobs.glob("*"), *folder.glob("*"), *folder.glob(".cache/huggingface/download/*"))
    empty = {f.name for f in folder.glob("*.*") if os.path.isfile(f) and not os.path.getsize(f)}
    left = sorted({f.name for f in files if f.suffix in COPYING} | empty)
    # aria2 gives a file its full length at once: a header may be whole above data that never came.
    faults += [f"{name} marks a download that never ended" for name in left if name.endswith(".aria2")]
    return ModelFiles(folder, commit, config, size, tuple(faults), tuple(left))


def _read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict):
        raise ValueError("is not a JSON object")
    return data


def _told(name: str, error: OSError | ValueError) -> str:
    return f"{name}: {error.strerror if isinstance(error, OSError) else error}"


def _read_shards(folder: Path) -> tuple[int | None, list[str]]:
    """Bytes of tensor data, None unless every shard is whole; and what is wrong."""
    wanted: dict[str, set[str]] = {file.name: set() for file in sorted(folder.glob("*.safetensors"))}
    try:
        index = _read_json(folder / INDEX)["weight_map"]
        wanted = {shard: {t for t, s in index.items() if s == shard} for shard in sorted(set(index.values()))}
    except FileNotFoundError:
        if any(re.search(r"-of-(?!0*1\.)\d+\.", name) for name in wanted):
            return None, [f"{INDEX}: missing, while the weights are in several shards"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return None, [f"{INDEX} cannot be read: {error!r:.200}"]
    size, faults = 0, [] if wanted else ["no *.safetensors: the weights are missing, or of another format"]
    for name, tensors in wanted.items():
        try:
            size += _read_shard(folder / name, tensors)
        except (OSError, ValueError) as error:
            faults.append(_told(name, error))
    return (None if faults else size), faults


def _read_shard(path: Path, tensors: set[str]) -> int:
    """Bytes of tensor data. ValueError unless the file is as long as its header says and holds `tensors`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"cut, its {size} bytes end within the header")
        try:
            header = json.loads(file.read(length))
            data = max((int(e["data_offsets"][1]) for key, e in header.items() if key != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise ValueError("its header is not that of a safetensors file") from None
    if (whole := 8 + length + data) != size:
        raise ValueError(f"{'cut' if size < whole else 'too long'}, {size} bytes where its header says {whole}")
    if missing := tensors - header.keys():
        raise ValueError(f"lacks {len(missing)} tensors of the index, such as {min(missing)}: of another revision?")
    return data


def shape_problems(config: Mapping[str, Any], *, tp_size: int, tokens: int, context: int | None) -> tuple[str, ...]:
    """Why SGLang cannot split the model over `tp_size` ranks, or hold `tokens` of one request; empty where it can.

    `context` is the length asked for on the command line, else the model's own counts, unless a factor of its rotary
    embedding may stretch it. Unknown keys say nothing.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        return ()
    # type() rather than isinstance(): a bool is an int, too.
    counts = {name: count for name in HEADS if type(count := text.get(name)) is int and count > 0}
    shared = counts.pop("num_key_value_heads", 1)  # ranks may share one
    found = [
        f"{name} is {count}, which TP {tp_size} does not divide" for name, count in counts.items() if count % tp_size
    ]
    if max(shared, tp_size) % min(shared, tp_size):
        found.append(f"num_key_value_heads is {shared}: neither it nor TP {tp_size} divides the other")
    limit = context or (None if _is_stretched(text) else text.get("max_position_embeddings"))
    if type(limit) is int and tokens > limit:
        found.append(f"the context is {limit} tokens, the longest output with its prompt needs at least {tokens}")
    return tuple(found)


def _is_stretched(text: Mapping[str, Any]) -> bool:
    """Whether a factor of the rotary embedding, of all layers or of a kind of them, may lengthen the context."""
    tables = [table for key in ("rope_scaling", "rope_parameters") if isinstance(table := text.get(key), Mapping)]
    inner = [part for table in tables for part in table.values() if isinstance(part, Mapping)]
    return any("factor" in table for table in (*tables, *inner))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU, without activations, CUDA graphs and context. `weights` is None where files do not tell."""

    weights: int | None
    kv_cache: int
    states: int  # of running requests
    verify_states: int  # of each token of a verify forward


def memory_need(
    config: Mapping[str, Any], *, weight_bytes: int | None, tp_size: int, requests: int, tokens: int,
    verify_tokens: int = 0, tree: bool = False, kv_bytes: int = 2, state_dtype: str | None = None,
) -> MemoryNeed | None:  # fmt: skip
    """What SGLang 0.5.23, its radix cache off, holds for `requests` of `tokens` each; None: unknown architecture.

    `verify_tokens` counts the root, 0 when autoregressive; a `tree` keeps a convolution window for each token, a chain
    lets them overlap. Shape of its pool: [layers, requests + 1, verify_tokens, heads, value, key].
    """
    text = config.get("text_config") or config
    try:
        every, layers = text.get("full_attention_interval") or 0, range(1, text["num_hidden_layers"] + 1)
        kinds = text.get("layer_types") or [LAYERS[bool(every and n % every)] for n in layers]
        if re.search(r"\b(mamba_(?!ssm_dtype)|ssm_|hybrid_|kv_lora_)", " ".join(text)) or not set(kinds) <= {*LAYERS}:
            return None
        linear, queries = kinds.count("linear_attention"), text["num_attention_heads"]
        heads = max(1, text.get("num_key_value_heads", queries) // tp_size)
        width = text.get("head_dim") or text["hidden_size"] // queries
        state, window, taps = 0, 0, 1
        if linear:
            keys, values = (text[f"linear_num_{n}_heads"] * text[f"linear_{n}_head_dim"] for n in ("key", "value"))
            wide = (state_dtype or text.get("mamba_ssm_dtype") or "float32") == "float32"
            state, window = values * text["linear_key_head_dim"] * (4 if wide else 2), 2 * (2 * keys + values)
            taps = text["linear_conv_kernel_dim"]
    except (KeyError, TypeError, AttributeError):
        return None
    columns = verify_tokens * (taps - 1) if tree else verify_tokens + taps - 2
    slots = linear * (requests + 1)
    return MemoryNeed(
        weights=None if weight_bytes is None else weight_bytes // tp_size,
        kv_cache=(len(kinds) - linear) * 2 * heads * width * kv_bytes * requests * tokens,
        states=slots * (state + window * (taps - 1)) // tp_size,
        verify_states=slots * (verify_tokens * state + columns * window) // tp_size if verify_tokens else 0,
    )
