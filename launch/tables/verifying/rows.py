"""A published row: its recipe, and the cells of the source with the recipe's key that each one prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from launch.tables.verifying.check import Check, Status, compared
from launch.tables.verifying.printed_values import Printed
from recipes.problems import RecipeError
from recipes.schema import Recipe
from recipes.tables import Table
from recipes.validation import validate

# Heading of a source, in lower case -> key of the recipe, and the factor from its unit to the key's.
HEADINGS: dict[str, tuple[str, float]] = {
    "gpus": ("hardware.gpus", 1), "num_gpu": ("hardware.gpus", 1), "model + data parallel gpus": ("hardware.gpus", 1),
    "model parallel gpus": ("parallel.tp", 1), "tp": ("parallel.tp", 1), "rank": ("parallel.tp", 1),
    "pp": ("parallel.pp", 1), "dp": ("parallel.dp", 1),
    "pp chunks": ("batch.accumulation", 1), "mic-bs": ("batch.micro", 1), "batch size": ("batch.micro", 1), "glob-bs": ("batch.global", 1),
    "layers": ("model.layers", 1), "number of layers": ("model.layers", 1),
    "hidden size": ("model.hidden", 1), "attention heads": ("model.heads", 1),
    "checkpoint_activations": ("activation_checkpointing", 1),
    "size": ("published.size_label", 1), "parameter count": ("published.size_label", 1),
    "number of parameters (billions)": ("published.size_label", 1),
    "model size": ("published.parameters", 1), "size/rank": ("published.parameters_per_rank", 1),
    "time/iteration (ms)": ("published.time_per_iteration_s", 1e-3), "samples/sec": ("published.samples_per_s", 1),
    "tflops": ("published.tflops", 1), "sustained teraflops per gpu": ("published.tflops", 1),
    "cached": ("published.cached_gb", 1), "notes": ("published.date", 1), "weak scaling": ("published.weak_scaling_percent", 1),
    "percentage of theoretical peak flops": ("published.peak_percent", 1),
}  # fmt: skip
THROUGHPUT = "throughput"  # an iteration's time in one document, samples/s in another
DATA_PARALLEL_RUN = "model + data parallel gpus"  # of a line that is two runs, the one with data parallelism


@dataclass(frozen=True)
class Row:
    """One row of a published table."""

    table: Table
    name: str
    recipe: Recipe

    @property
    def full_name(self) -> str:
        return f"{self.table.name}/{self.name}"

    @property
    def published(self) -> Any:
        assert self.recipe.published is not None, f"{self.full_name} is no published row"
        return self.recipe.published

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(heading, cell as printed)."""
        return list(
            zip(
                self.table.columns,
                [cell.strip() for cell in (self.published.row or "").split("|")],
                strict=False,
            )
        )

    def own(self, key: str) -> Any:
        """Value of a dotted key in the recipe; None where it is not stated."""
        return reduce(lambda value, part: getattr(value, _field(part), None), key.split("."), self.recipe)

    def as_printed(self, key: str) -> Any:
        """The source's value: the recipe's own unless it declares another one in `published.printed`."""
        return self.published.printed.get(key, self.own(key))

    def key_of(self, heading: str) -> tuple[str, float] | None:
        """The key of the recipe that a column prints, and the factor to its unit; None for a column of free text."""
        folded = heading.casefold()
        if folded == THROUGHPUT:
            timed = self.published.time_per_iteration_s is not None
            return ("published.time_per_iteration_s" if timed else "published.samples_per_s"), 1
        if folded == DATA_PARALLEL_RUN and self.recipe.parallel.dp == 1:
            return None
        return HEADINGS.get(folded)

    def cell_of(self, key: str) -> str | None:
        """What the source prints for a key; None where no column is for it."""
        return next((cell for heading, cell in self.cells if (self.key_of(heading) or ("",))[0] == key), None)

    def printed(self, key: str) -> Printed | None:
        """A key's number with the digits that its cell prints (those of the recipe where no cell does); None where there is none."""
        for heading, cell in self.cells:
            found = self.key_of(heading)
            if found and found[0] == key and (number := Printed.read(cell, found[1])):
                return number
        value = self.as_printed(key)
        return (
            None if value is None else Printed.read(f"{value:g}" if isinstance(value, float) else str(value))
        )

    def unknown(self, key: str) -> str | None:
        """Why no source gives a key, where the recipe says so of it, of what it belongs to, or of a part of it."""
        near = (
            name
            for name in self.recipe.unknown
            if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")
        )
        return next((self.recipe.unknown[name] for name in near), None)

    def compare(self, quantity: str, printed: str, computed: str, how: str | None) -> Check:
        return compared(self.table.name, self.full_name, quantity, printed, computed, how)

    def say(
        self, status: Status, quantity: str, computed: str = "", how: str = "", printed: str = ""
    ) -> Check:
        return Check(self.table.name, self.full_name, quantity, status, printed, computed, how)


def published_rows(tables: Sequence[Table]) -> list[Row]:
    """Every row of the tables that reproduce one of a document.

    Raises:
        RecipeError: rows that are no recipes, all of them in one error.
    """
    rows, problems = [], []
    for table in tables:
        for name in table.rows if table.published else ():
            try:
                recipe = validate(table.row(name), f"{table.name}/{name}", table.document, table.paths(name))
            except RecipeError as error:
                problems += error.problems
                continue
            if recipe.published is not None:
                rows.append(Row(table, name, recipe))
    if problems:
        raise RecipeError(problems)
    return rows


def _field(part: str) -> str:
    return "global_" if part == "global" else part
