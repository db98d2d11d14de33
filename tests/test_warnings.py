"""Each warning appears with its number when its cause is there, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from benchlib.record import RequestRecord, ServerRecord
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
    server = ServerRecord(url="x", effective_max_running_requests=8)
    assert check_run({"load_average_1m": 0.3, "cores": 2}, server, concurrency=4) == ()
    assert check_run({"load_average_1m": None, "cores": 2}, ServerRecord(url="x"), concurrency=4) == ()
    capped = ServerRecord(url="x", effective_max_running_requests=2, attached=True)
    loud = check_run({"load_average_1m": 1.5, "cores": 2}, capped, concurrency=4)
    assert codes(loud) == ["machine-busy", "requests-capped", "attached"]
    assert "load average was 1.5 on 2 cores" in loud[0]


def test_the_list_is_closed_and_every_text_ends_with_a_remedy_or_reason() -> None:
    with pytest.raises(KeyError):
        format_warning("nonsense")
    assert all(text.endswith(".") for text in CODES.values())
