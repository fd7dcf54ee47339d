"""A micro-batch (`recipes.micro_batch`) from the loader's form to what plain and pipeline engines take."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import rank_rows
from ds_configs.plan import Plan
from modeling.cost.families import SENTENCE_CLASSES, TOKEN_TYPES
from modeling.hidden_dropout import salts_of
from modeling.parallel.process_grid import ProcessGrid
from modeling.unpadding import ROW_MULTIPLE, filled, rounded_up, row_of
from recipes.micro_batch import MicroBatchFields, fields_of

MicroBatch = dict[str, Tensor]
Device = torch.device | str

LENGTH_MULTIPLE = 8  # trimmed samples stay a multiple of this, which matrix units want
PREDICTIONS_MULTIPLE = 16  # as do the predictions of a row


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


def for_plain(
    batch: MicroBatch, device: Device, salts: Tensor | None = None, position_ranks: int = 1
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Positional and named arguments of the plain model, on `device`; salts (B, S, 2) of hidden dropout.

    `position_ranks`: among which the positions of a sample are shared out.

    Nothing is computed for padding: the samples of a padded micro-batch become one row without it. Where that
    saves nothing, they are cut after the longest, and lengths are None, so that attention needs no mask,
    where they are equally long. On a CPU a row is faster even then.
    """
    fields = fields_of(batch)
    values: dict[str, Any] = {**batch, "salts": salts}
    dynamic: list[str] = []
    if fields.padded:
        lengths, positions = batch["lengths"], batch["tokens"].shape[1]
        kept = min(positions, rounded_up(int(lengths.max()), math.lcm(LENGTH_MULTIPLE, position_ranks)))
        row, whole = rounded_up(int(lengths.sum()), ROW_MULTIPLE), kept * lengths.numel()
        saves = row < whole or (row == whole and torch.device(device).type == "cpu")
        if saves and position_ranks == 1:
            values = _unpadded(batch, salts)
            dynamic = [name for name, size in fields.sizes.items() if size in ("BS", "BP")] + ["salts"]
        else:
            cut = (*(name for name, size in fields.inputs.items() if size == "BS"), "salts")
            values |= {name: values[name][:, :kept] for name in cut if values[name] is not None}
            values["lengths"] = None if bool((lengths == kept).all()) else lengths
    moved = {name: None if v is None else v.to(device, non_blocking=True) for name, v in values.items()}
    if "torch._dynamo" in sys.modules:  # one graph for rows of every length, should anything be compiled
        rows = [*(moved[name] for name in dynamic), *([moved["lengths"].places] if dynamic else [])]
        for x in rows:
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 1)
    named = {} if salts is None else {"salts": moved["salts"]}
    return tuple(moved[name] for name in fields.names), named


def _unpadded(batch: MicroBatch, salts: Tensor | None) -> dict[str, Any]:
    """The samples as one row, their predictions as one row, and the salts of that row."""
    fields = fields_of(batch)
    indices, row = row_of(batch["lengths"], batch["tokens"].shape[1])
    within = {**batch, "positions": batch["positions"] + row.firsts[:, None]}
    # Weights on a GPU are not waited for: with them, predictions that do not count stay.
    on_host = batch["weights"].device.type == "cpu"
    chosen = batch["weights"].flatten() > 0 if on_host else slice(None)
    values: dict[str, Any] = {**batch, "lengths": row}
    for name, size in fields.sizes.items():
        if size == "BS":
            values[name] = batch[name].flatten()[indices][None]
        elif size == "BP":
            values[name] = filled(within[name].flatten()[chosen], PREDICTIONS_MULTIPLE)[None]
    if salts is None:
        return {**values, "salts": None}
    return {**values, "salts": salts.flatten(0, 1)[indices.to(salts.device, non_blocking=True)][None]}


def for_pipeline(
    batch: MicroBatch, salts: Tensor | None = None, device: Device | None = None
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(inputs of the first stage, targets of the last), of full length, as stages exchange one shape.

    On `device` beforehand, from pinned memory: DeepSpeed copies what is elsewhere through memory that is not.
    """
    fields = fields_of(batch)
    if device is not None:
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    inputs = (*(batch[name] for name in fields.inputs), *(() if salts is None else (salts,)))
    return inputs if len(inputs) > 1 else inputs[0], tuple(batch[name] for name in fields.targets)


def random_batch(
    fields: MicroBatchFields, samples: int, length: int, predictions: int, vocabulary: int, device: Device
) -> tuple[Tensor | None, ...]:
    """Arguments of the plain model without padding, for timing; each sample predicts `predictions` tokens."""
    sizes = {"B": samples, "S": length, "P": predictions}
    below = {"token_types": TOKEN_TYPES, "positions": length, "sentence_labels": SENTENCE_CLASSES}
    values: dict[str, Tensor | None] = {"lengths": None}
    for name, dimensions in fields.sizes.items():
        size = [sizes[dimension] for dimension in dimensions]
        if name.endswith("weights"):
            weights = torch.ones(size, device=device)
            values[name] = weights / weights.numel()
        elif name != "lengths":
            values[name] = torch.randint(below.get(name, vocabulary), size, device=device)
    return tuple(values[name] for name in fields.names)
