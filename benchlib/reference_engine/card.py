"""Writes the model card of a trained pair from `training.json`: no fact in the card is typed by hand."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["accept_facts", "write_card"]

FACTS = "training.json"
CARD = "MODEL_CARD.md"
STAGES = ("tokens", "target", "rollouts", "drafter")
KINDS = {
    "code": "Python source of the packages below",
    "docs": "their documentation and long docstrings",
    "textbook": "generated: small Python lessons with checked results",
    "arith": "generated: arithmetic worksheets",
    "json": "generated: JSON documents whose totals add up",
}

Facts = dict[str, Any]

INTENDED = """\
## Intended use

A system under test for a benchmark suite: a real target and a real drafter, small enough for two processor cores, so
that clients, records, sweeps and reports can be exercised, and speculative decoding checked for losslessness, without a
GPU. It is not a language model to use: it answers no questions, follows no instructions and knows nothing.

## Limits

- It continues texts of its training distribution: Python, documentation, worksheets, JSON. Anything else is noise.
- Results that it writes may be wrong, and code that it writes may not run: do not execute it.
- Accept lengths are of openings that follow the forms of the generated training text (no training document begins like
  them). They say how the engine behaves, not how DFlash or DDTree do on a language model of usual size.
- Like any model trained on source code, it may repeat fragments of it.
"""


def write_card(folder: Path) -> Path:
    """Write `folder/MODEL_CARD.md` from `folder/training.json`; a stage that has not run has no section."""
    facts: Facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    known = [write(facts) for name, write in _SECTIONS.items() if name in facts]
    text = _wrap("\n".join([_head(facts), *known, INTENDED, _licence(facts)]))
    (folder / CARD).write_text(text, encoding="utf-8")
    return folder / CARD


def accept_facts(bench: Facts) -> Facts:
    """What the card shows of a `bench --json` file: accept length and whole-block share by method and opening."""
    methods: dict[str, dict[str, list[float]]] = {}
    for row in bench["methods"]:
        if row["accept_length"] is not None:
            pair = [round(row["accept_length"], 2), round(row["full_block_share"], 3)]
            methods.setdefault(row["method"], {})[row["prompt"]] = pair
    return {"new_tokens": bench["new_tokens"], "methods": methods}


def _head(facts: Facts) -> str:
    s = facts["settings"]
    full = s["layers"] // 4
    numbers = {name: f", {facts[name]['parameters']:,} parameters" for name in ("target", "drafter") if name in facts}
    taps = ", ".join(map(str, s["taps"]))
    return f"""\
# The embedded engine's pair

A target and its drafter, trained from nothing for this package by `benchlib.reference_engine.train`.

- **Target** (`target/`): `Qwen3_5ForCausalLM`{numbers.get("target", "")}; {s["layers"]} layers
  ({s["layers"] - full} gated DeltaNet, {full} full attention, 3:1), hidden {s["hidden_size"]},
  FFN {s["intermediate_size"]}; attention {s["heads"]} query and {s["kv_heads"]} key/value heads of {s["head_dim"]};
  DeltaNet {s["gdn_heads"]} key and {2 * s["gdn_heads"]} value heads of {s["head_dim"]}; tied embeddings.
- **Drafter** (`drafter/`): `DFlashDraftModel`{numbers.get("drafter", "")}; {s["draft_layers"]} layers of the same
  width, block {s["block_size"]} (one known token and {s["block_size"] - 1} drafted at once), reads the target's
  layers {taps} (counted from 0).
- **Weights**: bfloat16 safetensors (`A_log` and `dt_bias` float32).
- **Tokenizer** (`target/tokenizer.json`): byte-level BPE of {s["vocab_size"]:,} tokens, trained on the same corpus;
  every digit is a token of its own, a newline takes the indentation after it along.
"""


def _tokens(facts: Facts) -> str:
    tokens = facts["tokens"]
    rows = [[kind, f"{share / sum(tokens['mixture'].values()):.0%}", f"{tokens['held_out'][f'held_{kind}']:,}",
             KINDS.get(kind, "")] for kind, share in tokens["mixture"].items()]  # fmt: skip
    text = f"""\
## Data

{tokens["train"]:,} training tokens. One document in fifty is held out. No text is shipped with the weights: generated
kinds are made by this package (`synthetic.py`, `textbook.py`), real files are read from installed packages.

{_table(["Kind", "Share", "Held-out tokens", "What"], rows)}
"""
    if not tokens["sources"]:
        return text
    rows = [[name, s["version"], s["licence"], f"{s['files']:,}", f"{s['bytes'] / 1e6:.1f}"]
            for name, s in tokens["sources"].items()]  # fmt: skip
    return f"""{text}
