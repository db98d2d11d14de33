"""The engine's tokenizer: exact, deterministic, and loadable by others."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchlib.reference_engine import tokenizer as bpe

TEXTS = [
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nassert add(12, 345) == 357\n",
    '{"id": 12, "name": "Zoë", "items": [["tea", 3, 4, 12]]}\n',
    "for i in range(10):\n        print('日本語 — ☃ 😀')\n\tdone\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> bpe.Tokenizer:
    """A small tokenizer."""
    return bpe.train(TEXTS * 20, vocab_size=400)


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "\n\n\n", "a  b\t\tc \u00a0\r\n 1 23"])
def test_round_trip(tokenizer: bpe.Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_fixed_ids(tokenizer: bpe.Tokenizer) -> None:
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.decode([0, 1, *tokenizer.encode("x"), 2]) == "x"
    assert tokenizer.vocab_size <= 400


def test_every_digit_is_its_own_token(tokenizer: bpe.Tokenizer) -> None:
    assert len(tokenizer.encode("1234567")) == 7
    assert len(tokenizer.encode(" 1234567")) == 7


def test_stream_never_breaks_a_character(tokenizer: bpe.Tokenizer) -> None:
    for text in TEXTS:
        stream = tokenizer.stream()
        pieces = [stream.push([i]) for i in tokenizer.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == text


def test_stream_of_broken_bytes_equals_decode(tokenizer: bpe.Tokenizer) -> None:
    ids = tokenizer.encode("日本")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == tokenizer.decode(ids)


def test_training_is_deterministic(tokenizer: bpe.Tokenizer) -> None:
    assert bpe.train(TEXTS * 20, vocab_size=400).to_json() == tokenizer.to_json()


def test_saved_folder_loads_here_and_in_transformers(tokenizer: bpe.Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = bpe.Tokenizer.load(tmp_path)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_token_id
    assert theirs.mask_token_id == tokenizer.mask_token_id
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(ids) == text
