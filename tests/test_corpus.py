"""The engine's training text: deterministic, correct, split, and not repetitive."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchlib.reference_engine import corpus, synthetic, textbook
from benchlib.reference_engine import tokenizer as bpe

OPENINGS = Path(corpus.__file__).parents[1] / "prompts" / "openings.toml"
SYNTHETIC = {"textbook": 0.3, "arith": 0.4, "json": 0.3}


@pytest.fixture(scope="module")
def tokenizer() -> bpe.Tokenizer:
    """A tokenizer of the synthetic kinds."""
    documents = itertools.islice(corpus.iter_documents(0, mixture=SYNTHETIC), 400)
    return bpe.train(d.text for d in documents)


@pytest.fixture(autouse=True)
def few_real_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the real files of two small packages only."""
    found = [s for s in corpus.sources() if s.package in {"Jinja2", "aiohttp"}]
    monkeypatch.setattr(corpus, "sources", lambda: found)
    corpus.real_files.cache_clear()
    yield
    corpus.real_files.cache_clear()


def test_documents_are_deterministic_and_of_all_kinds() -> None:
    first = list(itertools.islice(corpus.iter_documents(3), 200))
    assert first == list(itertools.islice(corpus.iter_documents(3), 200))
    assert {d.kind for d in first} == set(corpus.MIXTURE)
    assert first != list(itertools.islice(corpus.iter_documents(4), 200))


def test_textbook_states_true_results() -> None:
    for i in range(40):
        text = textbook.document(random.Random(i))
        scope: dict[str, object] = {"__name__": "lesson"}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(text, scope)
            for name in [n for n in scope if n.startswith("test_")]:
                exec(f"{name}()", scope)


def test_all_bodies_of_an_entry_agree() -> None:
    rng = random.Random(0)
    for entry in itertools.chain(*textbook.chapters().values()):
        for body in entry.bodies[1:]:
            other = textbook._define(entry.params, body)
            for _ in range(5):
                args: list[object] = []
                for kind in entry.kinds:
                    args.append(textbook._argument(rng, kind, args))
                assert other(*args) == entry.solve(*args), entry.names


def test_every_equation_of_a_worksheet_holds() -> None:
    equation = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+(?: [-+*] \d+)*)(?=[,. ])")
    for i in range(60):
        found = equation.findall(synthetic.arithmetic(random.Random(i)))
        assert len(found) > 30
        assert all(eval(left) == eval(right) for left, right in found)


def test_json_documents_parse_and_totals_add_up() -> None:
    for i in range(60):
        document = json.loads(synthetic.json_document(random.Random(i)))
        for order in document.get("orders", []):
            assert all(q * p == cost for _, q, p, cost in order["items"])
            assert order["total"] == sum(cost for *_, cost in order["items"])


@pytest.mark.parametrize("kind", list(SYNTHETIC))
def test_synthetic_documents_seldom_repeat(tokenizer: bpe.Tokenizer, kind: str) -> None:
    shares = []
    for text in corpus.evaluation_documents(kind, 10):
        ids = tokenizer.encode(text)
        shares += [corpus.repeated_share(ids[i : i + 256]) for i in range(0, len(ids) - 256, 128)]
    assert np.mean(shares) < 0.15
    assert np.quantile(shares, 0.95) < 0.25


def test_split_has_no_common_first_line() -> None:
    stream = corpus.synthetic_documents("json", 0)
    train = {next(stream).split("\n")[0] for _ in range(200)}
    assert not train & {d.split("\n")[0] for d in corpus.evaluation_documents("json", 5)}


def test_real_files_are_clean_and_described() -> None:
    rows = corpus.describe_sources()
    assert rows["aiohttp"]["licence"] == "Apache-2.0"
    assert all("\r" not in f.text and "<|" not in f.text for f in corpus.real_files())
    assert len({f.text for f in corpus.real_files()}) == len(corpus.real_files())


def test_clean_drops_a_licence_comment() -> None:
    assert corpus.clean("# Copyright me\n# all\n\nx = 1\r\n") == "x = 1\n"
    assert corpus.clean("# a note\nx = 1 \n\n") == "# a note\nx = 1\n"


def test_tokens_do_not_depend_on_the_number_of_workers(
    tokenizer: bpe.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SHARD", 4000)
    one = corpus.build_tokens(tokenizer, 60_000, seed=1, mixture=SYNTHETIC)
    assert one.dtype == np.uint16
    assert len(one) == 60_000
    assert one.max() < tokenizer.vocab_size
    assert tokenizer.mask_token_id not in one
    assert (one == tokenizer.eos_token_id).sum() > 10
    assert np.array_equal(one, corpus.build_tokens(tokenizer, 60_000, 1, 2, mixture=SYNTHETIC))


def test_openings_are_held_out_and_short(tokenizer: bpe.Tokenizer) -> None:
    openings = tomllib.loads(OPENINGS.read_text(encoding="utf-8"))
    kinds = {"fib": "textbook", "qsort": "textbook", "arith": "arith", "json": "json"}
    assert set(openings) == set(kinds)
    for name, opening in openings.items():
        assert corpus.held_out(kinds[name], opening["text"]), name
        assert 50 <= len(tokenizer.encode(opening["text"])) <= 260, name
