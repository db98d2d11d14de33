"""Progress: what the kernel tells, how the time left is reckoned, and what a terminal, a log and a notebook show."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchlib import measure, progress
from benchlib.measure import _measure_round
from benchlib.progress import Follower, Moment, Teller, Told, load_told, remove_told, show_progress
from benchlib.record import RequestRecord
from benchlib.server import attach_server
from benchlib.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
Serve = Callable[..., str]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
HERE = Moment(3, 90, "tp4-b16", "round 2 of 3: fib 256 x1", done=0.5, tok_s=61.23, left_s=18360.0, assumed=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress sees: its only element."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def moment(**fields: Any) -> Moment:
    given: dict[str, Any] = {"number": 1, "total": 2, "run": "tp1-auto", "phase": "starting server"}
    return Moment(**(given | fields))


# ---- what the kernel tells


def test_each_round_is_told_before_it_starts_and_with_the_rate_of_the_one_before(
    make_spec: MakeSpec, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Told] = []
    events: list[str] = []

    def save(folder: Path, what: Told) -> None:
        told.append(what)
        events.append("told")

    def send(*arguments: Any, **options: Any) -> list[RequestRecord]:
        records = _measure_round(*arguments, **options)
        events.append("round")
        return records

    monkeypatch.setattr(progress, "_save_told", save)
    monkeypatch.setattr(measure, "_measure_round", send)
    spec = make_spec(prompts=["fib", "qsort"], max_new_tokens=[64], warmups=1, repeats=1, concurrency=[2])
    measure.measure_run(spec, attach_server(spec, url=serve("--pause", "0.002")).record, folder=tmp_path)
    assert events == ["told", "round"] * 4 + ["told"]
    assert [t.phase for t in told] == [
        "warm-up: fib 64 x2", "warm-up: qsort 64 x2", "round 1 of 1: fib 64 x2", "round 1 of 1: qsort 64 x2",
        "asking gaps",
    ]  # fmt: skip
    # Tokens asked for: 32 and 32 in the warm-ups, then 64 and 64.
    assert [t.done for t in told] == [0.0, 32 / 192, 64 / 192, 128 / 192, 1.0]
    assert told[0].tok_s is None
    assert all(t.tok_s and 50 < t.tok_s < 1000 for t in told[1:4])


def test_cells_that_are_precise_pass_and_more_rounds_are_at_most(
    make_spec: MakeSpec, serve: Serve, tmp_path: Path
) -> None:
    spec = make_spec(prompts=["fib"], warmups=0, repeats=2, max_repeats=4, precision=0.99)
    told: list[Told] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_save_told", lambda folder, what: told.append(what))
        measure.measure_run(spec, attach_server(spec, url=serve()).record, folder=tmp_path)
    assert told[1].phase == "round 2 of at most 4: fib 16 x1"


def test_what_is_told_is_read_and_leaves_nothing(tmp_path: Path) -> None:
    assert load_told(tmp_path) is None
    Teller(tmp_path, [32, 96]).tell("round 1 of 3: fib 96 x1", 1, {0: 50.0})
    told = load_told(tmp_path)
    assert told is not None
    assert (told.phase, told.done, told.tok_s) == ("round 1 of 3: fib 96 x1", 0.25, 50.0)
    (tmp_path / ".progress.json.1.tmp").touch()  # of a kernel killed while it wrote
    remove_told(tmp_path)
    remove_told(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / progress.PROGRESS_FILE).mkdir()
    remove_told(tmp_path)
    assert load_told(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"phase": 1}', b"\xff", b'{"phase": "x", "more": 1}'])
def test_what_cannot_be_read_is_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / progress.PROGRESS_FILE).write_bytes(content)
    assert load_told(tmp_path) is None


def test_where_nothing_can_be_written_measuring_goes_on(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    spec = make_spec(prompts=["fib"], repeats=1)
    measured = measure.measure_run(spec, attach_server(spec, url=serve()).record, folder=tmp_path / "missing")
    assert measured.error is None
    assert not (tmp_path / "missing").exists()


# ---- the time left


def follow(
    specs: list[RunSpec], took: dict[tuple[str, int], float], assumed: float | None = None
) -> tuple[Follower, list[Moment]]:
    seen: list[Moment] = []
    guess = None if assumed is None else lambda spec: assumed
    return Follower(specs, len(specs), took, guess, seen.append), seen


def tell(folder: Path, phase: str, done: float) -> None:
    progress._save_told(folder, Told(phase=phase, done=done, tok_s=61.2))


A, B, C = RunSpec(), RunSpec(start=2), RunSpec(method="linear")


def test_a_run_is_expected_to_take_what_it_took_or_its_condition_or_all() -> None:
    follower, _ = follow([A, B, C], {("tp1-auto", 1): 100.0, ("tp1-b16", 1): 40.0}, assumed=7.0)
    assert [follower.expected_s(spec) for spec in (A, B, C)] == [100.0, 100.0, 70.0]
    follower, _ = follow([A], {}, assumed=7.0)
    assert follower.expected_s(A) == 7.0
    follower, _ = follow([A], {})
    assert follower.expected_s(A) is None


def test_the_assumed_time_is_marked_until_a_run_is_measured(clock: list[float]) -> None:
    follower, seen = follow([A, B], {}, assumed=100.0)
    follower.begin(1, A)
    follower.enter("placing")
    clock[0] += 30
    follower.enter("ending")
    follower.end(1, A, "ok", 60.0)
    assert [(m.left_s, m.assumed, m.ended) for m in seen] == [
        (200.0, True, None),
        (170.0, True, None),
        (60.0, False, "ok"),
    ]


def test_a_run_that_takes_longer_takes_no_time_from_the_others(clock: list[float], tmp_path: Path) -> None:
    follower, seen = follow([A, B], {("tp1-auto", 1): 100.0})
    follower.begin(1, A)
    clock[0] += 150
    follower.enter("placing")
    # Its start alone took longer than the whole run was to take: half of its rounds, in 50 s, tell that 25 s are left,
    # half of them by its own pace, half in no time.
    tell(tmp_path, "warm-up: fib 256 x1", 0.0)
    follower.look(tmp_path, ready=True)
    clock[0] += 50
    tell(tmp_path, "round 2 of 3: fib 256 x1", 0.5)
    follower.look(tmp_path, ready=True)
    assert [m.left_s for m in seen] == [100.0, 100.0, 125.0]


def test_a_rate_is_that_of_the_phase_that_was_told(clock: list[float], tmp_path: Path) -> None:
    follower, seen = follow([A], {})
    follower.begin(1, A)
    tell(tmp_path, "round 2 of 3: fib 256 x1", 0.5)
    follower.look(tmp_path, ready=True)
    follower.enter("ending")
    assert [m.tok_s for m in seen] == [61.2, None]


def test_a_failed_run_tells_no_time_and_a_skipped_one_takes_none(clock: list[float]) -> None:
    follower, seen = follow([B], {("tp1-auto", 1): 50.0})
    follower.end(1, A, "skipped", 0.0)
    follower.begin(2, B)
    clock[0] += 5
    follower.end(2, B, "failed", 5.0)
    assert [(m.left_s, m.ended, m.seconds) for m in seen] == [(50.0, "skipped", 0.0), (0.0, "failed", 5.0)]
    assert follower.expected_s(B) == 50.0


def test_the_run_under_way_goes_over_to_its_own_pace(clock: list[float], tmp_path: Path) -> None:
    """Expected 120 s; it started in 20 s, so 100 s of rounds; half of them took 100 s instead of 50."""
    follower, seen = follow([A], {("tp1-auto", 1): 120.0})
    follower.begin(1, A)
    clock[0] += 20
    tell(tmp_path, "warm-up: fib 256 x1", 0.0)
    follower.look(tmp_path, ready=True)
    clock[0] += 100
    tell(tmp_path, "round 2 of 3: fib 256 x1", 0.5)
    follower.look(tmp_path, ready=True)
    clock[0] += 10
    follower.look(tmp_path, ready=True)
    # Half the rounds are left: 0.5 x (100 s so far + 0.5 x 100 s expected) = 75 s, and ten seconds later 65.
    assert [m.left_s for m in seen] == [100.0, 75.0, 65.0]
    assert (seen[-1].phase, seen[-1].tok_s, seen[-1].done) == ("round 2 of 3: fib 256 x1", 61.2, 0.5)


def test_without_history_the_pace_of_the_run_under_way_is_everybodys(clock: list[float], tmp_path: Path) -> None:
    follower, seen = follow([A, B], {})
    follower.begin(1, A)
    follower.enter("placing")
    clock[0] += 10
    tell(tmp_path, "warm-up: fib 256 x1", 0.0)
    follower.look(tmp_path, ready=True)
    clock[0] += 10
    tell(tmp_path, "round 1 of 3: fib 256 x1", 0.25)
    follower.look(tmp_path, ready=True)
    # 10 s of start, a quarter in 10 s: 50 s in all, 30 s of them left, and 50 s for the other run.
    assert [(m.left_s, m.assumed) for m in seen] == [(None, False), (None, False), (80.0, False)]


def test_the_kernel_is_looked_at_once_a_second(clock: list[float], tmp_path: Path) -> None:
    follower, seen = follow([A], {})
    follower.begin(1, A)
    for ready in (False, False, False, True, True, True):
        follower.look(tmp_path, ready=ready)
        clock[0] += 0.5
    assert [m.phase for m in seen] == ["starting server", "starting server", "starting notebook"]


# ---- what is shown


def test_a_moment_reads_well() -> None:
    assert (
        progress.format_moment(HERE)
        == "[3/90] tp4-b16: round 2 of 3: fib 256 x1, 61.2 tok/s, about 5.1 h left (assumed)"
    )
    ended = moment(phase="ok", ended="ok", seconds=200.52, left_s=609.0)
    assert progress.format_moment(ended) == "[1/2] tp1-auto ok 200.5 s, about 10 min left"
    assert progress.format_moment(moment(left_s=None)) == "[1/2] tp1-auto: starting server"


@pytest.mark.parametrize(("seconds", "text"), [(45.4, "45 s"), (119.0, "119 s"), (720.0, "12 min"), (12240.0, "3.4 h")])
def test_durations(seconds: float, text: str) -> None:
    assert progress.format_duration(seconds) == text


def test_a_log_has_plain_lines_seconds_apart(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    rounds = [f"round {n} of 3: {cell}" for n in (1, 2, 3) for cell in ("fib 256 x1", "json 256 x1")]
    with show_progress() as listener:
        for phase in ("placing", *["starting server"] * 9, *itertools.chain.from_iterable([r] * 20 for r in rounds)):
            listener(moment(phase=phase, left_s=100.0))
            clock[0] += 1
        listener(moment(phase="ok", ended="ok", seconds=130.0, left_s=50.0))
        listener(moment(number=2, run="tp1-linear", phase="placing"))
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert not CONTROL.search(out)
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "[1/2] tp1-auto: placing, about 100 s left",
        "[1/2] tp1-auto: starting server, about 100 s left",
        "[1/2] tp1-auto: round 1 of 3: fib 256 x1, about 100 s left",
        "[1/2] tp1-auto: round 1 of 3: json 256 x1, about 100 s left",
        "[1/2] tp1-auto: round 2 of 3: fib 256 x1, about 100 s left",
        "[1/2] tp1-auto: round 2 of 3: json 256 x1, about 100 s left",
        "[1/2] tp1-auto: round 3 of 3: fib 256 x1, about 100 s left",
        "[1/2] tp1-auto: round 3 of 3: json 256 x1, about 100 s left",
        "[1/2] tp1-auto ok 130.0 s, about 50 s left",
    ]


def test_a_log_says_once_what_stays_the_same(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with show_progress() as listener:
        for cell in ["fib", *["json"] * 100]:
            listener(moment(phase=f"round 1 of 3: {cell} 256 x1"))
            clock[0] += 1
    assert [line.split()[-3] for line in capsys.readouterr().out.splitlines()] == ["fib", "json"]


class Gone(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_that_left_ends_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `benchlib sweep | head` does, hours before the sweep's end."""
    pipe = Gone()
    monkeypatch.setattr(sys, "stdout", pipe)
    with show_progress() as listener:
        listener(HERE)
    assert "tp4-b16" in pipe.getvalue()


