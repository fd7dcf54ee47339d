"""A micro-batch (`recipes.micro_batch`) from the loader's form to what plain and pipeline engines take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import rank_rows
from ds_configs.plan import Plan
from modeling.cost.families import SENTENCE_CLASSES, TOKEN_TYPES
from modeling.hidden_dropout import salts_of
from modeling.parallel.process_grid import ProcessGrid
from recipes.micro_batch import MicroBatchFields, fields_of

MicroBatch = dict[str, Tensor]
Device = torch.device | str

LENGTH_MULTIPLE = 8  # trimmed samples stay a multiple of this, which matrix units want


def normalised(batches: Sequence[MicroBatch], grid: ProcessGrid, device: Device) -> Sequence[MicroBatch]:
    """The micro-batches of one step, weighted for the mean over the step's predicted tokens.

    The mean of their losses over micro-batches and ranks is that mean. Collective over data-parallel ranks
    where samples predict different numbers of tokens; elsewhere the loader's weights are right already.
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


def salts_of_step(plan: Plan, dp_rank: int, step: int, device: Device) -> Sequence[Tensor | None]:
    """Salts (B, S, 2) of hidden dropout for each micro-batch of the step after `step`; None without it."""
    recipe, layout = plan.recipe, plan.layout
    if not recipe.dropout.hidden:
        return [None] * layout.accumulation
    samples = torch.from_numpy(rank_rows(layout, dp_rank)).to(device)
    return list(salts_of(recipe.seed, step, samples, recipe.sequence_length))


def for_plain(batch: MicroBatch, device: Device, position_ranks: int = 1) -> tuple[Tensor | None, ...]:
    """Arguments of the plain model, on `device`; `position_ranks`: among which positions are shared out.

    Padded samples are cut after the longest of the micro-batch, and lengths are None where nothing is padded
    then: no work is wasted on columns of padding, and attention needs no mask.
    """
    fields = fields_of(batch)
    values: dict[str, Tensor | None] = {**batch}
    if fields.padded:
        lengths = batch["lengths"]
        multiple = math.lcm(LENGTH_MULTIPLE, position_ranks)
        kept = min(batch["tokens"].shape[1], -(-int(lengths.max()) // multiple) * multiple)
        values |= {name: batch[name][:, :kept] for name, size in fields.inputs.items() if size == "BS"}
        if bool((lengths == kept).all()):
            values["lengths"] = None
    ordered = (values[name] for name in fields.names)
    return tuple(None if value is None else value.to(device, non_blocking=True) for value in ordered)


def for_pipeline(
    batch: MicroBatch, salts: Tensor | None = None
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(inputs of the first stage, targets of the last), of full length, as stages exchange one shape."""
    fields = fields_of(batch)
    inputs = (*(batch[name] for name in fields.inputs), *(() if salts is None else (salts,)))
    return inputs if len(inputs) > 1 else inputs[0], tuple(batch[name] for name in fields.targets)


def random_batch(
    fields: MicroBatchFields, samples: int, length: int, predictions: int, vocabulary: int, device: Device
) -> tuple[Tensor | None, ...]:
    """Arguments of the plain model without padding, for timing; each sample predicts `predictions` tokens."""
    sizes = {"B": samples, "S": length, "P": predictions}
    below = {"token_types": TOKEN_TYPES, "positions": length, "sentence_labels": SENTENCE_CLASSES}
    values: dict[str, Tensor | None] = {"lengths": None}
    for name, dimensions in {**fields.inputs, **fields.targets}.items():
        size = [sizes[dimension] for dimension in dimensions]
        if name.endswith("weights"):
            weights = torch.ones(size, device=device)
            values[name] = weights / weights.numel()
        elif name != "lengths":
            values[name] = torch.randint(below.get(name, vocabulary), size, device=device)
    return tuple(values[name] for name in fields.names)
