"""Inspection of a checkpoint: reading every byte of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from launch.checkpoints import manifest
from launch.checkpoints.manifest import Fault, Manifest, size_fault
from launch.checkpoints.names import MOMENTS, NAME
from launch.checkpoints.stored import StoredTensors
from launch.checkpoints.tensor_file import BUCKET, DTYPES
from launch.records.directory import RunDirectory
from modeling.families import meta_parameters, with_few_layers
from recipes import catalog, files
from recipes.key_paths import KEPT_BY_RESUME, changes
from recipes.problems import Problem, ProblemsError, some
from recipes.schema import Recipe

Seen = Callable[[int], None]  # called with the number of bytes of each part read


def faults(directory: Path, seen: Seen = lambda number: None) -> Iterator[Fault]:
    """Yield all faults of a checkpoint, also of its numbers. Reads each file once, a bucket at a time."""
    try:
        held = manifest.read(directory)
    except files.FileError as error:
        for problem in error.problems:
            said = (problem.came, problem.rule)
            yield Fault(NAME, ": ".join(str(part) for part in said if part))
        return
    fault = recipe_fault(directory, held)
    if fault:
        yield fault
    yield from _model_faults(directory, held)
    for name in held.files:
        yield from file_faults(directory, held, name, seen)


def faults_of_kinds(
    directory: Path, kinds: Collection[str], fix: str, seen: Seen = lambda number: None
) -> list[Problem]:
    """Return the faults that make tensors of these kinds unusable. Reads the whole checkpoint."""
    found = faults(directory, seen)
    problems = []
    for fault in found:
        kinds_of_fault = {name.split("/", 1)[0] for name in fault.tensors}
        if fault.numbers and kinds_of_fault.isdisjoint(kinds):
            continue  # numbers of other kinds may be not finite
        problems.append(Problem(fault.file, str(fault), fix=fix, where=str(directory)))
    return problems


def run_around(directory: Path) -> RunDirectory | None:
    """Return the run that a checkpoint lies in; None: there is none with a recipe."""
    run = RunDirectory.around(directory.resolve())
    return run if run and os.path.lexists(run.recipe_yaml) else None


def recipe_fault(directory: Path, held: Manifest) -> Fault | None:
    """Return the fault of a manifest whose recipe is not that of the run around it; None without."""
    run = run_around(directory)
    if run is None:
        return None
    try:
        own = catalog.load_resolved(run.recipe_yaml)
        came = other_recipe(held, own, f" ({run.recipe_yaml})")
    except ProblemsError as error:
        came = f"cannot be compared with the run's recipe: {error.problems[0]}"
    return Fault(NAME, came) if came else None


def other_recipe(held: Manifest, recipe: Recipe, where: str = "") -> str:
    """Say where the recipe of a manifest differs from its run's in what decides numbers; "" nowhere."""
    there = Recipe.model_validate(held.recipe)
    changed = changes(recipe, there, KEPT_BY_RESUME)
    listed = some(
        [f"{key} is {here} instead of {there}" for key, there, here in changed]
    )
    return f"has another recipe than its run{where}: {listed}" if changed else ""


def _model_faults(directory: Path, held: Manifest) -> Iterator[Fault]:
    """Yield faults of tensors that differ from the recipe's model."""
    recipe = Recipe.model_validate(held.recipe)
    stored = StoredTensors(directory, held)
    expected = {
        n: tuple(p.shape)
        for n, p in meta_parameters(with_few_layers(recipe, len(stored))).items()
    }
    missing = tuple(name for name in expected if name not in stored)
    if missing:
        yield Fault(NAME, "lacks tensors of the recipe's model", missing)
    more = tuple(name for name in stored if name not in expected)
    if more:
        yield Fault(NAME, "has tensors that the recipe's model has not", more)
    for name, shape in expected.items():
        has = stored.shape(name) if name in stored else shape
        if has != shape:
            yield Fault(
                NAME,
                f"has shape {list(has)} where the recipe has {list(shape)}",
                (name,),
            )


