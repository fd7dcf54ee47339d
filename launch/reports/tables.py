"""Published tables for reports: the source's cells word for word, and the recipe of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tables import evidence
from launch.tables.evidence import Evidence, RowErratum
from recipes import files
from recipes.problems import Problem, ProblemsError, RecipeError, counted, did_you_mean
from recipes.schema import Published, Recipe
from recipes.tables import FOLDER, Table, read_table
from recipes.validation import validate


@dataclass(frozen=True)
class PublishedRow:
    """One row of a published table.

    Attributes:
        cells: the source's text, one cell per column.
        recipe: None where the YAML is no valid recipe.
        no_recipe: the reason why the source's row has no recipe here.
    """

    table: str
    name: str
    cells: tuple[str, ...]
    recipe: Recipe | None
    errata: tuple[RowErratum, ...] = ()
    no_recipe: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.table}/{self.name}" if self.table else self.name

    @property
    def published(self) -> Published | None:
        return self.recipe.published if self.recipe else None


@dataclass(frozen=True)
class PublishedTable:
    """A table of `recipes/`.

    Attributes:
        columns: the source's headings, or our own for a table without source.
        problems: broken recipes, and lines without a cell for each heading.
    """

    name: str
    title: str
    source: str | None
    note: str | None
    columns: tuple[str, ...]
    rows: list[PublishedRow]
    problems: Sequence[Problem] = ()
    evidence: Evidence = Evidence()

    def row(self, name: str) -> PublishedRow | None:
        return next((row for row in self.rows if row.name == name), None)


class Tables:
    """The tables of a folder, each read on first use."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, PublishedTable | None] = {}

    @property
    def names(self) -> list[str]:
        read = {name for name, table in self._read.items() if table}
        return sorted(read.union(path.stem for path in self._folder.glob("*.yaml")))

    def get(self, name: str) -> PublishedTable | None:
        """Return the table of a name; None if there is none. Raises ProblemsError for a broken file."""
        if name not in self._read:
            path = self._folder / f"{name}.yaml"
            self._read[name] = (
                load(read_table(path)) if path in self._folder.glob("*.yaml") else None
            )
        return self._read[name]

    def named(self, asked: Sequence[str]) -> list[str]:
        """Return the names of requested tables, given by name or as a YAML file, each once.

        Raises:
            ProblemsError: every missing or unreadable table, with near matches.
        """
        names: dict[str, None] = {}
        problems: list[Problem] = []
        for name in asked:
            path = Path(name)
            try:
                if path.suffix in (".yaml", ".yml") and files.is_file(path):
                    name = path.stem
                    self._read[name] = load(read_table(path))
                elif self.get(name) is None:
                    hint = did_you_mean(name, self.names)
                    problems.append(
                        Problem("--table", f"--table {name}", "no such table", hint)
                    )
                names[name] = None
            except ProblemsError as error:
                problems += error.problems
        if problems:
            raise ProblemsError(problems)
        return list(names)

    def published(self) -> list[str]:
        """Return the names of all tables reproduced from documents, and of unreadable files."""
        return [name for name in self.names if self._is_published(name)]

    def _is_published(self, name: str) -> bool:
        try:
            table = self.get(name)
        except ProblemsError:
            return True
        return bool(table and table.source and any(row.published for row in table.rows))

    def recipe(self, full_name: str) -> Recipe | None:
        """Return the current recipe of table/row; None if it is missing or invalid."""
        table, _, row = full_name.rpartition("/")
        try:
            published = self.get(table)
        except ProblemsError:
            return None
        return known.recipe if published and (known := published.row(row)) else None


def load(table: Table) -> PublishedTable:
    """Convert a table with every row; rows with an invalid recipe keep their published cells."""
    known = evidence.read(table)
    rows: list[PublishedRow] = []
    problems: list[Problem] = []

    def cells_of(name: str, published: Any) -> tuple[str, ...]:
        cells, problem = source_cells(published, table.columns)
        if problem:
            problems.append(
                Problem("published.row", problem, where=f"{table.name}/{name}")
            )
        return cells

    for name in table.rows:
        values = table.row(name)
        recipe = None
        full_name = f"{table.name}/{name}"
        try:
            recipe = validate(values, full_name, table.document, table.paths(name))
        except RecipeError as error:
            problems += error.problems
        title = (str(values.get("title", "")),)
        cells = cells_of(name, values.get("published")) if table.columns else title
        errata = tuple(known.errata_of(name))
        rows.append(PublishedRow(table.name, name, cells, recipe, errata))
    for name, other in known.others.items():
        cells = cells_of(name, {"row": other.published.row})
        rows.append(PublishedRow(table.name, name, cells, None, no_recipe=other.why))
    columns = table.columns or ("Recipe",)
    unique = list(dict.fromkeys(problems))
    return PublishedTable(
        table.name, table.title, table.source, table.note, columns, rows, unique, known
    )


def source_cells(
    published: Any, columns: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """Split `published.row` into one cell per column; return the cells and a problem or None."""
    printed = published.get("row") if isinstance(published, Mapping) else None
    width = len(columns)
    if not printed:
        missing = "published.row is missing: give the cells as the source prints them, separated by |"
        return ("",) * width, missing
    cells = tuple(cell.strip() for cell in str(printed).split("|"))
    if len(cells) == width:
        return cells, None
    problem = f"published.row has {counted(len(cells), 'cell')}, the table {counted(width, 'column')}"
    filled = (*cells, *[""] * width)[: width - 1]
    last = " | ".join(cells[width - 1 :])
    return (*filled, last), f"{problem}: separate the cells by |, empty ones too"
