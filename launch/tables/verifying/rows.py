"""A published row: its recipe, the cells of the source with the key that each one prints, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from launch.tables.verifying.printed_values import Printed
from recipes.problems import Problem, RecipeError
from recipes.schema import Published, Recipe
from recipes.tables import Table
from recipes.validation import validate

Status = Literal["agrees", "disagrees", "not checkable", "computed"]


@dataclass(frozen=True)
class Check:
    """A quantity of a row, as printed and as recomputed.

    Attributes:
        subject: the row, as "table/row".
        status: "computed" is for information: nothing printed stands against it.
        how: how the two agree; why they cannot be compared; of a computed value, what it is.
        transcribed: compares the recipe with its row's cells and its declarations; recomputes nothing.
        stated: compares the recipe with what a text or a public script says of its row; recomputes nothing.
    """

    table: str
    subject: str
    quantity: str
    status: Status
    printed: str = ""
    computed: str = ""
    how: str = ""
    transcribed: bool = False
    stated: bool = False

    @property
    def difference(self) -> str:
        """What differs, without the row."""
        return difference(self.quantity, self.printed, self.computed)


def difference(quantity: str, printed: str, computed: str) -> str:
    """What differs, in one phrase."""
    return f"{quantity}: printed {printed}, computed {computed}"


class Key(NamedTuple):
    """The key of the recipe that a column prints, and the factor from the column's unit to the key's.

    parts: fields of the key's value, where a cell prints several numbers.
    """

    name: str
    factor: float = 1
    parts: tuple[str, ...] = ()


TIME, SAMPLES = Key("published.time_per_iteration_s"), Key("published.samples_per_s")
HEADINGS = {  # of the sources, in lower case
    "gpus": Key("hardware.gpus"), "num_gpu": Key("hardware.gpus"),
    "model + data parallel gpus": Key("hardware.gpus"), "model parallel gpus": Key("parallel.tp"),
    "tp": Key("parallel.tp"), "rank": Key("parallel.tp"),
    "pp": Key("parallel.pp"), "dp": Key("parallel.dp"),
    "pp chunks": Key("batch.accumulation"), "mic-bs": Key("batch.micro"), "batch size": Key("batch.micro"),
    "glob-bs": Key("batch.global"), "layers": Key("model.layers"), "number of layers": Key("model.layers"),
    "hidden size": Key("model.hidden"), "attention heads": Key("model.heads"),
    "checkpoint_activations": Key("activation_checkpointing"),
    "size": Key("published.size_label"), "parameter count": Key("published.size_label"),
    "number of parameters (billions)": Key("published.size_label"),
    "model size": Key("published.parameters"), "size/rank": Key("published.parameters_per_rank"),
    "time/iteration (ms)": Key(TIME.name, 1e-3), "samples/sec": SAMPLES,
    "tflops": Key("published.tflops"), "sustained teraflops per gpu": Key("published.tflops"),
    "cached": Key("published.cached_gb"), "notes": Key("published.date"),
    "weak scaling": Key("published.weak_scaling_percent"),
    "percentage of theoretical peak flops": Key("published.peak_percent"),
    "trained tokens (ratio)": Key("published.trained_tokens"),
    "mnli m/mm accuracy (dev set)": Key("published.downstream.mnli", 1, ("matched", "mismatched")),
    "qqp accuracy (dev set)": Key("published.downstream.qqp.accuracy"),
    **{f"squad {version}.{minor} {heading}": Key(f"published.downstream.squad{version}", 1, ("f1", "em"))
       for version, minor in ((1, 1), (2, 0)) for heading in ("f1/em (dev set)", "dev set f1 / em")},
    **{f"race m/h {heading}": Key("published.downstream.race", 1, ("accuracy", "middle", "high"))
       for heading in ("accuracy (test set)", "test set accuracy")},
    "wikitext103 perplexity": Key("published.downstream.wikitext103.perplexity"),
    "sota perplexity": Key("published.previous.wikitext103.perplexity"),
    "lambada accuracy": Key("published.downstream.lambada.accuracy"),
    "sota accuracy": Key("published.previous.lambada.accuracy"),
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
    def published(self) -> Published:
        assert self.recipe.published is not None, f"{self.full_name} is no published row"
        return self.recipe.published

    @property
    def tp(self) -> int:
        return self.recipe.parallel.model_parallel[0]

    @property
    def micro(self) -> int:
        """Micro-batch; 0 where it is left open."""
        return self.recipe.batch.micro or 0

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(heading, cell as printed)."""
        cells = [cell.strip() for cell in (self.published.row or "").split("|")]
        return list(zip(self.table.columns, cells, strict=False))

    def own(self, key: str) -> Any:
        """Value of a dotted key in the recipe; None where it is not stated."""
        return value_of(self.recipe, key)

    def as_printed(self, key: str) -> Any:
        """The source's value: the recipe's own unless it declares another one in `published.printed`."""
        return self.published.printed.get(key, self.own(key))

    def key_of(self, heading: str) -> Key | None:
        """The key that a column prints; None for a column of free text."""
        folded = heading.casefold()
        if folded == THROUGHPUT:
            return SAMPLES if self.published.time_per_iteration_s is None else TIME
        if folded == DATA_PARALLEL_RUN and self.recipe.parallel.dp == 1:
            return None
        return HEADINGS.get(folded)

    def cell_of(self, name: str) -> str | None:
        """What the source prints for a key; None where no column is for it."""
        keys = ((self.key_of(heading), cell) for heading, cell in self.cells)
        return next((cell for key, cell in keys if key and key.name == name), None)

    def printed(self, name: str) -> Printed | None:
        """A key's number with the digits of its cell, or the recipe's where no cell prints it."""
        for key, cell in ((self.key_of(heading), cell) for heading, cell in self.cells):
            if key and key.name == name and (number := Printed.read(cell, key.factor)):
                return number
        value = self.as_printed(name)
        return Printed.read(f"{value:g}" if isinstance(value, float) else str(value))

    def unknown(self, key: str) -> str | None:
        """Why no source gives a key, where the recipe says so of it or of a related key."""
        return next((why for name, why in self.recipe.unknown.items() if related(key, name)), None)

    def compare(self, quantity: str, printed: object, computed: object, how: str | bool | None) -> Check:
        """Agrees where `how` says in which way; true: exactly."""
        how = "exact" if how is True else how or ""
        return self.say("agrees" if how else "disagrees", quantity, printed, computed, how)

    def unchecked(self, quantity: str, why: str, printed: object = "", computed: object = "") -> Check:
        """What cannot be compared."""
        return self.say("not checkable", quantity, printed, computed, why)

    def say(self, status: Status, quantity: str, printed: object, computed: object, how: str) -> Check:
        return Check(self.table.name, self.full_name, quantity, status, str(printed), str(computed), how)


def value_of(model: Any, key: str) -> Any:
    """Value of a dotted key; None where it is not stated."""
    for part in key.split("."):
        model = getattr(model, "global_" if part == "global" else part, None)
    return model


def related(key: str, name: str) -> bool:
    """Whether two dotted keys are the same, or one belongs to the other."""
    return key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def published_rows(tables: Sequence[Table]) -> list[Row]:
    """Every published row of the tables; one RecipeError for all rows that are no recipes."""
    rows, problems = list[Row](), list[Problem]()
    for table in tables:
        for name in table.rows:
            try:
                recipe = validate(table.row(name), f"{table.name}/{name}", table.document, table.paths(name))
                rows.append(Row(table, name, recipe))
            except RecipeError as error:
                problems += error.problems
    if problems:
        raise RecipeError(problems)
    return [row for row in rows if row.recipe.published is not None]