def test_without_a_standard_output_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as after `>&-`
    with show_progress() as listener:
        listener(HERE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Narrow(io.TextIOWrapper):
    """A stream that lacks most letters."""

    def __init__(self, *, live: bool) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")
        self.isatty = lambda: live  # type: ignore[method-assign]

    def shown(self) -> str:
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("live", [True, False])
def test_a_letter_that_a_terminal_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    stream = Narrow(live=live)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with show_progress() as listener:
        listener(moment(phase="round 1 of 3: Größe 256 x1, cut at the end of its line"))
        listener(moment(phase="Größe", ended="ok"))
    assert "round 1 of 3: Gr??e" in stream.shown()
    assert ("its line" in stream.shown()) != live  # a terminal's is cut by an ellipsis, which it lacks, too
    assert "[1/2] tp1-auto ok" in stream.shown()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), UnicodeEncodeError("x", "…", 0, 1, "lacks it")])
@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_that_goes_away_ends_no_sweep(monkeypatch: pytest.MonkeyPatch, live: bool, error: Exception) -> None:
    """As when a window is closed over `setsid benchlib sweep`: every write fails from then on."""
    terminal = Terminal() if live else io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")

    tried = []

    def gone(text: str) -> int:
        tried.append(text)
        raise error

    with show_progress() as listener:
        listener(HERE)
        terminal.write = gone  # type: ignore[method-assign, assignment]
        for ended in (None, "ok", None):
            listener(moment(phase="ok", ended=ended))
    assert sys.stdout is terminal
    assert len(tried) == 1  # a display would try all that it drew before, again and again
    assert "tp4-b16" in terminal.getvalue()
    with show_progress() as listener:  # gone before it began
        listener(HERE)
    assert sys.stdout is terminal


