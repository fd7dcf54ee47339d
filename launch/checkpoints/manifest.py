"""The manifest of a checkpoint, which lists its content and is written last.

    step-000100/
      rank-00000.safetensors ...   each rank's share of master weights and moments, in pieces
      manifest.json                all other state, and the place of each piece

A piece is a run of consecutive elements of a rank's tensor-parallel slice (`geometry`), stored flat under the
key kind/name, e.g. exp_avg/word.weight. Names are canonical: the names of the model in one process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from data.durable_files import write_atomically
from launch.checkpoints.geometry import (
    Cut,
    Rectangle,
    Whole,
    overlap,
    rectangles,
    run_around,
)
from launch.checkpoints.names import MOMENTS, NAME, WEIGHT, Kind, step_of
from modeling.cost.parameter_count import is_hidden_matrix
from recipes import files
from recipes.problems import some
from recipes.schema import Recipe

MOST_BYTES = 4 * 2**30  # of a manifest
SHOWN = 3  # tensors named in each fault
EVERYWHERE = range(2**63)  # in a slice

Counting = Annotated[int, Field(ge=1, lt=2**63)]
Form = Literal["canonical", "transformers"]
Sums = tuple[float, float]
FileName = Annotated[
    str, Field(pattern=r"^rank-([0-9]{5}|[1-9][0-9]{5,8})\.safetensors$")
]


@dataclass(frozen=True)
class Series:
    """Pieces that follow each other in a slice of a tensor: its elements [first, first + count).

    Each piece but the last has `each` elements; they are in the files of `rank`, `rank + step` and so on.
    `cut` None: the slice is the full tensor.
    """

    rank: Whole
    cut: Cut | None
    first: Whole
    count: Counting
    each: Counting
    step: Counting = 1

    def __len__(self) -> int:
        return -(-self.count // self.each)

    def held_by(self, rank: int) -> int:
        """Return the number of elements in the file of `rank`."""
        before = (
            self.ranks.index(rank) * self.each if rank in self.ranks else self.count
        )
        return min(self.each, self.count - before)

    @property
    def ranks(self) -> range:
        return range(self.rank, self.rank + len(self) * self.step, self.step)

    @property
    def file(self) -> str:
        """The name of its first file."""
        return file_name(self.rank)

    def pieces(self, within: range = EVERYWHERE) -> Iterator[Series]:
        """Yield series of one piece: those that share an element of the slice with `within`."""
        end = self.first + self.count
        low = max(0, (within.start - self.first) // self.each)
        high = -(-(min(within.stop, end) - self.first) // self.each)
        for number in range(low, high):
            first = self.first + number * self.each
            count = min(self.each, end - first)
            yield Series(self.ranks[number], self.cut, first, count, count)

    def pieces_around(
        self, shape: tuple[int, ...], wanted: Rectangle
    ) -> Iterator[Series]:
        """Yield the pieces that may hold elements of a rectangle of the tensor, found by arithmetic."""
        return self.pieces(run_around(shape, self.cut, wanted))

    def rectangles(self, shape: tuple[int, ...]) -> list[Rectangle]:
        return rectangles(shape, self.cut, self.first, self.count)

    def extended(self, by: Series) -> Series | None:
        """Return this series continued by one that begins at its end; None if both together are no series."""
        step = by.rank - self.ranks[-1]
        steps = {each.step for each in (self, by) if len(each) > 1}
        spaced = step > 0 and steps <= {step}
        even = by.count <= self.each if len(by) == 1 else by.each == self.each
        if not spaced or not even or self.count % self.each:
            return None
        return replace(self, count=self.count + by.count, step=step)


def joined(series: Iterable[Series]) -> tuple[Series, ...]:
    """Join series of one tensor, in the order of their pieces, to few."""
    found: list[Series] = []
    at_end: dict[tuple[Cut | None, int], int] = {}  # the series that ends there
    for each in series:
        number = at_end.pop((each.cut, each.first), len(found))
        longer = found[number].extended(each) if number < len(found) else None
        if longer is None:
            number = len(found)
            found.append(each)
        else:
            found[number] = longer
        at_end[each.cut, each.first + each.count] = number
    return tuple(found)


@dataclass(frozen=True)
class ListedTensor:
    """The full, unpadded shape of a tensor, and its pieces.

    Attributes:
        form: "transformers": shape and pieces are of GPT2LMHeadModel's tensor.
        sums: by kind, those of the full canonical tensor (`sums.sums_of`); {} in older checkpoints.
    """

    shape: tuple[Whole, ...]
    series: tuple[Series, ...]
    form: Form = "canonical"
    sums: dict[Kind, Sums] = field(default_factory=dict)

    @property
    def pieces(self) -> Iterator[Series]:
        """All pieces, one after the other: as many as ranks under ZeRO-3."""
        return (piece for each in self.series for piece in each.pieces())


@dataclass(frozen=True)
class StoredFile:
    """Size and checksum of a file of a checkpoint. `crc32`: of all its bytes, in hexadecimal."""

    bytes: Whole
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@dataclass(frozen=True)
class ScalerState:
    """The state of a dynamic fp16 loss scaler, by DeepSpeed's names."""

    cur_scale: Annotated[float, Field(gt=0, lt=2**128)]
    cur_iter: Whole
    last_overflow_iter: Annotated[int, Field(ge=-1, lt=2**63)]
    cur_hysteresis: Counting


