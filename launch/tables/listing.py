"""The subcommand `launch/recipe.py list`: the recipes as tables."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from launch.console import arguments, terminal
from launch.console.text_table import Page
from launch.machine.memory import this_machine
from launch.planning.memory_fit import fit, how
from launch.planning.prediction import hardware
from launch.planning.prediction.forecast_text import error
from launch.planning.prediction.hardware import Node
from launch.tables import evidence
from launch.tables.scores import scores
from modeling import cost
from recipes import catalog
from recipes.families import MASKED_LOSS
from recipes.problems import Problem, RecipeError, counted, did_you_mean
from recipes.schema import Published, Recipe
from recipes.tables import Table

HERE = "this machine"
DEFAULT_TABLE = catalog.DEFAULT_RECIPE.partition("/")[0]
MEASURED = {  # of a row, as its line says them
    "time_per_iteration_s": "{:g} s",
    "samples_per_s": "{:g} samples/s",
    "tflops": "{:g} TFLOPS",
    "cached_gb": "{:g} GB",
    "validation_loss": f"{MASKED_LOSS.name} {{:g}}",
}


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe with its table and name."""

    table: Table
    name: str
    recipe: Recipe
    fits: str | None = None  # how it fits this machine; None where nobody asks

    @property
    def has_stand_ins(self) -> bool:
        """True if values without a source stand in, besides the often missing number of steps."""
        return bool(self.recipe.unknown.keys() - {"steps"})

    @property
    def cells(self) -> dict[str, str]:
        """The cells of its line by heading."""
        recipe = self.recipe
        model = recipe.model
        tp, pp = recipe.parallel.model_parallel
        gpus = recipe.hardware.gpus if recipe.hardware else None
        family = "BERT " * model.facts.masked
        size = ""
        if model.config:  # torch would count for seconds
            family = f"{model.config['model_type']} "
        else:
            size = short_count(cost.parameters(model, recipe.positions))
        fits = {} if self.fits is None else {"fits": self.fits}
        return {
            # apart, so that a name can be copied
            "row": self.name + (" ?" if self.has_stand_ins else ""),
            **fits,
            "size": size,
            "layers x hidden": f"{family}{model.layers}x{model.hidden}",
            "tp x pp x dp": f"{tp}x{pp}x{recipe.parallel.dp or 'any'}",
            "GPUs": str(gpus or ""),
            "batch": f"{recipe.batch.global_}",
            "ds_config": recipe.ds_config,
            "published": published_text(recipe.published),
        }


def add_parser(commands: Any) -> None:
    """Add the subcommand `list` to the subparsers of launch/recipe.py."""
    about = "List the recipes, or those that fit a machine."
    parser = arguments.subcommand(commands, "list", "which recipes there are", about)
    add = parser.add_argument
    add("tables", nargs="*", metavar="TABLE", help="only this table; repeatable")
    add("--all", action="store_true", help="show every row of the published tables too")
    states = "only what fits this machine, or a NODE of plan.py such as 4xv100-32, by the planner's memory"
    fits = (
        f"{states}, activations included, as written or with fewer data-parallel ranks; by size of the model, "
        "and row by row with TABLE or --all"
    )
    add("--fits", nargs="?", const=HERE, metavar="NODE", help=fits)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = catalog_rows(args.tables)
    folded = list[ListedRecipe]()
    if not (args.tables or args.all or args.fits):
        folded = [row for row in rows if row.table.published]
        rows = [row for row in rows if not row.table.published]
    # First what runs at once, without a download, and of that the default.
    rows.sort(
        key=lambda row: (
            row.recipe.data.source != "packaged",
            row.table.name != DEFAULT_TABLE,
        )
    )
    terminal.quiet_libraries()
    fits = ""
    if args.fits:
        node = (
            hardware.of_memory(this_machine())
            if args.fits == HERE
            else hardware.find(args.fits, "--fits")
        )
        rows = fitting(rows, node)
        fits = f"{args.fits}: {node.memory}; memory as launch/plan.py predicts it, {error('memory')}"
    by_size = fits and rows and not (args.tables or args.all)
    shown = sizes_text if by_size else as_text
    print(shown(rows, fits, terminal.columns()))
    if folded:
        print(f"\n{fold(folded, terminal.columns())}")
    return 0


