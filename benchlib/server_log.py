"""What an SGLang server's log tells: why it died, and what it did otherwise than asked (texts of 0.5.17 to 0.5.23).

One death leaves many errors: in the parent, in the other ranks, at the pipes between them. The first is the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Cause", "Kind", "LogFacts", "explain_death", "read_log_facts"]

Kind = Literal["out of memory", "port in use", "missing file", "NCCL error", "CUDA error", "import error",
               "unknown flag", "unsupported", "hang", "killed", "python error"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a server died: a line of its log, empty where only the exit code tells, and what to do."""

    kind: Kind
    line: str
    advice: str


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a server tells of its work. SGLang logs one decode batch in `--decode-log-interval`."""

    decode_batches: int
    without_graph: int | None  # of those; None where no line tells
    max_running_requests: int | None  # as it came to be; None where no line tells
    capped_by: str | None
    retractions: int  # how often a running request was put back for want of memory


TAIL, WIDTH = 4 << 20, 400  # characters: a death is told at the end; of a longer line the rest is left out
USAGE = r"^[\w ./-]+: error: (unrecognized|ambiguous|argument -|the following arguments)"
SIGNALLED = "A signal ended it or one of its processes, and no error stands before: see dmesg or the job scheduler."
# Read downwards: what is more particular stands above.
KINDS: tuple[tuple[Kind, str, str], ...] = (
    ("unknown flag", USAGE, "Correct server_args; the engine's --help lists what it takes."),
    ("hang", r"watchdog timeout \(", "A step outlasted --watchdog-timeout: see in the log what the ranks waited for."),
    ("out of memory", r"(?i)out ?of ?memory|^memoryerror|not enough memory|cache is too small|alloc_failed",
     "Lower --mem-fraction-static if an allocation failed, raise it if a pool came out too small; or take fewer "
     "max_running_requests, a smaller tree_budget or a larger tp_size."),
    ("port in use", r"(?i)address already in use|port at \d+ is not available",
     "End what listens there (`ss -ltnp` names it; a stale server?), or take another port."),
    ("import error", r"^(\w+\.)*(ImportError|ModuleNotFoundError)",
     "Install what it names into the server's Python, at the version that this SGLang pins."),
    ("missing file", r"FileNotFound|No such file|EntryNotFound|RepositoryNotFound|GatedRepo|Repo id must|local folder|"
     r"any model weights|in its config\.json|[Cc]an't load|couldn't connect|not appear to have",
     "See that model_path and draft_model_path hold config, tokenizer and weights; download a hub name first."),
    ("CUDA error", r"CUDA (driver )?error|CUBLAS|CUDNN|AcceleratorError|CUDA GPUs|NVIDIA driver|Error \[CUDA|kernel im",
     "See nvidia-smi and the kernel's log (Xid); CUDA_LAUNCH_BLOCKING=1 finds the failing call."),
    ("NCCL error", r"NCCL|DistBackend|DistNetwork|DistStore|TCPStore",
     'Try nccl_profile "none"; the NCCL lines above, of NCCL_DEBUG=INFO, say what failed.'),
    ("unsupported", r"^NotImplementedError|Error: .*((?i:not support|unsupported|only support|unknown speculative)|"
     r"divisible|requires?\b|must (be|match)|implements neither|compatible)",
     "This SGLang cannot do it with this model, device or set of flags: change what the line names."),
    ("killed", r"Fatal Python error|SIGTERM received|(?i:sigquit)", SIGNALLED),
)  # fmt: skip
TRACEBACK = "Traceback (most recent call last)"
CHAINED = re.compile(r"During handling of the above|The above exception was")
HARMLESS = re.compile(r"Exception ignored|ASGI application|never retrieved|Logging error")
RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")
# Errors that only tell of the death of another process.
ECHO = re.compile(r"\S*(EOFError|BrokenPipe|ConnectionReset|Interrupt|SystemExit|Cancelled)|"
                  r".*(exit code: \d|Initialization failed)")  # fmt: skip
ALONE = re.compile(rf"{USAGE}|to bind on address|watchdog timeout \(.*soft=False|caught collective|what\(\):  |"
                   r"Fatal Python error|SIGTERM received|(?i:sigquit)|(exit code|terminated with) -\d")  # fmt: skip
ALIVE = re.compile(r"Decode batch|fired up and ready")
DIED = re.compile(r"(?:exit code:?|terminated with) -(\d+)")
HOLDER = re.compile(r"Process \d+ has [\d.]+ \w+ memory in use")
STAMP = re.compile(r"^\[[^\]]*\]:? ?")
OTHER_RANK = re.compile(r"\[[^\]]* TP[1-9]")
LIMIT = re.compile(r"max_running_requests=(\d+), context_len")
CAPPED = re.compile(r"max_running_requests (?:is capped to|was .*to|\d+ ->) (\d+).*?(?=\. |$)")


def explain_death(log: str, exit_code: int | None) -> Cause | None:
    """Why the server that wrote `log` ended; None where neither tells. `exit_code` counts signals as -n or 128 + n."""
    errors = _first_errors(log[-TAIL:])
    for line in errors:
        if died := DIED.search(line):
            return _killed(int(died[1]), line)
    for kind, pattern, advice in KINDS:
        if line := next((error for error in errors if re.search(pattern, error)), ""):
            holders = HOLDER.findall(line) if kind == "out of memory" else []
            advice = f"{', '.join(holders)}: end a stale server, or take other GPUs." if holders else advice
            return None if kind == "killed" and exit_code == 0 else Cause(kind, line, advice)
    if errors:
        return Cause("python error", errors[-1], "Its traceback in the log shows where it was raised.")
    number = 0 if exit_code is None else -exit_code if exit_code < 0 else exit_code - 128
    return _killed(number, "") if number > 0 else None


def _killed(number: int, line: str) -> Cause:
    if number == signal.SIGKILL:
        return Cause("out of memory", line, "SIGKILL, as the kernel sends it when host memory runs out: see dmesg.")
    return Cause("killed", line or f"signal {number}", SIGNALLED)


def _first_errors(text: str) -> list[str]:
    """Last lines of the tracebacks of the first error that the server did not outlive, or the line that tells it."""
    found: list[str] = []
    doomed = fatal = inside = wanted = chained = False
    before = ""
    for whole in filter(str.strip, text.splitlines()):
        line = STAMP.sub("", whole[:WIDTH]) if whole.startswith("[rank") else whole[:WIDTH]
        if TRACEBACK in line:
            # A traceback that follows from the one above it shares its fate.
            fatal = "hit an exception" in line and not doomed
            wanted = wanted if chained else fatal or not (found or HARMLESS.search(before + line))
            inside, chained = True, False
        elif inside and RAISED.match(line):
            inside = False
            if wanted and not ECHO.match(line):
                # What came before a scheduler's end did not end it.
                found, doomed, fatal = [line] if fatal else [*found, line], doomed or fatal, False
        elif found and before == found[-1] and before.endswith(": "):  # a message that begins on the next line
            found[-1] += line
        elif CHAINED.match(line):
            chained = True
        elif not found and ALONE.search(line):
            found, doomed = [STAMP.sub("", line).strip()], True
        elif not doomed and ALIVE.search(line):
            found = []
        before = line
    return found


def read_log_facts(log: str) -> LogFacts:
    """What the batch lines and the warnings tell; never raises. Where ranks repeat a line, the first rank's counts."""
    batches = list(_lines(log, "Decode batch"))
    limits = list(_lines(log, "max_running_requests"))
    caps = [found for line in limits if (found := CAPPED.search(line))]
    final = [found for line in limits if (found := LIMIT.search(line))] or caps
    return LogFacts(
        decode_batches=len(batches),
        without_graph=sum(" graph: False" in b for b in batches) if any(" graph: " in b for b in batches) else None,
        max_running_requests=int(final[-1][1]) if final else None,
        capped_by=caps[-1][0] if caps else None,
        retractions=sum(int(n) for line in _lines(log, "#retracted_reqs: ") for n in re.findall(r"_reqs: (\d+)", line)),
    )


def _lines(log: str, text: str) -> Iterator[str]:
    """Each line that holds `text`, as far as WIDTH around it, but not those of further tensor-parallel ranks."""
    at = log.find(text)
    while at >= 0:
        begin = max(at - WIDTH, 0, log.rfind("\n", max(at - WIDTH, 0), at) + 1)
        end = log.find("\n", at, at + WIDTH)
        end = at + WIDTH if end < 0 else end
        if not OTHER_RANK.match(line := log[begin:end]):
            yield line
        at = log.find(text, end)
