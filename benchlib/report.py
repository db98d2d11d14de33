"""The report of one or more campaigns: executes `04_report.ipynb`, renders one HTML file and, with LaTeX, one PDF.

Everything lands in one folder: `report.html`, `report.pdf`, `report.ipynb` (the executed notebook), `main.tex`,
`tables/` and `figures/`. Records are only read. The page is self-contained: no script, no external address, code behind
a toggle. nbconvert renders its cells through the small template below, not its own that loads scripts from elsewhere.
What the notebook needed to get ready (cells tagged `setup`) moves to the end, so that the page starts with its result.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.errors import ReportError
from benchlib.frames import find_folder
from benchlib.notebook import execute_notebook
from benchlib.typeset import PREAMBLE

__all__ = ["ReportResult", "build_page", "build_pdf", "build_report", "out_folder", "show"]

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "04_report.ipynb"
MAIN_TEX = ROOT / "report" / "main.tex"
PAGE_CSS = ROOT / "report" / "page.css"
LATEX_TIMEOUT_S = 300
LATEX_PACKAGES = (
    "texlive-latex-base texlive-latex-extra texlive-science texlive-fonts-recommended texlive-pictures latexmk"
)
_LOADED = r"""<script|<link|<iframe|@import|url\((?!["']?data:)|(?:src|href)=["']?(?:https?:)?//"""
# Addresses name machines: in a page to be shared there is not even the text of one.
_OUTSIDE = re.compile(rf"(?:https?:)?//[\w.-]+\.\w|{_LOADED}")
_TEMPLATE = """
{%- for cell in nb.cells -%}
{%- if cell.cell_type == 'markdown' -%}
<div class="prose">{{ cell.source | markdown2html }}</div>
{%- elif cell.cell_type == 'code' -%}
<div class="code">{{ cell.source | highlight_code(metadata=cell.metadata) }}</div>
{%- for output in cell.outputs if output.data is defined -%}
{%- if output.data['text/html'] is defined -%}{{ output.data['text/html'] }}
{%- elif output.data['text/plain'] is defined -%}<pre>{{ output.data['text/plain'] | escape }}</pre>{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Where everything is; `pdf_reason` says why there is no PDF."""

    html: Path
    tables: list[Path]
    figures: list[Path]
    pdf: Path | None
    pdf_reason: str | None


def build_report(paths: Sequence[Path], out: Path, *, full_provenance: bool = False) -> ReportResult:
    """Build tables, figures, HTML and, where `latexmk` is installed, the PDF of `paths` in `out`; takes about 15 s.

    `full_provenance` also shows command lines, variables, paths and UUIDs, which may name people and machines.

    Raises RecordError for a folder without runs, ReportError when the notebook fails or is not there.
    """
    folders = [find_folder(path) for path in paths]
    if out.exists() and not out.is_dir():
        raise ReportError(f"{out} is a file: the report needs a folder, give another --out")
    out.mkdir(parents=True, exist_ok=True)
    executed = out / "report.ipynb"
    parameters: dict[str, Any] = {"campaigns": [os.path.relpath(f) for f in folders], "out": os.path.relpath(out)}
    parameters |= {"full_provenance": True} if full_provenance else {}
    failure = execute_notebook(_existing(NOTEBOOK), executed, parameters)
    if failure:
        raise ReportError(f"{NOTEBOOK.name} failed: {failure}. Executed copy: {executed}")
    page = out / "report.html"
    text = build_page(executed, [folder.name for folder in folders], full=full_provenance)
    page.write_text(text, encoding="utf-8")
    pdf, reason = build_pdf(out)
    tables, figures = (sorted((out / name).iterdir()) for name in ("tables", "figures"))
    return ReportResult(page, tables, figures, pdf, reason)


def build_page(notebook: Path, campaigns: Sequence[str], *, full: bool = False) -> str:
    """The HTML of an executed `04_report.ipynb`; ReportError when it holds an address, or, `full`, loads from one."""
    import nbformat
    from nbconvert.exporters import HTMLExporter

    content: Any = nbformat.read(str(notebook), as_version=4)  # type: ignore[no-untyped-call]
    content.cells = list(_ordered(content.cells, campaigns))
    make: Any = HTMLExporter
    body, _ = make(raw_template=_TEMPLATE, exclude_anchor_links=True).from_notebook_node(content)
    headline = re.search(r'<p class="headline">.*?</p>', body, re.DOTALL)
    lead = headline.group(0) if headline else ""
    page = _page(f"Speculative decoding, measured: {', '.join(campaigns)}", lead, body.replace(lead, "", 1))
    if outside := (re.compile(_LOADED) if full else _OUTSIDE).search(page):
        around = page[max(0, outside.start() - 60) : outside.end() + 60]
        raise ReportError(
            f"the page would not be self-contained, it holds {outside.group(0)!r} in: ...{around!r}...; "
            "redact the text that brought it in"
        )
    return page


def _ordered(cells: Sequence[Any], campaigns: Sequence[str]) -> Iterable[Any]:
    """Result cells first; the introduction and cells tagged `setup`, each with the prose before it, after them."""
    late, pending = [cells[0]], []
    for cell in cells[1:]:
        tags = set(cell.metadata.get("tags", []))
        pending.append(cell)
        if "injected-parameters" in tags:
            # Folders as they were given name people and machines; the campaign's own name does not.
            cell.source = f"campaigns = {list(campaigns)!r}"
        if cell.cell_type == "markdown":
            continue
        if tags & {"setup", "injected-parameters"}:
            late += pending
        else:
            yield from pending
        pending = []
    yield from (*late, *pending)


def _page(title: str, lead: str, body: str) -> str:
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    heads = re.findall(r"<h2>(.*?)</h2>", body)
    slugs = {text: re.sub(r"\W+", "-", text.lower()).strip("-") for text in heads}
    toc = "".join(f'<a href="#{slug}">{text}</a>' for text, slug in slugs.items())
    body = re.sub(r"<h2>(.*?)</h2>", lambda m: f'<h2 id="{slugs[m[1]]}">{m[1]}</h2>', body)
    colours = HtmlFormatter(style="default").get_style_defs(".code")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{colours}\n{_existing(PAGE_CSS).read_text()}</style></head>\n<body><header><h1>{html.escape(title)}</h1>{lead}"
        f'<nav aria-label="Contents">{toc}</nav></header>'
        '<input type="checkbox" id="show-code"><label class="toggle" for="show-code">Show the code</label>\n'
        f"<main>{body}</main><footer>Made by benchlib from the campaign's records alone.</footer></body></html>\n"
    )


def build_pdf(out: Path) -> tuple[Path | None, str | None]:
    """Compile `main.tex` with the generated parts below `out`: (the PDF, None) or (None, why there is none)."""
    main = out / "main.tex"
    if main.resolve() != MAIN_TEX:
        shutil.copyfile(_existing(MAIN_TEX), main)
    (out / "tables" / "preamble.tex").write_text(PREAMBLE, encoding="utf-8")
    latexmk = shutil.which("latexmk")
    if latexmk is None:
        return None, f"latexmk is not installed; on Debian: apt-get install {LATEX_PACKAGES}"
    flags = ["-pdf", "-interaction=nonstopmode", "-halt-on-error", "-jobname=report"]
    keep: Any = {"cwd": out, "capture_output": True, "text": True, "errors": "replace", "timeout": LATEX_TIMEOUT_S}
    with tempfile.TemporaryDirectory() as build:
        try:
            done = subprocess.run([latexmk, *flags, f"-outdir={build}", "main.tex"], check=False, **keep)
        except subprocess.TimeoutExpired:
            return None, f"latexmk did not finish in {LATEX_TIMEOUT_S} s"
        if done.returncode:
            lines = done.stdout.splitlines()
            first = next((i for i, line in enumerate(lines) if line.startswith("!")), max(0, len(lines) - 3))
            return None, f"latexmk exited with code {done.returncode}: {' '.join(lines[first : first + 3])}"
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
