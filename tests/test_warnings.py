"""Each warning appears with its number when its cause is there, and not otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchlib.nccl import NcclLog
from benchlib.placement import place_gpus
from benchlib.record import RequestRecord, ServerRecord
from benchlib.spec import RunSpec
from benchlib.topology import load_topology
from benchlib.warnings import CODES, check_cell, check_run, format_warning


def requests(*rates: float, tokens: int = 101, **changes: Any) -> list[RequestRecord]:
    """One request a round: the first token after 1 s, then 100 tokens at each rate."""
    return [
        RequestRecord(
            **{
                "prompt": "p",
                "max_new_tokens": 101,
                "concurrency": 1,
                "round": number,
                "sent_s": 0.0,
                "ticks": ((1.0, 1), (1.0 + 100 / rate, tokens)),
                "end_s": 9.0,
                "completion_tokens": tokens,
                "cached_tokens": 0,
                **changes,
            }
        )
        for number, rate in enumerate(rates)
    ]


def codes(texts: tuple[str, ...]) -> list[str]:
    return [text.partition(":")[0] for text in texts]


def test_a_steady_cell_is_silent() -> None:
    assert check_cell(requests(100, 101, 99, 100)) == ()


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((100, 101), ["few-rounds"]),
        ((100, 120, 80), ["high-spread"]),
        ((80, 100, 100, 101), ["high-spread", "first-round-slow", "outlier"]),
        ((100, 100.5, 99.5, 100, 60), ["high-spread", "outlier"]),
        ((88, 100, 100), ["high-spread", "first-round-slow"]),
    ],
)
def test_spread(rates: tuple[float, ...], expected: list[str]) -> None:
    assert codes(check_cell(requests(*rates))) == expected


def test_texts_carry_their_numbers() -> None:
    few, *_ = check_cell(requests(100, 100))
    assert few.startswith("few-rounds: 2 timed rounds, fewer than 3")
    spread, *_ = check_cell(requests(100, 120, 80))
    # mean 100, sample deviation 20
    assert "varies by 20.0%" in spread
    *_, outlier = check_cell(requests(100, 100.5, 99.5, 100, 60))
    assert "round 5 decoded 60.0 tokens/s, the median is 100.0" in outlier


def test_requests_of_a_round_are_one_value() -> None:
    fast, slow = requests(120, 120, 120), requests(80, 80, 80)
    assert check_cell(fast + slow) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"cached_tokens": 5},
            "cached-tokens: 3 of 3 timed requests hit the prefix cache (up to 5",
        ),
        (
            {"error": "HTTP 500: oops"},
            "failed-requests: 3 of 3 timed requests failed, first: HTTP 500: oops",
        ),
        ({"completion_tokens": 50}, "short-output: 3 of 3 timed requests ended before 101 tokens"),
    ],
)
def test_requests(changes: dict[str, Any], expected: str) -> None:
    assert check_cell(requests(100, 100, 100, **changes))[0].startswith(expected)


def test_requests_of_one_chunk_have_no_rate() -> None:
    assert codes(check_cell(requests(100, 100, 100, ticks=((1.0, 101),)))) == ["few-rounds"]


def test_run() -> None:
    quiet = {"load_average_1m": 0.3, "cores": 2}
    assert check_run(RunSpec(), quiet, ServerRecord(url="x"), None) == ()
    assert check_run(RunSpec(), {"load_average_1m": None, "cores": 2}, ServerRecord(url="x"), None) == ()
    loud = check_run(RunSpec(), {"load_average_1m": 1.5, "cores": 2}, ServerRecord(url="x", attached=True), None)
    assert codes(loud) == ["machine-busy", "attached"]
    assert "load average was 1.5 on 2 cores" in loud[0]


MACHINE = load_topology(Path(__file__).parent / "data" / "topology" / "seed_8x_pcie_two_sockets.txt")
BEST = place_gpus(MACHINE, 4)
WORSE = place_gpus(MACHINE, 4, numa_policy="allow-cross", busy={1: "named busy", 5: "named busy"})


def run_codes(nccl: NcclLog | None = None, *, server: dict[str, Any] | None = None, **spec: Any) -> tuple[str, ...]:
    flat = {"engine": "sglang", "tp_size": 4, **spec}
    record = ServerRecord(**{"url": "x", "placement": BEST, **(server or {})})
    return check_run(RunSpec.from_parameters(flat), {}, record, nccl)


def test_a_worse_placement_is_told() -> None:
    assert run_codes() == ()
    (text,) = run_codes(server={"placement": WORSE})
    assert text.startswith("worse-placement: GPUs 0,2-4 were taken where the free machine would give 0-3: ")
    assert "busy: GPUs 1,5 (named busy)" in text


def test_links_that_disagree_are_told_each() -> None:
    told = run_codes(server={"links_disagree": ("GPUs 2 and 6 are faster.", "GPUs 1 and 5 are faster.")})
    assert codes(told) == ["links-disagree"] * 2
    assert "GPUs 1 and 5 are faster. Measure again" in told[1]


@pytest.mark.parametrize(
    ("profile", "which", "expected"),
    [
        ("pcie", "custom", ["nccl-bypassed"]),
        ("pcie", "other: mscclpp", ["nccl-bypassed"]),
        ("pcie", "nccl", []),
        ("pcie", None, []),  # the log does not say
        ("none", "custom", []),
    ],
)
def test_a_profile_that_decode_goes_past(profile: str, which: str | None, expected: list[str]) -> None:
    told = run_codes(NcclLog(nranks=4, decode_all_reduce=which), nccl_profile=profile)
    assert codes(told) == expected
    assert not told or f"NCCL profile {profile} was set, but decode's all-reduce was {which}: past NCCL" in told[0]


def test_a_variable_that_nccl_read_otherwise_is_told() -> None:
    server = {"env": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}}
    assert run_codes(NcclLog(variables={"NCCL_ALGO": "RING"}, decode_all_reduce="nccl"), server=server) == ()
    (text,) = run_codes(NcclLog(variables={"NCCL_ALGO": "Tree"}, decode_all_reduce="nccl"), server=server)
    assert text.startswith("nccl-variable: NCCL_ALGO=Ring was asked for, but NCCL read Tree.")


@pytest.mark.parametrize(
    ("expected", "which", "flags", "found"),
    [
        (True, "nccl", [], ["custom-all-reduce-off"]),
        (True, "custom", [], []),
        (True, None, [], []),
        (False, "nccl", [], []),
        (None, "nccl", [], []),
        (True, "nccl", ["--disable-custom-all-reduce"], []),
    ],
)
def test_custom_all_reduce_that_was_expected(
    expected: bool | None, which: str | None, flags: list[str], found: list[str]
) -> None:
    log = NcclLog(nranks=4, decode_all_reduce=which, decode_all_reduce_evidence="Setup Custom allreduce failed")
    told = run_codes(log, server={"custom_all_reduce_expected": expected}, server_args=flags)
    assert codes(told) == found
    assert not told or "expected on GPUs 0-3 and was not used: Setup Custom allreduce failed." in told[0]


def test_an_end_that_went_badly_is_told() -> None:
    text = format_warning("ended-badly", what="GPU 0 still holds 48 GiB")
    assert text.startswith("ended-badly: after the record was written: GPU 0 still holds 48 GiB. The measurement is")


@pytest.mark.parametrize(("clock", "expected"), [
    ({"bias_rate_percent": -3.2, "streams": 64}, ["client-bias"]),
    ({"bias_rate_percent": 1.9, "streams": 64}, []),
    ({"error": "no reply"}, []),
])  # fmt: skip
def test_a_biased_client_is_told(clock: dict[str, Any], expected: list[str]) -> None:
    assert codes(check_run(RunSpec(), {"clock": clock}, ServerRecord(url="x"), None)) == expected


def test_the_list_is_closed_and_every_text_ends_with_a_remedy_or_reason() -> None:
    with pytest.raises(KeyError):
        format_warning("nonsense")
    assert all(text.endswith(".") for text in CODES.values())
