"""Published tables as a report needs them: the source's own cells word for word, and each row's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tables.verifying import evidence
from recipes.problems import Problem, ProblemsError, RecipeError, did_you_mean
from recipes.schema import Recipe
from recipes.tables import FOLDER, Table, read_table
from recipes.validation import validate


@dataclass(frozen=True)
class Row:
    """One row. `cells`: as many as the table has columns. `recipe`: None where the YAML is no valid recipe. `errata`: of the printed
    numbers, each a text.
    """

    table: str
    name: str
    title: str
    cells: tuple[str, ...]
    recipe: Recipe | None
    errata: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return f"{self.table}/{self.name}" if self.table else self.name


@dataclass(frozen=True)
class Published:
    """A table of `recipes/`; `columns` are the source's headings, or one of ours where no document printed the table."""

    name: str
    title: str
    source: str | None
    note: str | None
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    problems: tuple[str, ...] = ()

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


class Tables:
    """The tables of a folder, each read when it is first asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, Published | None] = {}

    @property
    def names(self) -> list[str]:
        return sorted(
            {path.stem for path in self._folder.glob("*.yaml")}
            | {name for name, table in self._read.items() if table}
        )

    def get(self, name: str) -> Published | None:
        """The table of that name; None where there is none. Raises ProblemsError where its file is no table."""
        if name not in self._read:
            path = self._folder / f"{name}.yaml"
            self._read[name] = load(read_table(path)) if path.is_file() else None
        return self._read[name]

    def add(self, path: Path) -> str:
        """Take a table of the user's own; its name. Raises ProblemsError."""
        self._read[path.stem] = load(read_table(path))
        return path.stem

    def named(self, asked: Sequence[str]) -> list[str]:
        """Names of the tables asked for, by name or as a YAML file, each once.

        Raises:
            ProblemsError: every table that is not there or cannot be read, with near matches.
        """
        found, problems = [], []
        for name in asked:
            try:
                if Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
                    found.append(self.add(Path(name)))
                elif self.get(name) is None:
                    hint = did_you_mean(name, self.names)
                    problems.append(Problem("--table", f"--table {name}", "no such table", hint))
                else:
                    found.append(name)
            except ProblemsError as error:
                problems += error.problems
        if problems:
            raise ProblemsError(problems)
        return list(dict.fromkeys(found))

    def published(self) -> tuple[list[str], list[str]]:
        """(names of all tables that reproduce a document's, problems of those that cannot be read)."""
        found, problems = [], []
        for name in self.names:
            try:
                table = self.get(name)
            except ProblemsError as error:
                problems += map(str, error.problems)
                continue
            if table and table.source and any(row.recipe and row.recipe.published for row in table.rows):
                found.append(name)
        return found, problems

    def recipe(self, full_name: str) -> Recipe | None:
        """The recipe table/row as its file has it now; None where there is none, or none that is valid."""
        table, _, row = full_name.rpartition("/")
        try:
            found = self.get(table)
        except ProblemsError:
            return None
        known = found.row(row) if found else None
        return known.recipe if known else None


def load(table: Table) -> Published:
    """Every row, also where the recipe is not valid: what was published can be shown all the same."""
    rows, problems, known = [], [], evidence.read(table)
    for name in table.rows:
        values = table.row(name)
        recipe = None
        try:
            recipe = validate(values, f"{table.name}/{name}", table.document, table.paths(name))
        except RecipeError as error:
            problems += map(str, error.problems)
        title = str(values.get("title", ""))
        cells, problem = (
            source_cells(values.get("published"), table.columns) if table.columns else ((title,), None)
        )
        if problem:
            problems.append(f"{table.name}/{name}: {problem}")
        rows.append(Row(table.name, name, title, cells, recipe, tuple(map(str, known.errata_of(name)))))
    return Published(
        table.name,
        table.title,
        table.source,
        table.note,
        table.columns or ("Recipe",),
        tuple(rows),
        tuple(dict.fromkeys(problems)),
    )


def source_cells(published: Any, columns: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """(the cells of `published.row`, one per column; what is wrong with them or None)."""
    printed = published.get("row") if isinstance(published, Mapping) else None
    if not printed:
        return ("",) * len(
            columns
        ), "published.row is missing: give the cells as the source prints them, separated by |"
    cells = tuple(cell.strip() for cell in str(printed).split("|"))
    if len(cells) == len(columns):
        return cells, None
    problem = f"published.row has {len(cells)} cells, the table {len(columns)} columns: separate the cells by |, empty ones too"
    return (*cells, *[""] * len(columns))[: max(len(columns), 1) - 1] + (
        " | ".join(cells[len(columns) - 1 :]),
    ), problem
