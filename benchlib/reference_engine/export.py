"""Writes the pair as two folders that SGLang loads: `target`, under Qwen3.5's multimodal class, and `drafter`.

SGLang reads a drafter's layers from a Qwen3.5 target only under the class that also sees images. The target therefore
gets a vision tower of zeros, which no text reaches: what it says of an image means nothing. Every tensor of the pair
keeps its values and its precision; only the target's names change.
"""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from benchlib.reference_engine.loading import LoadError, ModelPlan, Shape, drafter_shapes, load_decoder, target_shapes
from benchlib.reference_engine.model import TargetConfig, load_weights
from benchlib.reference_engine.tokenizer import Tokenizer
from benchlib.reference_engine.train import save_model

__all__ = ["export_pair", "main", "target_config", "vision_shapes"]

Json = dict[str, Any]

# The smallest tower that two tensor-parallel ranks can share: one block of two heads.
VISION: Json = {
    "model_type": "qwen3_5", "depth": 1, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2,
    "num_position_embeddings": 16, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
}  # fmt: skip
IMAGES: Json = {
    "processor_class": "Qwen3VLProcessor", "patch_size": VISION["patch_size"], "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "do_convert_rgb": True, "resample": 3,
}  # fmt: skip
# SGLang warms a multimodal model up with a chat message, and ends where there is no template for it.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# transformers (5.19, not yet 5.12) cuts a Qwen3.5 folder's text as Qwen does, whatever tokenizer.json says, unless code
# for another tokenizer seems to come along; nobody looks for it without --trust-remote-code.
OWN_RULES: Json = {"auto_map": {"AutoTokenizer": ["tokenizer.TokenizersBackend", None]}}
# Tokens that no other text encodes to stand for what the model has no tokens for.
PLACEHOLDERS = ("vision_start", "vision_end", "image", "video")


def export_pair(weights: Path, out: Path) -> None:
    """Write `out/target` and `out/drafter` from the pair in `weights`.

    LoadError when the pair is incomplete or does not fit together, or when either folder is there already.
    """
    if taken := [str(path) for path in (out / "target", out / "drafter") if path.exists()]:
        raise LoadError(f"{' and '.join(taken)} exist already: name another folder, or remove them")
    # loading checks every name and shape, and the two against each other
    decoder = load_decoder(ModelPlan(weights / "target", weights / "drafter", method="linear", pack=False))
    assert decoder.drafter is not None
    _write_target(decoder.target.config, weights / "target", out / "target")
    tensors = {name.removeprefix("model."): value for name, value in load_weights(weights / "drafter").items()}
    own = decoder.drafter.config
    save_model(out / "drafter", {name: tensors[name] for name in drafter_shapes(own)}, own.to_json())


def _write_target(config: TargetConfig, source: Path, folder: Path) -> None:
    tokenizer, tensors = Tokenizer.load(source), load_weights(source)
    state = {name.replace("model.", "model.language_model.", 1): tensors[name] for name in target_shapes(config)}
    state |= {name: torch.zeros(shape) for name, shape in vision_shapes(config.hidden_size).items()}
    save_model(folder, state, target_config(config, tokenizer))
    tokenizer.save(folder, max_length=config.max_position_embeddings)
    names = {"image_processor_type": "Qwen2VLImageProcessorFast"}, {"video_processor_type": "Qwen3VLVideoProcessor"}
    _write(folder / "preprocessor_config.json", IMAGES | names[0])
    _write(folder / "video_preprocessor_config.json", IMAGES | names[1])
    # a list: SGLang takes a bare 0 for no token at all
    ends = {"eos_token_id": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    _write(folder / "generation_config.json", ends)
    file = folder / "tokenizer_config.json"
    own = json.loads(file.read_text(encoding="utf-8"))
    _write(file, own | OWN_RULES | {"chat_template": CHAT_TEMPLATE})


def target_config(config: TargetConfig, tokenizer: Tokenizer) -> Json:
    """The multimodal `config.json` around a text config."""
    text = config.to_json()
    dtype = text.pop("torch_dtype")
    del text["architectures"]
    reserved = (tokenizer.raw.token_to_id(f"<|reserved_{i}|>") for i in range(len(PLACEHOLDERS)))
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"dtype": dtype, "pad_token_id": tokenizer.pad_token_id},
        "vision_config": VISION | {"out_hidden_size": config.hidden_size},
        **{f"{name}_token_id": token for name, token in zip(PLACEHOLDERS, reserved, strict=True)},
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }


def vision_shapes(out_hidden: int) -> dict[str, Shape]:
    """Names and shapes of the vision tower in the target's checkpoint."""
    v, wide, ffn = VISION, int(VISION["hidden_size"]), int(VISION["intermediate_size"])
    merged = wide * v["spatial_merge_size"] ** 2
    patch = (v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    layers: dict[str, Shape] = {
        "patch_embed.proj": (wide, *patch),
        "merger.norm": (wide,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (out_hidden, merged),
    }
    for i in range(v["depth"]):
        own = {"norm1": (wide,), "norm2": (wide,), "attn.qkv": (3 * wide, wide), "attn.proj": (wide, wide),
               "mlp.linear_fc1": (ffn, wide), "mlp.linear_fc2": (wide, ffn)}  # fmt: skip
        layers |= {f"blocks.{i}.{name}": shape for name, shape in own.items()}
    shapes: dict[str, Shape] = {"model.visual.pos_embed.weight": (v["num_position_embeddings"], wide)}
    for name, shape in layers.items():
        shapes |= {f"model.visual.{name}.weight": shape, f"model.visual.{name}.bias": shape[:1]}
    return shapes


def _write(file: Path, data: Json) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchlib.reference_engine.export", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    packaged = Path(str(resources.files("benchlib.reference_engine") / "weights"))
    parser.add_argument("out", type=Path, help="folder to write `target` and `drafter` into")
    parser.add_argument("--weights", type=Path, default=packaged, help="another pair, as `train --out` leaves it")
    args = parser.parse_args(argv)
    try:
        export_pair(args.weights, args.out)
    except (LoadError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
