"""The proof that an engine holds the state of a checkpoint, before its first step, in any layout.

What is compared is read back from the engine: the sums of each tensor of weights and moments (`sums`), what
the engine has counted, and the loss of the sample that the checkpoint knows the loss of. Each copy of a
tensor is compared: those of tensor-parallel ranks, of tied stages, of every data-parallel rank under stage 0,
and the model's weights with the master weights. Of the next step, its batch and its dropout are compared.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import MicroBatch
from launch.checkpoints.engine_state import EngineState, Partition, is_cut
from launch.checkpoints.manifest import Manifest, Progress, Sums
from launch.checkpoints.names import Kind
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.stored import StoredTensors, TensorPlacement
from launch.checkpoints.sums import sums_of
from launch.deepspeed_fixes.short_steps import Fragment
from launch.ranks.processes import from_rank_0, merged
from modeling.initialization import DTYPES, canonical_name
from recipes.files import FileError
from recipes.key_paths import NEXT_STEP, changes, flatten
from recipes.problems import Problem, counted, some
from recipes.schema import Recipe

# Between layouts, in nats per token. Of two precisions the larger one.
LOSS = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
EXACT = 2.0**-45  # of float64 sums: 256 times its rounding
DEVIATIONS = 6.0  # of a sum of rounding errors with random factors
LEAST_NORM = 1e-15  # of which float32 holds all squares that count
SHOWN = 4  # tensors and pieces
RULE = "a run goes on with what was saved"
FIX = "take the layout that saved it, or an older checkpoint (--resume does once this one is moved away)"


class ProofDifference(NamedTuple):
    """A tensor of which a rank's engine has other sums than the checkpoint, or a part of a tensor that has.

    `pieces`: of this rank, those that differ from the checkpoint's files, in words.
    """

    kind: Kind
    name: str
    saved: Sums
    found: Sums
    pieces: list[str]


class Piece(NamedTuple):
    """Numbers of one kind of a fragment, flat."""

    kind: Kind
    numbers: Tensor
    fragment: Fragment


class ProofReport(NamedTuple):
    """The differences of one rank, and its engine's other counts in words."""

    differences: list[ProofDifference]
    counts: list[str]


@dataclass(frozen=True)
class ProofSample:
    """A sample of held-out text, how this run computes its loss, and what it trains on next.

    `batch`: the sample as a micro-batch of one row; `loss`: of such a micro-batch, in nats. `next_step`: None
    where it cannot be read. Both are collective.
    """

    recipe: Recipe
    precision: str
    batch: MicroBatch
    loss: Callable[[MicroBatch], float]
    next_step: Callable[[], int | None]


@torch.no_grad()
def check(
    state: EngineState,
    checkpoint: Checkpoint,
    sample: ProofSample,
    say: Callable[[str], None],
    *,
    weights: bool,
) -> None:
    """Compare the engine with a checkpoint that was read into it. Collective.

    `weights`: its weights alone were taken, and rounded to the run's precision (`--init_from`). Raises
    FileError on all ranks with each tensor, its ranks and pieces that differ.
    """
    held = checkpoint.manifest
    where = str(checkpoint.directory)
    summed = any(tensor.sums for tensor in held.tensors.values())
    if not summed and held.known_loss is None:
        say(f"{where} holds no sums and no loss: what was read of it is not proven")
        return
    kinds = held.kinds[:1] if weights else held.kinds
    dtype = DTYPES[sample.precision] if weights else torch.float32
    stored = StoredTensors(checkpoint.directory, held)
    differences = [*_differences(state, stored, kinds, dtype)]
    counts = list[str]()
    if not weights:
        counts += _other_counts(state, held.progress)
        counts += _other_step(held, sample)
        if held.next_step is None:
            say(f"{where} holds no sum of the next step: its data are not proven")
    stale = [*state.stale_weights()]
    if stale:
        which = some(stale, SHOWN)
        counts.append(f"the model's weights are not its master weights in {which}")
    group = state.grid.control_group
    own = [ProofReport(differences, counts)]
    reports = merged(own, operator.add, group, list[ProofReport])
    # only rank 0 has the reports of all
    came = [*from_rank_0([*_said(reports)], group), *_other_loss(held, sample)]
    if came:
        problems = [Problem(where, each, where=where) for each in came]
        problems[-1] = replace(problems[-1], rule=RULE, fix=FIX)
        raise FileError(problems)