def fitting(rows: Sequence[ListedRecipe], node: Node) -> list[ListedRecipe]:
    """Return the rows that fit one such node, each with how it does."""
    tried = ((row, fit(row.recipe, node)) for row in rows)
    return [replace(row, fits=how(each)) for row, each in tried if each.fits]


def fold(rows: Sequence[ListedRecipe], width: int | None) -> str:
    """Describe published tables with a line for each."""
    count = Counter((row.table.name, row.table.title) for row in rows)
    lines = [(name, number, title) for (name, title), number in count.items()]
    said = f"{counted(len(count), 'published table')} of {len(rows)} rows: list TABLE or --all shows them"
    page = Page(width)
    page.table(lines, (), "lrl", heading=[said])
    return str(page)


def catalog_rows(tables: Sequence[str]) -> list[ListedRecipe]:
    """Load every row of the named tables, or of all of recipes/.

    Raises RecipeError: tables that are not there, with near matches; broken tables and rows, all of them.
    """
    known = {table.name: table for table in catalog.tables()}
    problems = list[Problem]()
    asked = list[str]()
    for name in dict.fromkeys(tables):
        if name in known:
            asked.append(name)
        else:
            problems.append(
                Problem("TABLE", name[:100], "no such table", did_you_mean(name, known))
            )
    rows = list[ListedRecipe]()
    for name in asked or known:
        table = known[name]
        for row in table.rows:
            try:
                rows.append(ListedRecipe(table, row, catalog.load(f"{name}/{row}")))
            except RecipeError as error:
                problems += error.problems
    if problems:
        raise RecipeError(problems)
    return rows


def as_text(
    rows: Sequence[ListedRecipe], fits: str = "", width: int | None = None
) -> str:
    """Describe the rows in a block per table, with a legend. `fits`: the machine that all of them fit."""
    if not rows:
        return f"no recipe fits {fits}" if fits else "no recipe"
    page = Page(width)
    for name, listed in groupby(rows, key=lambda row: row.table.name):
        own = list(listed)
        cells = [row.cells for row in own]
        columns = zip(cells[0], *(each.values() for each in cells), strict=True)
        filled = (column for column in columns if any(column[1:]))
        headings, *lines = zip(*filled, strict=True)
        table = own[0].table
        others = evidence.read(table).others.values()
        left = [f"no recipe: {each.published.row}: {each.why}" for each in others]
        page.table(lines, headings, below=left, heading=[f"{name}: {table.title}"])
    notes = [
        f"{counted(len(rows), 'recipe')}; recipe.py show TABLE/ROW tells all of one",
        "size: parameters, each once; tp x pp x dp: tensor, and data-parallel ranks; "
        "GPUs: as printed",
    ]
    if fits:
        notes.append(fits)
    if any(row.has_stand_ins for row in rows):
        notes.append(
            "?: values that no source gives stand in for some of the row; show says which"
        )
    page.add([terminal.wrapped(note, width) for note in notes])
    return str(page)


def sizes_text(rows: Sequence[ListedRecipe], fits: str, width: int | None) -> str:
    """Name a recipe of each size among the rows, the smallest of a family first."""
    of_size = dict[tuple[str, int], ListedRecipe]()
    for row in rows:
        model = row.recipe.model
        size = cost.parameters(model, row.recipe.positions)
        of_size.setdefault((model.facts.title, size), row)
    lines = []
    for family, size in sorted(of_size):
        row = of_size[family, size]
        name = f"{row.table.name}/{row.name}"
        lines.append((family, short_count(size), name, row.fits))
    page = Page(width)
    below = f"{fits}; --all shows all {len(rows)} recipes that fit"
    page.table(lines, ("model", "size", "such as", "fits"), "lrll", below=[below])
    return str(page)


def published_text(published: Published | None) -> str:
    """Return the measured numbers of a row in one phrase."""
    if published is None:
        return ""
    label = f"{published.size_label}: " if published.size_label else ""
    if published.oom:
        return f"{label}out of memory"
    numbers = {form: getattr(published, name) for name, form in MEASURED.items()}
    said = [form.format(value) for form, value in numbers.items() if value is not None]
    said += [f"{name} {value}" for name, value in scores(published.downstream)]
    return label + (", ".join(said) or "size only")


def short_count(number: int) -> str:
    """Shorten a number of parameters: 14.2M, 8.30B."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,}"
