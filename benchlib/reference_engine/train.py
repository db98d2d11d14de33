"""Makes the embedded engine's tokenizer, target and drafter: `python -m benchlib.reference_engine.train --out DIR`.

Stages, each leaving its files in `DIR/work`, so that a stopped training goes on where it was:

1. tokens    the corpus, a BPE tokenizer trained on it, and the corpus as token ids
2. target    next-token cross-entropy; Muon on the matrices, AdamW on the rest; the rate falls as time runs out
3. rollouts  the target continues openings of training documents, greedily and sampled: what the drafter must predict
4. drafter   DFlash: random anchors, a block attends to the target's features before its anchor and to itself;
             cross-entropy weighted exp(-(k - 1) / gamma) by slot (arXiv 2602.06036, appendix A.1)

and `card`, which follows the drafter of itself: `DIR/MODEL_CARD.md`, from what the stages put down in
`DIR/training.json`; `--bench FILE` adds accept lengths that `bench --json FILE` measured.

Weights, configs and tokenizer go to `DIR/target` and `DIR/drafter` in the layout that SGLang and `transformers` load.
A run that does not begin with `tokens` takes its settings from `DIR/training.json`; `--set` changes them. `--tiny`
makes a very small pair on a CPU in about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchlib.reference_engine import card, corpus
from benchlib.reference_engine import tokenizer as bpe
from benchlib.reference_engine.drafter import DrafterConfig
from benchlib.reference_engine.model import Cache, Target, TargetConfig, chain_tree, load_weights
from benchlib.reference_engine.optim import Trainer
from benchlib.reference_engine.train_model import CHUNK, TrainDrafter, TrainTarget, use_compiler

__all__ = ["CHUNK", "TINY", "Run", "Settings", "TrainDrafter", "TrainTarget", "main", "parse_settings"]

log = logging.getLogger("benchlib.train")
MAX_POSITIONS = 2048


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and budgets of one training; times are minutes of wall clock."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    gdn_heads: int = 2
    draft_layers: int = 2
    taps: tuple[int, ...] = (1, 3, 5)
    block_size: int = 16
    tokens: int = 120_000_000
    sequence: int = 768
    batch: int = 64
    target_minutes: float = 8.0
    target_rate: float = 3e-3
    rollouts: int = 24576
    rollout_prompt: int = 64
    rollout_batch: int = 4096
    draft_batch: int = 32
    anchors: int = 48
    drafter_minutes: float = 6.0
    drafter_rate: float = 3e-3
    gamma: float = 7.0
    warm_up: int = 100  # steps until the rate is whole
    least_steps: int = 0  # train on until these are made, however long it takes
    held_documents: int = 40  # of a kind
    held_windows: int = 512  # of a kind, when the loss is measured
    seed: int = 0
    real_text: bool = True


TINY = Settings(
    vocab_size=512, hidden_size=64, intermediate_size=128, layers=4, heads=2, head_dim=32, gdn_heads=2, draft_layers=1,
    taps=(0, 1, 2), tokens=300_000, sequence=128, batch=4, target_minutes=0.4, target_rate=0.02, rollouts=64,
    rollout_prompt=64, rollout_batch=32, draft_batch=4, anchors=8, drafter_minutes=0.2, drafter_rate=0.01, warm_up=5,
    least_steps=30, held_documents=4, held_windows=32, real_text=False,
)  # fmt: skip


def target_config(s: Settings, tokenizer: bpe.Tokenizer) -> TargetConfig:
    """The target's config for these settings."""
    return TargetConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        linear_num_key_heads=s.gdn_heads,
        linear_num_value_heads=2 * s.gdn_heads,
        linear_key_head_dim=s.head_dim,
        linear_value_head_dim=s.head_dim,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * (s.layers // 4),
        eos_token_id=tokenizer.eos_token_id,
    )


def drafter_config(s: Settings, tokenizer: bpe.Tokenizer) -> DrafterConfig:
    """The drafter's config for these settings."""
    return DrafterConfig(
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_hidden_layers=s.draft_layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab_size,
        num_target_layers=s.layers,
        mask_token_id=tokenizer.mask_token_id,
        target_layer_ids=s.taps,
        block_size=s.block_size,
    )


