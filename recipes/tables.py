"""Table files: `title`, `defaults`, and `rows`, each laid over the defaults.

A published table also has `source`, `note` and `columns`, the headings of the source's table, in the order of
the cells of each row's `published.row`, and `evidence`, what launch/recipe.py verify checks the rows against
(launch.tables/evidence.py).

A table with other results of another table's models says `like: that_table`: each row starts from the row of
the same name there, without its `published`, or from the defaults there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.problems import Problem, RecipeError, did_you_mean
from recipes.yaml_lines import Document, KeyPath, read

FOLDER = Path(__file__).resolve().parent
_KEYS = ("title", "source", "columns", "note", "like", "defaults", "rows", "evidence")


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
    evidence: Mapping[str, Any] = field(default_factory=dict)
    like: Table | None = None

    @property
    def published(self) -> bool:
        """True if it reproduces a table of a document."""
        return bool(self.columns)

    def row(self, name: str) -> dict[str, Any]:
        """Lay the row over the defaults; not yet validated."""
        return merge(merge(self._below(name), self.defaults), self.rows[name])

    def _below(self, name: str) -> dict[str, Any]:
        """Return the row's base: the other table's row of the same name, or its defaults."""
        if self.like is None:
            return {}
        whole = self.like.row(name) if name in self.like.rows else self.like.defaults
        return {key: value for key, value in whole.items() if key != "published"}

    def paths(self, row: str) -> tuple[KeyPath, ...]:
        """List the sections of the file that may hold a key of the row, nearest first."""
        return (("rows", row), ("defaults",))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`: mappings are merged key by key, other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_table(path: Path) -> Table:
    """Read a table and check its frame, not yet its rows; RecipeError for malformed YAML or another frame."""
    where = f"{path.parent.name}/{path.name}" if path.parent == FOLDER else str(path)
    document = read(path, where)
    if problems := list(_frame_problems(document)):
        raise RecipeError(problems)
    value = document.value
    rows = {name: row or {} for name, row in value["rows"].items()}
    columns, evidence = tuple(value.get("columns") or ()), value.get("evidence") or {}
    title, defaults, source, note = (value.get(key) for key in ("title", "defaults", "source", "note"))
    like = _other_table(path, str(value["like"]), document) if value.get("like") else None
    return Table(path.stem, str(title), defaults or {}, rows, document, source, columns, note, evidence, like)


def _other_table(path: Path, name: str, document: Document) -> Table:
    """Read the table that `like` names, from the same folder. Raises RecipeError."""
    others = {other.stem: other for other in path.parent.glob("*.yaml") if other != path}

    def refused(came: str, rule: str, fix: str) -> RecipeError:
        return RecipeError([Problem("like", came, rule, fix, where=document.at("like"))])

    if name not in others:
        raise refused(f"like={name}", "no other table of this folder", did_you_mean(name, others))
    if isinstance(value := read(others[name], document.where).value, dict) and "like" in value:
        rule = "a table is like one that states its rows itself"
        raise refused(f"like={name}", rule, f"name {value['like']}")
    return read_table(others[name])


def _frame_problems(document: Document) -> Iterator[Problem]:
    value, where = document.value, document.where

    def at(path: KeyPath, came: str, rule: str, fix: str = "") -> Problem:
        return Problem(path[-1], came, rule, fix, where=document.at(*path))

    if not isinstance(value, dict):
        came = f"holds {type(value).__name__}"
        yield Problem(where, came, "a table is a mapping with title and rows", where=where)
        return
    for key in value:
        if key not in _KEYS:
            yield at((str(key),), str(key), "unknown key of a table", did_you_mean(str(key), _KEYS))
    if not value.get("title"):
        yield Problem(
            "title", "title is missing", "", "give the table one line for recipe.py list", where=where
        )
    if not isinstance(value.get("defaults") or {}, dict):
        yield at(("defaults",), f"defaults={value['defaults']!r}", "must be a mapping of recipe keys")
    columns = value.get("columns") or []
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        yield at(("columns",), f"columns={columns!r}", "must be a list of the source's headings")
    for key in ("source", "note", "like"):
        if not isinstance(value.get(key) or "", str):
            yield at((key,), f"{key}={value[key]!r}", "must be text")
    rows = value.get("rows")
    if not isinstance(rows, dict) or not rows:
        yield at(("rows",), f"rows={rows!r}", "a table has at least one row", "write name: {keys}")
        return
    for name, row in rows.items():
        if not isinstance(name, str):
            yield at(("rows",), f"row {name!r}", "a row's name is text", "put it in quotes")
        elif not isinstance(row or {}, dict):
            yield at(("rows", name), f"row {name} holds {row!r}", "must be a mapping of recipe keys")
