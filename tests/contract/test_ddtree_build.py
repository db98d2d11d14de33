"""DDTREE on SGLang: stock has none, and says so; a build that has it is found by asking it, and recorded exactly.

The stand-in package lies where `server_env` says, has the command line of the open pull request that adds DDTREE, and
serves through the fake server. Nothing of it is known to benchlib beforehand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchlib.compare import build_results
from benchlib.engines import EngineBuild, build_launch, engine_build, verify_tokens
from benchlib.environment import collect_environment
from benchlib.errors import ServerError, UnavailableError
from benchlib.frames import build_failures, load_campaign, rows_of
from benchlib.record import load_record, run_identity
from benchlib.server import start_server
from benchlib.spec import RunSpec, load_sweep
from benchlib.sweep import run_sweep, select_runs
from benchlib.tables import build_tables
from tests import fake_server
from tests.contract.conftest import LAPTOP, NEEDS_SGLANG

STOCK = (
    "--model-path --host --port --tp-size --random-seed --max-running-requests --enable-metrics --disable-radix-cache "
    "--speculative-algorithm --speculative-draft-model-path --speculative-num-draft-tokens --page-size --device"
)
DDTREE = f"{STOCK} --speculative-ddtree-budget"
TINY = str(Path(__file__).parent / "sglang_cpu" / "tiny")
COMMIT = "8d3f6f0b1c9e4a7785d2f1e0c3b2a190ffeeddcc"
LAUNCH = f"""
import runpy, sys
if "--help" in sys.argv:
    print("usage: sglang.launch_server", {{flags!r}})
    sys.exit()
