"""Leaks are caught through HTTP alone, clean servers raise no alarm. `make test-gate` runs it all: some ten minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchlib.prompts import Prompt
from benchlib.reference_engine import planted
from benchlib.reference_engine.loading import LoadError
from benchlib.sampling import measure_sampling
from benchlib.server import Server
from tests.gate.harness import CLEAN_RUNS, FAULTS, OPENINGS, clean_runs, judge, make_spec, planted_runs, serving

ALARM = "NOT lossless"
SHORT = {**OPENINGS, "prompts": ["fib", "json"], "max_new_tokens": [48]}


def test_a_sample_of_the_gate() -> None:
    auto = make_spec("auto", **SHORT)
    leaky, clean = make_spec("ddtree", 16, "flat-scan", **SHORT), make_spec("ddtree", 32, **SHORT)
    with serving(auto, leaky, clean) as servers:
        checks = judge(*servers)
        infos = [server.record.info for _, server in servers]
    assert {name: check.verdict for name, check in checks.items()} == {"tp1-b16": ALARM, "tp1-b32": "lossless"}
    assert [check.outputs for check in checks.values()] == [2, 2]
    assert all(d.gap is not None for d in checks["tp1-b16"].divergences)
    # A planted fault cannot be on unnoticed.
    assert [info.get("planted_fault") for info in infos] == [None, "flat-scan", None]


def test_the_engine_has_the_faults_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(planted.FAULTS) == set(FAULTS)
    monkeypatch.setenv(planted.VARIABLE, "nonsense")
    with pytest.raises(LoadError, match="'nonsense' is no fault: there are flat-scan"):
        planted.plant_fault.__wrapped__()


@pytest.fixture(scope="module")
def right() -> Iterator[list[Server]]:
    """Auto and the chain, neither with a fault."""
    with serving(make_spec("auto"), make_spec("linear")) as servers:
        yield [server for _, server in servers]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_leak_is_caught_at_every_budget(right: list[Server]) -> None:
    found = {(fault, budget): check.verdict for fault, budget, check in planted_runs(right)}
    assert len(found) == 9
    assert set(found.values()) == {ALARM}, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_clean_servers_raise_no_alarm(right: list[Server]) -> None:
    found = list(clean_runs(right))
    assert len(found) == CLEAN_RUNS
    verdicts = {check.verdict for _, *checks in found for check in checks}
    assert verdicts <= {"lossless", "within numeric noise"}, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampled_outputs_of_a_leaky_server_differ_in_distribution(right: list[Server]) -> None:
    prompt = Prompt("short", {"text": "def fib(n):\n"})
    # At budget 16 the first rounds' trees hardly branch: so short, its samples look right.
    specs = make_spec("linear"), make_spec("ddtree", 32), make_spec("ddtree", 32, "flat-scan")
    with serving(*specs) as servers:
        found = [
            measure_sampling(right[0].record.url, server.record.url, prompt, count=200, new_tokens=6)
            for _, server in servers
        ]
    assert [test.differ for test in found] == [False, False, True], found
