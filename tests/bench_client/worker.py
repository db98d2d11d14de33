"""One client under test in a process of its own: a JSON line in asks for a load, a JSON line out says how it went.

`python worker.py ours|sglang-python|sglang-rust FOLDER CPU FIFO`, under the interpreter that has the client.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

NEW_TOKENS, PROMPT_TOKENS = 100, 32
REALTIME = os.sched_param(10)


def ours(url: str, streams: int, requests: int, folder: Path) -> dict[str, Any]:
    from benchlib.clock import run_bench

    found = run_bench(url, streams=streams, requests=requests, new_tokens=NEW_TOKENS)
    return {"tok_s": found.output_throughput_tok_s, "ttft_ms": found.ttft_ms_p50, "done": requests - found.failed}


def theirs(kind: str, url: str, streams: int, requests: int, folder: Path) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    out = folder / f"{kind}.jsonl"
    options = {
        "backend": "sglang", "host": host, "port": port,
        "model": folder / "tokenizer", "tokenizer": folder / "tokenizer",
        "dataset-name": "random-ids", "random-input-len": PROMPT_TOKENS, "random-output-len": NEW_TOKENS,
        "random-range-ratio": 1.0, "num-prompts": requests, "max-concurrency": streams, "warmup-requests": 1,
        "output-file": out,
    }  # fmt: skip
    sys.argv = ["bench", "--disable-tqdm", *(str(x) for key, value in options.items() for x in (f"--{key}", value))]
    if kind == "sglang-rust":
        rust_client().run_argv(sys.argv)
    else:
        importlib.import_module("sglang.benchmark.serving").cli_main()
    told = json.loads(out.read_text().splitlines()[-1])
    return {"tok_s": told["output_throughput"], "ttft_ms": told["median_ttft_ms"], "done": told["completed"]}


def rust_client() -> Any:
    """The compiled client by itself: `import sglang` would bring torch along."""
    if "_bench" not in sys.modules:
        package = importlib.util.find_spec("sglang")
        roots = package.submodule_search_locations if package else None
        (path,) = Path(next(iter(roots or []))).glob("srt/rust_extensions/_bench*.so")
        spec = importlib.util.spec_from_file_location("_bench", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["_bench"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["_bench"])
    return sys.modules["_bench"]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["<unk>", "token", *(f"w{n}" for n in range(2000))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(words)}))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    kind, folder, cpu, fifo = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "fifo"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what clients print is not for the reader of the answers
    if kind == "sglang-python":
        importlib.import_module("sglang.benchmark.serving")  # a minute, once
    if kind != "ours" and not (folder / "tokenizer").is_dir():
        write_tokenizer(folder / "tokenizer")
    os.sched_setaffinity(0, {cpu})
    for line in sys.stdin:
        load = json.loads(line)
        if fifo:
            os.sched_setscheduler(0, os.SCHED_FIFO, REALTIME)
        before = cpu_s()
        try:
            told = ours(**load, folder=folder) if kind == "ours" else theirs(kind, **load, folder=folder)
        except SystemExit as left:
            told = {"error": f"exit {left.code}"}
        told["cpu_s"] = cpu_s() - before
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
