"""The micro-batches of a rank: made or received, weighted, and turned into arguments of the engines.

Of a stream, one rank of each model copy reads for all of it. `recipes.families` names a micro-batch's tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.bit_sums import batch_sum
from data.corpus import Corpus
from data.loader import (
    Made,
    MicroBatch,
    StepBatches,
    micro_batch,
    pin_batches,
    rank_rows,
    samples_sum,
)
from ds_configs.plan import Plan
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import processes
from launch.training.early_ends import BrokenData
from modeling.hidden_dropout import dropout_seeds_of
from modeling.parallel.process_grid import ProcessGrid
from recipes.families import PLACES, fields_of
from recipes.layout import model_groups

Device = torch.device | str


def training_batches(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None
) -> StepBatches:
    """Make this rank's training micro-batches, one step's per `next`, after the checkpoint. Collective."""
    recipe = plan.recipe
    pinned = processes.device().own_memory
    sizes = recipe.sizes_in_data
    how: dict[str, Any] = dict(
        samples=corpus.train,
        seed=recipe.seed,
        layout=plan.layout,
        dp_rank=grid.at.dp,
        workers=recipe.run.loader_workers,
        pinned=pinned,
        sizes=sizes,
    )
    if checkpoint:
        how["start_step"] = checkpoint.step
        # a branch with other data is at their beginning
        if sizes.samples(checkpoint.step):
            how["start_state"] = checkpoint.manifest.data
    if corpus.train.random_access:  # mapped tokens, in which nothing can be broken
        return StepBatches(**how)
    micro = plan.layout.micro
    form = micro_batch(corpus.validation.take([0] * micro), np.zeros(micro))
    return StreamBatches(grid, form, **how)


class StreamBatches(StepBatches):
    """Batches of a stream: one rank of each model copy reads and tokenizes for its whole copy.

    The loop fetches each step while the one before is computed, and the ranks tell each other of a failure in
    the message that ends a step: either all of them begin the next one, or none.
    """

    def __init__(
        self, grid: ProcessGrid, form: MicroBatch, *, workers: int, **how: Any
    ) -> None:
        """Start the batches of this rank, with `workers` threads if it reads. Collective.

        `form`: a micro-batch in the form of all; the others: as in `StepBatches`.
        """
        self._all_ranks = grid.control_group
        self._like = form
        self._copy, self._reader = _copy_group(grid)
        self._reads = grid.rank == self._reader
        super().__init__(workers=workers if self._reads else 0, **how)
        self._problem: str | None = None  # why the next step cannot be read
        self._packed = torch.empty(0, dtype=torch.uint8)
        self._arrival: dist.Work | None = None

    def fetch(self) -> str | None:
        """Read the next step, and begin to send it to this copy's ranks; return why that fails."""
        count = len(rank_rows(self._layout, 0, self._sizes.size(self.step)))
        problem = None
        self._made = ([self._like] * count, None, 0)
        try:
            if self._reads:
                self._made = self._take()
        except MemoryError:
            raise
        # of threads, tokenizers, file systems, networks: each has its own
        except Exception as error:
            known = isinstance(error, ValueError | OSError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
        # the others wait for something, also where there is nothing to read
        if self._copy is not None:
            self._packed = _packed(self._made[0])
            self._arrival = dist.broadcast(
                self._packed, self._reader, self._copy, async_op=True
            )
        self._problem = problem
        return problem

    def peek(self) -> Made:
        """Return the fetched step; fetch a launch's first one. Collective.

        Raises BrokenData if this rank cannot read the step, and for that first step on all ranks.
        """
        if self._made is None:
            try:
                end_together(self.fetch(), self._all_ranks)
            except BrokenData as error:
                self._problem = error.why
        if self._problem:
            raise BrokenData(self._problem)
        assert self._made is not None
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
            if not self._reads:
                received = _unpacked(self._packed, self._made[0])
                batches = pin_batches(received) if self._pinned else received
                self._made = (batches, None, int(batch_sum(received)))
        return self._made


def end_together(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raise BrokenData on all ranks if there is a `problem` on any, with all of them. Collective."""
    # ranks may share a lane
    problems = processes.texts_of_all([problem], group)
    if problems:
        raise BrokenData("\n".join(problems))


def _packed(batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Pack the bytes of a step's micro-batches into one tensor."""
    octets = []
    for batch in batches:
        for tensor in batch.values():
            octets.append(tensor.view(-1).view(torch.uint8))
    return torch.cat(octets)


def _unpacked(packed: torch.Tensor, like: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches of `_packed`, in the form of those that are `like` them."""
    unpacked = []
    at = 0
    for batch in like:
        found = {}
        for name, tensor in batch.items():
            part = packed[at : at + tensor.nbytes]
            # A copy, since a view of another type has to begin at a multiple of its size.
            found[name] = part.clone().view(tensor.dtype).view(tensor.shape)
            at += tensor.nbytes
        unpacked.append(found)
    return unpacked


def _copy_group(grid: ProcessGrid) -> tuple[dist.ProcessGroup | None, int]:
    """Return the group of ranks of this model copy, and its reading rank. Collective.

    The group is None if a copy is one rank.
    """
    groups = model_groups(grid.tp, grid.pp, grid.dp)
    own = next(ranks for ranks in groups if grid.rank in ranks)
    if len(own) == 1:
        return None, grid.rank
    if len(groups) == 1:
        return grid.control_group, own[0]
    # Among its members alone: under NCCL a rank that stays outside splits the whole world for each group.
    made = dist.new_group(own, grid.timeout, "gloo", use_local_synchronization=True)
    return made, own[0]


def move_unpadded(batches: Sequence[MicroBatch], device: Device) -> None:
    """Move micro-batches of full length to `device`, in place.

    The host still reads the lengths of others, and the places of tokens in their documents.
    """
    for batch in batches:
        if not fields_of(batch).padded:
            for name in batch.keys() - {PLACES}:
                batch[name] = batch[name].to(device, non_blocking=True)


def normalise(
    batches: Sequence[MicroBatch], grid: ProcessGrid, device: Device
) -> Sequence[MicroBatch]:
    """Weight the micro-batches of one step for the mean over the step's predicted tokens.

    The mean of their losses over micro-batches and ranks is then the mean per token. Collective over
    data-parallel ranks where samples predict different numbers of tokens; else the loader's weights are
    right.
    """
    if not fields_of(batches[0]).uneven:
        return batches
    sums = torch.stack([b["weights"].sum() for b in batches])
    # Filled in on the device: a copy of one number from memory that is not pinned would wait for it.
    predicted = torch.full((), sums.sum().item(), dtype=sums.dtype, device=device)
    if grid.dp > 1:
        dist.all_reduce(predicted, group=grid.data_group)
    scale = len(batches) * grid.dp / predicted
    return [
        {**b, "weights": b["weights"].to(device, non_blocking=True) * scale}
        for b in batches
    ]


def normalise_steps(
    steps: Sequence[Sequence[MicroBatch]], grid: ProcessGrid, device: Device
) -> list[Sequence[MicroBatch]]:
    """Weight the micro-batches of several steps for one mean, as in a validation."""
    flat = iter(normalise([b for batches in steps for b in batches], grid, device))
    return [[next(flat) for _ in batches] for batches in steps]


def dropout_seeds_of_step(
    plan: Plan, dp_rank: int, step: int, device: Device
) -> Sequence[Tensor | None]:
    """Return seeds (B, S, 2) of hidden dropout, or None, for each micro-batch of the step after `step`."""
    recipe = plan.recipe
    rows = rank_rows(plan.layout, dp_rank, recipe.sizes.size(step))
    if not recipe.dropout.hidden:
        return [None] * len(rows)
    # Made on the device, for a copy would wait for it: a rank's rows follow each other.
    first = int(rows.flat[0])
    samples = torch.arange(first, first + rows.size, device=device).view(rows.shape)
    return list(dropout_seeds_of(recipe.seed, step, samples, recipe.sequence_length))


def next_step(
    plan: Plan, batches: StepBatches, grid: ProcessGrid, step: int
) -> int | None:
    """Return a sum modulo 2**64 of the step after `step`, the same under every layout. Collective.

    It adds up the samples, each times a seed of hidden dropout: a function of place, seed and step, as all
    dropout is. None: a rank cannot read the step.
    """
    halves = torch.tensor([0, 0, 1])  # of the sum; then, whether it is missing
    with contextlib.suppress(Exception):  # the step itself will tell
        rows = rank_rows(plan.layout, grid.at.dp, plan.recipe.sizes.size(step))
        places = torch.from_numpy(rows)
        dropout_seeds = dropout_seeds_of(plan.recipe.seed, step, places, 1)
        own = samples_sum(batches.peek()[0], dropout_seeds[..., 0, 0].tolist())
        halves = torch.tensor([*divmod(own % 2**64, 2**32), 0])
    dist.all_reduce(halves, group=grid.control_group)
    high, low, missing = map(int, halves.tolist())
    if missing:
        return None
    # the ranks of a model copy have the same samples
    return (high * 2**32 + low) // (grid.tp * grid.pp) % 2**64


def for_plain(
    batch: MicroBatch,
    device: Device,
    dropout_seeds: Tensor | None = None,
    position_ranks: int = 1,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the plain model on `device`; `dropout_seeds`: of hidden dropout.

    Nothing is computed for padding: the samples of a padded micro-batch become one row without it. Where a
    row saves nothing, the samples stay as in `padded_arguments`, except on a CPU, which is faster with rows.

    `position_ranks`: number of ranks that share the positions of a sample.
    """
    if fields_of(batch).padded:
        from launch.training.padded_batches import as_row

        row = as_row(batch, device, dropout_seeds, position_ranks)
        if row is not None:
            return row
    given = padded_arguments(batch, device, position_ranks)
    assert given[0] is not None
    named: Any = {}
    if dropout_seeds is not None:
        positions = given[0].shape[1]
        named["dropout_seeds"] = dropout_seeds[:, :positions]
    if PLACES in batch:
        from modeling.documents import row_of_documents

        named[PLACES] = row_of_documents(batch[PLACES], device)
    return given, named


def padded_arguments(
    batch: MicroBatch, device: Device, position_ranks: int = 1
) -> tuple[Tensor | None, ...]:
    """Return arguments of a model that takes padded samples, on `device`.

    Samples are cut after the longest of the micro-batch. Lengths are None if no padding is left: attention
    then needs no mask.
    """
    fields = fields_of(batch)
    values: dict[str, Tensor | None] = {**batch}
    if fields.padded:
        from launch.training.padded_batches import cut_after_longest

        values |= cut_after_longest(batch, position_ranks)
    ordered = (values[name] for name in fields.names)
    return tuple(
        None if value is None else value.to(device, non_blocking=True)
        for value in ordered
    )


def for_pipeline(
    batch: MicroBatch, dropout_seeds: Tensor | None, device: Device
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (inputs of the first stage, targets of the last) of full length: stages exchange one shape.

    Copied to `device` from pinned memory: DeepSpeed would copy through memory that is not pinned.
    """
    fields = fields_of(batch)
    batch = {name: batch[name].to(device, non_blocking=True) for name in fields.names}
    inputs = [batch[name] for name in fields.inputs]
    if dropout_seeds is not None:
        inputs.append(dropout_seeds)
    targets = tuple(batch[name] for name in fields.targets)
    return tuple(inputs) if len(inputs) > 1 else inputs[0], targets


def rows_of_documents(batches: Iterable[MicroBatch], device: Device) -> Iterator[Any]:
    """Yield the `PackedRow`s of micro-batches with borders on `device`, for a pipeline's stage."""
    from modeling.documents import row_of_documents

    for batch in batches:
        yield row_of_documents(batch[PLACES], device)
