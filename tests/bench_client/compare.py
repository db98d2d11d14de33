"""Our client beside SGLang's two, the same load against the paced server, in one run: `make bench-client`.

One core for the server and one for the client. CPU a chunk is what three more waves of requests cost the whole process,
so that starting, tokenizing prompts and the like are not in it; reading the replies is. The rate is that of four waves,
ramps included, over the ideal. The bias is the median TTFT over the schedule's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchlib.client import get_json
from benchlib.paced_server import Schedule, run_paced_server
from tests.bench_client.worker import NEW_TOKENS, REALTIME

WAVES = 4
SCHEDULE = Schedule(ttft_ms=20.0, interval_ms=10.0)
REQUEST_S = (SCHEDULE.ttft_ms + SCHEDULE.interval_ms * (NEW_TOKENS - 1)) / 1000
BARS = {
    **{(streams, "cpu_us"): 8.0 for streams in (64, 256, 512)},
    **{(256, "rate_percent"): 98.0, (512, "rate_percent"): 97.0, (64, "bias_ms"): 1.0, (256, "bias_ms"): 1.0},
}
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Our client beside SGLang's, against the paced server.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--fifo", action="store_true", help="real-time priority for server and client: a busy machine")
    parser.add_argument("--server", default="", help="address of another paced server, such as one in C")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    rows: dict[tuple[str, int], list[Row]] = defaultdict(list)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = {"ours": sys.executable}
        if python := os.environ.get("BENCHLIB_SGLANG_PYTHON"):
            names |= {"sglang-rust": python, "sglang-python": python}
        workers = {
            name: stack.enter_context(worker(name, interpreter, Path(folder), cpus[-1], options.fifo))
            for name, interpreter in names.items()
        }
        url = options.server or stack.enter_context(paced(cpus[0], options.fifo))
        for repeat in range(options.repeats):
            for streams in options.streams:
                for name, process in workers.items():
                    row = measure(process, url, streams, not options.server)
                    rows[name, streams].append(row)
                    show(f"{repeat + 1}/{options.repeats} {name:<14}{streams:>4} streams  {json.dumps(row)}")
    show(f"\n{len(cpus)} CPUs, load {os.getloadavg()[0]:.1f}, real-time priority: {options.fifo}; medians (and range)")
    show_table(rows)
    if not os.environ.get("BENCHLIB_SGLANG_PYTHON"):
        show("SGLang's clients were not run: set BENCHLIB_SGLANG_PYTHON to an interpreter that has sglang")


@contextmanager
def paced(cpu: int, fifo: bool) -> Iterator[str]:
    """The packaged server, pinned: it inherits what this process is while it starts it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    if fifo:
        os.sched_setscheduler(0, os.SCHED_FIFO, REALTIME)
    with run_paced_server(SCHEDULE) as url:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, before)
        yield url


@contextmanager
def worker(name: str, python: str, folder: Path, cpu: int, fifo: bool) -> Iterator[subprocess.Popen[str]]:
    command = [python, str(Path(__file__).with_name("worker.py")), name, str(folder), str(cpu), "fifo" if fifo else ""]
    with (folder / f"{name}.log").open("w") as log:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process: subprocess.Popen[str]
        with subprocess.Popen(command, text=True, env=env, **pipes) as process:
            yield process


def measure(process: subprocess.Popen[str], url: str, streams: int, own: bool) -> Row:
    few = ask(process, url, streams, streams)
    late = get_json(f"{url}/lateness") if own else {}
    many = ask(process, url, streams, WAVES * streams)
    late = get_json(f"{url}/lateness") if own else {}
    row = {
        "cpu_us": 1e6 * (many["cpu_s"] - few["cpu_s"]) / ((WAVES - 1) * streams * NEW_TOKENS),
        "rate_percent": 100 * many["tok_s"] * REQUEST_S / (streams * NEW_TOKENS),
        "bias_ms": many["ttft_ms"] - SCHEDULE.ttft_ms,
        "late_p50_ms": late.get("p50_ms", math.nan),
        "late_p99_ms": late.get("p99_ms", math.nan),
    }
    return {key: round(value, 2) for key, value in row.items()}


def ask(process: subprocess.Popen[str], url: str, streams: int, requests: int) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"url": url, "streams": streams, "requests": requests}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline() or '{"error": "it ended"}'
    told: dict[str, Any] = json.loads(line)
    if told.get("done") != requests:
        log = Path(process.args[3]) / f"{process.args[2]}.log"
        sys.exit(f"{process.args}: {streams} streams, {requests} requests: {told}\n{log.read_text()[-1000:]}")
    return told


def show_table(rows: dict[tuple[str, int], list[Row]]) -> None:
    columns = {"cpu_us": "CPU us/chunk", "rate_percent": "% of ideal", "bias_ms": "TTFT bias ms"}
    columns |= {"late_p50_ms": "server late p50", "late_p99_ms": "p99 ms"}
    show(
        f"{'streams':>7} {'client':<14}" + "".join(f"{title:>24}" for title in columns.values()) + f"{'CPU / ours':>12}"
    )
    for (name, streams), repeats in sorted(rows.items(), key=lambda item: item[0][1]):
        cells = []
        for key in columns:
            values = [row[key] for row in repeats]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        ratio = middle(repeats, "cpu_us") / middle(rows["ours", streams], "cpu_us")
        show(f"{streams:>7} {name:<14}" + "".join(f"{cell:>24}" for cell in cells) + f"{ratio:>12.2f}")
    for (streams, key), bar in BARS.items():
        if ours := rows.get(("ours", streams)):
            seen = middle(ours, key)
            met = seen >= bar if key == "rate_percent" else seen <= bar
            show(f"{'met' if met else 'MISSED'} at {streams} streams: {columns[key]} {seen:.2f}, bar {bar:g}")


def middle(rows: list[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def show(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
