"""The notebooks' rules: prose first, literals as parameters, short cells, no logic, no outputs."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchlib.spec import RunSpec

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
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


def test_there_are_notebooks() -> None:
    assert "02_measure" in [path.stem for path in NOTEBOOKS]


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
