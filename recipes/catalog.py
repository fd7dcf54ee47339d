"""Recipes by name: `recipes/*.yaml` holds one table per file and one recipe per row.

    recipe = load("parallel_kinds/3d", overrides=["batch.global=16"], tiny=True)

A row is laid over its table's `defaults`. Every problem of a row is reported at once (`RecipeError`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from recipes import files
from recipes.consistency import schedule_problems
from recipes.key_paths import NO_NUMBER, key_of
from recipes.problems import Problem, ProblemsError, RecipeError, nearest, some
from recipes.schema import Recipe
from recipes.tables import FOLDER, RECORDED, RecordedTable, Table, read_table
from recipes.tiny import tiny as shrink
from recipes.validation import validate

FLAG = "--recipe"
DEFAULT_RECIPE = "default/sotu"
CURVES = FOLDER / "curves"
# for given weights of that family
BY_FAMILY = {"gpt2": DEFAULT_RECIPE, "bert": "bert/sotu"}


def titles() -> dict[str, str]:
    """Map the name of every recipe to its title, the default one first. Raises RecipeError as `tables`."""
    found = {}
    for table in tables():
        for row in table.rows:
            found[f"{table.name}/{row}"] = str(table.row(row).get("title", ""))
    return {DEFAULT_RECIPE: found.pop(DEFAULT_RECIPE), **found}


@dataclass(frozen=True)
class NamedRecipe:
    """A row of a table, or the recipe of a run, as it is written there; it is read once."""

    table: Table
    row: str

    @property
    def name(self) -> str:
        """Table/row; of a run its directory."""
        return f"{self.table.name}/{self.row}"

    @property
    def of_run(self) -> bool:
        return isinstance(self.table, RecordedTable)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe without a change. Raises RecipeError with all its problems."""
        return self._checked(self.table.row(self.row))

    def changed(
        self,
        overrides: Sequence[str] = (),
        tiny: bool = False,
        steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
        trained: bool = True,
    ) -> Recipe:
        """Shrink the recipe, lay `settings` over it, then `overrides`, and cut it to `steps`. See `load`."""
        values = self.table.row(self.row)
        if tiny:
            values = shrink(self.recipe).model_dump(by_alias=True)
        recipe = self._checked(values, overrides, settings)
        cut = steps is not None
        if steps is not None and steps < 1:
            raise RecipeError.of(
                "--steps",
                f"steps={steps}",
                "a run has at least one optimizer step",
                "give --steps a whole number from 1",
            )
        recipe = cut_to(recipe, steps)
        keys = [*map(key_of, overrides)]
        own = any(key.startswith("schedule") for key in keys)
        stands = self.of_run or recipe.published
        stretched = "steps" in keys or not stands
        if trained and (own or (stretched and not cut)):
            problems = [*schedule_problems(recipe, self.name, own=own, cut=cut)]
            if problems:
                raise RecipeError(problems)
        return recipe

    def _checked(
        self,
        values: Mapping[str, Any],
        overrides: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Recipe:
        return validate(
            values,
            self.name,
            self.table.document,
            self.table.paths(self.row),
            overrides,
            settings,
        )


def load(
    name: str | Path = DEFAULT_RECIPE,
    overrides: Sequence[str] = (),
    tiny: bool = False,
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    trained: bool = True,
) -> Recipe:
    """Load the recipe `name`; shrink it, lay values over it, override keys, cut it to `steps`, in this order.

    `name` is table/row, a row or a table with one row if that is unambiguous, a YAML file followed by /row or
    :row, or a run directory; a Path is a run directory.
    `settings` maps dotted keys to values, of given weights, a given text or a given JSON.
    `overrides` are texts like "batch.micro=4", the value in YAML; they have the last word over `tiny`.
    `steps` ends the run earlier or later and keeps the recipe's schedule, so that a short run is the
    beginning of the long one; to stretch the schedule as well, override `steps=`.

    `trained`: refuse a schedule that is `untrained`, but for one that is not set here: a published row's, a
    run's, or one that `steps` cuts.

    Raises RecipeError: no such recipe, or all its problems, one line each.
    """
    return find(name).changed(overrides, tiny, steps, settings, trained)


def cut_to(recipe: Recipe, steps: int | None) -> Recipe:
    """Cut the recipe to `steps` steps, with an unchanged schedule."""
    if steps is None:
        return recipe
    schedule = recipe.schedule.model_copy(update={"decay_steps": recipe.decay_steps})
    return recipe.model_copy(update={"steps": steps, "schedule": schedule})


def dump(recipe: Recipe) -> str:
    """Write the recipe as YAML with every value; `load_resolved` reads it back."""
    return yaml.safe_dump(
        recipe.as_data(), sort_keys=False, allow_unicode=True, width=120
    )


def load_resolved(path: str | Path) -> Recipe:
    """Read a run's recipe.yaml, written by `dump`; RecipeError: missing, malformed or no recipe."""
    table = RecordedTable.of(Path(path))
    return validate(table.document.value, str(path), table.document, ((),))


def digest(recipe: Recipe) -> str:
    """Return the sha256 of the values that decide the numbers of the training.

    The layout (`parallel`, `batch.micro`, `batch.accumulation`, `ds_config`), values for printing and
    keeping, and `steps`, the end of the run, are left out; the step of the learning rate's decay replaces
    `steps`.
    """
    values = {
        key: value for key, value in recipe.compared().items() if key not in NO_NUMBER
    }
    values["batch"] = {key: values["batch"][key] for key in ("global", "rampup")}
    # sound data have none, and a run reports skips
    del values["steps"], values["data"]["broken_records"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tables(folder: Path = FOLDER) -> list[Table]:
    """Read every table of the folder, in the order of their names. Raises RecipeError for all broken ones."""
    found, problems = _tables(folder)
    if problems:
        raise RecipeError(problems)
    return found


def _tables(folder: Path) -> tuple[list[Table], list[Problem]]:
    found = list[Table]()
    problems = list[Problem]()
    for path in sorted(folder.glob("*.yaml")):
        try:
            found.append(read_table(path))
        except ProblemsError as error:
            problems += error.problems
    return found, problems


def recorded(name: str) -> Path | None:
    """Return the run directory of this name; None: it holds no recipe."""
    directory = os.path.expanduser(name)
    held = os.path.isfile(os.path.join(directory, RECORDED))
    return Path(directory) if held else None


def find(name: str | Path, flag: str = FLAG) -> NamedRecipe:
    """Find the recipe of a name, or of a run. Raises RecipeError if there is none.

    `flag`: where the name was given.
    """
    if isinstance(name, Path):
        return NamedRecipe(RecordedTable.of(name / RECORDED), name.name)
    outside = _outside(name, flag)
    if outside:
        path, row = outside
        if not files.is_file(path):
            raise _unfound(
                flag,
                name,
                f"there is no file {path}",
                f"give the path of a table and a row, as in {path}/row",
            )
        own = read_table(path)
        key = f"{own.name}/{row}" if row else own.name
        return _row_of(
            [own],
            (flag, name),
            key,
            [],
            lambda key: f"{path}/{key.removeprefix(own.name + '/')}",
        )
    if DEFAULT_RECIPE.startswith(f"{name}/"):
        name = DEFAULT_RECIPE
    table, _, row = name.partition("/")
    path = FOLDER / f"{table}.yaml"
    if path in FOLDER.glob("*.yaml"):  # a full name needs no other table
        only = read_table(path)
        if row in only.rows:
            return NamedRecipe(only, row)
    found, problems = _tables(FOLDER)
    try:
        return _row_of(found, (flag, name), name, problems)
    except RecipeError:
        run = recorded(name)
        if run is None:
            raise
    return find(run)


def _unfound(
    flag: str, asked: str, came: str, fix: str, others: Sequence[Problem] = ()
) -> RecipeError:
    return RecipeError([Problem(flag, came, "", fix, where=f"{flag} {asked}"), *others])


def _outside(name: str, flag: str) -> tuple[Path, str] | None:
    """Split `path.yaml/row` or `path.yaml:row` into path and row; None for a name of the catalog."""
    for suffix in (".yaml", ".yml"):
        before, found, after = name.rpartition(suffix)
        if found and after[:1] in ("", "/", ":"):
            return files.path_of(before + suffix, flag), after[1:]
    return None


def _row_of(
    tables: list[Table],
    asked: tuple[str, str],
    name: str,
    problems: list[Problem],
    written: Callable[[str], str] = str,
) -> NamedRecipe:
    """Find the only row that matches `name`; other tables' problems are reported only if none matches.

    `asked`: the flag, and the name as it was given; `written` turns table/row into the user's form of the name.
    """
    every = {
        f"{table.name}/{row}": (table, row) for table in tables for row in table.rows
    }
    matching = (
        [name] if name in every else [key for key in every if name in key.split("/", 1)]
    )
    if len(matching) == 1:
        return NamedRecipe(*every[matching[0]])
    if matching:
        options = some([written(key) for key in matching])
        raise _unfound(*asked, f"can be {options}", "give the table and the row")
    raise _unfound(
        *asked, "no such recipe", _suggestion(name, every, written), problems
    )


def _suggestion(
    name: str, every: Mapping[str, tuple[Table, str]], written: Callable[[str], str]
) -> str:
    """Suggest rows spelt like `name`, else tables spelt like it, else all tables."""
    near = nearest(name, every) if "/" in name else []
    if not near:
        rows = nearest(name.rpartition("/")[2], {row for _, row in every.values()})
        near = [key for row in rows for key in every if key.endswith(f"/{row}")][:3]
    if near:
        return f"did you mean {' or '.join(written(key) for key in near)}?"
    default = DEFAULT_RECIPE.partition("/")[0]
    tables = sorted(
        {table.name for table, _ in every.values()},
        key=lambda table: (table != default, table),
    )
    if len(tables) == 1:
        return f"there is: {some([written(key) for key in every])}"
    near = nearest(name.partition("/")[0], tables)
    if near:
        rows_of = f"a row of {' or '.join(near)}"
        return f"did you mean {rows_of}? (launch/recipe.py list --table {near[0]} shows them)"
    if "/" in name:
        near = nearest(name, every, cutoff=0.0)
        return f"the nearest are {some([written(key) for key in near])} (launch/recipe.py list shows all)"
    return f"there are tables {some(tables)} (launch/recipe.py list shows all rows)"