def _said(reports: Sequence[ProofReport]) -> Iterator[str]:
    """Say what all ranks, in rank order, found."""
    by_tensor: dict[str, dict[int, ProofDifference]] = {}
    for rank, report in enumerate(reports):
        for each in report.differences:
            tensor = f"{each.kind} of {each.name}"
            by_tensor.setdefault(tensor, {})[rank] = each
    for tensor in [*by_tensor][:SHOWN]:
        yield f"{tensor} has {_sums_said(by_tensor[tensor])}"
    others = [*by_tensor][SHOWN:]
    if others:
        yield f"so have {counted(len(others), 'more tensor')}: {some(others, SHOWN)}"
    for rank, report in enumerate(reports):
        for count in report.counts:
            yield f"rank {rank}: {count}"


def _sums_said(by_rank: Mapping[int, ProofDifference]) -> str:
    """Say the sums of a tensor, of the first rank that found it, and where all ranks found it."""
    pieces = []
    for rank, difference in by_rank.items():
        for piece in difference.pieces:
            pieces.append(f"rank {rank}: {piece}")
    which = some(pieces, SHOWN)
    if not pieces:
        ranks = some([str(rank) for rank in by_rank], SHOWN)
        which = f"rank {ranks}: each piece is as in the files"
    first = next(iter(by_rank.values()))
    found = ", ".join(f"{value:.9g}" for value in first.found)
    saved = ", ".join(f"{value:.9g}" for value in first.saved)
    return f"sums {found}, and {saved} were saved ({which})"


def _differences(
    state: EngineState, files: StoredTensors, kinds: Sequence[Kind], dtype: torch.dtype
) -> Iterator[ProofDifference]:
    """Yield this rank's tensors whose copy has other sums than the checkpoint.

    `dtype`: to which the numbers were rounded when they were read. Collective.
    """
    # In the order of the module, which data- and tensor-parallel ranks share.
    parameters = {
        canonical_name(each): each for each in state.engine.module.parameters()
    }
    rows = {key: row for row, key in enumerate(product(kinds, parameters))}
    # with squares
    table = torch.zeros(len(rows), 3, dtype=torch.float64, device=state.engine.device)
    types = {}
    for kind in kinds:
        held_as = [state.dtype(each, kind) for each in state.partitions]
        # that with the fewest digits
        types[kind] = max(dtype, *held_as, key=lambda each: torch.finfo(each).eps)
    with host_threads() as pool:
        for partition in state.partitions:
            pieces = list(_pieces(state, partition, kinds))
            on_host = all(numbers.device.type == "cpu" for _, numbers, _ in pieces)
            added = (pool.map if on_host else map)(_three_sums, pieces)
            for (kind, _, fragment), sums in zip(pieces, added, strict=True):
                row = rows[kind, canonical_name(fragment.parameter)]
                table[row] += sums.to(table.device)
    state.close()
    grid = state.grid
    if not state.shared and grid.dp > 1:
        dist.all_reduce(table, group=grid.data_group)
    if grid.tp > 1:
        joined = table.clone()
        dist.all_reduce(joined, group=grid.tensor_group)
        cut = [is_cut(parameters[name]) for _, name in rows]
        table[cut] = joined[cut]
    for (kind, name), row in zip(rows, table.tolist(), strict=True):
        stored = files.manifest.tensors.get(name)
        elements = math.prod(TensorPlacement.of(parameters[name]).shape)
        if stored is None or kind not in stored.sums:
            continue
        if elements != math.prod(stored.shape):
            continue  # of another model's size, which `--init_from` cuts or fills up
        *found, squares = row
        saved = stored.sums[kind]
        was = files.dtype(name, kind)
        most = _tolerances(squares, elements, was, types[kind])
        errors = map(abs, map(operator.sub, found, saved))
        if not all(map(operator.le, errors, most)):  # of NaN, too
            odd = [*_differing_pieces(state, files, kind, name, dtype)]
            yield ProofDifference(kind, name, saved, (found[0], found[1]), odd)


@contextlib.contextmanager
def host_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of as many threads as torch has; torch computes on one in each of them, and in this one.

    Its own threads wait for each other after every short operation: on busy cores for 16 times as long as
    they compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _pieces(
    state: EngineState, partition: Partition, kinds: Sequence[Kind]
) -> Iterator[Piece]:
    """Yield this rank's numbers of a partition; valid until the next one is opened."""
    for fragment in partition.fragments:
        for kind in kinds:
            numbers = _numbers(state, partition, fragment, kind)
            if numbers is not None:
                yield Piece(kind, numbers, fragment)


def _three_sums(piece: Piece) -> Tensor:
    """Return both sums and that of the squares (3,) in float64."""
    numbers = piece.numbers
    sums = sums_of(numbers, piece.fragment.parameter, piece.fragment.first)
    return torch.cat([sums, squares_of(numbers).view(1)])


