"""The proof that an engine holds the state of a checkpoint, before its first step, in any layout.

What is compared is read back from the engine: the sums of each tensor of weights and moments (`sums`), what
the engine has counted, and the loss of the sample that the checkpoint knows the loss of. Each copy of a
tensor is compared: those of tensor-parallel ranks, of tied stages, of every data-parallel rank under stage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import MicroBatch
from launch.checkpoints.engine_state import EngineState, Partition, is_cut
from launch.checkpoints.manifest import Kind, Manifest, Progress, Sums
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.stored import Placement, StoredTensors
from launch.checkpoints.sums import sums_of
from launch.deepspeed_fixes.short_steps import Fragment
from launch.ranks.processes import from_rank_0, merged
from modeling.initialization import DTYPES, canonical_name, shard_of
from recipes.files import FileError
from recipes.key_paths import flatten
from recipes.problems import Problem, counted, some
from recipes.schema import Recipe

# Nats per token between layouts; of fp32 as in `compare_layouts.py`. Of two precisions the larger one.
LOSS = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
EXACT = 2.0**-45  # of float64 sums: 256 times its rounding
DEVIATIONS = 6.0  # of a sum of rounding errors with random factors
SHOWN = 4  # tensors and pieces
FIX = "resume under the layout that saved it, or from an older checkpoint: move this one away"


@dataclass(frozen=True)
class Difference:
    """A tensor of an engine whose sums are not the checkpoint's.

    Attributes:
        ranks: those that hold it, whole or a part of it.
        pieces: of them, those that differ from the checkpoint's files, in words; []: none does.
    """

    kind: Kind
    name: str
    saved: Sums
    found: Sums
    ranks: tuple[int, ...]
    pieces: tuple[str, ...] = ()

    def joined(self, other: Difference) -> Difference:
        """Join the same tensor on other ranks."""
        pieces = tuple(dict.fromkeys((*self.pieces, *other.pieces)))
        return replace(self, ranks=(*self.ranks, *other.ranks), pieces=pieces)

    def said(self) -> str:
        """Say what differs, and where."""
        saved = ", ".join(f"{value:.9g}" for value in self.saved)
        found = ", ".join(f"{value:.9g}" for value in self.found)
        ranks = some([str(rank) for rank in self.ranks], SHOWN)
        pieces = some(self.pieces, SHOWN) or "each piece is as the files are read"
        return (
            f"{self.kind} of {self.name} has sums {found}, and {saved} were saved (on rank {ranks}: {pieces})"
        )


@dataclass(frozen=True)
class Report:
    """What ranks found: the names of their tensors, differing ones, and other problems in words."""

    names: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    counts: tuple[str, ...] = ()

    def joined(self, other: Report) -> Report:
        """Join the report of later ranks."""
        names = tuple(dict.fromkeys((*self.names, *other.names)))
        found = {(each.kind, each.name): each for each in self.differences}
        for each in other.differences:
            key = each.kind, each.name
            found[key] = found[key].joined(each) if key in found else each
        return Report(names, tuple(found.values()), (*self.counts, *other.counts))


@dataclass(frozen=True)
class Sample:
    """A sample of held-out text, and how this run computes its loss.

    `batch`: the sample as a micro-batch of one row; `loss`: of such a micro-batch, in nats. Collective.
    """

    recipe: Recipe
    precision: str
    batch: MicroBatch
    loss: Callable[[MicroBatch], float]


@torch.no_grad()
def check(
    state: EngineState, checkpoint: Checkpoint, sample: Sample, say: Callable[[str], None], *, weights: bool
) -> None:
    """Compare the engine with a checkpoint that was read into it. Collective.

    `weights`: its weights alone were taken, and rounded to the run's precision (`--init_from`). Raises
    FileError on all ranks with each tensor, its ranks and pieces that differ.
    """
    held = checkpoint.manifest
    if held.known_loss is None and not any(tensor.sums for tensor in held.tensors.values()):
        say(f"{checkpoint.directory} holds no sums and no loss: what was read of it is not proven")
        return
    kinds = held.kinds[:1] if weights else held.kinds
    dtype = DTYPES[sample.precision] if weights else torch.float32
    group = state.grid.control_group
    # In the order of the module, which data- and tensor-parallel ranks share.
    parameters = {canonical_name(each): each for each in state.engine.module.parameters()}
    found = list(_differences(state, parameters, held, kinds, dtype))
    counts = [] if weights else list(_other_counts(state, held.progress))
    stored = StoredTensors(checkpoint.directory, held)
    found = [replace(each, pieces=tuple(_differing(state, stored, each, dtype))) for each in found]
    own = Report(tuple(parameters), tuple(found), tuple(counts))
    told = from_rank_0(merged(own, Report.joined, group, Report), group, Report)
    came = [each.said() for each in told.differences[:SHOWN]]
    more = [f"{each.kind} of {each.name}" for each in told.differences[SHOWN:]]
    if more:
        came.append(f"so have {counted(len(more), 'more tensor')}: {some(more, SHOWN)}")
    came += told.counts
    missing = [] if weights else [name for name in held.tensors if name not in told.names]
    if missing:
        came.append(f"no rank holds {some(missing, SHOWN)}")
    came += _other_loss(held, sample)
    if came:
        where = str(checkpoint.directory)
        rule = "the engine has to hold what was saved"
        problems = [Problem(where, each, where=where) for each in came]
        raise FileError([*problems[:-1], replace(problems[-1], rule=rule, fix=FIX)])


def _differences(
    state: EngineState,
    parameters: dict[str, torch.nn.Parameter],
    held: Manifest,
    kinds: tuple[Kind, ...],
    dtype: torch.dtype,
) -> Iterator[Difference]:
    """Yield this rank's parameters whose copy has other sums than the checkpoint.

    `dtype`: to which the numbers were rounded when they were read. Collective.
    """
    rows = {key: number for number, key in enumerate((kind, name) for kind in kinds for name in parameters)}
    table = torch.zeros(len(rows), 3, dtype=torch.float64, device=state.engine.device)  # with squares
    types = {kind: coarsest(dtype, *(state.dtype(each, kind) for each in state.partitions)) for kind in kinds}
    for partition in state.partitions:
        for fragment in partition.fragments:
            parameter = fragment.parameter
            for kind in kinds:
                numbers = _numbers(state, partition, fragment, kind)
                if numbers is None:
                    continue
                row = rows[kind, canonical_name(parameter)]
                table[row, :2] += sums_of(numbers, parameter, fragment.first).to(table.device)
                table[row, 2] += torch.linalg.vector_norm(numbers, dtype=torch.float64).square()
    state.close()
    grid = state.grid
    if not state.shared and grid.dp > 1:
        dist.all_reduce(table, group=grid.data_group)
    if grid.tp > 1:
        joined = table.clone()
        dist.all_reduce(joined, group=grid.tensor_group)
        cut = [is_cut(parameters[name]) for _, name in rows]
        table[cut] = joined[cut]
    for key, row in zip(rows, table.tolist(), strict=True):
        kind, name = key
        stored = held.tensors.get(name)
        elements = math.prod(Placement.of(parameters[name]).shape)
        if stored is None or kind not in stored.sums or elements != math.prod(stored.shape):
            continue  # of another model's size, which `--init_from` cuts or fills up
        plain, weighted, squares = row
        saved = stored.sums[kind]
        most = _tolerances(squares, elements, types[kind])
        errors = abs(plain - saved[0]), abs(weighted - saved[1])
        if not (errors[0] <= most[0] and errors[1] <= most[1]):
            yield Difference(kind, name, saved, (plain, weighted), (dist.get_rank(),))


def coarsest(*types: torch.dtype) -> torch.dtype:
    """Return the type with the fewest digits."""
    return max(types, key=lambda each: torch.finfo(each).eps)


def _numbers(state: EngineState, partition: Partition, fragment: Fragment, kind: str) -> Tensor | None:
    """Read numbers of the engine; None: it has no moments."""
    try:
        return state.read(partition, fragment, kind)
    except KeyError:
        return None


def _tolerances(squares: float, elements: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest differences of both sums of numbers that are rounded to `dtype`.

    The same numbers differ by float64's rounding in the order of the additions. Errors of rounding to fewer
    bits may all have one sign; times random factors, they add up as their squares.
    """
    norm = squares**0.5
    root = elements**0.5
    exact = EXACT * root * norm
    if dtype == torch.float32:
        return exact, exact
    about = torch.finfo(dtype)
    error = about.eps / 2 * norm + about.smallest_normal * about.eps / 2 * root
    return exact + root * error, exact + DEVIATIONS * error


