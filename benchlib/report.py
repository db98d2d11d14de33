"""The report of one or more campaigns: executes `04_report.ipynb`, renders one HTML file and, with LaTeX, one PDF.

Everything lands in one folder: `report.html`, `report.pdf`, `report.ipynb` (the executed notebook), `main.tex`,
`tables/` and `figures/`. Records are only read.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.errors import ReportError
from benchlib.frames import find_folder
from benchlib.page import build_page
from benchlib.sweep import execute_notebook
from benchlib.typeset import PREAMBLE

__all__ = ["ReportResult", "build_pdf", "build_report", "out_folder", "show"]

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "04_report.ipynb"
MAIN_TEX = ROOT / "report" / "main.tex"
LATEX_TIMEOUT_S = 300
LATEX_PACKAGES = (
    "texlive-latex-base texlive-latex-extra texlive-science texlive-fonts-recommended texlive-pictures latexmk"
)


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Where everything is; `pdf_reason` says why there is no PDF."""

    html: Path
    tables: list[Path]
    figures: list[Path]
    pdf: Path | None
    pdf_reason: str | None


def build_report(paths: Sequence[Path], out: Path) -> ReportResult:
    """Build tables, figures, HTML and, where `latexmk` is installed, the PDF of `paths` in `out`; takes about 20 s.

    Raises RecordError for a folder without runs, ReportError when the notebook fails or is not there.
    """
    folders = [find_folder(path) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    executed = out / "report.ipynb"
    parameters = {"campaigns": [os.path.relpath(f) for f in folders], "out": os.path.relpath(out)}
    failure = execute_notebook(_existing(NOTEBOOK), executed, parameters)
    if failure:
        raise ReportError(f"{NOTEBOOK.name} failed: {failure}. Executed copy: {executed}")
    page = out / "report.html"
    page.write_text(build_page(executed, [folder.name for folder in folders]), encoding="utf-8")
    pdf, reason = build_pdf(out)
    tables, figures = (sorted((out / name).iterdir()) for name in ("tables", "figures"))
    return ReportResult(page, tables, figures, pdf, reason)


def build_pdf(out: Path) -> tuple[Path | None, str | None]:
    """Compile `main.tex` with the generated parts below `out`: (the PDF, None) or (None, why there is none)."""
    main = out / "main.tex"
    if main.resolve() != MAIN_TEX:
        shutil.copyfile(_existing(MAIN_TEX), main)
    (out / "tables" / "preamble.tex").write_text(PREAMBLE, encoding="utf-8")
    latexmk = shutil.which("latexmk")
    if latexmk is None:
        return None, f"latexmk is not installed; on Debian: apt-get install {LATEX_PACKAGES}"
    with tempfile.TemporaryDirectory() as build:
        flags = ["-pdf", "-interaction=nonstopmode", "-halt-on-error", "-jobname=report", f"-outdir={build}"]
        try:
            done = subprocess.run(
                [latexmk, *flags, "main.tex"],
                cwd=out,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LATEX_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"latexmk did not finish in {LATEX_TIMEOUT_S} s"
        if done.returncode:
            return None, f"latexmk exited with code {done.returncode}: {_tex_error(done.stdout)}"
        return Path(shutil.copyfile(Path(build) / "report.pdf", out / "report.pdf")), None


def out_folder(out: str) -> Path:
    """Where a notebook writes: as given when absolute or the folder is here, else below the repository."""
    path = Path(out)
    return path if path.is_absolute() or path.exists() else ROOT / path


def show(*items: Any) -> None:
    """Display tables and drawings as HTML in a notebook; a text becomes the headline."""
    from IPython import display

    jupyter: Any = display
    for item in items:
        text = f'<p class="headline">{html.escape(item)}</p>' if isinstance(item, str) else None
        jupyter.display(jupyter.HTML(text or item.to_html()))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ReportError(f"{path.name} is not beside the package: reports are made in a clone of the repository")
    return path


def _tex_error(log: str) -> str:
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("!")), max(0, len(lines) - 3))
    return " ".join(lines[first : first + 3])
