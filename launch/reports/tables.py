"""Published tables as a report needs them: the source's own cells word for word, and each row's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tables import evidence
from launch.tables.evidence import RowErratum
from recipes import files
from recipes.problems import Problem, ProblemsError, RecipeError, counted, did_you_mean
from recipes.schema import Published as PublishedNumbers
from recipes.schema import Recipe
from recipes.tables import FOLDER, Table, read_table
from recipes.validation import validate

# Quantity -> what an erratum may be of for the number to be wrong, or computed from what is wrong.
WRONG_BY = {
    "tflops": {"TFLOPS", "time", "GPUs", "global batch"},
    "samples_per_s": {"samples/s", "time", "global batch"},
    "time_per_iteration_s": {"time", "GPUs", "global batch"},
}


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        cells: as many as the table has columns.
        recipe: None where the YAML is no valid recipe.
        errata: of the printed numbers.
        no_recipe: why the source's line is of a model that is none here.
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
    def published(self) -> PublishedNumbers | None:
        return self.recipe.published if self.recipe else None

    def is_wrong(self, quantity: str) -> bool:
        """Whether an erratum says that the published number is wrong."""
        return any(known.quantity in WRONG_BY[quantity] for known in self.errata)


@dataclass(frozen=True)
class Published:
    """A table of `recipes/`; `columns`: the source's headings, or ours where no document printed it."""

    name: str
    title: str
    source: str | None
    note: str | None
    columns: tuple[str, ...]
    rows: list[Row]
    problems: Sequence[str] = ()

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


class Tables:
    """The tables of a folder, each read when it is first asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, Published | None] = {}

    @property
    def names(self) -> list[str]:
        read = {name for name, table in self._read.items() if table}
        return sorted(read.union(path.stem for path in self._folder.glob("*.yaml")))

    def get(self, name: str) -> Published | None:
        """The table of that name; None: there is none. Raises ProblemsError where its file is no table."""
        if name not in self._read:
            path = self._folder / f"{name}.yaml"
            self._read[name] = load(read_table(path)) if path in self._folder.glob("*.yaml") else None
        return self._read[name]

    def named(self, asked: Sequence[str]) -> list[str]:
        """Names of the tables asked for, by name or as a YAML file, each once.

        Raises:
            ProblemsError: every table that is not there or cannot be read, with near matches.
        """
        found: dict[str, None] = {}
        problems: list[Problem] = []
        for name in asked:
            path = Path(name)
            try:
                if path.suffix in (".yaml", ".yml") and files.is_file(path):
                    name = path.stem
                    self._read[name] = load(read_table(path))
                elif self.get(name) is None:
                    hint = did_you_mean(name, self.names)
                    problems.append(Problem("--table", f"--table {name}", "no such table", hint))
                found[name] = None
            except ProblemsError as error:
                problems += error.problems
        if problems:
            raise ProblemsError(problems)
        return list(found)

    def published(self) -> tuple[list[str], list[str]]:
        """(names of all tables that reproduce a document's, problems of those that cannot be read)."""
        found: list[str] = []
        problems: list[str] = []
        for name in self.names:
            try:
                table = self.get(name)
            except ProblemsError as error:
                problems += [str(problem) for problem in error.problems]
                continue
            if table and table.source and any(row.published for row in table.rows):
                found.append(name)
        return found, problems

    def recipe(self, full_name: str) -> Recipe | None:
        """The recipe table/row as its file has it now; None where there is none, or none that is valid."""
        table, _, row = full_name.rpartition("/")
        try:
            found = self.get(table)
        except ProblemsError:
            return None
        return known.recipe if found and (known := found.row(row)) else None


def load(table: Table) -> Published:
    """Every row, also where the recipe is not valid: what was published can be shown all the same."""
    known = evidence.read(table)
    rows: list[Row] = []
    problems: list[str] = []
    for name in table.rows:
        values, full_name = table.row(name), f"{table.name}/{name}"
        recipe = None
        try:
            recipe = validate(values, full_name, table.document, table.paths(name))
        except RecipeError as error:
            problems += [str(problem) for problem in error.problems]
        cells: tuple[str, ...] = (str(values.get("title", "")),)
        if table.columns:
            cells, problem = source_cells(values.get("published"), table.columns)
            problems += [f"{full_name}: {problem}"] if problem else []
        rows.append(Row(table.name, name, cells, recipe, tuple(known.errata_of(name))))
    for name, other in known.others.items():
        cells, problem = source_cells({"row": other.published.row}, table.columns)
        problems += [f"{table.name}/{name}: {problem}"] if problem else []
        rows.append(Row(table.name, name, cells, None, no_recipe=other.why))
    columns, unique = table.columns or ("Recipe",), list(dict.fromkeys(problems))
    return Published(table.name, table.title, table.source, table.note, columns, rows, unique)


def source_cells(published: Any, columns: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """(the cells of `published.row`, one per column; what is wrong with them or None)."""
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
