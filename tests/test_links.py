"""Measured links: the file, what disagrees with the labels, and the probe as far as a machine without GPUs goes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchlib import links as links_module
from benchlib.errors import PlacementError
from benchlib.links import (
    Links,
    format_links,
    link_strength,
    links_disagree,
    load_links,
    measure_links,
    pair_labels,
    pair_times_us,
    save_links,
)
from benchlib.topology import Gpu, Topology

# GPUs 0 and 1 share a switch, 2 is behind the root complex, 3 on the other socket.
LABELS = {(0, 1): "PIX", (0, 2): "NODE", (1, 2): "NODE", (0, 3): "SYS", (1, 3): "SYS", (2, 3): "SYS"}
TIMES = {(0, 1): 10.0, (0, 2): 20.0, (1, 2): 22.0, (0, 3): 40.0, (1, 3): 41.0, (2, 3): 42.0}
UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def square(values: dict[tuple[int, int], Any], diagonal: Any) -> Any:
    return tuple(tuple(diagonal if i == j else values[min(i, j), max(i, j)] for j in range(4)) for i in range(4))


def topology() -> Topology:
    return Topology(tuple(Gpu(i, uuid=uuid) for i, uuid in enumerate(UUIDS)), square(LABELS, "X"), "test")


def measured(**changed: Any) -> Links:
    matrix = square(TIMES, None)
    made = Links(UUIDS, matrix, matrix, matrix, "cuda", "2026-01-01T00:00:00+00:00", 30)
    return dataclasses.replace(made, **changed)


def test_labels_are_ordered() -> None:
    labels = ["NV18", "NV12", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", None]
    strengths = [link_strength(label) for label in labels]
    assert strengths == sorted(set(strengths), reverse=True)
    assert strengths[-1] == 0


def test_a_saved_file_is_read_back(tmp_path: Path) -> None:
    save_links(measured(), tmp_path / "links.json")
    assert load_links(tmp_path / "links.json") == measured()
    assert [path.name for path in tmp_path.iterdir()] == ["links.json"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"device": "cpu"}, "dry run on a CPU and says nothing of any link"),
        ({"n": "many"}, "'n'"),
        ({"extra": 1}, "'extra'"),
        ({"uuids": ["GPU-a"]}, "bandwidth_gb_s must be 1 x 1"),
        ({"latency_us": [[None, 1.0], [1.0, None]]}, "latency_us must be 4 x 4"),
        ({"all_reduce_us": square(dict.fromkeys(TIMES), None)}, "all_reduce_us must be 4 x 4, positive"),
        ({"all_reduce_us": square(dict.fromkeys(TIMES, 0.0), None)}, "all_reduce_us must be 4 x 4, positive"),
        ({"all_reduce_us": square(TIMES, 0.0)}, "null on its diagonal"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(dataclasses.asdict(measured()) | changed))
    with pytest.raises(PlacementError, match=text) as refusal:
        load_links(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="cannot read measured links"):
        load_links(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"uuids": [')
    with pytest.raises(PlacementError, match="holds no measured links"):
        load_links(tmp_path / "half.json")


def test_pairs_are_those_of_the_topology_in_whatever_order_they_were_measured() -> None:
    order = (2, 0, 3, 1)
    matrix = tuple(tuple(measured().all_reduce_us[i][j] for j in order) for i in order)
    shuffled = measured(uuids=tuple(UUIDS[i] for i in order), all_reduce_us=matrix)
    assert pair_times_us(topology(), shuffled) == pair_times_us(topology(), measured()) == TIMES
    assert pair_labels(topology()) == LABELS


def test_links_of_other_gpus_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"measured on GPU-a, GPU-b, GPU-c, GPU-x; test has .*GPU-d"):
        pair_times_us(topology(), measured(uuids=(*UUIDS[:3], "GPU-x")))


def test_labels_that_hold_are_not_mentioned() -> None:
    assert links_disagree(topology(), measured()) == ()
    # Within 10% nothing is said.
    near = TIMES | {(1, 2): 40.0, (0, 3): 37.0}
    assert links_disagree(topology(), measured(all_reduce_us=square(near, None))) == ()


def test_a_pair_faster_than_its_label_is_named() -> None:
    times = TIMES | {(0, 1): 30.0, (2, 3): 25.0}
    assert links_disagree(topology(), measured(all_reduce_us=square(times, None))) == (
        "GPUs 0 and 2 (NODE) all-reduce in 20.0 us, faster than 0 and 1 (PIX) in 30.0 us",
        "GPUs 2 and 3 (SYS) all-reduce in 25.0 us, faster than 0 and 1 (PIX) in 30.0 us",
    )


def test_pairs_are_shown_a_line_each_with_both_ways() -> None:
    one_way = ((None, 50.0), (48.0, None))
    pair = measured(
        uuids=UUIDS[:2], bandwidth_gb_s=one_way, latency_us=one_way, all_reduce_us=((None, 9.0), (9.0, None))
    )
    head, line = format_links(pair).splitlines()
    assert head.startswith("median of 30, 2026-01-01")
    assert line == "GPUs 0 and 1: 50.0 | 48.0 GB/s, 50.0 | 48.0 us; 9.0 us"


def python(folder: Path, body: str) -> str:
    """An interpreter that does `body` instead of running the probe."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_measuring_runs_the_probe_in_the_named_python(tmp_path: Path) -> None:
    save_links(measured(), tmp_path / "out.json")
    fake = python(tmp_path, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/out.json')
    assert measure_links(fake, timeout_s=50) == measured()
    assert (tmp_path / "asked").read_text().split() == [str(links_module.PROBE), "--json", "--timeout-s", "50"]


def test_a_failed_measurement_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"failed in .*: error: no GPU$"):
        measure_links(python(tmp_path, "echo noise >&2; echo error: no GPU >&2; exit 1"))
    with pytest.raises(PlacementError, match="exit status 3"):
        measure_links(python(tmp_path, "exit 3"))
    with pytest.raises(PlacementError, match=r"timed out after 0\.1 seconds"):
        measure_links(python(tmp_path, "exec sleep 5"), timeout_s=0.1)
    with pytest.raises(PlacementError, match="No such file"):
        measure_links(str(tmp_path / "nowhere"))


def test_the_probe_without_torch_says_so() -> None:
    command = [sys.executable, "-I", "-S", str(links_module.PROBE), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no torch in {sys.executable}")
    assert len(done.stderr.splitlines()) == 1


def test_the_probe_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlacementError, match="sees 0 CUDA devices"):
        measure_links(sys.executable)


def test_a_dry_run_goes_all_the_way_and_is_no_measurement(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(links_module.PROBE), "--json", "--dry-run-cpu", "2", "--n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == {field.name for field in dataclasses.fields(Links)}
    assert (found["uuids"], found["device"], found["n"]) == (["cpu-0", "cpu-1"], "cpu", 1)
    for name in ("bandwidth_gb_s", "latency_us", "all_reduce_us"):
        for i, j in combinations(range(2), 2):
            assert found[name][i][i] is None
            assert found[name][i][j] > 0
            assert found[name][j][i] > 0
    (tmp_path / "links.json").write_text(done.stdout)
    with pytest.raises(PlacementError, match="dry run on a CPU"):
        load_links(tmp_path / "links.json")
