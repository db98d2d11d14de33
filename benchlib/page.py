"""An executed report notebook as one HTML file: self-contained, no script, no external address, code behind a toggle.

nbconvert renders the cells through the small template below, instead of its own that loads scripts from elsewhere.
What the notebook needed to get ready (cells tagged `setup`) moves to the end, so that the page starts with its result.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchlib.errors import ReportError

__all__ = ["build_page"]

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
_CSS = """
:root{color-scheme:light;--ink:#1d2430;--soft:#5a6475;--line:#d9dee6;--tint:#f5f7fa;--link:#0b5cad}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.5rem 1.25rem 4rem;max-width:66rem;background:#fff;color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.15rem;line-height:1.3;margin:0;color:var(--soft);font-weight:600}
h2{font-size:1.3rem;margin:2.6rem 0 .4rem;padding-top:.6rem;border-top:1px solid var(--line)}
h3{font-size:1.05rem;margin:1.6rem 0 .3rem}
.headline{font-size:1.35rem;line-height:1.4;font-weight:600;margin:.6rem 0 1rem}
.prose p,.notes{max-width:46rem}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:.15rem 1rem;font-size:.9rem}
nav a{text-decoration:none;padding:.2rem 0}nav a:hover{text-decoration:underline}
.toggle{font-size:.85rem;color:var(--soft);cursor:pointer;user-select:none}
#show-code{accent-color:var(--link);margin:1rem .3rem 0 0;vertical-align:-.1rem}
.code{display:none;margin:.8rem 0;overflow-x:auto;border:1px solid var(--line);border-radius:4px}
.code,.code .highlight{background:var(--tint)}
.code pre{margin:0;padding:.7rem .9rem;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
#show-code:checked~main .code{display:block}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{overflow-x:auto}
figure{margin:1.4rem 0}
figcaption{font-size:.9rem;color:var(--soft);margin:.3rem 0}
figure.table figcaption{color:var(--ink);font-weight:600}
figure.plot img{display:block;width:100%;max-width:920px;height:auto}
.scroll{overflow-x:auto;border-bottom:1px solid var(--ink);border-top:1px solid var(--ink)}
.scroll:focus-visible{outline:2px solid var(--link)}
table{border-collapse:collapse;font-size:.85rem;line-height:1.35;width:100%}
th,td{padding:.28rem .6rem;vertical-align:top;text-align:left;font-weight:400}
thead th{vertical-align:bottom;font-weight:600}
thead tr:last-child th{border-bottom:1px solid var(--soft)}
thead th small{display:block;font-weight:400;color:var(--soft)}
thead th[colspan]{text-align:center;color:var(--soft)}
th.number,td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.number small,td.empty{color:var(--soft)}
tbody th{white-space:nowrap}
tbody tr:nth-child(even) td,tbody tr:nth-child(even) th{background:var(--tint)}
tr.group th{font-weight:600;padding-top:.7rem;background:#fff!important}
td.text{min-width:9rem}
.notes{font-size:.8rem;color:var(--soft)}.notes p{margin:.35rem 0}
footer{margin-top:3rem;font-size:.8rem;color:var(--soft)}
@media(max-width:40rem){body{padding:1rem .9rem 3rem}.headline{font-size:1.15rem}
.scroll tbody th{position:sticky;left:0;background:#fff}}
@media print{body{max-width:none;padding:0;font-size:10pt}nav,.toggle,#show-code{display:none}
h2{break-after:avoid}figure{break-inside:avoid}.scroll{overflow:visible}table{font-size:7.5pt}
th,td{padding:.12rem .3rem}
td.text{min-width:0}}
"""


def build_page(notebook: Path, campaigns: Sequence[str]) -> str:
    """The HTML of an executed `04_report.ipynb`; ReportError when it holds an external address."""
    import nbformat
    from nbconvert.exporters import HTMLExporter

    content: Any = nbformat.read(str(notebook), as_version=4)  # type: ignore[no-untyped-call]
    content.cells = list(_ordered(content.cells, campaigns))
    make: Any = HTMLExporter
    exporter = make(raw_template=_TEMPLATE, exclude_anchor_links=True)
    body, _ = exporter.from_notebook_node(content)
    headline = re.search(r'<p class="headline">.*?</p>', body, re.DOTALL)
    lead = headline.group(0) if headline else ""
    page = _page(f"Speculative decoding, measured: {', '.join(campaigns)}", lead, body.replace(lead, "", 1))
    _check(page)
    return page


def _ordered(cells: Iterable[Any], campaigns: Sequence[str]) -> Iterable[Any]:
    """Result cells first; cells tagged `setup`, each with the prose before it, after them."""
    setup: list[Any] = []
    pending: list[Any] = []
    for index, cell in enumerate(cells):
        tags = cell.metadata.get("tags", [])
        pending.append(cell)
        if "injected-parameters" in tags:
            # Folders as they were given name people and machines; the campaign's own name does not.
            cell.source = f"campaigns = {list(campaigns)!r}"
        elif cell.cell_type == "markdown" and index:
            continue
        if index == 0 or {"setup", "injected-parameters"} & set(tags):
            setup += pending
        else:
            yield from pending
        pending = []
    yield from setup


def _page(title: str, lead: str, body: str) -> str:
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    heads = re.findall(r"<h2>(.*?)</h2>", body)
    slugs = {text: re.sub(r"\W+", "-", text.lower()).strip("-") for text in heads}
    toc = "".join(f'<a href="#{slugs[text]}">{text}</a>' for text in heads)
    body = re.sub(r"<h2>(.*?)</h2>", lambda m: f'<h2 id="{slugs[m[1]]}">{m[1]}</h2>', body)
    colours = HtmlFormatter(style="default").get_style_defs(".code")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{colours}\n{_CSS}</style></head>\n<body><header><h1>{html.escape(title)}</h1>{lead}"
        f'<nav aria-label="Contents">{toc}</nav></header>'
        '<input type="checkbox" id="show-code"><label class="toggle" for="show-code">Show the code</label>\n'
        f"<main>{body}</main><footer>Made by benchlib from the campaign's records alone.</footer></body></html>\n"
    )


def _check(page: str) -> None:
    outside = re.search(r"""(?:https?:)?//[\w.-]+\.\w|<script|<link|<iframe|@import|url\((?!["']?data:)""", page)
    if outside:
        around = page[max(0, outside.start() - 60) : outside.end() + 60]
        raise ReportError(
            f"the page would not be self-contained, it holds {outside.group(0)!r} in: ...{around!r}...; "
            "redact the text that brought it in"
        )
