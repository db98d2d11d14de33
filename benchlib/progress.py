"""How far a sweep is: told by the kernel that measures, reckoned and shown by the process that waits for it.

The kernel leaves a small file in the run's folder, between rounds and never during one. Nothing depends on it: where
it cannot be written or read, that run's rounds are not seen, and its measurement is the same.
"""

from __future__ import annotations

import functools
import io
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from benchlib.spec import Frozen, RunSpec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Follower", "Listener", "Moment", "Teller", "Told", "format_duration", "format_moment", "load_told",
    "remove_told", "show_progress",
]  # fmt: skip

PROGRESS_FILE = ".progress.json"
LOOK_S = 1.0
# Of plain lines: a log of a campaign of hours is to be read. What changes inside a phase is its cell.
PHASE_S, CELL_S = 3.0, 30.0
BAR_WIDTH = 40
# A terminal that is gone, or that lacks a letter: a sweep goes on without being watched.
UNSHOWN = (OSError, UnicodeError)
Expect = Callable[[RunSpec], float]


class Told(Frozen):
    """What the kernel says of its run before each round."""

    phase: str = Field(description="what comes next: `round 2 of 3: fib 256 x1`")
    done: float = Field(0.0, ge=0, le=1, description="share of the rounds that are over, by tokens asked for")
    tok_s: float | None = Field(None, description="decode rate of the last round, tokens/s a request")


class Teller:
    """Tells a sweep, through a file in `folder`, which round comes next; silent without a folder.

    `tokens` are those asked for in each round of each cell, in measuring order.
    """

    def __init__(self, folder: Path | None, tokens: Sequence[int]) -> None:
        self._folder, self._tokens = folder, tokens

    def tell(self, phase: str, at: int | None = None, rates: Mapping[int, float] | None = None) -> None:
        """Say what comes next: the round at this index of `tokens`; None: all are over. `rates`: of the last round."""
        if self._folder is None:
            return
        done = sum(self._tokens[:at]) / sum(self._tokens) if self._tokens else 1.0
        rate = statistics.fmean(rates.values()) if rates else None
        _save_told(self._folder, Told(phase=phase, done=done, tok_s=rate))


def _save_told(folder: Path, told: Told) -> None:
    temporary = folder / f"{PROGRESS_FILE}.{os.getpid()}.tmp"
    # Not forced to the disk: it is worth nothing after a crash, and the disk may be the server's, too.
    with suppress(OSError):
        temporary.write_text(told.model_dump_json(), encoding="utf-8")
        temporary.replace(folder / PROGRESS_FILE)


