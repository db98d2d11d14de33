"""Causes of death and facts, read from real logs (cut down) and from texts that SGLang, torch and C++ print."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchlib.server_log import explain_death, read_log_facts

LOGS = Path(__file__).parent / "data" / "logs"
RAISE = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\n    g()\n"
CRASH = f"[2026-11-29 15:01:46 TP0] Scheduler hit an exception: {RAISE}"
QUIT = "[2026-11-29 15:01:46] Received sigquit from a child process. It usually means the child failed.\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB.\n"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled cuda error, NCCL version 2.28.9\n"
)
DECODE = "[2026-11-29 15:23:25{}] Decode batch, #running-req: 1, #token: 47, cuda graph: {}, gen throughput: 1\n"


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def cause(log: str, exit_code: int | None = 1) -> tuple[str, str]:
    found = explain_death(log, exit_code)
    assert found is not None
    assert found.advice.endswith(".")
    return found.kind, found.line


@pytest.mark.parametrize(
    ("name", "exit_code", "kind", "line"),
    [
        (
            "oom_relaunch",
            137,
            "out of memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 340.00 MiB",
        ),
        ("missing_model", 1, "missing file", "Repo id must be in the form"),
        ("empty_model", 1, "missing file", "Unrecognized model in /models/empty"),
        ("missing_weights", 137, "missing file", "Cannot find any model weights with `/models/tiny`"),
        ("bad_flag", 2, "unknown flag", "ambiguous option: --cuda-graph-max-bs"),
        ("dflash_on_cpu", 1, "unsupported", "DFLASH speculative decoding is not supported by"),
        ("ddtree_on_stock", 1, "unsupported", "Unknown speculative algorithm name: DDTREE"),
        ("missing_library", 1, "import error", "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops"),
        ("missing_module", 137, "import error", "ModuleNotFoundError: No module named 'vllm'"),
        ("index_error", 137, "python error", "IndexError: index is out of bounds for dimension with size 0"),
        ("port_in_use", 1, "port in use", "[Errno 98] error while attempting to bind on address"),
        ("tp2", 143, "killed", "SIGTERM received."),
    ],
)
def test_real_deaths(name: str, exit_code: int, kind: str, line: str) -> None:
    found = cause(read(name), exit_code)
    assert found[0] == kind
    assert line in found[1]


def test_who_holds_the_memory_is_named() -> None:
    found = explain_death(read("oom_relaunch"), -9)
    assert found is not None
    assert found.advice.startswith("Process 3294 has 112.58 GiB memory in use: ")
    assert "--mem-fraction-static" in (explain_death(CRASH + OOM, 1) or found).advice


def test_a_server_that_was_stopped_in_order_has_no_cause() -> None:
    assert explain_death(read("tp2"), 0) is None
    assert explain_death(read("dflash_capped"), None) is None
    assert explain_death("", 1) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sglang serve: error: unrecognized arguments: --speculative-ddtree-budget 4", "unknown flag"),
        ("launch_server.py: error: the following arguments are required: --model-path/--model", "unknown flag"),
        ("[2026-11-29 15:01:46] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "hang"),
        ("[2026-11-29 15:01:46] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): "
         "address already in use", "port in use"),
        (f"[x] Port is already in use. nccl_port=5\n{RAISE}ValueError: nccl_port at 5 is not available in 30 seconds. "
         "nccl_port is used by a process already.", "port in use"),
        (f"{CRASH}torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
         "address. port: 29500, code: -98, name: EADDRINUSE, message: address already in use", "port in use"),
        (f"{CRASH}RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)", "NCCL error"),
        (CRASH + NCCL, "NCCL error"),
        ("terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 1] Process "
         "group watchdog thread terminated with exception: CUDA error: an illegal memory access", "CUDA error"),
        ("[rank1]:[E1129 15:01 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=4, OpType=ALLREDUCE) ran for 600011 milliseconds", "NCCL error"),
        (f"{CRASH}RuntimeError: CUDA error: no kernel image is available for execution on the device", "CUDA error"),
        (f"{CRASH}Exception: Capture cuda graph failed: CUDA out of memory.", "out of memory"),
        (f"{CRASH}RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out of memory"),
        (f"{CRASH}NotImplementedError", "unsupported"),
        (f"{CRASH}ValueError: DFLASH speculative decoding requires setting --speculative-draft-model-path.",
         "unsupported"),
        (f"{RAISE}OSError: /models/x does not appear to have a file named config.json.", "missing file"),
        ("Fatal Python error: Segmentation fault", "killed"),
        ("[x] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
         "out of memory"),
        (f"{RAISE}EOFError\n\n{RAISE}RuntimeError: Rank 0 scheduler died during initialization (exit code: -11). If "
         "exit code is -9 (SIGKILL), a common cause is the OS OOM killer.", "killed"),
        (f"[rank0]: {RAISE.replace(chr(10), chr(10) + '[rank0]: ')}KeyError: 'x'", "python error"),
    ],
)  # fmt: skip
def test_known_texts(text: str, kind: str) -> None:
    assert cause(text)[0] == kind
    assert cause(f"starting\n{text}\n{QUIT}{CRASH}BrokenPipeError: [Errno 32] Broken pipe\n")[0] == kind


def test_the_first_error_is_the_cause() -> None:
    assert cause(CRASH + OOM + QUIT + CRASH + NCCL, 137) == ("out of memory", OOM.strip())
    assert cause(CRASH + NCCL + QUIT + CRASH + OOM, 137) == ("NCCL error", NCCL.strip())
    hang = "[x] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
    assert cause(CRASH + OOM + hang)[0] == "out of memory"
    assert cause(hang + CRASH + NCCL)[0] == "hang"


def test_of_a_chain_the_telling_error_is_shown() -> None:
    chain = f"{CRASH}KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{RAISE}"
    assert cause(f"{chain}ValueError: b") == ("python error", "ValueError: b")
    assert cause(f"{chain}{OOM}{CRASH}{NCCL}") == ("out of memory", OOM.strip())


def test_what_kills_nothing_is_no_cause() -> None:
    ignored = "[x] Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'\n"
    assert explain_death(ignored, 1) is None
    assert explain_death("[x] Scheduler watchdog timeout (self.watchdog_timeout=9, self.soft=True)\n", 1) is None
    assert explain_death(f"ERROR:    Exception in ASGI application\n{RAISE}ValueError: x\n", 1) is None
    assert explain_death("[x] [http_server] Error: The input (9000 tokens) is longer\n", 1) is None
    survived = f"{RAISE}ImportError: no optional thing\n[x] The server is fired up and ready to roll!\n"
    assert explain_death(survived, 1) is None
    assert cause(survived + CRASH + OOM)[0] == "out of memory"
    assert cause(f"[x] cannot load an optional thing\n{RAISE}ImportError: y\n{CRASH}{OOM}")[0] == "out of memory"
    # Another rank may log a batch after the scheduler of the first has fallen.
    assert cause(CRASH + OOM + DECODE.format("", "True"))[0] == "out of memory"


@pytest.mark.parametrize(
    ("code", "kind"), [(137, "out of memory"), (-9, "out of memory"), (-11, "killed"), (134, "killed")]
)
def test_without_an_error_the_exit_code_tells(code: int, kind: str) -> None:
    assert cause(DECODE.format("", "True"), code)[0] == kind
    # SGLang ends itself with SIGKILL: that is no sign of memory running out.
    assert cause(DECODE.format("", "True") + QUIT, code)[0] == "killed"


def test_facts_of_real_logs() -> None:
    capped = read_log_facts(read("dflash_capped"))
    assert (capped.decode_batches, capped.without_graph, capped.retractions) == (6, 0, 0)
    assert capped.max_running_requests == 8
    slots = "max_mamba_cache_size=40, 5 state slots per request"
    assert capped.capped_by == f"max_running_requests is capped to 8 by the mamba state cache ({slots})"
    for name in ("small", "tp2"):
        facts = read_log_facts(read(name))
        assert (facts.decode_batches, facts.without_graph, facts.max_running_requests) == (6, 0, 16)
        assert facts.capped_by is None
    # What was asked for is no fact of a server that did not come up.
    assert "max_running_requests=16" in read("oom_relaunch")
    assert read_log_facts(read("oom_relaunch")).max_running_requests is None
    assert read_log_facts(read("oom_relaunch")).without_graph is None


def test_ranks_that_repeat_a_line_are_counted_once() -> None:
    log = read("tp2")
    both = log + "\n".join(line.replace(" TP0]", " TP1]") for line in log.splitlines())
    assert read_log_facts(both) == read_log_facts(log)
    retracted = (
        "[2026-11-29 15:23:25{}] KV cache pool is full. Retract requests. #retracted_reqs: {}, #new_tokens_gained: 9\n"
    )
    lines = [retracted.format(rank, n) for n in (1, 2) for rank in (" TP0", " TP1", " TP12")]
    assert read_log_facts("".join(lines)).retractions == 3


def test_batches_without_a_graph_are_counted() -> None:
    log = DECODE.format("", "True") + DECODE.format("", "False") * 2
    assert read_log_facts(log).without_graph == 2
    assert read_log_facts(log.replace("cuda graph", "cpu graph")).without_graph == 2
    prefill = "[x] Prefill batch, #new-seq: 1, cuda graph: False\n"
    assert read_log_facts(prefill).decode_batches == 0
    assert read_log_facts("[x] Decode batch, #running-req: 1\n").without_graph is None


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("max_running_requests was reduced from the requested 16 to 4 (per dp worker) due to the available KV cache "
         "capacity. More", 4),
        ("max_running_requests 16 -> 12", 12),
    ],
)  # fmt: skip
def test_other_caps(line: str, limit: int) -> None:
    facts = read_log_facts(f"[2026-11-29 15:23:25 TP0] Post-capture KV sizing: {line}\nnext\n")
    assert facts.max_running_requests == limit
    assert facts.capped_by == line.removesuffix(". More")


PIECES = [CRASH, OOM, NCCL, QUIT, DECODE, RAISE, "max_running_requests ", "=1, context_len", " -> ", "exit code -", "9",
          "#retracted_reqs: ", "\n", "[", "[rank0]: ", ": error: ", "During handling of the above"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text()).map("".join), st.none() | st.integers())
def test_any_text_can_be_read(log: str, exit_code: int | None) -> None:
    found = explain_death(log, exit_code)
    assert found is None or found.advice
    facts = read_log_facts(log)
    assert facts.decode_batches >= (facts.without_graph or 0)


@pytest.mark.parametrize(
    "text",
    [DECODE.format(" TP0", "True"), "\n", "x", "Decode batch", f" {RAISE}", "#retracted_reqs: 1", f"{CRASH}E: \n"],
)
def test_long_logs_are_read_quickly(text: str) -> None:
    log = text * (10_000_000 // len(text))
    began = time.process_time()
    explain_death(log, 1)
    read_log_facts(log)
    assert time.process_time() - began < 5
