"""What formulas of claims can ask: values of rows, counts of modules, cost arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ds_configs.sections.transformers_modules import embedding_rows
from launch.tables.verifying.printed_values import Printed, label_unit
from launch.tables.verifying.rows import Row
from modeling import cost
from modeling.counting import RankCounts
from recipes.problems import did_you_mean

Input = tuple[str, str]  # (row, key)
STAGES = {"first": 0, "middle": 1, "last": -1}


class Facts:
    """Functions over the published rows.

    value(row, key): a key of the recipe, or a printed number as `published.tflops`; a size label in 10^9
    once(row), size(row), all_ranks(row), rank(row, stage): parameters: each once; summed over the tensor ranks of the first (or only)
        stage, over all ranks; on one rank of the first, middle or last stage
    stage_ranks(row): tensor ranks of one stage; stages(row): pipeline stages
    padded_vocab(row): tokens of the vocabulary with its padding
    tflops(row, billions): the documents' formula with another size; formula(billions, length, batch, seconds, gpus): with any numbers
    state_bytes(zero_stage, dp, precision): of weights, gradients and Adam's states per parameter and rank
    exact_tflops(row, batch, milliseconds, gpus): of the row's model, every product counted and layers recomputed
    count(table, condition): rows with "key == value" or "key == key"; largest(table, key), smallest(table, key)
    """

    def __init__(self, rows: Iterable[Row], counts: Callable[[Row], RankCounts]) -> None:
        self._rows = {row.full_name: row for row in rows}
        self._counts = counts
        self._inputs: list[Input] | None = None
        self._shifts: Mapping[Input, int] = {}
        self.functions: dict[str, Callable[..., Any]] = {
            "value": self.value,
            "once": lambda row: self._of(row).once,
            "size": lambda row: self._of(row).stages[0],
            "all_ranks": lambda row: self._of(row).all_ranks,
            "rank": lambda row, stage: self._of(row).held[STAGES[stage]][0],
            "stage_ranks": lambda row: len(self._of(row).held[0]),
            "stages": lambda row: len(self._of(row).held),
            "padded_vocab": lambda row: embedding_rows(
                self._row(row).recipe, self._row(row).recipe.parallel.model_parallel[0]
            ),
            "tflops": self._tflops,
            "formula": lambda billions, length, batch, seconds, gpus: cost.published_tflops(
                billions * 1e9, length, batch, seconds, gpus, checkpointing=True
            ),
            "exact_tflops": self._exact_tflops,
            "state_bytes": lambda stage, dp, precision: cost.model_state_bytes(
                1.0, stage, dp, mixed_precision=precision != "fp32"
            ),
            "count": self._count,
            "largest": lambda table, key: max(self._values(table, key)),
            "smallest": lambda table, key: min(self._values(table, key)),
        }

    def value(self, name: str, key: str) -> Any:
        """A printed number at its printed value, or at an end of what rounding can have hidden while inputs are moved."""
        row = self._row(name)
        if not key.startswith("published."):
            return row.as_printed(key)
        printed = row.printed(key)
        if printed is None:
            raise ValueError(
                f"{name} prints no {key.removeprefix('published.')}: a formula of claims.yaml asks for it"
            )
        if key == "published.size_label":
            return printed.value * label_unit(row.published.size_label) / 1e9
        if self._inputs is not None and (name, key) not in self._inputs:
            self._inputs.append((name, key))
        return printed.value + self._shifts.get((name, key), 0) * printed.half

    @contextmanager
    def recording(self) -> Iterator[list[Input]]:
        """The printed numbers that formulas ask for meanwhile."""
        self._inputs = []
        try:
            yield self._inputs
        finally:
            self._inputs = None

    def corners(self, inputs: Sequence[Input]) -> Iterator[dict[Input, int]]:
        """Every choice of the lower and the upper end of each input's rounding."""
        for signs in itertools.product((-1, 1), repeat=len(inputs)):
            yield dict(zip(inputs, signs, strict=True))

    def moved(self, corner: Mapping[Input, int]) -> dict[str, Callable[..., Any]]:
        """The functions with the inputs moved to a corner."""
        other = Facts(self._rows.values(), self._counts)
        other._shifts = corner
        return other.functions

    def _row(self, name: str) -> Row:
        if name not in self._rows:
            raise ValueError(f"claims.yaml: no published row {name}: {did_you_mean(name, self._rows)}")
        return self._rows[name]

    def _of(self, name: str) -> RankCounts:
        return self._counts(self._row(name))

    def _tflops(self, name: str, billions: float) -> float:
        recipe = self._row(name).recipe
        return cost.published_tflops(
            billions * 1e9, recipe.sequence_length, self.value(name, "batch.global"), self.value(name, "published.time_per_iteration_s"),
            self.value(name, "hardware.gpus"), checkpointing=recipe.checkpoint_interval > 0,
        )  # fmt: skip

    def _exact_tflops(self, name: str, batch: int, milliseconds: float, gpus: int) -> float:
        recipe = self._row(name).recipe
        operations = cost.exact_flops_per_step(
            recipe.model,
            recipe.sequence_length,
            batch,
            padded_vocab=embedding_rows(recipe, recipe.parallel.model_parallel[0]),
            checkpointing=True,
        )
        time = (name, f"{milliseconds} ms")  # printed to the millisecond: its rounding is followed too
        if self._inputs is not None and time not in self._inputs:
            self._inputs.append(time)
        return cost.exact_tflops(operations, (milliseconds + 0.5 * self._shifts.get(time, 0)) / 1000, gpus)

    def _table(self, table: str) -> list[Row]:
        found = [row for row in self._rows.values() if row.table.name == table]
        if not found:
            raise ValueError(f"claims.yaml: no published table {table}")
        return found

    def _values(self, table: str, key: str) -> list[float]:
        values = [self._number(row, key) for row in self._table(table)]
        return [value for value in values if value is not None]

    def _count(self, table: str, condition: str) -> int:
        tests = [[side.strip() for side in test.split("==")] for test in condition.split(" and ")]
        return sum(
            all(self._number(row, left) == self._number(row, right) for left, right in tests)
            for row in self._table(table)
        )

    def _number(self, row: Row, term: str) -> float | None:
        """A number, or a key of the row."""
        try:
            return float(term)
        except ValueError:
            printed: Printed | None = row.printed(term)
            return None if printed is None else printed.value
