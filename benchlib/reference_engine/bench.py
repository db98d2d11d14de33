"""What the embedded engine does without a server: `python -m benchlib.reference_engine.bench`.

One process, one request at a time: every method over the four openings, interleaved round by round so that drift falls
on all alike; auto beside `transformers`' generate on the same weights and threads where that is installed; then, in a
run of its own because stage clocks cost time, where a round's time goes. Ratios are of pooled seconds a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tomllib
import warnings
from dataclasses import asdict
from importlib import resources, util
from pathlib import Path
from typing import Any

import torch

from benchlib.reference_engine.decode import Decoder, Generation, Method, Request, StageTimes
from benchlib.reference_engine.drafter import Drafter, DrafterConfig
from benchlib.reference_engine.model import Target, TargetConfig, load_weights
from benchlib.reference_engine.tokenizer import Tokenizer

METHODS: dict[str, tuple[Method, int]] = {
    "auto": ("auto", 1),
    "linear": ("linear", 1),
    **{f"b{b}": ("ddtree", b) for b in (15, 16, 32, 64)},
}


def openings() -> dict[str, str]:
    """The four default prompts."""
    text = (resources.files("benchlib") / "prompts" / "openings.toml").read_text(encoding="utf-8")
    return {name: entry["text"] for name, entry in tomllib.loads(text).items()}


def load_decoders(weights: Path, *, pack: bool) -> tuple[dict[str, Decoder], Tokenizer]:
    """One decoder a method, over one set of weights."""
    config, draft = TargetConfig.load(weights / "target"), DrafterConfig.load(weights / "drafter")
    target = Target(config, load_weights(weights / "target"), taps=draft.target_layer_ids, pack=pack)
    drafter = Drafter(draft, load_weights(weights / "drafter"), target, pack=pack)
    made = {
        name: Decoder(target, None if method == "auto" else drafter, method=method, budget=budget, slots=1)
        for name, (method, budget) in METHODS.items()
    }
    return made, Tokenizer.load(weights / "target")


def generate(decoder: Decoder, ids: list[int], new_tokens: int) -> tuple[Generation, float]:
    """One request; the seconds are those of decoding, after the first token."""
    generation = decoder.prefill(Request(tuple(ids), new_tokens, ignore_eos=True), 0)
    begun = time.perf_counter()
    while generation.finish_reason is None:
        decoder.step([generation])
    return generation, time.perf_counter() - begun


def measure(
    decoders: dict[str, Decoder], prompts: dict[str, list[int]], new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each method, prompt and round."""
    rows = []
    for turn in range(rounds + 1):  # the first is the warm-up
        for prompt, ids in prompts.items():
            for name, decoder in decoders.items():
                generation, seconds = generate(decoder, ids, new_tokens)
                if turn:
                    rows.append(
                        {
                            "method": name,
                            "prompt": prompt,
                            "seconds": seconds,
                            "generation": generation,
                        }
                    )
    return rows


def summarise(rows: list[dict[str, Any]], block: int) -> list[dict[str, Any]]:
    """One object a method and prompt, and one over all prompts; ratios against auto of the same prompts."""
    prompts = [*dict.fromkeys(r["prompt"] for r in rows), "all"]
    spent: dict[tuple[str, str], float] = {}
    out = []
    for name in dict.fromkeys(r["method"] for r in rows):
        for prompt in prompts:
            own = [r for r in rows if r["method"] == name and prompt in (r["prompt"], "all")]
            made = [r["generation"] for r in own]
            tokens = sum(len(g.output_ids) - 1 for g in made)
            spent[name, prompt] = sum(r["seconds"] for r in own) / tokens
            steps = sum(g.verify_ct for g in made)
            whole = sum(g.histogram[block - 1] for g in made if len(g.histogram) >= block)
            out.append(
                {
                    "method": name,
                    "prompt": prompt,
                    "n": len(own),
                    "tok_s": 1 / spent[name, prompt],
                    "step_ms": 1e3 * sum(r["seconds"] for r in own) / (steps or tokens),
                    "accept_length": 1 + sum(g.correct_drafts for g in made) / steps if steps else None,
                    "full_block_share": whole / steps if steps else None,
                    "speedup": spent["auto", prompt] / spent[name, prompt],
                }
            )
    return out


