"""Measuring against the fake server in this process: order, warm-ups, concurrency, and what failing looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchlib.errors import SpecError
from benchlib.measure import Measurement, format_requests, measure_run, save_measurement
from benchlib.record import ServerRecord, load_record, load_requests
from benchlib.server import attach_server
from benchlib.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
Serve = Callable[..., str]


def measure(spec: RunSpec, url: str) -> Measurement:
    return measure_run(spec, attach_server(spec, url=url).record)


def test_cells_are_interleaved_round_by_round(make_spec: MakeSpec, serve: Serve) -> None:
    spec = make_spec(max_new_tokens=[8, 16], warmups=1, repeats=3)
    m = measure(spec, serve())
    cells = [(p, n) for p in ("fib", "qsort") for n in (8, 16)]
    order = [(r.prompt, r.max_new_tokens, r.round, r.warmup) for r in m.requests]
    assert order == [(*cell, 0, True) for cell in cells] + [
        (*cell, number, False) for number in range(3) for cell in cells
    ]
    assert [r.sent_s for r in m.requests] == sorted(r.sent_s for r in m.requests)
    assert [(c.prompt, c.max_new_tokens, c.rounds) for c in m.cells] == [(*cell, 3) for cell in cells]
    assert m.error is None
    assert all(r.error is None for r in m.requests)


def test_warmups_are_short_and_count_in_no_cell(make_spec: MakeSpec, serve: Serve) -> None:
    """A warm-up of 40 tokens asks for 32, as a timed request of the other cell does."""
    m = measure(make_spec(prompts=["fib"], max_new_tokens=[32, 40], repeats=1), serve())
    assert [(r.max_new_tokens, r.completion_tokens, r.warmup) for r in m.requests] == [
        (32, 32, True), (32, 32, True), (32, 32, False), (40, 40, False),
    ]  # fmt: skip
    assert [(c.max_new_tokens, c.rounds) for c in m.cells] == [(32, 1), (40, 1)]
    assert all(cell.warnings[0].startswith("few-rounds: 1 timed") for cell in m.cells)


def test_a_round_sends_all_its_streams_at_once(make_spec: MakeSpec, serve: Serve) -> None:
    spec = make_spec(prompts=["fib"], concurrency=[1, 4], warmups=0, repeats=1)
    m = measure(spec, serve("--pause", "0.005"))
    assert [(r.concurrency, r.stream) for r in m.requests] == [
        (1, 0),
        (4, 0),
        (4, 1),
        (4, 2),
        (4, 3),
    ]
    together = m.requests[1:]
    assert max(r.sent_s for r in together) < min(r.sent_s + r.ticks[0][0] for r in together)
    assert [c.rounds for c in m.cells] == [1, 1]


def test_speculative_counts_reach_the_record(make_spec: MakeSpec, serve: Serve) -> None:
    spec = make_spec(method="ddtree", tree_budget=16)
    flags = ["--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "16"]
    m = measure(spec, serve(*flags, "--speculative-ddtree-budget", "16", "--chunk", "5"))
    assert {(r.verify_ct, r.correct_drafts, r.drafts_histogram) for r in m.requests} == {(3, 12, (0, 0, 0, 0, 3))}


def test_a_failed_request_stays_and_fails_its_cell(make_spec: MakeSpec, serve: Serve) -> None:
    m = measure(make_spec(), serve("--mode", "short"))
    assert len(m.requests) == 2  # two rounds failed whole: the rest is not tried
    assert m.error is not None
    assert "2 rounds in a row failed whole" in m.error
    assert "8 of 16 tokens" in m.error
    assert all(r.error and r.ticks for r in m.requests)


def test_one_bad_cell_fails_the_run_and_spares_the_others(make_spec: MakeSpec, serve: Serve) -> None:
    # The fake's faults spare requests of one token, which are its canaries.
    m = measure(make_spec(prompts=["fib"], max_new_tokens=[1, 16]), serve("--mode", "http400"))
    assert m.error == (
        "no timed request of fib (16 tokens, 1 at once) succeeded: HTTP 400: The input is longer than the context."
    )
    assert [r.error is None for r in m.requests] == [True, False] * 3
    assert any("failed-requests: 2 of 2" in text for text in m.cells[1].warnings)


@pytest.mark.parametrize(("mode", "status"), [("unflushable", 400), ("no-flush", 404)])
def test_a_cache_that_cannot_be_flushed_is_noted_once(
    make_spec: MakeSpec, serve: Serve, mode: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchlib.measure.FLUSH_PAUSE_S", 0.0)
    m = measure(make_spec(), serve("--mode", mode))
    assert m.error is None
    (warning,) = m.warnings
    assert warning.startswith(f"cache-not-flushed: /flush_cache gave HTTP {status}")


def test_prefix_hits_are_noted(make_spec: MakeSpec, serve: Serve) -> None:
    m = measure(make_spec(), serve("--mode", "cached"))
    assert all(any("cached-tokens" in w for w in cell.warnings) for cell in m.cells)


def test_a_server_that_is_gone(make_spec: MakeSpec) -> None:
    spec = make_spec()
    m = measure_run(spec, ServerRecord(url="http://127.0.0.1:9", info={"vocab_size": 99}))
    assert m.error is not None
    assert "cannot connect" in m.error


ENVIRONMENT = {"load_average_1m": 0.0, "cores": 2, "identity": {"x": 1}}


def test_saved_as_it_was_measured(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    spec = make_spec(concurrency=[4])
    server = attach_server(spec, url=serve()).record
    m = measure_run(spec, server)
    save_measurement(tmp_path, spec, environment=ENVIRONMENT, server=server, measurement=m)
    record = load_record(tmp_path)
    assert record.status == "ok"
    assert record.spec == spec
    assert tuple(load_requests(tmp_path)) == m.requests
    assert [w.partition(":")[0] for w in record.warnings] == ["attached"]
    table = format_requests(m)
    assert table.count("\n| fib |") == 8
    assert "few-rounds" in table


def test_cells_over_the_servers_limit_are_not_measured(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    """They would measure its queue."""
    spec = make_spec(concurrency=[2, 4], prompts=["fib"])
    server = attach_server(spec, url=serve("--max-running-requests", "2")).record
    m = measure_run(spec, server)
    assert m.error is None
    assert {r.concurrency for r in m.requests} == {2}
    assert [(cell.concurrency, cell.rounds) for cell in m.cells] == [(2, 2), (4, 0)]
    (capped,) = m.cells[1].warnings
    assert capped.startswith("requests-capped: not measured: the server runs 2 requests at once, the cell asks for 4")
    assert save_measurement(tmp_path, spec, environment=ENVIRONMENT, server=server, measurement=m).status == "ok"


def test_a_server_without_room_for_any_cell_fails_the_run(make_spec: MakeSpec, serve: Serve, tmp_path: Path) -> None:
    spec = make_spec(concurrency=[4])
    server = attach_server(spec, url=serve("--max-running-requests", "2")).record
    m = measure_run(spec, server)
    assert (m.requests, m.error) == (
        (), "nothing could be measured: the server runs 2 requests at once, every cell asks for more",
    )  # fmt: skip
    assert save_measurement(tmp_path, spec, environment=ENVIRONMENT, server=server, measurement=m).status == "failed"


@pytest.mark.parametrize(("tp_size", "way"), [(1, None), (2, "custom")])
def test_what_nccl_did_is_read_from_the_servers_log(
    make_spec: MakeSpec, serve: Serve, tmp_path: Path, tp_size: int, way: str | None
) -> None:
    spec = make_spec(tp_size=tp_size, prompts=["fib"])
    server = attach_server(spec, url=serve("--tp-size", str(tp_size))).record.model_copy(update={"log": "server.log"})
    m = measure_run(spec, server)
    for text in ("", (Path(__file__).parent / "data/nccl/tp2_custom.log").read_text()):
        (tmp_path / "server.log").write_text(text)
        record = save_measurement(tmp_path, spec, environment=ENVIRONMENT, server=server, measurement=m)
    assert load_record(tmp_path).nccl == record.nccl
    assert (record.nccl and record.nccl.decode_all_reduce) == way


def test_the_vocabulary_comes_from_the_model_where_the_server_does_not_tell(
    make_spec: MakeSpec, tmp_path: Path, serve: Serve
) -> None:
    spec = make_spec(model_path=str(tmp_path))
    silent = ServerRecord(url=serve())
    with pytest.raises(SpecError, match="vocabulary's size"):
        measure_run(spec, silent)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7}}))
    assert measure_run(spec, silent).error is None


def test_unknown_prompts_are_refused_before_measuring(make_spec: MakeSpec) -> None:
    spec = make_spec(prompt_set="instructions", prompts=["sonnet"])
    with pytest.raises(SpecError, match="sonnet"):
        measure_run(spec, ServerRecord(url="http://127.0.0.1:9"))


def test_rounds_go_on_until_they_are_precise_or_the_cap_is_reached(make_spec: MakeSpec, serve: Serve) -> None:
    """Looked at every five rounds; an unreachable precision ends at the cap, an easy one at the first look."""
    url = serve("--pause", "0.005")
    counts = {}
    for precision in (0.9, 1e-9):
        spec = make_spec(repeats=2, max_repeats=7, precision=precision)
        counts[precision] = measure_run(spec, attach_server(spec, url=url).record).cells[0].rounds
    assert counts == {0.9: 5, 1e-9: 7}
