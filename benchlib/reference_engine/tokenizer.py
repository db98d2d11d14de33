"""Byte-level BPE of the embedded engine: training, loading, and decoding as a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
EOS = "<|endoftext|>"
MASK = "<|MASK|>"
PAD = "<|pad|>"
SPECIALS = (EOS, MASK, PAD, *(f"<|reserved_{i}|>" for i in range(5)))
# Newlines keep the indentation that follows; every digit stands alone (with its leading space).
_PATTERN = r"\n+ *| ?[0-9]| ?_*[A-Za-z]+| ?[^\sA-Za-z0-9]+| +|\s"


def _byte_table() -> dict[str, int]:
    """Character of the byte-level alphabet -> the byte it stands for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in set(visible)]
    table = {chr(b): b for b in visible}
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from texts; the same texts give the same tokenizer."""
    raw = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(_PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return Tokenizer(raw)


class Tokenizer:
    """Encode and decode with the trained merges; special tokens have fixed ids."""

    def __init__(self, raw: Any) -> None:
        """Wrap a `tokenizers.Tokenizer`."""
        self.raw = raw
        self.vocab_size: int = raw.get_vocab_size()
        self.eos_token_id: int = raw.token_to_id(EOS)
        self.mask_token_id: int = raw.token_to_id(MASK)
        self.pad_token_id: int = raw.token_to_id(PAD)
        table = _byte_table()
        self._bytes = [self._to_bytes(i, table) for i in range(self.vocab_size)]

    def _to_bytes(self, token_id: int, table: dict[str, int]) -> bytes:
        """Bytes of one token; special tokens read as nothing."""
        token = self.raw.id_to_token(token_id)
        return b"" if token in SPECIALS else bytes(table[c] for c in token)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load from a folder (or its tokenizer.json)."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        return cls(tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Load from the text of a tokenizer.json."""
        return cls(tokenizers.Tokenizer.from_str(text))

    def to_json(self) -> str:
        """Return the text of tokenizer.json."""
        text: str = self.raw.to_str(pretty=False)
        return text

    def save(self, folder: Path | str, *, max_length: int = 1024) -> None:
        """Write a folder that `transformers.AutoTokenizer` loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "mask_token": MASK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        }
        (folder / "tokenizer.json").write_text(self.to_json() + "\n", encoding="utf-8")
        text = json.dumps(config, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no special token is added."""
        ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [e.ids for e in self.raw.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens are left out, broken bytes become U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes tokens as they come."""
        return StreamDecoder(self._bytes)


class StreamDecoder:
    """Turn tokens into text piece by piece; half a character waits for its other half."""

    def __init__(self, table: Sequence[bytes]) -> None:
        """Keep the bytes of every token."""
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        return self._decoder.decode(b"".join(self._table[i] for i in ids))

    def finish(self) -> str:
        """Return what was left incomplete (as U+FFFD)."""
        return self._decoder.decode(b"", final=True)