def load_told(folder: Path) -> Told | None:
    """What the run's kernel said last; None where it said nothing that can be read."""
    try:
        return Told.model_validate_json((folder / PROGRESS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def remove_told(folder: Path) -> None:
    """Once a record says everything; half-written ones, too."""
    for path in folder.glob(f"{PROGRESS_FILE}*"):
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Moment:
    """A sweep at one moment. `ended` is the run's status once it is over, with its `seconds`."""

    number: int  # of the run, from 1
    total: int
    run: str
    phase: str
    done: float = 0.0  # share of the run's rounds
    tok_s: float | None = None
    left_s: float | None = None  # of the whole sweep; None: nothing is known yet
    assumed: bool = False  # left_s rests on the sweep's `assumed`, measured by nobody here
    ended: str | None = None
    seconds: float = 0.0


Listener = Callable[[Moment], None]


class Follower:
    """Follows a sweep and tells `listener` of each change, of `look` once a second, with the time left.

    `todo` are the runs that will be measured. `took` holds the seconds of runs that are known, by condition and start:
    a run is expected to take what it took before, else what its condition took, else the mean of all, else `assumed`.
    """

    def __init__(
        self,
        todo: Sequence[RunSpec],
        total: int,
        took: Mapping[tuple[str, int], float],
        assumed: Expect | None,
        listener: Listener,
    ) -> None:
        self._todo, self._total, self._took = list(todo), total, dict(took)
        self._assumed, self._listener = assumed, listener
        self._number = 0
        self._spec: RunSpec | None = None
        self._told: Told | None = None
        self._began = self._looked_at = self._startup_s = self._rounds_s = 0.0

    def begin(self, number: int, spec: RunSpec) -> None:
        """The run of this number, from 1, is made now."""
        self._number, self._spec, self._told = number, spec, None
        self._began = time.monotonic()

    def enter(self, phase: str) -> None:
        """The run under way enters a phase that this process knows of."""
        self._send(phase)

    def look(self, folder: Path, *, ready: bool) -> None:
        """See how far the kernel is; called a few times a second."""
        if (now := time.monotonic()) - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        told = load_told(folder)
        if told is not None and told != self._told:
            if self._told is None:
                self._startup_s = now - self._began
            self._told, self._rounds_s = told, now - self._began - self._startup_s
        waiting = "starting notebook" if ready else "starting server"
        self._send(self._told.phase if self._told else waiting)

    def end(self, number: int, spec: RunSpec, status: str, seconds: float) -> None:
        """A run is over, or was skipped; one that was measured tells how long others will take."""
        self._number, self._spec, self._told = number, spec, None
        self._todo = [other for other in self._todo if other != spec]
        if status == "ok":
            self._took[spec.condition_name, spec.start] = seconds
        self._send(status, ended=status, seconds=seconds)

    def expected_s(self, spec: RunSpec) -> float | None:
        """Seconds that a run will take from its start to its end; None: nothing is known."""
        known = [s for (condition, _), s in self._took.items() if condition == spec.condition_name]
        known = known or list(self._took.values())
        if not known:
            return self._assumed and self._assumed(spec)
        return self._took.get((spec.condition_name, spec.start), statistics.fmean(known))

    def left_s(self, now: float) -> float | None:
        """Seconds until the sweep's end; what nothing is known of takes as long as the run under way."""
        current = self._spec if self._spec in self._todo else None
        whole = self._whole_s(current) if current else 0.0
        rest = [self.expected_s(spec) for spec in self._todo if spec != current]
        if whole is None or (None in rest and not current):
            return None
        own = max(whole - (now - self._began), 0.0) if current else 0.0
        return own + sum(whole if seconds is None else seconds for seconds in rest)

    def _whole_s(self, spec: RunSpec) -> float | None:
        """Seconds of the run under way: as expected, and by its own pace the more, the further it is."""
        expected, told = self.expected_s(spec), self._told
        if told is None:
            return expected
        if expected is None:
            return self._startup_s + self._rounds_s / told.done if told.done else None
        still = 1 - told.done
        # Which is done x its own pace + still x the expected one.
        all_rounds_s = self._rounds_s + still * max(expected - self._startup_s, 0.0)
        return self._startup_s + self._rounds_s + still * all_rounds_s

    def _send(self, phase: str, *, ended: str | None = None, seconds: float = 0.0) -> None:
        assert self._spec is not None
        told = self._told
        self._listener(
            Moment(
                number=self._number,
                total=self._total,
                run=self._spec.run_name,
                phase=phase,
                done=told.done if told else 0.0,
                tok_s=told.tok_s if told and told.phase == phase else None,
                left_s=self.left_s(time.monotonic()),
                assumed=not self._took and self._assumed is not None,
                ended=ended,
                seconds=seconds,
            )
        )


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def format_moment(moment: Moment) -> str:
    """`[3/90] tp4-b16: round 2 of 3: fib 256 x1, 61.2 tok/s, about 5.1 h left (assumed)`."""
    name = f"[{moment.number}/{moment.total}] {moment.run}"
    rate = "" if moment.tok_s is None else f", {moment.tok_s:.3g} tok/s"
    what = f" {moment.ended} {moment.seconds:.1f} s" if moment.ended else f": {moment.phase}{rate}"
    return ", ".join(filter(None, (name + what, _format_left(moment))))


def _format_left(moment: Moment) -> str:
    if not moment.left_s:
        return ""
    return f"about {format_duration(moment.left_s)} left{' (assumed)' if moment.assumed else ''}"


@contextmanager
def show_progress() -> Iterator[Listener]:
    """Show a sweep where it runs: two live lines on a terminal; in a log, a pipe or a notebook plain ones, in time.

    What cannot be shown is left out: showing never ends a sweep.
    """
    from rich.console import Console

    if sys.stdout is None:  # closed by whoever started this
        yield lambda _: None
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that it lacks becomes "?"
    console = Console(highlight=False, soft_wrap=True)
    if sys.stdout.isatty() and not console.is_jupyter and not console.is_dumb_terminal:
        with _live(console) as listener:
            yield listener
    else:
        yield _PlainLines()


class _PlainLines:
    """A line for each run that ended and for each change of phase, the latter some seconds apart."""

    def __init__(self) -> None:
        self._phase, self._cell, self._run, self._at = "", "", "", -math.inf

    def __call__(self, moment: Moment) -> None:
        phase, _, cell = moment.phase.partition(": ")
        now = time.monotonic()
        if (phase, moment.run) != (self._phase, self._run):
            wait_s = PHASE_S
        else:
            wait_s = CELL_S if cell != self._cell else math.inf
        if now - self._at < wait_s and not moment.ended:
            return
        self._phase, self._cell, self._run, self._at = phase, cell, moment.run, now
        with suppress(*UNSHOWN):
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {format_moment(moment)}\n")
            sys.stdout.flush()


@contextmanager
def _live(console: Console) -> Iterator[Listener]:
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    # Drawn when something is told, at most once a second: a thread of its own would draw during rounds.
    live = Live(console=console, auto_refresh=False, transient=True)

    def draw(moment: Moment) -> None:
        if moment.ended:
            console.print(format_moment(moment), markup=False)
            return
        share = (moment.number - 1 + moment.done) / moment.total
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), Text(_format_left(moment)))
        text = format_moment(moment).removesuffix(f", {_format_left(moment)}")
        live.update(Group(Text(text, no_wrap=True, overflow="ellipsis"), bar), refresh=True)

    def attempt(show: Callable[..., None], *arguments: Moment) -> None:
        try:
            show(*arguments)
        except UNSHOWN:
            console.quiet = True  # else it would keep what it could not write, and fail on that again

    with ExitStack() as stack:
        attempt(live.start)
        if not console.quiet:
            stack.callback(attempt, live.stop)
        yield functools.partial(attempt, draw)
