"""The record schema as a document, made from the models: `python -m benchlib.schema` writes `results/SCHEMA.md`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from benchlib import gaps, record
from benchlib.draft_tree import Drafted, DraftTree, Node
from benchlib.gaps import PromptGaps
from benchlib.nccl import NcclLog
from benchlib.placement import Placement
from benchlib.record import CellRecord, RequestRecord, RunRecord, ServerRecord
from benchlib.spec import RunSpec, Workload
from benchlib.telemetry import COLUMNS, Sample, TelemetryRecord

__all__ = ["SCHEMA_FILE", "build_schema"]

SCHEMA_FILE = Path(__file__).resolve().parents[1] / "results" / "SCHEMA.md"
FILES: dict[str, tuple[type, ...]] = {
    "record.json": (RunRecord, CellRecord, ServerRecord, Placement, NcclLog, RunSpec, Workload),
    "requests.jsonl": (RequestRecord,),
    "telemetry.json": (TelemetryRecord, Sample),
    "gaps.json": (PromptGaps,),
    "draft_tree.json": (DraftTree, Node, Drafted),
}
NOTES = {
    "requests.jsonl": "One line a request, in the order they were sent. A field that has its default is left out. "
    "`requests.jsonl.gz` is read, too.",
    "telemetry.json": "On GPUs only. A value that the device does not support is null.",
    "gaps.json": '`{"schema_version": 2, "prompts": {SHA-256 of the prompt: PromptGaps}}`, of autoregressive runs.',
    "draft_tree.json": "Of speculative runs whose engine can tell it.",
}
INTRODUCTION = """\
# What a run's folder holds

Written by `make docs` from the models in `benchlib/`: change those, not this. The types are Python's: a tuple is a JSON
array, None is null and means that something is not known, never 0. Units stand in a field's name, or beside it. Nothing
is derived: rates are computed from the ticks by `benchlib/metrics.py`, each time. An unknown field is an error, so that
a record of a newer schema is refused and not half read. Beside these files lie `notebook.ipynb`, as executed, and
`server.log`.

```python
from benchlib import load_record, load_requests

record = load_record("results/laptop-sample/tp1-b16")      # verified: checksum, schema
requests = load_requests("results/laptop-sample/tp1-b16")  # warm-ups and failed requests included
```
"""
LONG = 60  # characters of a default that still fit a table
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
ANCHORS = {model.__name__ for models in FILES.values() for model in models}


def build_schema() -> str:
    """The whole document: a section a file, a table a model, and what the schema versions changed."""
    parts = [INTRODUCTION, "## Schema versions\n", f"`record.json` and `requests.jsonl`:\n\n{_history(record)}\n"]
    parts.append(f"`gaps.json`:\n\n{_history(gaps)}\n")
    for file, models in FILES.items():
        parts += [f"## {file}\n", *([f"{NOTES[file]}\n"] if file in NOTES else [])]
        parts += [_section(model) for model in models]
    return "\n".join(parts)


def _history(module: Any) -> str:
    """The versions from a module's docstring, a list item each: lines that begin with a number, and what follows."""
    lines = [line.strip() for line in (module.__doc__ or "").splitlines()]
    text = "\n".join(lines)
    found = re.findall(r"^(?:schema )?(\d)  (.+(?:\n(?!\n|(?:schema )?\d  ).+)*)", text, re.MULTILINE)
    return "\n".join(f"- **{number}** {' '.join(what.split())}" for number, what in found)


def _section(model: type) -> str:
    said = inspect.getdoc(model) or ""
    rows = "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in _rows(model))
    return f"### {model.__name__}\n\n{said}\n\n| field | type | default | what |\n|---|---|---|---|\n{rows}\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rows(model: type) -> Iterator[tuple[str, str, str, str]]:
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            what = "; ".join(filter(None, (field.description, *_bounds(field.metadata))))
            yield f"`{name}`", _format_type(field.annotation), _default(field), what
        return
    types = get_type_hints(model)
    given = {f.name: f for f in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else {}
    # What these have instead of descriptions: comments, of samples units.
    said = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(model), re.MULTILINE))
    said |= COLUMNS if model is Sample else {}
    for name, kind in types.items():
        default = _plain_default(given[name]) if name in given else ""
        yield f"`{name}`", _format_type(kind), default, said.get(name, "")


def _plain_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _value(field.default_factory())
    return "" if field.default is dataclasses.MISSING else _value(field.default)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    return "its own" if isinstance(value, BaseModel) else _value(value)


def _value(value: object) -> str:
    text = json.dumps(to_jsonable_python(value), ensure_ascii=False)
    return f"`{text}`" if len(text) <= LONG else "its own"


def _bounds(metadata: Iterable[Any]) -> list[str]:
    found = [f"{sign} {getattr(m, name):g}" for m in metadata for name, sign in BOUNDS.items() if hasattr(m, name)]
    return [" and ".join(found)] if found else []


def _format_type(kind: Any) -> str:
    """`tuple[str, ...]`, `int or None`; a model of this document as a link."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (None, NoneType):
        return "None"
    if origin is Annotated:
        return _format_type(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_format_type, inner))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin:
        return f"{origin.__name__}[{', '.join('...' if one is Ellipsis else _format_type(one) for one in inner)}]"
    name = str(kind.__name__)
    return f"[{name}](#{name.lower()})" if name in ANCHORS else name


if __name__ == "__main__":
    SCHEMA_FILE.write_text(build_schema(), encoding="utf-8")
