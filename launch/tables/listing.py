"""`launch/recipe.py list`: the recipes as tables, filtered."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.console import terminal, text_table
from launch.machine.memory import Memory, this_machine
from launch.planning.memory_fit import verdict
from launch.planning.resolved_plans import processes
from launch.tables import evidence
from launch.tables.scores import scores
from modeling import cost
from recipes import catalog, files
from recipes.families import FAMILIES
from recipes.plural import counted
from recipes.problems import Problem, ProblemsError, RecipeError, did_you_mean
from recipes.schema import Hardware, Published, Recipe
from recipes.tables import Table, read_table

COLUMNS = (
    "row", "parameters, each once", "layers x hidden", "tp x pp x dp", "GPUs", "batch", "ds_config",
    "published",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A recipe with where it stands."""

    table: Table
    name: str
    recipe: Recipe
    asked: str  # its table as `catalog.load` takes it: the table's name, or the path of a file
    fits: str | None = None  # how, or why not; None where nobody asked

    @property
    def gpus(self) -> int | None:
        """The number of GPUs as printed."""
        return self.recipe.hardware.gpus if self.recipe.hardware else None

    @property
    def processes(self) -> int | None:
        """The number of processes of the layout; None where it leaves dp open."""
        return processes(self.recipe) if self.recipe.parallel.dp else None

    @property
    def stands_in(self) -> bool:
        """Whether it has values that no source gives, besides the number of steps, which most tables lack."""
        return bool(self.recipe.unknown.keys() - {"steps"})


def add_parser(commands: Any) -> None:
    """Add the subcommand `list` to the subparsers of launch/recipe.py."""
    parser = commands.add_parser(
        "list", help="which recipes there are", allow_abbrev=False,
        description="List the recipes, filtered; every filter narrows the list.",
    )  # fmt: skip
    add = parser.add_argument
    own = "only this table, or that of your own file.yaml; repeatable"
    add("--table", action="append", default=[], metavar="NAME", help=own)
    add("--family", choices=tuple(FAMILIES), help="only this family")
    gpus = "only rows that print so many GPUs, or run so many processes, e.g. 16, 1-8 or 64-"
    add("--gpus", metavar="N|A-B", type=_range, help=gpus)
    hardware = "only rows whose hardware has this text, e.g. dgx-2, 'jean zay' or a100"
    add("--hardware", metavar="TEXT", help=hardware)
    add("--published", action="store_true", help="only rows of published tables")
    add("--oom", action="store_true", help="only rows that ran out of memory")
    states = "only rows that fit this machine by the planner's memory, activations included"
    fits = f"{states}, as published or with fewer data-parallel ranks"
    add("--fits", action="store_true", help=fits)
    add("--json", action="store_true", help="as JSON, one object per row")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = select(catalog_rows(args.table), args)
    memory = this_machine() if args.fits else None
    if memory:
        rows = [replace(row, fits=how) for row in rows for ok, how in [verdict(row.recipe, memory)] if ok]
    values = [as_json(row) for row in rows] if args.json else []
    text = json.dumps(values, indent=2, ensure_ascii=False) if args.json else ""
    print(text or as_text(rows, memory, terminal.columns()))
    return 0


def catalog_rows(tables: Sequence[str] = ()) -> list[Row]:
    """Every row of the named tables or YAML files, or of all of recipes/.

    Raises RecipeError: tables that are not there, with near matches; broken tables and rows, all of them.
    """
    known = {table.name: table for table in catalog.tables()}
    chosen: dict[str, Table] = {}
    rows, problems = list[Row](), list[Problem]()
    for name in dict.fromkeys(tables) or known:
        if name in known:
            chosen[name] = known[name]
        elif name.endswith((".yaml", ".yml")):
            try:
                chosen[name] = read_table(files.path_of(name, "--table"))
            except ProblemsError as error:
                problems += error.problems
        else:
            fix = did_you_mean(name, known)
            problems.append(Problem("--table", f"--table {name[:100]}", "no such table", fix))
    for name, table in chosen.items():
        for row in table.rows:
            try:
                rows.append(Row(table, row, catalog.load(f"{name}/{row}"), name))
            except RecipeError as error:
                problems += error.problems
    if problems:
        raise RecipeError(problems)
    return rows