def transformers_ratio(weights: Path, decoder: Decoder, ids: list[int], new_tokens: int, rounds: int) -> dict[str, Any]:
    """auto against `transformers` greedy generate, turn about, prefill included on both sides."""
    if util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen3_5ForCausalLM

        model = Qwen3_5ForCausalLM.from_pretrained(weights / "target", dtype=torch.float32)
        ours, theirs = [], []
        prompt = torch.tensor([ids])
        for turn in range(rounds + 1):
            begun = time.perf_counter()
            made, _ = generate(decoder, ids, new_tokens)
            middle = time.perf_counter()
            options = {
                "max_new_tokens": new_tokens,
                "min_new_tokens": new_tokens,
                "do_sample": False,
            }
            other = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            if turn:
                ours.append(middle - begun)
                theirs.append(time.perf_counter() - middle)
    return {
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "n": rounds,
        "auto_tok_s": new_tokens / statistics.median(ours),
        "transformers_tok_s": new_tokens / statistics.median(theirs),
        "same_tokens": made.output_ids == other[0, len(ids) :].tolist(),
    }


def stages(decoder: Decoder, prompts: dict[str, list[int]], new_tokens: int) -> dict[str, float]:
    """Milliseconds a round in each stage, over all prompts."""
    decoder.times = StageTimes()
    for ids in prompts.values():
        generate(decoder, ids, new_tokens)
    times, decoder.times = asdict(decoder.times), None
    rounds = times.pop("rounds")
    return {name: 1e3 * seconds / rounds for name, seconds in times.items()}


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchlib.reference_engine.bench", description=__doc__)
    parser.add_argument(
        "--weights",
        type=Path,
        default=Path(str(resources.files("benchlib.reference_engine") / "weights")),
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="without packed weights")
    parser.add_argument("--json", type=Path, help="write everything here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with torch.inference_mode():  # as in the server
        report = run(args)
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, in one process."""
    decoders, tokenizer = load_decoders(args.weights, pack=not args.plain)
    prompts = {name: tokenizer.encode(text) for name, text in openings().items()}
    rows = measure(decoders, prompts, args.new_tokens, args.rounds)
    drafter = decoders["linear"].drafter
    assert drafter is not None
    return {
        "threads": args.threads,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "methods": summarise(rows, drafter.config.block_size),
        "transformers": transformers_ratio(
            args.weights, decoders["auto"], prompts["fib"], args.new_tokens, args.rounds
        ),
        "stage_ms": {name: stages(decoders[name], prompts, args.new_tokens) for name in decoders if name != "auto"},
    }


def _print(report: dict[str, Any]) -> None:
    lines = [f"{'method':8}{'prompt':8}{'tok/s':>9}{'ms/step':>9}{'accept':>8}{'full':>7}{'speedup':>9}   n"]
    for row in report["methods"]:
        accept, full = (f"{v:.2f}" if v is not None else "-" for v in (row["accept_length"], row["full_block_share"]))
        lines.append(
            f"{row['method']:8}{row['prompt']:8}{row['tok_s']:9.1f}{row['step_ms']:9.3f}{accept:>8}{full:>7}"
            f"{row['speedup']:9.2f}{row['n']:4}"
        )
    lines.append("transformers: " + json.dumps(report["transformers"]))
    for name, stage in report["stage_ms"].items():
        shares = " ".join(f"{k} {v:.3f}" for k, v in stage.items())
        lines.append(
            f"{name:8}ms a round: {shares}; heap {stage['heap'] / stage['verify']:.1%}, "
            f"build {stage['tree_build'] / stage['verify']:.1%} of verify"
        )
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