def _other_counts(state: EngineState, saved: Progress) -> Iterator[str]:
    """Yield, in words, what this rank's engine counts otherwise than the checkpoint."""
    found = state.progress()
    scaled = found.loss_scaler is not None and saved.loss_scaler is not None  # else the JSON begins afresh
    if not scaled:
        found = replace(found, loss_scaler=None)
        saved = replace(saved, loss_scaler=None)
    rank = dist.get_rank()
    here = dict(flatten(asdict(found)))
    for name, value in flatten(asdict(saved)):
        if here[name] != value:
            yield f"rank {rank}: {name} is {here[name]}, and {value} was saved"
    odd = state.adam_step_counts - {saved.adam_steps}
    if odd and saved.adam_steps and found.adam_steps == saved.adam_steps:
        updates = some([str(count) for count in sorted(odd)])
        yield f"rank {rank}: Adam corrects its bias for {updates} updates, and {saved.adam_steps} were made"


def _other_loss(held: Manifest, sample: Sample) -> Iterator[str]:
    """Yield a loss that is not the known one, in words. Collective."""
    known = held.known_loss
    saved, here = (
        each.model.model_dump(exclude={"implementation"})
        for each in (Recipe.model_validate(held.recipe), sample.recipe)
    )
    if known is None or saved != here or known.batch.keys() != sample.batch.keys():
        return
    batch = {name: torch.tensor(known.batch[name], dtype=like.dtype) for name, like in sample.batch.items()}
    if any(batch[name].shape != like.shape for name, like in sample.batch.items()):
        return
    loss = sample.loss(batch)
    most = max(LOSS[known.precision], LOSS[sample.precision])
    if not abs(loss - known.loss) <= most:
        yield f"the loss of its sample is {loss:.7g}, and {known.loss:.7g} was saved (within {most:g})"


def _differing(
    state: EngineState, stored: StoredTensors, difference: Difference, dtype: torch.dtype
) -> Iterator[str]:
    """Yield this rank's pieces of a tensor that differ from the files, in words.

    `dtype`: to which the numbers were rounded when they were read.
    """
    kind = difference.kind
    full = stored.canonical(difference.name, kind)
    for partition in state.partitions:
        for parameter, first, _, elements in partition.fragments:
            if canonical_name(parameter) != difference.name:
                continue
            place = Placement.of(parameter)
            shard = shard_of(parameter)
            theirs = full if place.form == "canonical" else shard.form.to_theirs(full, shard.heads)[0]
            part = place.slice_of(theirs).reshape(-1)[first : first + elements].to(dtype)
            fragment = next(each for each in partition.fragments if each.parameter is parameter)
            numbers = _numbers(state, partition, fragment, kind)
            count = elements if numbers is None else int((numbers.cpu() != part.to(numbers.dtype)).sum())
            if count:
                rank = dist.get_rank()
                yield f"rank {rank}, {count:,} of elements {first} to {first + elements - 1} of its slice"
    state.close()
