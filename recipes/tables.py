"""Table files: `title`, `defaults`, and `rows`, each laid over the defaults.

A published table also has `source`, `note` and `columns`, and `evidence`, what tools/check_tables.py checks
the rows against (launch.tables/evidence.py).

A table with other results of another table's models says `like: that_table`: each row starts from the row of
the same name there, without its `published`, or from the defaults there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from recipes.key_paths import shown
from recipes.problems import Problem, RecipeError, did_you_mean
from recipes.schema import Strict
from recipes.yaml_lines import KeyPath, YamlDocument, read

Form = TypeVar("Form", bound=BaseModel)

FOLDER = Path(__file__).resolve().parent
RECORDED = "recipe.yaml"  # of a run directory


class TableFrame(Strict):
    """The keys of a table's file; those of its rows are not checked yet."""

    title: str = Field(
        min_length=1, description="a table has one line for recipe.py list"
    )
    source: str | None = Field(default=None, description="should be text")
    columns: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """should be a list of the source's headings, in the order of the cells of each row's published.row"""
    note: str | None = Field(default=None, description="should be text")
    like: str | None = Field(
        default=None, description="should be the name of another table"
    )
    defaults: dict[str, Any] = Field(
        default={}, description="should be a mapping of recipe keys"
    )
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
            came = f"holds {type(document.value).__name__}, not a recipe"
            where = str(path)
            raise RecipeError(
                [
                    Problem(
                        where, came, "", "was it written by this project?", where=where
                    )
                ]
            )
        title = str(directory)
        name = str(directory.parent)
        rows = {directory.name: document.value}
        return cls.model_construct(title=title, name=name, rows=rows, document=document)

    def paths(self, row: str) -> tuple[KeyPath, ...]:
        return ((),)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`: mappings are merged key by key, other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
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

    def refused(came: str, rule: str, fix: str) -> RecipeError:
        return RecipeError(
            [Problem("like", came, rule, fix, where=document.at("like"))]
        )

    if name not in others:
        raise refused(
            f"like={name}", "no other table of this folder", did_you_mean(name, others)
        )
    if (
        isinstance(value := read(others[name], document.where).value, dict)
        and "like" in value
    ):
        rule = "a table is like one that states its rows itself"
        raise refused(f"like={name}", rule, f"name {value['like']}")
    return read_table(others[name])


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
        came = f"{shown(path) or 'the file'}={detail['input']!r}"[:100]
        rule = (field and field.description) or detail["msg"][0].lower() + detail[
            "msg"
        ][1:]
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