fake = runpy.run_path({fake_server.__file__!r})
fake["Handler"].info = (lambda info: lambda self: info(self) | {{told!r}})(fake["Handler"].info)
fake["main"](sys.argv[1:])
"""
Install = Callable[..., RunSpec]


@pytest.fixture
def install(tmp_path: Path, pretend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a stand-in for SGLang and give a run of it; `told` replaces what its /server_info would say."""
    free = pretend()
    monkeypatch.setattr("benchlib.server.read_gpu_states", lambda: free)
    monkeypatch.setattr("benchlib.server.check_devices", lambda *_: "not looked at")

    def make(
        flags: str,
        *,
        name: str = "site",
        version: str = "0.5.23",
        commit: str | None = None,
        plugin: str = "",
        told: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> RunSpec:
        site, origin = tmp_path / name, {"url": "https://example.org/sglang.git"}
        package, facts = site / "sglang", site / f"sglang-{version}.dist-info"
        for folder in (package, facts):
            folder.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(LAUNCH.format(flags=flags, told=told or {}))
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        if commit:
            (facts / "direct_url.json").write_text(
                json.dumps(origin | {"vcs_info": {"vcs": "git", "commit_id": commit, "requested_revision": "x"}})
            )
        if plugin:
            facts = site / "tree_plugin-0.3.dist-info"
            facts.mkdir()
            (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tree-plugin\nVersion: 0.3\n")
            (facts / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = tree_plugin:register\n")
        own = {"engine": "sglang", "server_python": sys.executable, "method": "ddtree", "model_path": TINY}
        own |= {"draft_model_path": TINY, "server_args": ["--load-format", "dummy"], "weights": "random"}
        own |= {"server_env": {"PYTHONPATH": str(site)}, "prompt_set": "random-ids", "startup_timeout_s": 30.0}
        return RunSpec.from_parameters(own | parameters)

    return make


def build_of(spec: RunSpec) -> EngineBuild:
    return engine_build("sglang", spec.server_python, tuple(sorted(spec.server_env.items())))


@pytest.mark.parametrize("budget", [15, 16])
def test_a_build_that_has_it_is_found_and_recorded(install: Install, tmp_path: Path, budget: int) -> None:
    spec = install(DDTREE, version="0.5.24.dev7+g8d3f6f0", commit=COMMIT, plugin="tree", tree_budget=budget)
    assert build_of(spec) == EngineBuild("0.5.24.dev7+g8d3f6f0", COMMIT, (("tree", "0.3"),))
    environment = collect_environment(spec)
    for kept in (environment, environment["identity"]):
        assert (kept["engine_version"], kept["engine_commit"]) == ("0.5.24.dev7+g8d3f6f0", COMMIT)
        assert kept["engine_plugins"] == {"tree": "0.3"}
    assert "example.org" not in json.dumps(environment)
    with start_server(spec, folder=tmp_path / "run") as server:
        record = server.record
    assert record.verify_tokens == 1 + budget
    assert (record.info["speculative_algorithm"], record.info["speculative_ddtree_budget"]) == ("DDTREE", budget)
    assert f"--speculative-ddtree-budget {budget}" in " ".join(record.argv)
    assert "--speculative-algorithm DDTREE --speculative-num-draft-tokens 16" in " ".join(record.argv)


def test_what_it_reports_counts_and_not_what_it_was_asked_for(install: Install, tmp_path: Path) -> None:
    silent = install(DDTREE, tree_budget=15, told={"speculative_ddtree_budget": None})
    with pytest.raises(ServerError, match="speculative_ddtree_budget is None, planned 15"):
        start_server(silent, folder=tmp_path / "a")
    capped = install(DDTREE, name="capped", tree_budget=64, told={"speculative_ddtree_budget": 32})
    with pytest.raises(ServerError, match="speculative_ddtree_budget is 32, planned 64"):
        start_server(capped, folder=tmp_path / "b")
    assert verify_tokens({"speculative_algorithm": "DDTREE"}) is None


def test_another_commit_of_one_version_is_another_run(install: Install) -> None:
    specs = [install(DDTREE, name=f"site{n}", commit=c, tree_budget=16) for n, c in enumerate((COMMIT, "f" * 40, None))]
    assert [build_of(spec).commit for spec in specs] == [COMMIT, "f" * 40, None]
    # The same run but for the build: only what the installation tells differs.
    environments = [collect_environment(spec) for spec in specs]
    assert len({run_identity(specs[0], environment) for environment in environments}) == 3


def test_what_is_no_installation_tells_nothing(tmp_path: Path) -> None:
    assert engine_build("sglang", str(tmp_path / "none")) == EngineBuild()
    assert engine_build("sglang", sys.executable, (("PYTHONPATH", str(tmp_path)),)) == EngineBuild()
    reference = engine_build("reference", sys.executable)
    assert (bool(reference.version), reference.plugins) == (True, ())


def test_stock_is_unavailable_recorded_and_its_row_empty(install: Install, tmp_path: Path) -> None:
    spec = install(STOCK, tree_budget=16, campaign="c")
    reason = "method ddtree is unavailable in sglang 0.5.23: its command line has no --speculative-ddtree-budget"
    with pytest.raises(UnavailableError, match=reason):
        build_launch(spec, host="127.0.0.1", port=1)
    (outcome,) = run_sweep([spec], results=tmp_path)
    assert_unavailable(tmp_path / "c", reason)
    assert outcome.status == "failed"


def assert_unavailable(folder: Path, reason: str) -> None:
    """The run failed for that reason, and nowhere in the analysis has it a figure."""
    record = load_record(folder / "tp1-b16")
    assert (record.status, record.server, record.cells) == ("failed", None, ())
    assert (record.error or "").startswith(reason)
    assert record.environment["engine_version"] == "0.5.23"
    campaign = load_campaign(folder)
    assert [reason in row["reason"] for row in rows_of(build_failures([campaign]))] == [True]
    results = build_results([campaign])
    assert len(results) == 1 + len(record.spec.workload.prompts)  # each, and all pooled
    for row in rows_of(results):
        figures = [row.get(key) for key in ("decode_tok_s", "speedup", "accept_length", "step_ms", "verify_tokens")]
        assert (row["label"], row["note"], figures) == ("DDTree b16", "failed", [None] * 5)
    table = build_tables(results, results[:0], results[:0], "source")["main"]
    (cells,) = (row for row in table.rows if not isinstance(row, str))
    assert {cell.value for cell in cells} == {None}
    assert [cell.text for cell in cells[1:] if any(map(str.isdigit, cell.text))] == []


@pytest.mark.parametrize("_", [pytest.param(None, marks=NEEDS_SGLANG, id="sglang")])
def test_real_stock_is_unavailable_recorded_and_its_row_empty(_: None, tmp_path: Path) -> None:
    spec = load_sweep(LAPTOP, engine="sglang")
    (outcome,) = run_sweep(select_runs(spec, ["tp1-b16"]), results=tmp_path)
    assert outcome.status == "failed"
    assert_unavailable(tmp_path / "laptop", "method ddtree is unavailable in sglang 0.5.23")
