"""A micro-batch from the loader's form to what the plain engine and the pipeline engine take.

Names and shapes of its tensors: `recipes.micro_batch.FIELDS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from modeling.cost.families import SENTENCE_CLASSES, TOKEN_TYPES
from modeling.parallel.process_grid import ProcessGrid
from recipes.micro_batch import MicroBatchFields, fields_of

MicroBatch = dict[str, torch.Tensor]
Device = torch.device | str

LENGTH_MULTIPLE = 8  # trimmed samples stay a multiple of this, which matrix units want


def normalised(batches: Sequence[MicroBatch], grid: ProcessGrid, device: Device) -> Sequence[MicroBatch]:
    """The micro-batches of one step, weighted for the mean over the step's predicted tokens.

    The mean of their losses over micro-batches and ranks is that mean. Collective over the data-parallel
    ranks where samples predict different numbers of tokens; where they do not, the loader's weights are right
    already.
    """
    if not fields_of(batches[0]).uneven:
        return batches
    predicted = torch.stack([b["weights"].sum() for b in batches]).sum().to(device)
    if grid.dp > 1:
        dist.all_reduce(predicted, group=grid.data_group)
    scale = len(batches) * grid.dp / predicted
    return [{**b, "weights": b["weights"].to(device) * scale} for b in batches]


def normalised_steps(
    steps: Sequence[Sequence[MicroBatch]], grid: ProcessGrid, device: Device
) -> list[Sequence[MicroBatch]]:
    """The same over several steps taken together, as in a validation."""
    flat = iter(normalised([b for batches in steps for b in batches], grid, device))
    return [[next(flat) for _ in batches] for batches in steps]


def for_plain(batch: MicroBatch, device: Device) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the plain model, on `device`.

    Padded samples are cut after the longest of the micro-batch, and lengths are None where nothing is padded
    then: no work is wasted on columns of padding, and attention needs no mask.
    """
    fields = fields_of(batch)
    values: dict[str, torch.Tensor | None] = {**batch}
    if fields.padded:
        lengths, kept = batch["lengths"], trimmed_length(batch["lengths"], batch["tokens"].shape[1])
        values |= {
            name: batch[name][:, :kept] for name, dimensions in fields.inputs.items() if dimensions == "BS"
        }
        if bool((lengths == kept).all()):
            values["lengths"] = None
    ordered = (values[name] for name in fields.names)
    return tuple(None if value is None else value.to(device, non_blocking=True) for value in ordered)


def trimmed_length(lengths: torch.Tensor, positions: int) -> int:
    """Columns that hold every sample of the micro-batch, rounded up to LENGTH_MULTIPLE."""
    longest = int(lengths.max())
    return min(positions, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


def for_pipeline(
    batch: MicroBatch,
) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(inputs of the first stage, targets of the last), of full length.

    Stages exchange tensors of one shape.
    """
    fields = fields_of(batch)
    inputs = tuple(batch[name] for name in fields.inputs)
    return inputs if len(inputs) > 1 else inputs[0], tuple(batch[name] for name in fields.targets)


def random_batch(
    fields: MicroBatchFields, *, samples: int, length: int, predictions: int, vocabulary: int, device: Device
) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the plain model without padding, for timing.

    `predictions` of the `length` tokens of a sample are predicted.
    """
    sizes = {"B": samples, "S": length, "P": predictions}
    below = {"token_types": TOKEN_TYPES, "positions": length, "sentence_labels": SENTENCE_CLASSES}
    values: dict[str, torch.Tensor | None] = {"lengths": None}
    for name, dimensions in {**fields.inputs, **fields.targets}.items():
        size = [sizes[dimension] for dimension in dimensions]
        if name.endswith("weights"):
            weights = torch.ones(size, device=device)
            values[name] = weights / weights.numel()
        elif name != "lengths":
            values[name] = torch.randint(below.get(name, vocabulary), size, device=device)
    return tuple(values[name] for name in fields.names)
