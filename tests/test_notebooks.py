"""The notebooks' rules: prose first, literals as parameters, short cells, no logic, no outputs."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchlib.notebook import execute_notebook
from benchlib.record import load_record
from benchlib.spec import RunSpec

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOPOLOGIES = Path("tests") / "data" / "topology"
MAX_CELLS = 10
MAX_LINES = 12
FORBIDDEN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.While, ast.Try, ast.Lambda)

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    for cell in found:
        cell["text"] = "".join(cell["source"])
        cell["tags"] = cell["metadata"].get("tags", [])
    return found


def code(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def parameters(path: Path) -> str:
    (cell,) = [cell for cell in code(path) if "parameters" in cell["tags"]]
    return str(cell["text"])


def executed(name: str, out: Path, **parameters: Any) -> list[str]:
    """What each code cell of a notebook shows, as HTML where there is some, else as text."""
    copy = out / f"{name}.ipynb"
    assert execute_notebook(ROOT / "notebooks" / f"{name}.ipynb", copy, {"out": str(out), **parameters}) is None
    shown = []
    for cell in code(copy):
        data = [output.get("data", {"text/plain": output.get("text", "")}) for output in cell["outputs"]]
        shown.append("".join("".join(d.get("text/html") or d.get("text/markdown") or d["text/plain"]) for d in data))
    return shown


def test_there_are_notebooks() -> None:
    names = ["01_host", "02_measure", "03_validate", "04_report", "05_explore"]
    assert [path.stem for path in NOTEBOOKS] == names


@each
def test_prose_comes_first_and_before_every_code_cell(path: Path) -> None:
    found = cells(path)
    assert found[0]["cell_type"] == "markdown"
    assert found[0]["text"].startswith("# ")
    for promise in ("**Question.**", "**Writes**", "**Takes**"):
        assert promise in found[0]["text"]
    for before, cell in itertools.pairwise(found):
        assert cell["cell_type"] == "markdown" or before["cell_type"] == "markdown"


@each
def test_code_is_short_and_has_no_logic(path: Path) -> None:
    assert len(code(path)) <= MAX_CELLS
    for cell in code(path):
        assert not [node for node in ast.walk(ast.parse(cell["text"])) if isinstance(node, FORBIDDEN)]
        # A parameters cell is a table: one literal a line.
        if "parameters" not in cell["tags"]:
            assert len(cell["text"].splitlines()) <= MAX_LINES


@each
def test_parameters_are_annotated_literals_with_a_comment(path: Path) -> None:
    text = parameters(path)
    for node in ast.parse(text).body:
        assert isinstance(node, ast.AnnAssign)
        assert node.value is not None
        ast.literal_eval(node.value)
    for line in text.splitlines():
        assert re.search(r"  # \S", line), line


@each
def test_papermill_understands_every_parameter(path: Path) -> None:
    import papermill

    found = papermill.inspect_notebook(str(path))
    names = [node.target.id for node in ast.parse(parameters(path)).body]  # type: ignore[attr-defined]
    assert list(found) == names
    assert all(found[name]["help"] for name in names)


@each
def test_outputs_are_stripped(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert "papermill" not in notebook["metadata"]
    for cell in code(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert "papermill" not in cell["metadata"]


def test_measures_parameters_are_a_runs_with_their_defaults() -> None:
    (path,) = [path for path in NOTEBOOKS if path.stem == "02_measure"]
    values = {
        node.target.id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in ast.parse(parameters(path)).body
    }
    assert (values.pop("server_url"), values.pop("results_dir")) == ("", "results")
    assert values == RunSpec().to_parameters()


# papermill leaves the event loop of its thread to the garbage collector, which may come at any test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestExecuted:
    """Each notebook as it is used; `test_report` executes 04, and `test_sweep` 02 with a server of its own."""

    def test_the_host_is_shown_without_a_gpu_too(self, tmp_path: Path) -> None:
        shown = "".join(executed("01_host", tmp_path))
        assert "This machine" in shown
        assert 'alt="GPUs, their NUMA nodes and links' in shown
        assert (tmp_path / "figures" / "topology.pdf").is_file()
        for what in ("/dev/shm", "GPUs 0 and 1: 357.9 | 357.8 GB/s", "4228.2"):
            assert what in shown

    def test_the_sample_is_validated(self, tmp_path: Path) -> None:
        copy = tmp_path / "copy.ipynb"
        assert execute_notebook(ROOT / "notebooks" / "03_validate.ipynb", copy, {}) is None
        assert "laptop-sample: lossless" in copy.read_text()

    @pytest.mark.slow
    def test_a_machine_of_eight_is_looked_at_from_its_text(self, tmp_path: Path) -> None:
        saved = str(TOPOLOGIES / "quad_nvlink_pairs_four_numa_nodes.txt")
        shown = "".join(executed("01_host", tmp_path, topology=saved, tp_size=2))
        assert f"A saved machine, {Path(saved).name}." in shown
        assert "chosen: GPUs 0-1." in shown
        assert "tp_size=8 needs as many GPUs: 4 of" in shown

    def test_the_sample_is_explored_and_a_sweep_of_ones_own_planned(self, tmp_path: Path) -> None:
        shown = executed("05_explore", tmp_path, results_dir=str(tmp_path))
        assert re.search(r"DDTree b16 over DFlash linear: 1\.\d\d \(", "".join(shown))
        for figure in ("speedup", "ticks", "timeline"):
            assert f'id="fig-{figure}"' in "".join(shown)
            assert (tmp_path / f"{figure}-1col.png").is_file()
        # A kept tree is drawn; a run without one says so.
        assert 'id="fig-tree"' in shown[-2] or "tp1-b16 kept no draft tree." in shown[-2]
        assert all(f"tp1-{method}" in shown[-1] for method in ("auto", "b16", "auto.2", "b16.2"))
        assert shown[-1].count("<td>new</td>") == 4

    @pytest.mark.engine
    def test_a_newcomers_first_sweep_runs_from_the_notebook_and_is_explored(self, tmp_path: Path) -> None:
        executed("05_explore", tmp_path, results_dir=str(tmp_path), run_own=True)
        own = tmp_path / "my-first"
        assert sorted(load_record(path.parent).status for path in own.glob("*/record.json")) == ["ok"] * 4
        again = {"campaign": str(own), "methods": ["autoregressive", "DDTree b16"], "other": str(own)}
        shown = "".join(executed("05_explore", tmp_path, results_dir=str(tmp_path), **again))
        assert "DDTree b16 over autoregressive: " in shown
        assert shown.count("<td>finished</td>") == 4

    @pytest.mark.engine
    def test_one_run_is_measured_by_papermill_in_a_shell(self, tmp_path: Path) -> None:
        papermill = Path(sys.executable).with_name("papermill")
        flags = "-p tp_size 1 -p method ddtree -p tree_budget 16"
        command = f"{papermill} notebooks/02_measure.ipynb {tmp_path}/out.ipynb {flags} -p results_dir {tmp_path}"
        subprocess.run(command.split(), cwd=ROOT, check=True, capture_output=True, timeout=300)
        assert (tmp_path / "out.ipynb").is_file()
        assert load_record(tmp_path / "adhoc" / "tp1-b16").status == "ok"