def test_what_fails_in_a_sweep_is_not_hidden_by_its_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(OSError, match="disk"), show_progress():
        raise OSError("disk")


def test_nothing_is_drawn_between_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the display's own would draw during rounds."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    before = threading.enumerate()
    with show_progress() as listener:
        listener(HERE)
        assert threading.enumerate() == before


def test_the_bar_is_the_share_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress() as listener:
        listener(moment(number=2, total=4, done=0.4))
    # One run of four and 0.4 of the second: 0.35 of 40; the rest of the bar is of another colour.
    assert len(re.findall("━+", terminal.getvalue())[0]) == 14


def test_a_terminal_has_two_live_lines_and_keeps_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with show_progress() as listener:
        listener(HERE)
        listener(moment(phase="ok", ended="ok", seconds=130.0, left_s=50.0))
        listener(HERE)
    shown = terminal.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "[3/90] tp4-b16: round 2 of 3: fib 256 x1, 61.2 tok/s" in text
    assert "━" in text
    assert "about 5.1 h left (assumed)" in text
    assert text.count("[1/2] tp1-auto ok 130.0 s, about 50 s left") == 1
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1  # the cursor is back


@pytest.mark.parametrize("where", ["dumb", "notebook"])
def test_dumb_terminals_and_notebooks_have_plain_lines(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb" if where == "dumb" else "xterm")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: where == "notebook")
    with show_progress() as listener:
        listener(HERE)
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().endswith("about 5.1 h left (assumed)\n")


def test_a_piped_log_stays_plain_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with show_progress() as listener:
        listener(HERE)
    assert not CONTROL.search(pipe.getvalue())
    assert "tp4-b16" in pipe.getvalue()
