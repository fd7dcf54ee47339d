"""Lines of published tables as they are checked: each cell with its key, and the recipe's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from launch.reports.tables import PublishedTable, load
from launch.tables.evidence import Evidence, difference
from recipes.key_paths import is_part
from recipes.problems import RecipeError
from recipes.schema import Published, Recipe
from recipes.tables import Table
from tools.tables.printed import Printed

Checks = Iterator["LineCheck"]
Status = Literal["agrees", "disagrees", "not checkable", "computed"]


@dataclass(frozen=True)
class LineCheck:
    """A quantity of a row, printed and recomputed.

    Attributes:
        subject: the row, as "table/row".
        status: "computed" is for information, without a printed number.
        how: the kind of agreement, the reason for no comparison, or the meaning of a computed value.
        transcribed: the recipe is compared with its row's cells and declarations; nothing is recomputed.
        stated: the recipe is compared with a text or a public script; nothing is recomputed.
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
        """The disagreement, without the row."""
        return difference(self.quantity, self.printed, self.computed)


TIME = "published.time_per_iteration_s"
SAMPLES = "published.samples_per_s"
TFLOPS = "published.tflops"
# key of a recipe -> headings of the sources for it
HEADINGS = yaml.safe_load(Path(__file__).with_name("headings.yaml").read_text())
KEYS = {heading: key for key, headings in HEADINGS.items() for heading in headings}
THROUGHPUT = "throughput"  # an iteration's time in one document, samples/s in another
# of a line that is two runs, the one with data parallelism
DATA_PARALLEL_RUN = "model + data parallel gpus"


class Cell(NamedTuple):
    """A source's text under a heading; `key`: the recipe's, None for free text."""

    heading: str
    text: str
    key: str | None

    @property
    def number(self) -> Printed | None:
        """The cell's number in the unit of the key."""
        unit = 1e-3 if self.heading.endswith("(ms)") else 1.0
        return Printed.read(self.text, unit)


@dataclass(frozen=True)
class Line:
    """A line of a published table.

    Attributes:
        texts: of its cells, one a column.
        pretraining: steps, samples per step and tokens per sample; None: no source gives them.
    """

    table: Table
    name: str
    texts: Sequence[str]
    published: Published
    pretraining: tuple[int, int, int] | None

    @property
    def full_name(self) -> str:
        return f"{self.table.name}/{self.name}"

    @property
    def cells(self) -> list[Cell]:
        # a table without columns has its title
        headed = zip(self.table.columns, self.texts, strict=False)
        return [
            Cell(heading, text, self._key_of(heading.casefold()))
            for heading, text in headed
        ]

    def _key_of(self, heading: str) -> str | None:
        if heading == THROUGHPUT:
            return SAMPLES if self.published.time_per_iteration_s is None else TIME
        if heading == DATA_PARALLEL_RUN and self.value("parallel.dp") == 1:
            return None
        return KEYS.get(heading)

    def cell_of(self, key: str) -> Cell | None:
        """Return the cell of a key; None without a column."""
        return next((cell for cell in self.cells if cell.key == key), None)

    def text_of(self, key: str) -> str:
        """Return the text of a key's cell; empty if it is blank or missing."""
        cell = self.cell_of(key)
        return cell.text if cell else ""

    def value(self, key: str) -> Any:
        return value_of(self, key)

    def compare(
        self, quantity: str, printed: object, computed: object, how: str | bool | None
    ) -> LineCheck:
        """Make a check. `how`: the kind of agreement, or True for an exact one; else they disagree."""
        how = "exact" if how is True else how or ""
        status: Status = "agrees" if how else "disagrees"
        return self.check(status, quantity, printed, computed, how)

    def not_checkable(
        self, quantity: str, why: str, printed: object = "", computed: object = ""
    ) -> LineCheck:
        """Make a check without a comparison. `why`: the reason."""
        return self.check("not checkable", quantity, printed, computed, why)

    def check(
        self, status: Status, quantity: str, printed: object, computed: object, how: str
    ) -> LineCheck:
        return LineCheck(
            self.table.name,
            self.full_name,
            quantity,
            status,
            str(printed),
            str(computed),
            how,
        )


@dataclass(frozen=True)
class CheckedRow(Line):
    """A line with a recipe."""

    recipe: Recipe
    source: CheckedTable = field(repr=False, compare=False)

    @property
    def tp(self) -> int:
        return self.recipe.parallel.model_parallel[0]

    @property
    def micro(self) -> int:
        """Micro-batch; 0: left open."""
        return self.recipe.batch.micro or 0

    @property
    def gpus(self) -> Any:
        """Number of GPUs as printed; None: no source gives it."""
        return self.printed_value("hardware.gpus")

    @property
    def batch(self) -> Any:
        """Samples per step, as printed."""
        return self.printed_value("batch.global")

    def value(self, key: str) -> Any:
        return value_of(self.recipe, key)

    def printed_value(self, key: str) -> Any:
        """Return the source's value: the recipe's own, unless `published.printed` has another."""
        return self.published.printed.get(key, self.value(key))

    def printed_number(self, key: str) -> Printed | None:
        """Return a key's number with the digits of its cell, or the recipe's if no cell prints it."""
        numbers = (cell.number for cell in self.cells if cell.key == key)
        value = self.printed_value(key)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return next((number for number in numbers if number), Printed.read(text))

    def unknown_reason(self, key: str) -> str | None:
        """Return the reason for an unknown key or related key, as stated in the recipe."""
        return next(
            (why for name, why in self.recipe.unknown.items() if related(key, name)),
            None,
        )


def value_of(model: Any, key: str) -> Any:
    """Return the value of a dotted key; None if it is not stated."""
    for part in key.split("."):
        attribute = "global_" if part == "global" else part
        model = getattr(model, attribute, None)
    return model


def related(key: str, name: str) -> bool:
    """Check whether two dotted keys are the same, or one contains the other."""
    return is_part(key, [name]) or is_part(name, [key])


@dataclass(frozen=True)
class CheckedTable:
    """A published table as it is checked.

    Attributes:
        rows: those with published numbers.
        others: lines about models that are no recipes.
    """

    table: Table
    rows: Sequence[CheckedRow]
    others: Sequence[Line]
    evidence: Evidence


def checked_tables(tables: Sequence[Table]) -> list[CheckedTable]:
    """Read rows and evidence of tables. Raises ProblemsError for wrong evidence, or all broken rows."""
    loaded = [load(table) for table in tables]
    problems = [problem for each in loaded for problem in each.problems]
    if problems:
        raise RecipeError(problems)
    return [_checked(table, each) for table, each in zip(tables, loaded, strict=True)]


def _checked(table: Table, loaded: PublishedTable) -> CheckedTable:
    rows: list[CheckedRow] = []
    others: list[Line] = []
    source = CheckedTable(table, rows, others, loaded.evidence)
    for row in loaded.rows:
        own = row.recipe
        if own and row.published:
            length = own.steps, own.batch.global_, own.sequence_length
            rows.append(
                CheckedRow(
                    table, row.name, row.cells, row.published, length, own, source
                )
            )
        elif row.no_recipe:
            other = loaded.evidence.others[row.name]
            its = other.pretraining
            trained = (its.steps, its.batch, its.sequence_length) if its else None
            others.append(Line(table, row.name, row.cells, other.published, trained))
    return source
