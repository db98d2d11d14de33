"""Training text of the embedded engine: real Python and documentation, textbook code, arithmetic, JSON."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import multiprocessing
import os
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchlib.reference_engine import synthetic, textbook
from benchlib.reference_engine import tokenizer as bpe

MIXTURE = {"code": 0.40, "docs": 0.05, "textbook": 0.15, "arith": 0.20, "json": 0.20}
MAKERS: dict[str, Callable[[random.Random], str]] = {
    "textbook": textbook.document,
    "arith": synthetic.arithmetic,
    "json": synthetic.json_document,
}
# Import name -> (distribution, licence): only licences that permit reuse with attribution.
PACKAGES: dict[str, tuple[str, str]] = {
    "numpy": ("numpy", "BSD-3-Clause"),
    "scipy": ("scipy", "BSD-3-Clause"),
    "pandas": ("pandas", "BSD-3-Clause"),
    "matplotlib": ("matplotlib", "Matplotlib (PSF-based)"),
    "networkx": ("networkx", "BSD-3-Clause"),
    "sympy": ("sympy", "BSD-3-Clause"),
    "mpmath": ("mpmath", "BSD-3-Clause"),
    "sklearn": ("scikit-learn", "BSD-3-Clause"),
    "statsmodels": ("statsmodels", "BSD-3-Clause"),
    "seaborn": ("seaborn", "BSD-3-Clause"),
    "torch": ("torch", "BSD-3-Clause"),
    "jax": ("jax", "Apache-2.0"),
    "jinja2": ("Jinja2", "BSD-3-Clause"),
    "aiohttp": ("aiohttp", "Apache-2.0"),
    "requests": ("requests", "Apache-2.0"),
    "transformers": ("transformers", "Apache-2.0"),
    "tornado": ("tornado", "Apache-2.0"),
    "attr": ("attrs", "MIT"),
    "rich": ("rich", "MIT"),
    "pydantic": ("pydantic", "MIT"),
    "pytest": ("pytest", "MIT"),
    "_pytest": ("pytest", "MIT"),
    "IPython": ("ipython", "BSD-3-Clause"),
    "pygments": ("Pygments", "BSD-2-Clause"),
    "click": ("click", "BSD-3-Clause"),
    "anyio": ("anyio", "MIT"),
    "PIL": ("pillow", "MIT-CMU (HPND)"),
    "fontTools": ("fonttools", "MIT"),
}
_SKIPPED = {
    "tests", "test", "testing", "_vendor", "vendor", "vendored", "extern", "externals", "external", "_external",
    "third_party", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "idle_test", "lib2to3",
    "cpp", "array_api_compat", "array_api_extra", "_unicodefun", "lexers", "unicode",
}  # fmt: skip
_PACKAGE_LIMIT = 8_000_000
_FILE_LIMIT = 200_000
_SHARD = 250_000
_HELD_OUT = 50  # one document in fifty is kept for evaluation


@dataclass(frozen=True)
class Document:
    """One training document."""

    kind: str
    text: str


@dataclass(frozen=True)
class Source:
    """A package that real files come from."""

    package: str
    version: str
    licence: str
    root: Path


@dataclass(frozen=True)
class RealFile:
    """One file of a source, cleaned."""

    source: Source
    name: str
    kind: str
    text: str


def held_out(kind: str, text: str) -> bool:
    """Tell whether a document is for evaluation: by its text, or by a synthetic one's first line."""
    key = text.split("\n", 1)[0] if kind in MAKERS else text
    digest = hashlib.sha256(f"{kind}\n{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT == 0


# ---------------------------------------------------------------------------- real files
def sources() -> list[Source]:
    """The standard library and every listed package that is installed."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = [Source("python", platform.python_version(), "PSF-2.0", stdlib)]
    for module, (name, licence) in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(next(iter(spec.submodule_search_locations)))
        found.append(Source(name, metadata.version(name), licence, root))
    return found


def clean(text: str) -> str:
    """Normalise line ends and trailing space; drop a leading licence comment."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    lead = re.match(r"(?:#.*\n|\n)+", text)
    if lead and re.search(r"copyright|licen[sc]e", lead[0], re.IGNORECASE):
        text = text[lead.end() :]
    return text.strip("\n") + "\n"


def worth_keeping(text: str) -> bool:
    """Refuse generated tables, minified text, much non-ASCII, and special tokens."""
    if not 200 <= len(text) <= _FILE_LIMIT or "<|" in text:
        return False
    longest = max(map(len, text.split("\n")))
    other = len(text) - len(text.encode("ascii", "ignore"))
    digits = sum(map(text.count, "0123456789"))
    marks = sum(map(text.count, ",'\"|"))
    lines = text.count("\n")
    return longest <= 300 and other <= len(text) // 50 and digits + marks <= len(text) // 6 and lines > 5


def _docstrings(text: str) -> str:
    """Long docstrings of a module, dedented, as documentation."""
    found = re.findall(r'"""(.*?)"""', text, re.DOTALL)
    return "\n\n".join(inspect.cleandoc(d) for d in found if len(d) >= 600)


def _paths(source: Source) -> list[Path]:
    """Files of a source in an order that is fixed but mixes its folders."""
    files = [p for p in source.root.rglob("*") if p.suffix in {".py", ".rst", ".md"}]
    names = [p.relative_to(source.root) for p in files]
    kept = [n for n in names if not _SKIPPED & set(n.parts[:-1])]
    return sorted(kept, key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())


def _read(source: Source) -> Iterator[RealFile]:
    """Clean files of a source up to the limit of one package."""
    room = _PACKAGE_LIMIT if source.package != "python" else 3 * _PACKAGE_LIMIT
    for name in _paths(source):
        try:
            text = clean((source.root / name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if not worth_keeping(text):
            continue
        room -= len(text)
        if room < 0:
            return
        yield RealFile(source, name.as_posix(), "code" if name.suffix == ".py" else "docs", text)
        prose = _docstrings(text) if name.suffix == ".py" else ""
        if worth_keeping(prose):
            yield RealFile(source, f"{name.as_posix()} (docstrings)", "docs", prose + "\n")


@cache
def real_files() -> tuple[RealFile, ...]:
    """Every usable real file once, in a fixed order."""
    seen: set[bytes] = set()
    files = []
    for source in sources():
        for file in _read(source):
            key = hashlib.sha256(file.text.encode()).digest()
            if key not in seen:
                seen.add(key)
                files.append(file)
    return tuple(files)


def describe_sources() -> dict[str, dict[str, str | int]]:
    """Package -> version, licence, number of files and bytes, for the model card."""
    table: dict[str, dict[str, str | int]] = {}
    for file in real_files():
        s = file.source
        row = table.setdefault(s.package, {"version": s.version, "licence": s.licence, "files": 0, "bytes": 0})
        row["files"] = int(row["files"]) + (not file.name.endswith("(docstrings)"))
        row["bytes"] = int(row["bytes"]) + len(file.text.encode())
    return table


# ----------------------------------------------------------------------------- documents
def synthetic_documents(kind: str, seed: int, *, evaluation: bool = False) -> Iterator[str]:
    """Endless documents of one synthetic kind; both sides of the split never share a first line."""
    make, i = MAKERS[kind], 0
    while True:
        text = make(random.Random(f"{kind}/{seed}/{i}"))
        if held_out(kind, text) == evaluation:
            yield text
        i += 1


def real_documents(kind: str, seed: int, *, evaluation: bool = False) -> Iterator[str]:
    """Endless real documents of one kind, shuffled anew for every pass."""
    texts = [f.text for f in real_files() if f.kind == kind]
    texts = [t for t in texts if held_out(kind, t) == evaluation]
    epoch = 0
    while texts:
        order = list(texts)
        random.Random(f"{kind}/{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1


def documents_of(kind: str, seed: int, *, evaluation: bool = False) -> Iterator[str]:
    """Endless documents of any kind."""
    make = synthetic_documents if kind in MAKERS else real_documents
    return make(kind, seed, evaluation=evaluation)


def iter_documents(
    seed: int, *, mixture: dict[str, float] | None = None, evaluation: bool = False
) -> Iterator[Document]:
    """Endless documents in shares of characters; the same seed gives the same documents."""
    shares = {k: v for k, v in (mixture or MIXTURE).items() if v > 0}
    streams = {k: documents_of(k, seed, evaluation=evaluation) for k in shares}
    given = dict.fromkeys(shares, 0)
    while streams:
        kind = min(streams, key=lambda k: given[k] / shares[k])
        text = next(streams[kind], None)
        if text is None:
            del streams[kind]
            continue
        given[kind] += len(text)
        yield Document(kind, text)


def evaluation_documents(kind: str, count: int, seed: int = 0) -> list[str]:
    """The first held-out documents of a kind."""
    stream = documents_of(kind, seed, evaluation=True)
    return [text for _, text in zip(range(count), stream, strict=False)]


def sample_texts(seed: int, characters: int, *, mixture: dict[str, float] | None = None) -> list[str]:
    """A part of the corpus to train the tokenizer on."""
    texts: list[str] = []
    for document in iter_documents(seed, mixture=mixture):
        texts.append(document.text)
        characters -= len(document.text)
        if characters <= 0:
            break
    return texts


# -------------------------------------------------------------------------------- tokens
Tokens = npt.NDArray[np.uint16]
_TOKENIZER: list[bpe.Tokenizer] = []


def _start_worker(tokenizer_json: str) -> None:
    """Give a worker process its tokenizer; the processes are the parallelism."""
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _TOKENIZER[:] = [bpe.Tokenizer.from_json(tokenizer_json)]


def _encode(texts: Sequence[str]) -> list[Tokens]:
    """Token arrays of documents, each closed by the end token."""
    tokenizer = _TOKENIZER[0]
    end = tokenizer.eos_token_id
    return [np.array([*ids, end], np.uint16) for ids in tokenizer.encode_batch(texts)]


_Job = tuple[str, int, int, int]  # kind, seed, index, tokens


def _shard(job: _Job) -> list[Tokens]:
    """Make about as many tokens of a synthetic kind as the job says."""
    kind, seed, index, size = job
    stream = synthetic_documents(kind, seed * 1_000_003 + index)
    arrays: list[Tokens] = []
    while sum(map(len, arrays)) < size:
        arrays += _encode([next(stream) for _ in range(32)])
    return arrays


def _take(arrays: Sequence[Tokens], budget: int) -> list[Tokens]:
    """Arrays from the front until the budget is met, starting over when they run out."""
    kept: list[Tokens] = []
    i = 0
    while budget > 0 and arrays:
        kept.append(arrays[i % len(arrays)])
        budget -= len(kept[-1])
        i += 1
    return kept


def build_tokens(
    tokenizer: bpe.Tokenizer,
    n_tokens: int,
    seed: int,
    workers: int = 1,
    *,
    mixture: dict[str, float] | None = None,
) -> Tokens:
    """Concatenate shuffled training documents to n_tokens; the number of workers changes nothing."""
    shares = {k: v for k, v in (mixture or MIXTURE).items() if v > 0}
    budgets = {k: int(n_tokens * v / sum(shares.values())) + 1 for k, v in shares.items()}
    run = partial(_parallel, tokenizer.to_json(), workers)
    real = {k: [f.text for f in real_files() if f.kind == k] for k in shares if k not in MAKERS}
    batches = [(k, t[i : i + 64]) for k, ts in real.items() for t in [_train_only(k, ts)] for i in range(0, len(t), 64)]
    jobs = [(k, seed, i, _SHARD) for k in shares if k in MAKERS for i in range(budgets[k] // _SHARD + 1)]
    arrays: dict[str, list[Tokens]] = {k: [] for k in shares}
    results = run([b for _, b in batches], jobs)
    for kind, part in zip([k for k, _ in batches] + [job[0] for job in jobs], results, strict=True):
        arrays[kind] += part
    rng = random.Random(f"order/{seed}")
    chosen: list[Tokens] = []
    for kind, found in arrays.items():
        rng.shuffle(found)
        chosen += _take(found, budgets[kind])
    rng.shuffle(chosen)
    return np.concatenate(chosen)[:n_tokens]


def _train_only(kind: str, texts: list[str]) -> list[str]:
    """Real texts that are not held out."""
    return [t for t in texts if not held_out(kind, t)]


def _parallel(tokenizer_json: str, workers: int, batches: list[list[str]], jobs: list[_Job]) -> Iterator[list[Tokens]]:
    """Encode real batches, then make synthetic shards, in order."""
    if workers <= 1:
        _start_worker(tokenizer_json)
        yield from map(_encode, batches)
        yield from map(_shard, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (tokenizer_json,)) as pool:
        real, made = pool.imap(_encode, batches), pool.imap(_shard, jobs)
        yield from real
        yield from made


# -------------------------------------------------------------------------------- checks
def repeated_share(ids: Sequence[int], size: int = 8) -> float:
    """Share of n-grams of ids that occurred before in the same sequence."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