def select(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """The rows that every filter lets through."""
    least, most = args.gpus or (0, 0)

    def passes(row: Row) -> Iterator[bool]:
        recipe = row.recipe
        yield not args.family or recipe.model.family == args.family
        yield not args.gpus or any(least <= count <= most for count in (row.gpus, row.processes) if count)
        yield not args.hardware or _has(recipe.hardware, args.hardware)
        yield not args.published or row.table.published
        yield not args.oom or (recipe.published is not None and recipe.published.oom)

    return [row for row in rows if all(passes(row))]


def _has(hardware: Hardware | None, text: str) -> bool:
    plain, wanted = (re.sub(r"[^a-z0-9]+", "", str(part).lower()) for part in (hardware, text))
    return hardware is not None and wanted in plain


def as_json(row: Row) -> dict[str, Any]:
    recipe = row.recipe
    return {
        "recipe": f"{row.asked}/{row.name}", "title": recipe.title, "family": recipe.model.family,
        "parameters": cost.parameters(recipe.model, recipe.positions), "gpus": row.gpus,
        "processes": row.processes, "ds_config": recipe.ds_config,
        "hardware": str(recipe.hardware) if recipe.hardware else None,
        "published": recipe.published.model_dump(mode="json") if recipe.published else None,
        "unknown": sorted(recipe.unknown),
    } | ({"fits": row.fits} if row.fits else {})  # fmt: skip


def as_text(rows: Sequence[Row], memory: Memory | None = None, width: int | None = None) -> str:
    """A block per table, then what the marks mean, in lines of `width` columns. `memory`: of --fits."""
    if not rows:
        return "no recipe is left by these filters" + (f" (this machine: {memory})" if memory else "")
    lines = [[*COLUMNS, "fits"], *([*cells(row), row.fits or ""] for row in rows)]
    headings, *shown = lines if memory else [line[:-1] for line in lines]
    heading, *aligned = (f"  {line.rstrip()}" for line in text_table.table([headings, *shown]).splitlines())
    fits = width is None or max(map(len, (heading, *aligned))) <= width
    blocks = []
    for name in dict.fromkeys(row.asked for row in rows):
        own = [number for number, row in enumerate(rows) if row.asked == name]
        block = [heading, *(aligned[number] for number in own)]
        if not fits:
            narrow = text_table.table([shown[number] for number in own], headings, width=width and width - 2)
            block = [textwrap.indent(narrow, "  ")]
        left = [f"  {line}" for line in no_recipes(rows[own[0]].table)]
        blocks.append([f"{name}: {rows[own[0]].table.title}", *block, *left])
    notes = [f"{counted(len(rows), 'recipe')}; recipe.py show TABLE/ROW tells all of one"]
    if memory:
        notes.append(f"this machine: {memory}; memory as launch/plan.py predicts it")
    if any(row.stands_in for row in rows):
        notes.append("?: values that no source gives stand in for some of the row; show says which")
    if any(row.gpus and row.processes and row.gpus != row.processes for row in rows):
        notes.append("16 (32): 16 GPUs are printed, and the layout has 32 processes")
    return terminal.wrapped("\n\n".join("\n".join(block) for block in (*blocks, notes)), width)


def no_recipes(table: Table) -> list[str]:
    """The lines of the source about models that are no recipe here, and why they are none."""
    others = evidence.read(table).others.values()
    return [f"no recipe: {each.published.row}: {each.why}" for each in others]


def cells(row: Row) -> list[str]:
    """The row under `COLUMNS`."""
    recipe, model, (tp, pp) = row.recipe, row.recipe.model, row.recipe.parallel.model_parallel
    other = f"({row.processes})" if row.processes and row.processes != row.gpus else ""
    size = short_count(cost.parameters(model, recipe.positions))
    shape = f"{'BERT ' if model.family == 'bert' else ''}{model.layers}x{model.hidden}"
    layout, gpus = f"{tp} x {pp} x {recipe.parallel.dp or 'any'}", f"{row.gpus or ''} {other}".strip()
    # The mark stands apart, so that a name can be copied.
    name, batch = row.name + (" ?" if row.stands_in else ""), f"{recipe.batch.global_}"
    return [name, size, shape, layout, gpus, batch, recipe.ds_config, published_text(recipe.published)]


def published_text(published: Published | None) -> str:
    """The measured numbers of a row in one phrase."""
    if published is None:
        return ""
    label = f"{published.size_label}: " if published.size_label else ""
    if published.oom:
        return f"{label}out of memory"
    numbers = [
        (published.time_per_iteration_s, "{:g} s"), (published.samples_per_s, "{:g} samples/s"),
        (published.tflops, "{:g} TFLOPS"), (published.cached_gb, "{:g} GB"),
        (published.validation_loss, "loss {:g}"),
    ]  # fmt: skip
    said = [form.format(value) for value, form in numbers if value is not None]
    said += [f"{name} {value}" for name, value in scores(published.downstream)]
    return label + (", ".join(said) or "size only")


def short_count(number: int) -> str:
    """14.2M, 8.30B."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,}"


def _range(text: str) -> tuple[int, float]:
    rule = "give a number of processes or a range, e.g. 16, 1-8 or 64-"
    if match := re.fullmatch(r"(\d+)(-(\d*))?", text):
        first = int(match[1])
        last = first if not match[2] else float(match[3] or "inf")
        if last >= max(first, 1):
            return first, last
        rule = "no number lies in it: give the smaller one first, from 1, e.g. 8-16"
    raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
