"""Table files: `title`, `defaults`, and `rows`, each laid over the defaults.

A published table also has `source`, `note` and `columns`, and `evidence`, what tools/check_tables.py checks
the rows against (launch.tables/evidence.py).

A table with other results of another table's models says `like: that_table`: each row starts from the row of
the same name there, without its `published`, or from the defaults there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from recipes.key_paths import shown
from recipes.problems import Problem, RecipeError, did_you_mean, uncapitalised
from recipes.schema import Listed, Strict
from recipes.yaml_lines import KeyPath, YamlDocument, read

Form = TypeVar("Form", bound=BaseModel)

FOLDER = Path(__file__).resolve().parent
RECORDED = "recipe.yaml"  # of a run directory


class TableFrame(Strict):
    """The keys of a table's file; those of its rows are not checked yet."""

    title: str = Field(min_length=1)
    """a table has one line for recipe.py list"""
    source: str | None = None
    """should be text"""
    columns: Listed[str] = ()
    """should be a list of the source's headings, in the order of the cells of each row's published.row"""
    note: str | None = None
    """should be text"""
    like: str | None = None
    """should be the name of another table"""
    defaults: dict[str, Any] = {}
    """should be a mapping of recipe keys"""
    rows: dict[str, dict[str, Any] | None] = Field(min_length=1)
    """should be at least one row, name: {keys of the recipe}, the name a text"""
    evidence: dict[str, Any] = {}


class Table(TableFrame):
    """One parsed table. `below`: the table that it is like."""

    name: str
    document: YamlDocument
    below: Table | None = None

    @property
    def published(self) -> bool:
        """True if it reproduces a table of a document."""
        return bool(self.columns)

    def row(self, name: str) -> dict[str, Any]:
        """Lay the row over the defaults; not yet validated.

        Both lie over the other table's row of the same name, or its defaults.
        """
        base = dict[str, Any]()
        if self.below:
            other = self.below
            base |= other.row(name) if name in other.rows else other.defaults
            base.pop("published", None)
        return merge(merge(base, self.defaults), self.rows[name] or {})

    def paths(self, row: str) -> tuple[KeyPath, ...]:
        """List the sections of the file that may hold a key of the row, nearest first."""
        return (("rows", row), ("defaults",))


class RecordedTable(Table):
    """The recipe.yaml of a run, which has no rows, as a table with one."""

    @classmethod
    def of(cls, path: Path) -> RecordedTable:
        """Read a run's recipe.yaml. Raises RecipeError."""
        directory = path.parent
        document = read(path, str(path))
        if not isinstance(document.value, dict):
            raise RecipeError.of(
                str(path),
                f"holds {type(document.value).__name__}, not a recipe",
                "",
                "was it written by this project?",
                str(path),
            )
        return cls.model_construct(
            title=str(directory),
            name=str(directory.parent),
            rows={directory.name: document.value},
            document=document,
        )

    def paths(self, row: str) -> tuple[KeyPath, ...]:
        return ((),)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`: mappings are merged key by key, other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def read_table(path: Path) -> Table:
    """Read a table and check its frame, not yet its rows; RecipeError for malformed YAML or another frame."""
    where = str(path)
    if path.parent == FOLDER:
        where = f"{path.parent.name}/{path.name}"
    document = read(path, where)
    frame = checked(TableFrame, document.value, document)
    below = _other_table(path, frame.like, document) if frame.like else None
    return Table(**dict(frame), name=path.stem, document=document, below=below)


def _other_table(path: Path, name: str, document: YamlDocument) -> Table:
    """Read the table that `like` names, from the same folder. Raises RecipeError."""
    others = {
        other.stem: other for other in path.parent.glob("*.yaml") if other != path
    }
    rule = "no other table of this folder"
    fix = did_you_mean(name, others)
    if name in others:
        value = read(others[name], document.where).value
        if not isinstance(value, dict) or "like" not in value:
            return read_table(others[name])
        rule = "a table is like one that states its rows itself"
        fix = f"name {value['like']}"
    raise RecipeError.of("like", f"like={name}", rule, fix, document.at("like"))


def checked(
    form: type[Form], value: Any, document: YamlDocument, *section: str
) -> Form:
    """Check a section of a table's file against its form. Raises RecipeError: every fault, with its line.

    The rule of a fault is the description of the field that it is in, else in pydantic's words.
    """
    try:
        return form.model_validate(value)
    except ValidationError as error:
        details = error.errors()
    problems = []
    for detail in details:
        loc = detail["loc"]
        kind = detail["type"]
        fix = ""
        path = (*section, *loc)
        field = form.model_fields.get(str(loc[0])) if loc else None
        key = shown(path)
        came = f"{key or 'the file'}={detail['input']!r}"[:100]
        rule = (field and field.description) or uncapitalised(detail["msg"])
        if kind == "missing":
            came = f"{key} is missing"
        elif kind == "model_type":
            rule = "should be a mapping"
        elif kind == "extra_forbidden":
            came = key
            rule = "unknown key"
            fix = did_you_mean(str(loc[0]), form.model_fields) if len(loc) == 1 else ""
        problems.append(
            Problem(key, came, rule, fix, where=document.at(*map(str, path)))
        )
    raise RecipeError(problems)