def sample_windows(tokens: Tensor, starts: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows (count, length): half begin at a document's start, half anywhere."""
    half = count // 2
    picked = starts[torch.randint(len(starts), (half,), generator=generator, device=tokens.device)]
    anywhere = torch.randint(len(tokens) - length, (count - half,), generator=generator, device=tokens.device)
    first = torch.cat([picked.clamp(max=len(tokens) - length), anywhere])
    return tokens[first[:, None] + torch.arange(length, device=tokens.device)].long()


def token_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (N,) of hidden (N, H) against labels (N,) through the tied head; bfloat16 logits on CUDA."""
    if hidden.is_cuda:
        hidden, embedding = hidden.bfloat16(), embedding.bfloat16()
    return F.cross_entropy((hidden @ embedding.T).float(), labels, reduction="none")


# --- stages ------------------------------------------------------------------------------------------------------


Facts = dict[str, Any]


class Run:
    """One training: settings, device, folder, and what is put down in `training.json`."""

    def __init__(self, s: Settings, out: Path, device: str, *, command: str = "", facts: Facts | None = None) -> None:
        self.s, self.out, self.work, self.device = s, out, out / "work", torch.device(device)
        self.facts: Facts = (facts or {}) | {"settings": dataclasses.asdict(s)}
        self.made = {
            "device": _device_name(self.device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "command": command,
        }
        self.generator = torch.Generator(self.device).manual_seed(s.seed)

    def note(self, stage: str, **facts: Any) -> None:
        """Keep and log what a stage found, and by what it was made."""
        log.info("%s: %s", stage, json.dumps(facts))
        self.facts[stage] = facts | self.made
        self.save()

    def save(self) -> None:
        """Write `training.json`."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / card.FACTS).write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")

    @property
    def tokenizer(self) -> bpe.Tokenizer:
        return bpe.Tokenizer.load(self.out / "target")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def tokens(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Training ids, the places where documents start, and held-out ids by kind."""
        data = np.load(self.work / "tokens.npz")
        ids = {name: torch.from_numpy(data[name].astype(np.int16)).to(self.device) for name in data.files}
        train = ids.pop("train")
        starts = (train == self.tokenizer.eos_token_id).nonzero().squeeze(1) + 1
        held = {name.removeprefix("held_"): kept for name, kept in ids.items()}
        return train, starts[: max(1, len(starts) - 2)], held


def make_tokens(run: Run, workers: int) -> None:
    """Stage 1."""
    s, begun = run.s, time.monotonic()
    for folder in (run.out / "target", run.work):
        folder.mkdir(parents=True, exist_ok=True)
    mixture = {k: v for k, v in corpus.MIXTURE.items() if s.real_text or k in corpus.MAKERS}
    tokenizer = bpe.train(corpus.sample_texts(s.seed, min(24_000_000, 8 * s.tokens), mixture=mixture), s.vocab_size)
    tokenizer.save(run.out / "target", max_length=MAX_POSITIONS)
    log.info("tokenizer trained after %.0f s", time.monotonic() - begun)
    train = corpus.build_tokens(tokenizer, s.tokens, s.seed, workers or os.cpu_count() or 1, mixture=mixture)
    held = {}
    for kind in mixture:
        texts = corpus.evaluation_documents(kind, s.held_documents)
        ids = [i for ids in tokenizer.encode_batch(texts) for i in [*ids, tokenizer.eos_token_id]]
        held[f"held_{kind}"] = np.array(ids[:60_000], np.uint16)
    arrays: dict[str, Any] = {"train": train} | held
    np.savez(run.work / "tokens.npz", **arrays)
    run.note("tokens", train=len(train), held_out={k: len(v) for k, v in held.items()},
             mixture=mixture, seconds=round(time.monotonic() - begun, 1),
             sources=corpus.describe_sources() if s.real_text else {})  # fmt: skip


def train_target(run: Run) -> None:
    """Stage 2."""
    s = run.s
    torch.manual_seed(s.seed)
    tokens, starts, held = run.tokens()
    config = target_config(s, run.tokenizer)
    model = TrainTarget(config, s.taps).to(run.device)
    trainer = Trainer(model, s.target_rate, s.target_minutes, warm_up=s.warm_up, least_steps=s.least_steps)
    embedding = model.model.embed_tokens.weight
    while trainer.progress < 1:
        window = sample_windows(tokens, starts, s.batch, s.sequence + 1, run.generator)
        with run.autocast():
            hidden, _ = model(window[:, :-1])
            loss = token_loss(hidden.flatten(0, 1), embedding, window[:, 1:].flatten()).mean()
        trainer.update(loss)
    save_model(run.out / "target", model.state_dict(), config.to_json())
    run.note("target", steps=trainer.step_count, tokens_seen=trainer.step_count * s.batch * s.sequence,
             parameters=sum(p.numel() for p in model.parameters()), train_loss=round(trainer.loss.item(), 4),
             held_out_loss={k: round(held_out_loss(run, model, ids), 4) for k, ids in held.items()},
             minutes=s.target_minutes)  # fmt: skip


@torch.no_grad()
def held_out_loss(run: Run, model: TrainTarget, held: Tensor) -> float:
    """Mean cross-entropy a token over whole windows of the held-out ids."""
    length = run.s.sequence
    windows = held[: len(held) // (length + 1) * (length + 1)].view(-1, length + 1)[: run.s.held_windows].long()
    losses = []
    for part in torch.split(windows, run.s.batch):
        with run.autocast(), torch.compiler.set_stance("force_eager"):
            hidden, _ = model(part[:, :-1])
            losses.append(token_loss(hidden.flatten(0, 1), model.model.embed_tokens.weight, part[:, 1:].flatten()))
    return torch.cat(losses).mean().item()


@torch.no_grad()
def make_rollouts(run: Run) -> None:
    """Stage 3: three quarters greedy, one quarter sampled at temperature 0.8."""
    s, begun = run.s, time.monotonic()
    tokens, starts, _ = run.tokens()
    target = Target(target_config(s, run.tokenizer), load_weights(run.out / "target"), device=run.device)
    parts = []
    for done in range(0, s.rollouts, s.rollout_batch):
        count = min(s.rollout_batch, s.rollouts - done)
        picked = starts[torch.randint(len(starts), (count,), generator=run.generator, device=run.device)]
        prompts = tokens[picked.clamp(max=len(tokens) - s.rollout_prompt)[:, None]
                         + torch.arange(s.rollout_prompt, device=run.device)].long()  # fmt: skip
        parts.append(continue_prompts(target, prompts, s.sequence, run.generator).to(torch.int16).cpu())
    rollouts = torch.cat(parts).numpy()
    np.save(run.work / "rollouts.npy", rollouts)
    run.note(
        "rollouts",
        sequences=len(rollouts),
        length=s.sequence,
        seconds=round(time.monotonic() - begun, 1),
    )


def continue_prompts(target: Target, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue (B, P) prompts to (B, length); the last quarter of the batch is sampled, the others are greedy."""
    batch, prompt = prompts.shape
    cache, slots = Cache(target, batch, length + CHUNK), list(range(batch))
    tree = chain_tree(batch, prompt, target.kernel, target.device)
    depths = torch.arange(prompt, device=target.device).expand(batch, -1)
    output = target.forward(prompts, depths, cache, slots, tree)
    assert output.pending is not None
    target.commit(cache, output.pending, [range(prompt)] * batch)
    greedy = batch - batch // 4
    out, hidden = [prompts], output.hidden[:, -1:]
    zero = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
    for _ in range(length - prompt):
        logits = target.logits(hidden)[:, 0]
        chosen = logits.argmax(-1)
        if batch > greedy:
            weights = (logits[greedy:] / 0.8).softmax(-1)
            chosen[greedy:] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        out.append(chosen[:, None])
        hidden = target.forward(chosen[:, None], zero, cache, slots).hidden
    return torch.cat(out, 1)


def draft_batches(run: Run, rollouts: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random sequences with sorted random anchors whose whole block lies inside."""
    s = run.s
    last = rollouts.shape[1] - s.block_size
    while True:
        rows = torch.randint(len(rollouts), (batch,), generator=run.generator, device=run.device)
        anchors = torch.randint(8, last + 1, (batch, s.anchors), generator=run.generator, device=run.device)
        yield rollouts[rows].long(), anchors.sort(1).values


def train_drafter(run: Run) -> None:
    """Stage 4."""
    s = run.s
    torch.manual_seed(s.seed + 1)
    target = TrainTarget(target_config(s, run.tokenizer), s.taps).to(run.device)
    target.load_state_dict({k: v.float() for k, v in load_weights(run.out / "target").items()})
    target.requires_grad_(False)
    embedding = target.model.embed_tokens.weight
    rollouts = torch.from_numpy(np.load(run.work / "rollouts.npy")).to(run.device)
    held = max(len(rollouts) // 50, 4)
    config = drafter_config(s, run.tokenizer)
    drafter = TrainDrafter(config).to(run.device)
    trainer = Trainer(drafter, s.drafter_rate, s.drafter_minutes, warm_up=s.warm_up, least_steps=s.least_steps)
    weights = torch.exp(-torch.arange(s.block_size - 1, device=run.device) / s.gamma)
    for tokens, anchors in draft_batches(run, rollouts[held:], s.draft_batch):
        with run.autocast():
            with torch.no_grad():
                _, taps = target(tokens)
            hidden = drafter(taps, tokens, anchors, embedding)
            labels = block_labels(tokens, anchors, s.block_size)
            losses = token_loss(hidden.flatten(0, 2), embedding, labels.flatten()).view(labels.shape)
            loss = (losses * weights).sum(-1).mean() / weights.sum()
        trainer.update(loss)
        if trainer.progress >= 1:
            break
    save_model(run.out / "drafter", drafter.state_dict(), config.to_json())
    accept = held_out_accept(run, target, drafter, rollouts[:held])
    run.note("drafter", steps=trainer.step_count, parameters=sum(p.numel() for p in drafter.parameters()),
             train_loss=round(trainer.loss.item(), 4), held_out_accept_length=round(accept, 3),
             minutes=s.drafter_minutes)  # fmt: skip
    card.write_card(run.out)


def block_labels(tokens: Tensor, anchors: Tensor, block: int) -> Tensor:
    """The tokens (B, M, block - 1) after each anchor."""
    index = anchors[..., None] + torch.arange(1, block, device=tokens.device)
    return tokens.gather(1, index.flatten(1)).view(index.shape)


@torch.no_grad()
def held_out_accept(run: Run, target: TrainTarget, drafter: TrainDrafter, rollouts: Tensor) -> float:
    """Mean accept length (bonus included) of the argmax chain at random anchors of held-out rollouts."""
    lengths = []
    batches = draft_batches(run, rollouts, run.s.draft_batch)
    for _ in range(8):
        tokens, anchors = next(batches)
        with run.autocast(), torch.compiler.set_stance("force_eager"):
            _, taps = target(tokens)
            hidden = drafter(taps, tokens, anchors, target.model.embed_tokens.weight)
            guess = (hidden @ target.model.embed_tokens.weight.T).argmax(-1)
        right = guess == block_labels(tokens, anchors, run.s.block_size)
        lengths.append(1 + right.long().cumprod(-1).sum(-1).float())
    return torch.cat(lengths).mean().item()


# --- files -------------------------------------------------------------------------------------------------------


def save_model(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write `model.safetensors` in bfloat16 (float32 where the recurrence needs it) and `config.json`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    keep = ("A_log", "dt_bias")
    tensors = {k: (v if k.endswith(keep) else v.to(torch.bfloat16)).contiguous().cpu() for k, v in state.items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors leaves it readable to its owner alone
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def parse_settings(base: Settings, items: list[str]) -> Settings:
    """`base` with NAME=VALUE items; ValueError names what is wrong with one."""
    changes: dict[str, object] = {}
    for item in items:
        name, _, text = item.partition("=")
        kind = type(getattr(base, name, ()))
        if kind not in (bool, int, float):
            known = sorted(f.name for f in dataclasses.fields(base) if f.name != "taps")
            raise ValueError(f"--set {item}: no such setting; settings are {', '.join(known)}")
        try:
            changes[name] = _BOOLEANS[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"--set {item}: {text!r} is not {wanted}") from None
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


_BOOLEANS = {"true": True, "false": False}


def _recorded(facts: Facts) -> Settings:
    """The settings in `training.json`; what an older file does not name is as the defaults are."""
    names = {f.name for f in dataclasses.fields(Settings)}
    known: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in facts["settings"].items() if k in names
    }
    return Settings(**known)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchlib.reference_engine.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and model card")
    parser.add_argument("--tiny", action="store_true", help="a very small pair, in about a minute on a CPU")
    parser.add_argument("--stages", default="tokens,target,rollouts,drafter", help="which stages, by name, in order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that build the corpus; 0: one a core")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace one setting")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="accept lengths for the card, from bench --json")
    return parser


def _command(args: argparse.Namespace) -> str:
    """The command line as the card tells it: without where it wrote and on what it ran."""
    tiny = " --tiny" if args.tiny else ""
    changes = "".join(f" --set {item}" for item in args.set)
    return f"python -m benchlib.reference_engine.train --out DIR{tiny} --stages {args.stages}{changes}"


def _make_card(run: Run, bench: Path | None) -> None:
    if bench is not None:
        run.facts["accept"] = card.accept_facts(json.loads(bench.read_text(encoding="utf-8")))
        run.save()
    card.write_card(run.out)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    wanted = args.stages.split(",")
    facts: Facts = {}
    if "tokens" not in wanted and (args.out / card.FACTS).is_file():
        facts = json.loads((args.out / card.FACTS).read_text(encoding="utf-8"))
    base = _recorded(facts) if facts else TINY if args.tiny else Settings()
    try:
        settings = parse_settings(base, args.set)
        run = Run(settings, args.out, args.device, command=_command(args), facts=facts)
    except (ValueError, RuntimeError) as error:  # a setting, a device
        parser.error(str(error))
    stages: dict[str, Callable[[], None]] = {
        "tokens": lambda: make_tokens(run, args.workers), "target": lambda: train_target(run),
        "rollouts": lambda: make_rollouts(run), "drafter": lambda: train_drafter(run),
        "card": lambda: _make_card(run, args.bench),
    }  # fmt: skip
    for name in wanted:
        if name not in stages:
            parser.error(f"unknown stage {name!r}; stages are {', '.join(stages)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if run.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        use_compiler(True)
    for name in wanted:
        log.info("stage %s", name)
        try:
            stages[name]()
        except FileNotFoundError as error:
            parser.error(f"stage {name} needs a file that an earlier stage leaves: {error}")


if __name__ == "__main__":
    main()
