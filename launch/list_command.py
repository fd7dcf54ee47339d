"""`recipes.py list`: the recipes as tables, filtered."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.fitting import Memory, processes, this_machine, verdict
from modeling import cost
from recipes import catalog
from recipes.problems import did_you_mean
from recipes.schema import Published, Recipe
from recipes.tables import Table

COLUMNS = ("row", "parameters", "layers x hidden", "tp x pp x dp", "GPUs", "batch", "ds_config", "published")


@dataclass(frozen=True)
class Row:
    """A recipe with where it stands."""

    table: Table
    name: str
    recipe: Recipe
    fits: str | None = None  # how, or why not; None where nobody asked

    @property
    def full_name(self) -> str:
        return f"{self.table.name}/{self.name}"


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "list", help="which recipes there are", description="List the recipes, filtered; every filter narrows the list.", allow_abbrev=False
    )
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="only this table; repeatable")
    parser.add_argument("--family", choices=("gpt2", "bert"), help="only this family")
    parser.add_argument("--gpus", metavar="N|A-B", type=_range, help="only rows of so many processes, e.g. 16, 1-8 or 64-")
    parser.add_argument("--hardware", metavar="TEXT", help="only rows whose hardware has this text, e.g. dgx-2, 'jean zay' or a100")
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
        rows = [Row(row.table, row.name, row.recipe, how) for row in rows for ok, how in [verdict(row.recipe, memory)] if ok]
    print(json.dumps([as_json(row) for row in rows], indent=2, ensure_ascii=False) if args.json else as_text(rows, memory))
    return 0


def catalog_rows(tables: Sequence[str] = ()) -> list[Row]:
    """Every row of the named tables (of all where none is named).

    Raises:
        RecipeError: a table that is not there, with near matches; broken tables and rows.
    """
    known = {table.name: table for table in catalog.tables()}
    unknown = [name for name in tables if name not in known]
    if unknown:
        raise catalog.RecipeError([f"--table {name}: no such table: {did_you_mean(name, list(known))}" for name in unknown])
    chosen = [known[name] for name in dict.fromkeys(tables)] or list(known.values())
    return [Row(table, row, catalog.load(f"{table.name}/{row}")) for table in chosen for row in table.rows]


def select(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    checks: list[Callable[[Row], bool]] = []
    if args.family:
        checks.append(lambda row: row.recipe.model.family == args.family)
    if args.gpus:
        checks.append(lambda row: row.recipe.parallel.dp is not None and args.gpus[0] <= processes(row.recipe) <= args.gpus[1])
    if args.hardware:
        checks.append(lambda row: row.recipe.hardware is not None and _plain(args.hardware) in _plain(str(row.recipe.hardware)))
    if args.published:
        checks.append(lambda row: row.table.published)
    if args.oom:
        checks.append(lambda row: row.recipe.published is not None and row.recipe.published.oom)
    return [row for row in rows if all(check(row) for check in checks)]


def as_json(row: Row) -> dict:
    recipe = row.recipe
    return {
        "recipe": row.full_name, "title": recipe.title, "family": recipe.model.family,
        "parameters": cost.parameters(recipe.model, recipe.sequence_length), "processes": processes(recipe) if recipe.parallel.dp else None,
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
    for table in {row.table.name: row.table for row in rows}.values():
        body = [_line(lines[row.full_name], widths) for row in rows if row.table is table]
        blocks.append("\n".join([f"{table.name}: {table.title}", _line(columns, widths), *body]))
    count = f"{len(rows)} recipe{'s' if len(rows) > 1 else ''}; recipes.py show TABLE/ROW tells all of one"
    notes = [f"this machine: {memory}; model states only, activations come on top"] if memory else []
    if any(row.recipe.unknown for row in rows):
        notes.append("?: values that no source gives stand in for some of the row; show says which")
    return "\n\n".join([*blocks, "\n".join([count, *notes])])


def cells(row: Row) -> list[str]:
    recipe, model, parallel = row.recipe, row.recipe.model, row.recipe.parallel
    gpus = str(recipe.hardware.gpus) if recipe.hardware and recipe.hardware.gpus else ""
    return [
        row.name + ("?" if recipe.unknown.keys() - {"steps"} else ""),
        short_count(cost.parameters(model, recipe.sequence_length)),
        f"{'BERT ' if model.family == 'bert' else ''}{model.layers}x{model.hidden}",
        f"{parallel.tp} x {parallel.pp} x {parallel.dp or 'any'}",
        gpus,
        f"{recipe.batch.global_}",
        recipe.ds_config,
        published_text(recipe.published),
    ]


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
    return label + (", ".join(form.format(value) for value, form in numbers if value is not None) or "size only")


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
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of processes or a range, e.g. 16, 1-8 or 64-")
    first = int(match[1])
    return first, first if not match[2] else (int(match[3]) if match[3] else float("inf"))
