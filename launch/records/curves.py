"""Reference curves: files of what runs of one recipe came to under several seeds.

A file holds the recipe, the checksums of text and vocabulary, what the runs were made with, and a line of
figures for each seed. Medians and bands are computed where they are shown. A file `misuses-NAME.json` next to
it holds the first steps of runs with a known mistake each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.records.facts import Finite, RunFacts
from launch.records.metrics import Records
from launch.records.reference import Series
from recipes import files
from recipes.families import LossFigure
from recipes.key_paths import CURVE, PLACES, Difference, changes, differences
from recipes.problems import counted, some
from recipes.schema import Recipe

BEGINNING = '{\n "curve_of": '
# of a corpus' summary
CHECKSUMS = ("train_tokens_crc32", "vocabulary_digest")
DIGITS = 5
MOST_NAMED = 3  # keys
NOT_STORED = {"published", "inferred", "differs", "unknown", "hardware", "branch"}


@dataclass(frozen=True)
class Points:
    """The figures of one run by step, step 1 first, None where a step was skipped; `about`: its mistake."""

    loss: tuple[Finite | None, ...]
    grad_norm: tuple[Finite | None, ...]
    validation: dict[int, Finite]
    about: str = ""

    @classmethod
    def of(cls, records: Records, figure: LossFigure, steps: int) -> Points:
        """Take the first `steps` steps of a run's records."""
        loss: list[float | None] = [None] * steps
        norm: list[float | None] = [None] * steps
        for record in records.steps:
            if record.step <= steps and not record.skipped:
                loss[record.step - 1] = figure.of(record)
                norm[record.step - 1] = record.grad_norm
        held_out = {}
        for validation in records.validations:
            value = figure.of(validation)
            if value is not None and validation.step <= steps:
                held_out[validation.step] = value
        return cls(tuple(loss), tuple(norm), held_out)

    @property
    def series(self) -> Series:
        return Series(
            np.array(self.loss, float), np.array(self.grad_norm, float), self.validation
        )


@dataclass(frozen=True)
class Standing:
    """A run next to the curve of its recipe. `begun`: from what it began, None: from random weights."""

    name: str
    seeds: int
    begun: str | None
    apart: tuple[Difference, ...]

    @property
    def fits(self) -> bool:
        return not (self.begun or self.apart)

    def __str__(self) -> str:
        if self.fits:
            return f"curve of {self.name}, {counted(self.seeds, 'seed')}"
        if self.begun:
            return f"none: the run begins with {self.begun}, {self.name}'s curve with random weights"
        told = [f"{key}={now} is not the {was}" for key, was, now in self.apart]
        return f"none: {some(told, MOST_NAMED)} of {self.name}'s curve"


@dataclass(frozen=True)
class Curve:
    """The content of a curve's file.

    Attributes:
        curve_of: name of the recipe, table/row.
        recipe: that of the runs; keys outside of the fingerprint (`CURVE`) mean nothing.
        text: checksums of training tokens and vocabulary.
        made: hardware, precisions, versions and commits of the runs, for a reader.
        runs: by seed, all of as many steps.
    """

    curve_of: str
    recipe: Recipe
    text: dict[str, str]
    made: dict[str, list[str]]
    runs: dict[int, Points]

    @property
    def steps(self) -> int:
        return min(len(run.loss) for run in self.runs.values())

    def standing(self, run: RunFacts, *, given_weights: bool) -> Standing:
        """Compare a run's recipe, and its text where that is known, with the curve's."""
        recipe = run.plan.recipe
        apart = changes(self.recipe, recipe, CURVE)
        if run.data:
            own = {key: run.data.get(key) for key in CHECKSUMS}
            other = differences(self.text, own)
            if not other:
                apart = [each for each in apart if each[0] not in PLACES]
            apart += other
        begun = "given weights" if given_weights else None
        if recipe.branch is not None:
            begun = f"step {recipe.branch.step:,} of another run"
        return Standing(self.curve_of, len(self.runs), begun, tuple(apart))


def read(path: Path) -> tuple[Curve, Mapping[str, Points]]:
    """Read the file of a curve, and the misuses next to it. Raises FileError."""
    curve: Curve = files.checked(TypeAdapter(Curve), files.read_json_object(path), path)
    lengths = {
        len(each) for run in curve.runs.values() for each in (run.loss, run.grad_norm)
    }
    if len(lengths) != 1 or 0 in lengths:
        files.refuse(
            path, "has runs of different lengths", "each has all steps of the recipe"
        )
    beside = path.with_name(f"misuses-{path.name}")
    if not beside.is_file():
        return curve, {}
    form = TypeAdapter(dict[str, Points])
    return curve, files.checked(form, files.read_json_object(beside), beside)


def write(path: Path, curve: Curve) -> None:
    """Write the file of a curve."""
    recipe = curve.recipe.model_dump(mode="json", by_alias=True, exclude=NOT_STORED)
    known = {**vars(curve), "recipe": recipe}
    runs = known.pop("runs")
    head = json.dumps(known, indent=1, ensure_ascii=False)
    write_atomically(path, f'{head[:-2]},\n "runs": {lines_of(runs)}}}\n')


def lines_of(runs: Mapping[Any, Points]) -> str:
    """Write runs as a JSON object, each in a line."""
    lines = []
    for key, run in runs.items():
        values = {name: rounded(value) for name, value in vars(run).items() if value}
        line = json.dumps(values, separators=(",", ":"))
        lines.append(f"{json.dumps(str(key))}:{line}")
    return "{\n" + ",\n".join(lines) + "\n}"


def rounded(value: Any) -> Any:
    """Round the numbers of lists and mappings to `DIGITS` digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, tuple):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return value
