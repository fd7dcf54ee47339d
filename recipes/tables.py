"""A table file: `title`, `defaults`, and `rows`, each laid over the defaults; a published table has `source`, `columns` and `note` too.

`columns` are the headings of the source's table, in the order of the cells of each row's `published.row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.problems import did_you_mean
from recipes.validation import RecipeError
from recipes.yaml_lines import Document, KeyPath, YamlError, read

FOLDER = Path(__file__).resolve().parent
_KEYS = ("title", "source", "columns", "note", "defaults", "rows")


@dataclass(frozen=True)
class Table:
    """One parsed table."""

    name: str
    title: str
    defaults: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    document: Document
    source: str | None = None
    columns: tuple[str, ...] = ()
    note: str | None = None

    @property
    def published(self) -> bool:
        """Whether it reproduces a table of a document."""
        return bool(self.columns)

    def row(self, name: str) -> dict[str, Any]:
        """The row over the defaults; not yet validated."""
        return merge(self.defaults, self.rows[name])

    def paths(self, row: str) -> tuple[KeyPath, ...]:
        """Where a key of the row may stand in the file, nearest first."""
        return (("rows", row), ("defaults",))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings are merged key by key, anything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_table(path: Path) -> Table:
    """Read and check the frame of a table; its rows are validated when they are loaded.

    Raises:
        RecipeError: malformed YAML (file:line:column), or a frame that is no table's.
    """
    where = f"{path.parent.name}/{path.name}" if path.parent == FOLDER else str(path)
    try:
        document = read(path, where)
    except YamlError as error:
        raise RecipeError([str(error)]) from None
    problems = _frame_problems(document)
    if problems:
        raise RecipeError(problems)
    rows = {name: row or {} for name, row in document.value["rows"].items()}
    value = document.value
    return Table(
        path.stem, str(value["title"]), value.get("defaults") or {}, rows, document, value.get("source"),
        tuple(value.get("columns") or ()), value.get("note"),
    )  # fmt: skip


def _frame_problems(document: Document) -> list[str]:
    value = document.value
    if not isinstance(value, dict):
        return [f"{document.where}: holds {type(value).__name__}: a table is a mapping with title and rows"]
    problems = [
        f"{document.at(str(key))}: {key}: unknown key of a table: {did_you_mean(str(key), _KEYS)}"
        for key in value
        if key not in _KEYS
    ]
    if not value.get("title"):
        problems.append(f"{document.where}: title is missing: give the table one line for --list")
    if not isinstance(value.get("defaults") or {}, dict):
        problems.append(
            f"{document.at('defaults')}: defaults={value['defaults']!r}: must be a mapping of recipe keys"
        )
    columns = value.get("columns") or []
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        problems.append(
            f"{document.at('columns')}: columns={columns!r}: must be a list of the source's headings"
        )
    for key in ("source", "note"):
        if not isinstance(value.get(key) or "", str):
            problems.append(f"{document.at(key)}: {key}={value[key]!r}: must be text")
    rows = value.get("rows")
    if not isinstance(rows, dict) or not rows:
        return [
            *problems,
            f"{document.at('rows')}: rows={rows!r}: a table has at least one row, name: {{keys}}",
        ]
    for name, row in rows.items():
        if not isinstance(name, str):
            problems.append(f"{document.at('rows')}: row {name!r}: a row's name is text; put it in quotes")
        elif not isinstance(row or {}, dict):
            problems.append(
                f"{document.at('rows', name)}: row {name} holds {row!r}: must be a mapping of recipe keys"
            )
    return problems
