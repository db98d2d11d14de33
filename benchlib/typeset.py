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
from itertools import groupby
from pathlib import Path
from typing import Literal

__all__ = ["PREAMBLE", "Cell", "Column", "Table", "escape_tex", "redact"]

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
BREAK_FROM = 60  # characters of a text that is broken into lines
# Caption and notes are set as wide as their table. With one narrower than so many characters they would be a tower.
NARROW, STRETCHED = 72, r"0.62\linewidth"


@dataclass(frozen=True, slots=True)
class Cell:
    """A number with the half-width of its interval, or the word that stands where there is none."""

    value: float | None = None
    error: float | None = None
    text: str = ""
    bold: bool = False

    def digits(self, decimals: int) -> tuple[str, str]:
        """(value, uncertainty in units of its last digit, rounded up, or empty)."""
        error = "" if self.error is None else str(max(1, math.ceil(round(self.error * 10**decimals, 6))))
        return f"{self.value:.{decimals}f}", error


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
    """Columns, rows and notes. A row that is a string is a heading across the table; `wrap`: break the longest text."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[str | tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    wrap: bool = False

    def to_latex(self) -> str:
        """A `table` environment for `\\input`, given PREAMBLE; every text in it is escaped."""
        decimals = self._decimals()
        notes = [rf"\item {escape_tex(note)}" for note in self.notes]
        columns = f"{self._tex_columns(decimals)}@{{}}"
        begin, end = rf"\begin{{tabular}}{{@{{}}{columns}}}", r"\end{tabular}"
        narrow = self._characters() < NARROW
        if narrow and (len(self.caption) > self._characters() or any(len(note) > NARROW for note in self.notes)):
            begin = rf"\begin{{tabular*}}{{{STRETCHED}}}{{@{{\extracolsep{{\fill}}}}{columns}}}"
            end = r"\end{tabular*}"
        if notes:
            notes = [r"\begin{tablenotes}[flushleft]\footnotesize", *notes, r"\end{tablenotes}"]
        lines = [
            *(r"\begin{table}[htbp]", r"\centering\footnotesize\setlength{\tabcolsep}{4pt}"),
            *(r"\begin{threeparttable}", rf"\caption{{{escape_tex(self.caption)}}}\label{{tab:{self.name}}}"),
            *(begin, r"\toprule", *self._tex_heads()),
            *(r"\midrule", *(self._tex_row(row, decimals) for row in self.rows), r"\bottomrule", end),
            *(*notes, r"\end{threeparttable}", r"\end{table}", ""),
        ]
        return "\n".join(lines)

    def to_html(self) -> str:
        """A `figure` with caption, table and notes; it scrolls inside its own box. All texts are escaped."""
        decimals, caption = self._decimals(), html.escape(self.caption)
        body = "".join(self._html_row(row, decimals) for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<figure class="table" id="tab-{self.name}"><figcaption>{caption}</figcaption>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
            f"<thead>{''.join(self._html_heads())}</thead><tbody>{body}</tbody></table></div>"
            f'<div class="notes">{notes}</div></figure>'
        )

    _repr_html_ = to_html

    def save(self, folder: Path) -> Path:
        """Write `<name>.tex` into `folder`; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.tex"
        path.write_text(self.to_latex(), encoding="utf-8")
        return path

    def _cells(self, index: int) -> list[Cell]:
        return [row[index] for row in self.rows if not isinstance(row, str)]

    def _decimals(self) -> list[int]:
        """Of each column: its own, else two digits of its median uncertainty, else 1."""
        found = []
        for index, column in enumerate(self.columns):
            errors = [cell.error for cell in self._cells(index) if cell.error]
            warranted = 1 - math.floor(math.log10(statistics.median(errors))) if errors else 1
            found.append(max(0, min(MAX_DECIMALS, warranted)) if column.decimals is None else column.decimals)
        return found

    def _groups(self) -> list[tuple[str, int]]:
        return [(group, len(list(same))) for group, same in groupby(self.columns, lambda column: column.group)]

    def _tex_columns(self, decimals: list[int]) -> str:
        longest = [max((len(cell.text) for cell in self._cells(i)), default=0) for i in range(len(self.columns))]
        specs = []
        for index, column in enumerate(self.columns):
            parts = [cell.digits(decimals[index]) for cell in self._cells(index) if cell.value is not None]
            if column.kind == "text" or not parts:
                broken = self.wrap and index == longest.index(max(longest)) and longest[index] > BREAK_FROM
                specs.append(r"p{9cm}" if broken else "l")
                continue
            width = max(len(value.partition(".")[0]) for value, _ in parts)
            digits = max(len(error) for _, error in parts)
            specs.append(f"S[table-format={width}.{decimals[index]}{f'({digits})' if digits else ''}]")
        return "".join(specs)

    def _characters(self) -> int:
        """About how wide it is set: its columns' longest texts, or a heading across them."""
        texts = [
            [c.head, c.unit, *(cell.text or "0000 ± 00" for cell in self._cells(i))] for i, c in enumerate(self.columns)
        ]
        headings = [len(row) for row in self.rows if isinstance(row, str)]
        return max(sum(max(map(len, column)) + 2 for column in texts), *headings, 0)

    def _tex_heads(self) -> Iterable[str]:
        if any(column.group for column in self.columns):
            yield " & ".join(rf"\multicolumn{{{n}}}{{c}}{{{escape_tex(g)}}}" for g, n in self._groups()) + r" \\"
            at = 1
            for group, n in self._groups():
                if group:
                    yield rf"\cmidrule(lr){{{at}-{at + n - 1}}}"
                at += n
        for texts in ([c.head for c in self.columns], [c.unit for c in self.columns]):
            if any(texts):
                yield " & ".join(f"{{{escape_tex(text)}}}" for text in texts) + r" \\"

    def _tex_row(self, row: str | tuple[Cell, ...], decimals: list[int]) -> str:
        if isinstance(row, str):
            heading = rf"\multicolumn{{{len(self.columns)}}}{{@{{}}l}}{{\textit{{{escape_tex(row)}}}}}"
            return rf"\addlinespace[2pt]{heading} \\"
        texts = []
        for cell, column, places in zip(row, self.columns, decimals, strict=True):
            if cell.value is None:
                # Braces keep a word in an S column from being read as a number.
                text = escape_tex(cell.text or "—")
                texts.append(text if column.kind == "text" else f"{{{text}}}")
            else:
                value, error = cell.digits(places)
                texts.append((r"\bfseries " if cell.bold else "") + value + (f"({error})" if error else ""))
        return " & ".join(texts) + r" \\"

    def _html_heads(self) -> Iterable[str]:
        if any(column.group for column in self.columns):
            spans = (f'<th colspan="{n}" scope="colgroup">{html.escape(g)}</th>' for g, n in self._groups())
            yield f"<tr>{''.join(spans)}</tr>"
        units = (f"<small>{html.escape(c.unit)}</small>" if c.unit else "" for c in self.columns)
        pairs = zip(self.columns, units, strict=True)
        heads = (f'<th scope="col" class="{c.kind}">{html.escape(c.head)}{unit}</th>' for c, unit in pairs)
        yield f"<tr>{''.join(heads)}</tr>"

    def _html_row(self, row: str | tuple[Cell, ...], decimals: list[int]) -> str:
        if isinstance(row, str):
            return f'<tr class="group"><th colspan="{len(self.columns)}" scope="rowgroup">{html.escape(row)}</th></tr>'
        texts: list[str] = []
        for cell, column, places in zip(row, self.columns, decimals, strict=True):
            inner, css = html.escape(cell.text or "—"), "text" if column.kind == "text" else "number empty"
            if cell.value is not None:
                inner, error = cell.digits(places)
                inner += f" <small>± {int(error) / 10**places:.{places}f}</small>" if error else ""
                inner, css = f"<b>{inner}</b>" if cell.bold else inner, "number"
            texts.append(f'<td class="{css}">{inner}</td>' if texts else f'<th scope="row">{inner}</th>')
        return f"<tr>{''.join(texts)}</tr>"


def escape_tex(text: str) -> str:
    """Text that LaTeX prints as it is; characters that its Latin fonts lack become `?`."""
    return "".join(_TEX.get(c) or (c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in text)


def redact(text: str, limit: int = 240) -> str:
    """Text without addresses, home folders and absolute paths (their last part stays), cut to `limit` characters."""
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "(address)", text)
    text = re.sub(r"(?<![\w.])~?(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