def file_faults(
    directory: Path, held: Manifest, name: str, seen: Seen = lambda number: None
) -> Iterator[Fault]:
    """Yield the faults of a file of the manifest `held`, also of its numbers. Reads it once."""
    fault = size_fault(directory, held, name)
    if fault:
        yield fault
        return
    path = directory / name
    told = held.files[name]
    counts = held.held_by(name)
    names = tuple(counts)
    try:
        problem = ""
        header = dict[str, files.StoredTensor]()
        try:
            header = files.read_safetensors_header(path)
        except files.FileError as error:
            problem = "; ".join(f"{each.came} ({each.rule})" for each in error.problems)
        with path.open("rb") as file:
            checksum, odd = _read_through(file, told.bytes, header, seen)
    except OSError as error:
        yield Fault(path.name, f"cannot be read ({error.strerror})", names)
        return
    if checksum != told.crc32:
        yield Fault(
            path.name, f"has checksum {checksum} instead of {told.crc32}", names
        )
    if problem:
        yield Fault(path.name, problem, names)
        return
    expected = {}
    for tensor, count in counts.items():
        for kind in held.kinds_of(tensor):
            expected[f"{kind}/{tensor}"] = count
    yield from _header_faults(path.name, header, expected)
    if odd:
        said = "holds numbers that are not finite, or negative squares"
        yield Fault(path.name, said, tuple(odd), numbers=True)


def _header_faults(
    name: str, header: Mapping[str, files.StoredTensor], expected: Mapping[str, int]
) -> Iterator[Fault]:
    """Yield what a file's header says otherwise than the manifest; `expected`: elements of each tensor."""
    missing = tuple(key for key in expected if key not in header)
    if missing:
        yield Fault(
            name,
            f"lacks {some(missing, manifest.SHOWN)}, which the manifest says it holds",
        )
    more = tuple(key for key in header if key not in expected)
    if more:
        yield Fault(
            name,
            f"holds {some(more, manifest.SHOWN)}, of which the manifest says nothing",
        )
    for key, tensor in header.items():
        right = (expected.get(key),)
        if key in expected and (tensor.shape != right or tensor.dtype not in DTYPES):
            has = f"{list(tensor.shape)} of {tensor.dtype}"
            yield Fault(
                name, f"holds {key} as {has} instead of {list(right)} of a float type"
            )


def _read_through(
    file: BinaryIO, size: int, header: dict[str, files.StoredTensor], seen: Seen
) -> tuple[str, list[str]]:
    """Return the checksum of a file, and its keys with numbers that are not finite."""
    tensors = sorted(header.items(), key=lambda item: item[1].start)
    begin = size - sum(tensor.end - tensor.start for _, tensor in tensors)
    spans = [("", None, begin)] + [
        (key, DTYPES.get(t.dtype), t.end - t.start) for key, t in tensors
    ]
    checksum = 0
    odd = dict[str, None]()
    bucket = memoryview(bytearray(min(BUCKET, size)))
    for key, dtype, left in spans:
        while left:
            part = bucket[: min(left, BUCKET)]
            count = file.readinto(part)  # type: ignore[attr-defined]
            if count < len(part):
                raise OSError(0, "it became shorter meanwhile")
            checksum = zlib.crc32(part, checksum)
            left = left - count
            if dtype is not None and not _possible(
                torch.frombuffer(part, dtype=dtype), key
            ):
                odd[key] = None
            seen(count)
    return f"{checksum:08x}", list(odd)


def _possible(numbers: torch.Tensor, key: str) -> bool:
    """Check for NaN, infinity and negative squares, in an eighth of the time of `isfinite`."""
    least, most = torch.aminmax(numbers)
    return bool(
        least.isfinite()
        and most.isfinite()
        and (least >= 0 or not key.startswith(MOMENTS[1]))
    )