@dataclass(frozen=True)
class Progress:
    """The progress of training, without its tensors.

    Attributes:
        step: optimizer steps, with skipped ones.
        adam_steps: updates by the optimizer; 0: there are no moments yet.
        schedule: steps of the learning rate's schedule.
        skipped: steps that the loss scaler dropped.
        loss_scaler: None in other precisions than fp16.
    """

    step: Whole
    adam_steps: Whole
    schedule: Whole
    skipped: Whole = 0
    loss_scaler: ScalerState | None = None


@dataclass(frozen=True)
class KnownLoss:
    """The loss of one sample of held-out text in evaluation mode.

    Attributes:
        loss: what is minimised, in nats (`StepRecord.loss`).
        precision: of the engine that computed it.
        batch: the micro-batch, as nested lists by name.
    """

    loss: float
    precision: str
    batch: dict[str, list[Any]]


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint: training's state, its origin and its files.

    Attributes:
        data: position in the data, of all ranks (`data.loader.merge_states`).
        corpus: checksum of the training tokens; of a stream, of its head.
        recipe: the resolved recipe, as JSON.
        plan: facts of the plan at the save, without recipe and DeepSpeed configuration.
        versions: versions of the packages that wrote it.
        files: files by name.
        tensors: tensors by canonical name.
        kinds: weight and moments that are stored of every tensor, but for those that `kinds_of` leaves out.
        known_loss: None in older checkpoints.
        next_step: sum of the next step's batch and dropout (`launch.training.micro_batches.next_step`); None in
            older checkpoints, and where the step was not read before the save.
        format: version of the manifest's format.
    """

    progress: Progress
    data: dict[str, Any]
    corpus: str
    recipe: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str | None]
    files: dict[FileName, StoredFile]
    tensors: dict[str, ListedTensor]
    kinds: tuple[Kind, ...] = (WEIGHT, *MOMENTS)
    known_loss: KnownLoss | None = None
    next_step: int | None = None
    format: Literal[2] = 2
    saved: str = field(default="", compare=False)  # local time

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files.values())

    def kinds_of(self, name: str) -> tuple[Kind, ...]:
        """Return the kinds that are stored of a tensor: Muon's matrices have one moment."""
        by_muon = self.recipe["optimizer"].get("name") == "muon"
        if by_muon and is_hidden_matrix(name, len(self.tensors[name].shape)):
            return tuple(kind for kind in self.kinds if kind != MOMENTS[1])
        return self.kinds

    def held_by(self, file: str) -> dict[str, int]:
        """Map each tensor with a piece in `file` to its number of elements there."""
        rank = rank_of(file)
        counts = {}
        for name, tensor in self.tensors.items():
            count = sum(each.held_by(rank) for each in tensor.series)
            if count:
                counts[name] = count
        return counts

    def contradictions(
        self, recipe: Recipe, named: int | None
    ) -> Iterator[tuple[str, str]]:
        """Yield facts that contradict others or the recipe, with the rule.

        `named`: the step in the directory's name; None: it has another name.
        """
        at = self.progress
        updates = at.step - at.skipped
        more = recipe.branch.more_updates if recipe.branch else 0
        expected: dict[str, tuple[object, object]] = {
            "adam_steps": (at.adam_steps, updates + more), "schedule": (at.schedule, updates),
            "the last step": (max(at.step, recipe.steps), recipe.steps),
        }  # fmt: skip
        if named is not None:
            position = self.data.get("position")
            expected["the step in its directory's name"] = (named, at.step)
            expected["data.position"] = (
                position,
                recipe.sizes_in_data.samples(at.step),
            )
            expected["kinds"] = (self.kinds, kinds_after(updates))
        for fact, (value, right) in expected.items():
            if value != right:
                rule = f"after {at.step} steps, of them {at.skipped} skipped, it is {right}"
                yield f"{fact} is {str(value)[:60]}", rule
        forms = {tensor.form for tensor in self.tensors.values()}
        model = recipe.model.implementation
        if model not in forms and "transformers" in forms:
            yield "holds tensors in transformers' form", f"its model is {model}'s"
        gaps = list(self.gaps())
        if gaps:
            yield (
                f"the pieces of {gaps[0]} leave gaps or overlap",
                "they hold each of its elements once",
            )

    def gaps(self) -> Iterator[str]:
        """Yield the names of tensors whose pieces, one in a file, do not hold each element once."""
        ranks = {rank_of(file) for file in self.files}
        for name, tensor in self.tensors.items():
            covered = [
                r for series in tensor.series for r in series.rectangles(tensor.shape)
            ]
            held = sum(each.elements for each in covered)
            # one more than may be there: a damaged manifest can state any number
            holding = chain.from_iterable(series.ranks for series in tensor.series)
            found = [*islice(holding, len(ranks) + 1)]
            apart = len(ranks.intersection(found)) == len(found)
            if held != math.prod(tensor.shape) or overlap(covered) or not apart:
                yield name


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank that wrote a file of this name."""
    return int(file.removeprefix("rank-").removesuffix(".safetensors"))


def kinds_after(adam_steps: int) -> tuple[Kind, ...]:
    """Return the kinds of tensors to store after so many updates by the optimizer."""
    if adam_steps:
        return (WEIGHT, *MOMENTS)
    return (WEIGHT,)


FORM = TypeAdapter(Manifest)
RECIPE = TypeAdapter(dict[str, Recipe])


def write(manifest: Manifest, directory: Path) -> None:
    """Write the manifest of `directory` atomically, with a checksum of itself."""
    values = asdict(manifest)
    write_atomically(
        directory / NAME, json.dumps({**values, "sha256": digest(values)}) + "\n"
    )


def read(directory: Path) -> Manifest:
    """Read the manifest of `directory`. Raises FileError if it is missing or damaged."""
    path = directory / NAME
    values = files.read_json_object(path, most=MOST_BYTES)
    told = values.pop("sha256", None)
    if told != digest(values):
        files.refuse(
            path, "its own checksum is another", "it is written once and never edited"
        )
    found: Manifest = files.checked(FORM, values, path)
    recipe = files.checked(RECIPE, {"recipe": found.recipe}, path)["recipe"]
    try:
        for came, rule in found.contradictions(recipe, step_of(directory)):
            files.refuse(path, came, rule)
    except AssertionError as error:
        files.refuse(path, str(error), "a piece lies within its tensor")
    return found


def digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's values, which is the manifest's last value."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Fault:
    """A fault of one file of a checkpoint.

    Attributes:
        file: name of the file.
        came: the fault in words.
        tensors: names of the affected tensors.
        numbers: the file is undamaged, but holds numbers that are not finite.
    """

    file: str
    came: str
    tensors: tuple[str, ...] = ()
    numbers: bool = False

    def __str__(self) -> str:
        joined = "in" if self.numbers else "it holds"
        held = some(self.tensors, SHOWN)
        return f"{self.file} {self.came}" + (f"; {joined} {held}" if held else "")


def size_fault(directory: Path, held: Manifest, name: str) -> Fault | None:
    """Return the fault of a file: unreadable, or of another size than the manifest `held` says; or None."""
    path = directory / name
    told = held.files[name].bytes
    try:
        size = path.stat().st_size
        came = f"has {size} bytes instead of {told}"
        if not path.is_file():
            came = "is no file"
        elif size == told:
            return None
    except OSError as error:
        came = f"cannot be read ({error.strerror})"
    return Fault(name, came, tuple(held.held_by(name)))