def squares_of(numbers: Tensor) -> Tensor:
    """Return the sum of the squares in float64; added up in float32 where that can hold them."""
    norm: Tensor = torch.linalg.vector_norm(numbers, dtype=torch.float32)
    if not LEAST_NORM < norm < 1 / LEAST_NORM:
        norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    return norm.double().square()


def _numbers(
    state: EngineState, partition: Partition, fragment: Fragment, kind: str
) -> Tensor | None:
    """Read numbers of the engine; None: it has no moments."""
    try:
        return state.read(partition, fragment, kind)
    except KeyError:
        return None


def _tolerances(
    squares: float, elements: int, was: torch.dtype, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the largest differences of both sums of numbers of type `was` that are rounded to `dtype`.

    The same numbers differ by float64's rounding in the order of the additions. Errors of rounding to fewer
    bits may all have one sign; times random factors, they add up as their squares.
    """
    norm = squares**0.5
    root = elements**0.5
    exact = EXACT * root * norm
    if torch.promote_types(was, dtype) == dtype:
        return exact, exact
    about = torch.finfo(dtype)
    error = about.eps / 2 * norm + about.smallest_normal * about.eps / 2 * root
    return exact + root * error, exact + DEVIATIONS * error


def _other_counts(state: EngineState, saved: Progress) -> Iterator[str]:
    """Yield, in words, what this rank's engine counts otherwise than the checkpoint."""
    found = state.progress()
    # else the JSON begins afresh
    if None in (found.loss_scaler, saved.loss_scaler):
        found = replace(found, loss_scaler=None)
        saved = replace(saved, loss_scaler=None)
    here = dict(flatten(asdict(found)))
    for name, value in flatten(asdict(saved)):
        if here[name] != value:
            yield f"{name} is {here[name]}, and {value} was saved"
    odd = state.adam_step_counts - {saved.adam_steps}
    if odd and saved.adam_steps and found.adam_steps == saved.adam_steps:
        updates = some([str(count) for count in sorted(odd)])
        yield f"Adam corrects its bias for {updates} updates, and {saved.adam_steps} were made"


def _other_step(held: Manifest, sample: ProofSample) -> Iterator[str]:
    """Yield, in words, what the next step trains on otherwise than the step after the save. Collective."""
    saved = held.next_step
    then = Recipe.model_validate(held.recipe)
    if saved is None or changes(then, sample.recipe, NEXT_STEP):
        return
    if sample.next_step() not in (saved, None):
        yield "the next step has other samples or other dropout than the step after the save"


def _other_loss(held: Manifest, sample: ProofSample) -> Iterator[str]:
    """Yield a loss that is not the known one, in words. Collective."""
    known = held.known_loss
    if known is None or known.batch.keys() != sample.batch.keys():
        return
    saved = Recipe.model_validate(held.recipe)
    if _what_decides_loss(saved) != _what_decides_loss(sample.recipe):
        return
    batch = {}
    for name, like in sample.batch.items():
        batch[name] = torch.tensor(known.batch[name], dtype=like.dtype)
        if batch[name].shape != like.shape:
            return
    loss = sample.loss(batch)
    most = max(LOSS[known.precision], LOSS[sample.precision])
    if not abs(loss - known.loss) <= most:
        yield f"the loss of its sample is {loss:.7g}, and {known.loss:.7g} was saved (within {most:g})"


def _what_decides_loss(recipe: Recipe) -> tuple[object, ...]:
    """Return what decides the loss of given weights on a given batch."""
    model = recipe.model.model_dump(exclude={"implementation"})
    return model, recipe.data.attend, recipe.data.positions


def _differing_pieces(
    state: EngineState, stored: StoredTensors, kind: Kind, name: str, dtype: torch.dtype
) -> Iterator[str]:
    """Yield this rank's pieces of a tensor that differ from the files, in words.

    `dtype`: to which the numbers were rounded when they were read.
    """
    for partition in state.partitions:
        for fragment in partition.fragments:
            parameter, first, _, elements = fragment
            if canonical_name(parameter) != name:
                continue
            saved = torch.empty(elements, dtype=torch.float32)
            stored.fill(saved, TensorPlacement.of(parameter), first, kind)
            part = saved.to(dtype)
            numbers = _numbers(state, partition, fragment, kind)
            count = elements
            if numbers is not None:
                count = int((numbers.cpu() != part.to(numbers.dtype)).sum())
            if count:
                yield f"{count:,} of elements {first} to {first + elements - 1} of its slice"
    state.close()
