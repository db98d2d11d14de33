"""Executing notebooks: in this interpreter, saying why they fail, and leaving no kernel behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchlib.errors import ServerError
from benchlib.notebook import execute_notebook, read_parameters

Write = Callable[..., Path]
Started = Callable[[], list[list[str]]]


def test_a_notebook_runs_in_this_interpreter_or_says_why_not(write_notebook: Write, tmp_path: Path) -> None:
    source = write_notebook("import sys; print(sys.executable, x)", "1 / 0", "never = 1")
    assert read_parameters(source) == {"x"}
    error = execute_notebook(source, tmp_path / "out.ipynb", {"x": 5})
    assert error == "ZeroDivisionError: division by zero"
    text = (tmp_path / "out.ipynb").read_text()
    assert "ZeroDivisionError" in text
    printed = [cell for cell in json.loads(text)["cells"] if "sys.executable" in "".join(cell["source"])]
    assert "".join(printed[0]["outputs"][0]["text"]) == f"{sys.executable} 5\n"
    assert json.loads(source.read_text())["cells"][1]["outputs"] == []


@pytest.mark.parametrize("kernels", [0, 1])
def test_what_the_watch_raises_ends_the_kernel(
    write_notebook: Write, tmp_path: Path, started: Started, kernels: int
) -> None:
    """Raised before the kernel has a process, and while that starts: neither is left to run its cells."""

    def watch() -> None:
        if len(started()) >= kernels:
            raise ServerError("the server died")

    source = write_notebook("import time; time.sleep(100)")
    began = time.monotonic()
    with pytest.raises(ServerError, match="the server died"):
        execute_notebook(source, tmp_path / "out.ipynb", {}, watch=watch)
    assert time.monotonic() - began < 30
    assert not started()
