"""The chain on a stock SGLang server: the laptop's own sweep file, with only `engine` changed.

BENCHLIB_SGLANG_PYTHON names an interpreter that has sglang; the server runs on the CPU, autoregressively, on a tiny
model with random weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchlib.engines import build_launch
from benchlib.errors import UnavailableError
from benchlib.record import load_record, load_requests
from benchlib.spec import Sweep, load_sweep
from benchlib.sweep import run_sweep, select_runs

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif("BENCHLIB_SGLANG_PYTHON" not in os.environ, reason="BENCHLIB_SGLANG_PYTHON is not set"),
]
LAPTOP = Path(__file__).parents[2] / "notebooks" / "sweeps" / "laptop.toml"


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    # Fewer tokens: the sweep's own take minutes on this server, and prove nothing more.
    return load_sweep(LAPTOP, engine="sglang", workload={"max_new_tokens": [12], "repeats": 1})


def test_the_laptop_sweep_leaves_a_valid_record(sweep: Sweep, tmp_path: Path) -> None:
    (outcome,) = run_sweep(select_runs(sweep, ["tp1-auto"]), results=tmp_path)
    assert (outcome.status, outcome.error) == ("ok", None)
    folder = tmp_path / "laptop" / "tp1-auto"
    record = load_record(folder)
    assert record.spec.weights == "random"
    assert record.server is not None
    assert record.server.version == record.environment["engine_version"]
    assert record.server.info["device"] == "cpu"
    assert record.server.info["disable_radix_cache"] is True
    assert record.server.effective_max_running_requests
    assert record.server.verify_tokens is None
    requests = load_requests(folder)
    assert len(requests) == 4 * 2
    for request in requests:
        assert request.error is None
        counts = [n for _, n in request.ticks]
        # A busy server may put two tokens in one chunk.
        assert counts == sorted(set(counts))
        assert (counts[0], counts[-1]) == (1, 12)
        assert (request.completion_tokens, request.cached_tokens) == (12, 0)
        assert request.output_ids is not None
        assert len(request.output_ids) == 12
        assert request.verify_ct is None


def test_what_stock_sglang_lacks_is_unavailable(sweep: Sweep) -> None:
    for name, reason in (
        ("tp1-b16", "ddtree is unavailable in sglang"),
        ("tp1-linear", "on device cpu"),
    ):
        (spec,) = select_runs(sweep, [name])
        with pytest.raises(UnavailableError, match=reason):
            build_launch(spec, host="127.0.0.1", port=1)
