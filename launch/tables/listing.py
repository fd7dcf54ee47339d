"""`recipes.py list`: the recipes as tables, filtered."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.machine.memory import Memory, this_machine
from launch.planning.memory_fit import processes, verdict
from modeling import cost
from recipes import catalog
from recipes.problems import Problem, RecipeError, did_you_mean
from recipes.schema import Published, Recipe
from recipes.tables import Table, read_table

COLUMNS = (
    "row",
    "parameters, each once",
    "layers x hidden",
    "tp x pp x dp",
    "GPUs",
    "batch",
    "ds_config",
    "published",
)


@dataclass(frozen=True)
class Row:
    """A recipe with where it stands."""

    table: Table
    name: str
    recipe: Recipe
    asked: str  # its table as `catalog.load` takes it: the table's name, or the path of a file
    fits: str | None = None  # how, or why not; None where nobody asked

    @property
    def full_name(self) -> str:
        return f"{self.asked}/{self.name}"

    @property
    def gpus(self) -> int | None:
        """As printed."""
        return self.recipe.hardware.gpus if self.recipe.hardware else None

    @property
    def processes(self) -> int | None:
        """Of the layout; None where it leaves dp open."""
        return processes(self.recipe) if self.recipe.parallel.dp else None


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "list",
        help="which recipes there are",
        description="List the recipes, filtered; every filter narrows the list.",
        allow_abbrev=False,
    )
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="only this table, or that of your own file.yaml; "
                        "repeatable")  # fmt: skip
    parser.add_argument("--family", choices=("gpt2", "bert"), help="only this family")
    parser.add_argument("--gpus", metavar="N|A-B", type=_range, help="only rows that print so many GPUs, or run so many processes, e.g. "
                        "16, 1-8 or 64-")  # fmt: skip
    parser.add_argument(
        "--hardware",
        metavar="TEXT",
        help="only rows whose hardware has this text, e.g. dgx-2, 'jean zay' or a100",
    )
    parser.add_argument("--published", action="store_true", help="only rows of published tables")
    parser.add_argument("--oom", action="store_true", help="only rows that ran out of memory")
    parser.add_argument("--fits", action="store_true", help="only rows whose weights, gradients and optimizer states fit this machine, as "
                        "published or with fewer data-parallel ranks (activations come on top)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON, one object per row")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = select(catalog_rows(args.table), args)
    memory = this_machine() if args.fits else None
    if memory:
        rows = [replace(row, fits=how) for row in rows for ok, how in [verdict(row.recipe, memory)] if ok]
    print(
        json.dumps([as_json(row) for row in rows], indent=2, ensure_ascii=False)
        if args.json
        else as_text(rows, memory)
    )
    return 0


def catalog_rows(tables: Sequence[str] = ()) -> list[Row]:
    """Every row of the named tables (of all of recipes/ where none is named); a name may be the path of a YAML file.

    Raises:
        RecipeError: tables that are not there, with near matches; broken tables and rows, all of them.
    """
    known = {table.name: table for table in catalog.tables()}
    chosen, rows, problems = {}, [], []
    for name in dict.fromkeys(tables) or known:
        if name in known:
            chosen[name] = known[name]
        elif name.endswith((".yaml", ".yml")) and Path(name).expanduser().is_file():
            chosen[name] = read_table(Path(name).expanduser())
        elif name.endswith((".yaml", ".yml")):
            fix = "give the path of a table, or the name of one of recipes/"
            problems.append(Problem("--table", f"--table {name}", "there is no such file", fix))
        else:
            problems.append(Problem("--table", f"--table {name}", "no such table", did_you_mean(name, known)))
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
    checks: list[Callable[[Row], bool]] = []
    if args.family:
        checks.append(lambda row: row.recipe.model.family == args.family)
    if args.gpus:
        checks.append(
            lambda row: any(
                args.gpus[0] <= count <= args.gpus[1] for count in (row.gpus, row.processes) if count
            )
        )
    if args.hardware:
        checks.append(
            lambda row: (
                row.recipe.hardware is not None and _plain(args.hardware) in _plain(str(row.recipe.hardware))
            )
        )
    if args.published:
        checks.append(lambda row: row.table.published)
    if args.oom:
        checks.append(lambda row: row.recipe.published is not None and row.recipe.published.oom)
    return [row for row in rows if all(check(row) for check in checks)]


def as_json(row: Row) -> dict:
    recipe = row.recipe
    return {
        "recipe": row.full_name, "title": recipe.title, "family": recipe.model.family,
        "parameters": cost.parameters(recipe.model, recipe.sequence_length), "gpus": row.gpus, "processes": row.processes,
        "ds_config": recipe.ds_config, "hardware": str(recipe.hardware) if recipe.hardware else None,
        "published": recipe.published.model_dump(mode="json") if recipe.published else None, "unknown": sorted(recipe.unknown),
    } | ({"fits": row.fits} if row.fits else {})  # fmt: skip


def as_text(rows: Sequence[Row], memory: Memory | None = None) -> str:
    if not rows:
        return "no recipe is left by these filters" + (f" (this machine: {memory})" if memory else "")
    columns = [*COLUMNS, *(["fits"] if memory else [])]
    lines = {row.full_name: cells(row) + ([row.fits or ""] if memory else []) for row in rows}
    widths = [max(len(name), *(len(line[i]) for line in lines.values())) for i, name in enumerate(columns)]
    blocks = []
    for name, table in {row.asked: row.table for row in rows}.items():
        body = [_line(lines[row.full_name], widths) for row in rows if row.asked == name]
        blocks.append("\n".join([f"{name}: {table.title}", _line(columns, widths), *body]))
    count = f"{len(rows)} recipe{'s' if len(rows) > 1 else ''}; recipes.py show TABLE/ROW tells all of one"
    notes = [f"this machine: {memory}; model states only, activations come on top"] if memory else []
    if any(_stands_in(row.recipe) for row in rows):
        notes.append("?: values that no source gives stand in for some of the row; show says which")
    if any(row.gpus and row.processes and row.gpus != row.processes for row in rows):
        notes.append("16 (32): 16 GPUs are printed, and the layout has 32 processes")
    return "\n\n".join([*blocks, "\n".join([count, *notes])])


def cells(row: Row) -> list[str]:
    recipe, model, parallel = row.recipe, row.recipe.model, row.recipe.parallel
    tp, pp = parallel.model_parallel
    counts = [
        str(row.gpus or ""),
        f"({row.processes})" if row.processes and row.processes != row.gpus else "",
    ]
    return [
        row.name + ("?" if _stands_in(recipe) else ""),
        short_count(cost.parameters(model, recipe.sequence_length)),
        f"{'BERT ' if model.family == 'bert' else ''}{model.layers}x{model.hidden}",
        f"{tp} x {pp} x {parallel.dp or 'any'}",
        " ".join(filter(None, counts)),
        f"{recipe.batch.global_}",
        recipe.ds_config,
        published_text(recipe.published),
    ]


def _stands_in(recipe: Recipe) -> bool:
    """Whether values that no source gives are part of it; that the number of steps is one goes for most tables."""
    return bool(recipe.unknown.keys() - {"steps"})


def published_text(published: Published | None) -> str:
    """The measured numbers of a row in one phrase."""
    if published is None:
        return ""
    label = f"{published.size_label}: " if published.size_label else ""
    if published.oom:
        return f"{label}out of memory"
    numbers = [
        (published.time_per_iteration_s, "{:g} s"), (published.samples_per_s, "{:g} samples/s"), (published.tflops, "{:g} TFLOPS"),
        (published.cached_gb, "{:g} GB"), (published.validation_loss, "loss {:g}"),
    ]  # fmt: skip
    return label + (
        ", ".join(form.format(value) for value, form in numbers if value is not None) or "size only"
    )


def short_count(number: int) -> str:
    """14.2M, 8.30B."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())


def _range(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number of processes or a range, e.g. 16, 1-8 or 64-"
        )
    first = int(match[1])
    last = first if not match[2] else (int(match[3]) if match[3] else float("inf"))
    if last < max(first, 1):
        raise argparse.ArgumentTypeError(
            f"{text!r}: no number lies in it: give the smaller one first, from 1, e.g. 8-16"
        )
    return first, last
