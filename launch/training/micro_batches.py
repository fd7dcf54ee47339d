"""Conversion of a micro-batch (`recipes.families`) into the arguments of plain and pipeline engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import MicroBatch, rank_rows
from ds_configs.plan import Plan
from modeling.hidden_dropout import salts_of
from modeling.parallel.process_grid import ProcessGrid
from recipes.families import PLACES, fields_of

Device = torch.device | str


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


def salts_of_step(
    plan: Plan, dp_rank: int, step: int, device: Device
) -> Sequence[Tensor | None]:
    """Return salts (B, S, 2) of hidden dropout, or None, for each micro-batch of the step after `step`."""
    recipe = plan.recipe
    rows = rank_rows(plan.layout, dp_rank, recipe.sizes.size(step))
    if not recipe.dropout.hidden:
        return [None] * len(rows)
    # Made on the device, for a copy would wait for it: a rank's rows follow each other.
    first = int(rows.flat[0])
    samples = torch.arange(first, first + rows.size, device=device).view(rows.shape)
    if recipe.model.task_head == "choice":  # a sample of the model is one choice
        choices = torch.arange(recipe.model.head_classes, device=device)
        samples = (samples[..., None] * recipe.model.head_classes + choices).flatten(1)
    return list(salts_of(recipe.seed, step, samples, recipe.sequence_length))


def for_plain(
    batch: MicroBatch,
    device: Device,
    salts: Tensor | None = None,
    position_ranks: int = 1,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the plain model on `device`; `salts`: of hidden dropout.

    Nothing is computed for padding: the samples of a padded micro-batch become one row without it. Where a
    row saves nothing, the samples stay as in `padded_arguments`, except on a CPU, which is faster with rows.

    `position_ranks`: number of ranks that share the positions of a sample.
    """
    if fields_of(batch).padded:
        from launch.training.padded_batches import as_row

        row = as_row(batch, device, salts, position_ranks)
        if row is not None:
            return row
    given = padded_arguments(batch, device, position_ranks)
    assert given[0] is not None
    named: Any = {} if salts is None else {"salts": salts[:, : given[0].shape[1]]}
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
    batch: MicroBatch, salts: Tensor | None, device: Device
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (inputs of the first stage, targets of the last) of full length: stages exchange one shape.

    Copied to `device` from pinned memory: DeepSpeed would copy through memory that is not pinned.
    """
    fields = fields_of(batch)
    batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    inputs = (
        *(batch[name] for name in (*fields.inputs, PLACES) if name in batch),
        *(() if salts is None else (salts,)),
    )
    return inputs if len(inputs) > 1 else inputs[0], tuple(
        batch[name] for name in fields.targets
    )
