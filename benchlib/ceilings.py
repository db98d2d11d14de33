"""How fast decoding could be at best: the bytes that one step must move, over the memory bandwidth measured here.

A floor tells how much of a step's time is left to win. It holds for autoregressive decoding; a verify forward reads
the same weights for more tokens. Only architectures whose tensors are known are counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.bandwidth_probe import Bandwidth
from benchlib.errors import RecordError, UnavailableError
from benchlib.record import write_atomic

__all__ = [
    "Bandwidth", "StepBytes", "floor_ms", "floor_tok_s", "load_bandwidth", "measure_bandwidth", "probe_devices",
    "save_bandwidth", "step_bytes",
]  # fmt: skip

HYBRID = {"qwen3_5", "qwen3_5_text"}
TYPES = {"qwen3", *HYBRID}
CLASSES = {"Qwen3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"}
FULL, LINEAR = "full_attention", "linear_attention"
BANDWIDTH_FILE = "bandwidth.json"
PROBE = Path(__file__).with_name("bandwidth_probe.py")


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step moves through the memory of each GPU."""

    weights: int
    state: int  # recurrent and convolution states, read and written
    kv: int
    total: int


def step_bytes(
    config: Mapping[str, Any], *, tp_size: int, batch: int, context_tokens: int,
    weight_dtype_bytes: int = 2, state_dtype_bytes: int = 4, kv_dtype_bytes: int = 2,
) -> StepBytes:  # fmt: skip
    """Bytes of one autoregressive step of `batch` requests that hold `context_tokens` each, activations left out.

    `config` is the config.json of a dense Qwen3 or Qwen3.5/3.6. UnavailableError for any other, for quantised weights,
    and for a `tp_size` that does not divide it. Such a step reads the output head, tied or not, but neither the
    embedding table nor the vision tower nor layers for multi-token prediction.
    """
    text = config.get("text_config") or config
    try:
        _check_known(config, text)
        rank = _Rank(text, tp_size)
        linear, full = rank.layers()
        mixer, recurrent, window = rank.linear_mixer() if linear else (0, 0, 0)
        rows = -(-int(text["vocab_size"]) // tp_size) + 1  # of the head, and the last norm
        weights = rows * rank.hidden + linear * (mixer + rank.mlp()) + full * (rank.attention() + rank.mlp())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnavailableError(f"config.json says too little to count a step's bytes: {error!r}") from error
    weights *= weight_dtype_bytes
    state = 2 * batch * linear * (recurrent * state_dtype_bytes + window * weight_dtype_bytes)
    kv = batch * context_tokens * full * 2 * rank.kv_heads * rank.head_dim * kv_dtype_bytes
    return StepBytes(weights, state, kv, weights + state + kv)


def _check_known(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    kind, classes = text.get("model_type"), set(config.get("architectures") or ())
    if kind not in TYPES or not classes <= CLASSES or text.get("num_experts"):
        raise UnavailableError(
            f"what a step of model_type {kind!r}, architectures {sorted(classes)}, reads is not known (with experts it "
            f"depends on the tokens); known are {sorted(TYPES)} as {sorted(CLASSES)}"
        )
    if config.get("quantization_config") or text.get("quantization_config"):
        raise UnavailableError("the weights are quantised: the bytes that each tensor takes are not known")


class _Rank:
    """What one of `tp_size` ranks holds, in parameters or elements a layer."""

    def __init__(self, text: Mapping[str, Any], tp_size: int) -> None:
        self.text, self.tp_size, self.hidden = text, tp_size, int(text["hidden_size"])
        self.heads = self.share("num_attention_heads")
        # Fewer heads than ranks are held by several ranks each.
        self.kv_heads = 1 if text["num_key_value_heads"] < tp_size else self.share("num_key_value_heads")
        self.head_dim = int(text.get("head_dim") or self.hidden // text["num_attention_heads"])

    def share(self, name: str) -> int:
        if self.tp_size < 1 or self.text[name] % self.tp_size:
            raise UnavailableError(f"tp_size={self.tp_size} does not divide {name}={self.text[name]}: no such server")
        return int(self.text[name]) // self.tp_size

    def layers(self) -> tuple[int, int]:
        """How many are linear, how many of full attention; unlisted, a hybrid has one of these after each three."""
        n = self.text["num_hidden_layers"]
        every = self.text.get("full_attention_interval", 4) if self.text["model_type"] in HYBRID else 1
        kinds = self.text.get("layer_types") or [FULL] * (n // every) + [LINEAR] * (n - n // every)
        if unknown := set(kinds) - {FULL, LINEAR}:
            raise UnavailableError(f"what a step reads of layers {sorted(unknown)} is not known")
        return kinds.count(LINEAR), kinds.count(FULL)

    def mlp(self) -> int:
        return 3 * self.hidden * self.share("intermediate_size") + 2 * self.hidden

    def attention(self) -> int:
        gated = self.text["model_type"] in HYBRID and self.text.get("attn_output_gate", True)
        wide = ((1 + gated) * self.heads + 2 * self.kv_heads) * self.head_dim
        bias = wide + self.hidden if self.text.get("attention_bias") else 0
        return int(self.hidden * (wide + self.heads * self.head_dim) + bias + 2 * self.head_dim)

    def linear_mixer(self) -> tuple[int, int, int]:
        """Parameters, elements of a request's recurrent state, elements of its convolution window."""
        keys, values = self.share("linear_num_key_heads"), self.share("linear_num_value_heads")
        key, value, taps = (self.text[f"linear_{n}"] for n in ("key_head_dim", "value_head_dim", "conv_kernel_dim"))
        channels = 2 * keys * key + values * value
        projections = self.hidden * (channels + 2 * values * value + 2 * values)
        return projections + channels * taps + 2 * values + value, values * key * value, channels * (taps - 1)


def floor_ms(step: StepBytes, copy_gb_s: float) -> float:
    """Least time of one step, milliseconds, at a measured bandwidth in GB/s (1e9 bytes)."""
    return step.total / copy_gb_s / 1e6


def floor_tok_s(step: StepBytes, copy_gb_s: float) -> float:
    """The highest decode rate of one request at this bandwidth, tokens/s; times the batch for all of them."""
    return 1e3 / floor_ms(step, copy_gb_s)


def measure_bandwidth(python: str, *, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> Bandwidth:
    """Of the slowest GPU that `python`, the engine's interpreter, sees: all ranks wait for it. See `probe_devices`."""
    return min(probe_devices(python, env=env, timeout_s=timeout_s), key=lambda found: found.copy_gb_s)


def save_bandwidth(folder: Path, found: Sequence[Bandwidth]) -> None:
    """Write `bandwidth.json` into a campaign's folder."""
    rows = [dataclasses.asdict(device) for device in found]
    write_atomic(folder / BANDWIDTH_FILE, json.dumps(rows, indent=1).encode() + b"\n")


def load_bandwidth(folder: Path) -> tuple[Bandwidth, ...]:
    """A campaign's measured bandwidth; empty where none was measured. RecordError for a broken file."""
    path = folder / BANDWIDTH_FILE
    try:
        return tuple(Bandwidth(**row) for row in json.loads(path.read_bytes()))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path} is no bandwidth measurement: {error}; delete it, or measure again") from None


def probe_devices(
    python: str, *, env: Mapping[str, str] | None = None, timeout_s: float = 120, cpu: bool = False
) -> tuple[Bandwidth, ...]:
    """Of each visible GPU, one after another. UnavailableError without torch or CUDA, or after `timeout_s`.

    `env` is added to the inherited variables. `cpu` tries it out on small buffers of the CPU: no ceiling.
    """
    # From standard input: run as a file, its folder would come first on the path, and there is a warnings.py.
    command, source = [python, "-", *["--cpu"] * cpu], PROBE.read_text(encoding="utf-8")
    variables = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, input=source, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return tuple(Bandwidth(**found) for found in json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, IndexError) as error:
        raise UnavailableError(f"cannot measure memory bandwidth with {python}: {error}") from error