Real files, without tests, vendored code, generated tables and licence comments; MB include docstrings counted as
documentation.

{_table(["Package", "Version", "Licence", "Files", "MB"], rows)}
"""


def _target(facts: Facts) -> str:
    s, target = facts["settings"], facts["target"]
    rows = [[kind, f"{loss:.3f}"] for kind, loss in target["held_out_loss"].items()]
    return f"""\
## Target

{target["steps"]:,} steps of {s["batch"]} sequences of {s["sequence"]} tokens ({target["tokens_seen"]:,} tokens seen) in
{target["minutes"]} minutes; Muon on the matrices, AdamW on the rest, rate {s["target_rate"]:g}. Last training loss
{target["train_loss"]:.3f}; held-out loss (nats a token):

{_table(["Kind", "Loss"], rows)}
"""


def _rollouts(facts: Facts) -> str:
    s, made = facts["settings"], facts["rollouts"]
    return f"""\
## Rollouts

{made["sequences"]:,} sequences of {made["length"]} tokens, written by the target from {s["rollout_prompt"]}-token
openings of training documents, in {made["seconds"]} s: three quarters greedy, one quarter at temperature 0.8.
"""


def _drafter(facts: Facts) -> str:
    s, drafter = facts["settings"], facts["drafter"]
    return f"""\
## Drafter

{drafter["steps"]:,} steps of {s["draft_batch"]} rollouts with {s["anchors"]} random blocks each in {drafter["minutes"]}
minutes, rate {s["drafter_rate"]:g}; cross-entropy weighted exp(-(k - 1) / {s["gamma"]:g}) by slot k. Last training loss
{drafter["train_loss"]:.3f}. Held-out accept length (chain, bonus token included, random places in rollouts that it was
not trained on): **{drafter["held_out_accept_length"]:.2f}** of at most {s["block_size"]}.
"""


def _accept(facts: Facts) -> str:
    accept, block = facts["accept"], facts["settings"]["block_size"]
    methods = accept["methods"]
    prompts = dict.fromkeys(p for rows in methods.values() for p in rows)
    rows = [[p, *(f"{m[p][0]:.2f} ({m[p][1]:.0%})" for m in methods.values())] for p in prompts]
    return f"""\
## Accept lengths

Tokens a round (bonus included) on the four default openings, greedy, {accept["new_tokens"]} new tokens; in brackets
the share of rounds that accept a whole block of {block - 1} drafts. `linear` is DFlash's chain, `bN` a DDTree of N
nodes; `all` pools the openings. By `python -m benchlib.reference_engine.bench`.

{_table(["Opening", *methods], rows)}
"""


def _making(facts: Facts) -> str:
    made = [facts[name] for name in STAGES if name in facts]
    commands = "\n".join(dict.fromkeys(m["command"] for m in made))
    where = _several(made, "device"), _several(made, "torch"), _several(made, "python")
    return f"""\
## How it was made

On {where[0]}, torch {where[1]}, Python {where[2]}:

```
{commands}
```

Training is limited by time, so that another run gives another pair of like quality.
"""


def _licence(facts: Facts) -> str:
    sources = facts.get("tokens", {}).get("sources", {})
    by_licence: dict[str, list[str]] = {}
    for name, source in sources.items():
        by_licence.setdefault(source["licence"], []).append(name)
    lines = "\n".join(f"- {licence}: {', '.join(names)}" for licence, names in by_licence.items())
    trained = f"They were trained on sources under permissive licences:\n\n{lines}" if lines else (
        "They were trained on generated text alone.")  # fmt: skip
    return f"""\
## Licence

The weights are licensed under Apache-2.0, as the project is. {trained}
"""


def _wrap(text: str) -> str:
    """Paragraphs and list items of at most 100 columns; headings, tables and code as they are."""
    blocks = re.split(r"\n(?=\n|- )", text)
    return "\n".join(block if re.match(r"\n*[#|`]", block) else _fill(block) for block in blocks)


def _fill(block: str) -> str:
    lead = block[: len(block) - len(block.lstrip("\n"))]
    inner = "  " if block.startswith("- ") else ""
    end = "\n" if block.endswith("\n") else ""
    body = textwrap.fill(" ".join(block.split()), 100, subsequent_indent=inner, break_on_hyphens=False)
    return lead + body + (end if body else "")


def _several(made: Sequence[Facts], key: str) -> str:
    return ", ".join(dict.fromkeys(str(m[key]) for m in made))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_SECTIONS = {
    "tokens": _tokens, "target": _target, "rollouts": _rollouts, "drafter": _drafter, "accept": _accept,
    "settings": _making,
}  # fmt: skip
