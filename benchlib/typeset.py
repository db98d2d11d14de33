"""One description of a table, rendered as LaTeX (booktabs, siunitx) and as HTML.

A number is printed with the decimals that its column's uncertainties warrant, and the uncertainty is rounded up. Every
text is escaped for the language it is rendered in, headers included.
"""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["PREAMBLE", "Cell", "Column", "Table", "build_document", "escape_tex", "redact"]

# separate-uncertainty and mode=text: the settings under which a bold 158.2(31) is bold, aligned and well spaced.
PREAMBLE = r"""\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{textcomp,mathptmx,microtype,booktabs,siunitx,threeparttable,graphicx}
\sisetup{separate-uncertainty=true,detect-weight=true,mode=text}
"""
_TEX = {
    **{c: f"\\{c}" for c in "{}$&#_%"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"×": r"\texttimes{}", "±": r"\textpm{}", "·": r"\textperiodcentered{}", "…": r"\ldots{}"},
    **{"—": "---", "–": "--", "’": "'", "“": "``", "”": "''", "\n": " "},
}
MAX_DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A number with the half-width of its interval, or the word that stands where there is none."""

    value: float | None = None
    error: float | None = None
    text: str = ""
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A header with its unit, below a heading shared by neighbours; `decimals` None: by the uncertainties."""

    head: str
    unit: str = ""
    group: str = ""
    kind: Literal["text", "number"] = "number"
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, rows and notes. A row that is a string is a heading across the table."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[str | tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    wrap: bool = False

    def to_latex(self) -> str:
        """A `table` environment for `\\input`, given PREAMBLE; every text in it is escaped."""
        lines = [r"\begin{table}[htbp]", r"\centering\footnotesize\setlength{\tabcolsep}{4pt}"]
        lines += [r"\begin{threeparttable}"]
        lines += [rf"\caption{{{escape_tex(self.caption)}}}\label{{tab:{self.name}}}"]
        lines += [rf"\begin{{tabular}}{{@{{}}{self._tex_columns()}@{{}}}}", r"\toprule"]
        lines += [*self._tex_heads(), r"\midrule", *map(self._tex_row, self.rows)]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.notes:
            lines += [r"\begin{tablenotes}[flushleft]\footnotesize"]
            lines += [rf"\item {escape_tex(note)}" for note in self.notes]
            lines += [r"\end{tablenotes}"]
        return "\n".join([*lines, r"\end{threeparttable}", r"\end{table}", ""])

    def to_html(self) -> str:
        """A `figure` with caption, table and notes; it scrolls inside its own box. All texts are escaped."""
        heads = "".join(f"<tr>{''.join(row)}</tr>" for row in self._html_heads())
        body = "".join(map(self._html_row, self.rows))
        notes = "".join(f"<p>{_html(note)}</p>" for note in self.notes)
        return (
            f'<figure class="table" id="tab-{self.name}"><figcaption>{_html(self.caption)}</figcaption>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{_html(self.caption)}"><table>'
            f"<thead>{heads}</thead><tbody>{body}</tbody></table></div>"
            f'<div class="notes">{notes}</div></figure>'
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def save(self, folder: Path) -> Path:
        """Write `<name>.tex` into `folder`; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.tex"
        path.write_text(self.to_latex(), encoding="utf-8")
        return path

    def _numbers(self, index: int) -> list[Cell]:
        cells = [row[index] for row in self.rows if not isinstance(row, str)]
        return [cell for cell in cells if cell.value is not None]

    def _decimals(self, index: int) -> int:
        column = self.columns[index]
        errors = [c.error for c in self._numbers(index) if c.error]
        if column.decimals is not None or not errors:
            return 1 if column.decimals is None else column.decimals
        return max(0, min(MAX_DECIMALS, 1 - math.floor(math.log10(statistics.median(errors)))))

    def _parts(self, cell: Cell, index: int) -> tuple[str, str]:
        """(value, uncertainty in units of its last digit or empty), both as digits."""
        decimals = self._decimals(index)
        value = f"{cell.value:.{decimals}f}"
        if cell.error is None:
            return value, ""
        return value, str(max(1, math.ceil(round(cell.error * 10**decimals, 6))))

    def _tex_columns(self) -> str:
        specs = []
        for index, column in enumerate(self.columns):
            parts = [self._parts(cell, index) for cell in self._numbers(index)]
            if column.kind == "text" or not parts:
                specs.append(r"p{9cm}" if self.wrap and index == self._longest() else "l")
                continue
            width = max(len(value.partition(".")[0]) for value, _ in parts)
            digits = max(len(error) for _, error in parts)
            spread = f"({digits})" if digits else ""
            specs.append(f"S[table-format={width}.{self._decimals(index)}{spread}]")
        return "".join(specs)

    def _longest(self) -> int:
        rows = [row for row in self.rows if not isinstance(row, str)]
        return max(range(len(self.columns)), key=lambda i: max((len(r[i].text) for r in rows), default=0))

    def _groups(self) -> list[tuple[str, int]]:
        runs: list[tuple[str, int]] = []
        for column in self.columns:
            if runs and runs[-1][0] == column.group:
                runs[-1] = (column.group, runs[-1][1] + 1)
            else:
                runs.append((column.group, 1))
        return runs

    def _tex_heads(self) -> Iterable[str]:
        if any(column.group for column in self.columns):
            spans = [rf"\multicolumn{{{n}}}{{c}}{{{escape_tex(group)}}}" for group, n in self._groups()]
            yield " & ".join(spans) + r" \\"
            at = 1
            for group, n in self._groups():
                if group:
                    yield rf"\cmidrule(lr){{{at}-{at + n - 1}}}"
                at += n
        yield " & ".join(f"{{{escape_tex(c.head)}}}" for c in self.columns) + r" \\"
        if any(column.unit for column in self.columns):
            yield " & ".join(f"{{{escape_tex(c.unit)}}}" for c in self.columns) + r" \\"

    def _tex_row(self, row: str | tuple[Cell, ...]) -> str:
        if isinstance(row, str):
            span = rf"\multicolumn{{{len(self.columns)}}}{{@{{}}l}}{{\textit{{{escape_tex(row)}}}}}"
            return rf"\addlinespace[2pt]{span} \\"
        return " & ".join(self._tex_cell(cell, i) for i, cell in enumerate(row)) + r" \\"

    def _tex_cell(self, cell: Cell, index: int) -> str:
        if cell.value is None:
            # Braces keep a word in an S column from being read as a number.
            text = escape_tex(cell.text or "—")
            return text if self.columns[index].kind == "text" else f"{{{text}}}"
        value, error = self._parts(cell, index)
        return (r"\bfseries " if cell.bold else "") + value + (f"({error})" if error else "")

    def _html_heads(self) -> Iterable[list[str]]:
        if any(column.group for column in self.columns):
            yield [f'<th colspan="{n}" scope="colgroup">{_html(group)}</th>' for group, n in self._groups()]
        yield [
            f'<th scope="col" class="{c.kind}">{_html(c.head)}'
            + (f"<small>{_html(c.unit)}</small>" if c.unit else "")
            + "</th>"
            for c in self.columns
        ]

    def _html_row(self, row: str | tuple[Cell, ...]) -> str:
        if isinstance(row, str):
            return f'<tr class="group"><th colspan="{len(self.columns)}" scope="rowgroup">{_html(row)}</th></tr>'
        head, *rest = (self._html_cell(cell, i) for i, cell in enumerate(row))
        return f'<tr><th scope="row">{head}</th>' + "".join(rest) + "</tr>"

    def _html_cell(self, cell: Cell, index: int) -> str:
        if cell.value is None:
            inner = _html(cell.text or "—")
            kind_class = "text" if self.columns[index].kind == "text" else "number empty"
        else:
            value, error = self._parts(cell, index)
            spread = int(error) / 10 ** self._decimals(index) if error else None
            inner = value + (f" <small>± {spread:.{self._decimals(index)}f}</small>" if spread else "")
            inner, kind_class = f"<b>{inner}</b>" if cell.bold else inner, "number"
        return inner if index == 0 else f'<td class="{kind_class}">{inner}</td>'


def escape_tex(text: str) -> str:
    """Text that LaTeX prints as it is; characters that its Latin fonts lack become `?`."""
    return "".join(_TEX.get(c) or (c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in text)


def redact(text: str, limit: int = 240) -> str:
    """Text without addresses, home folders and absolute paths (their last part stays), cut to `limit` characters."""
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "(address)", text)
    text = re.sub(r"(?<![\w.])~?(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def build_document(fragment: str) -> str:
    """A whole LaTeX document around one fragment: each compiles alone."""
    return f"\\documentclass{{article}}\n{PREAMBLE}\\begin{{document}}\n{fragment}\\end{{document}}\n"


def _html(text: str) -> str:
    return html.escape(text)
