"""Micro-batches with padding as arguments of a plain model: cut after the longest sample, or as one row."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from data.loader import MicroBatch
from modeling.unpadding import ROW_MULTIPLE, fill_up, round_up, row_of
from recipes.families import fields_of

Device = torch.device | str

# trimmed lengths are multiples of this, for the matrix units of GPUs
LENGTH_MULTIPLE = 8
PREDICTIONS_MULTIPLE = 16  # the same for the number of predictions in a row


def cut_after_longest(
    batch: MicroBatch, position_ranks: int
) -> dict[str, Tensor | None]:
    """Cut the samples after the longest of the micro-batch; lengths are None if no padding is left."""
    fields = fields_of(batch)
    kept = _longest(batch, position_ranks)
    values: dict[str, Tensor | None] = {
        name: batch[name][:, :kept]
        for name, size in fields.inputs.items()
        if size == "BS"
    }
    if bool((batch["lengths"] == kept).all()):
        values["lengths"] = None
    return values


def as_row(
    batch: MicroBatch, device: Device, dropout_seeds: Tensor | None, position_ranks: int
) -> tuple[tuple[Any, ...], dict[str, Tensor]] | None:
    """Return the arguments with the samples as one row, or None where a row saves nothing.

    A CPU is faster with rows that save nothing, too.
    """
    multiple = math.lcm(ROW_MULTIPLE, position_ranks)
    lengths = batch["lengths"]
    row = round_up(int(lengths.sum()), multiple)
    whole = _longest(batch, position_ranks) * lengths.numel()
    if row < whole or (row == whole and torch.device(device).type == "cpu"):
        return _row_arguments(batch, device, dropout_seeds, multiple)
    return None


def _longest(batch: MicroBatch, position_ranks: int) -> int:
    """Return the length to which samples are cut."""
    needed = round_up(
        int(batch["lengths"].max()), math.lcm(LENGTH_MULTIPLE, position_ranks)
    )
    return min(batch["tokens"].shape[1], needed)


def _row_arguments(
    batch: MicroBatch, device: Device, dropout_seeds: Tensor | None, multiple: int
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return arguments with the samples as one row and their predictions as one row, and its seeds."""
    fields = fields_of(batch)
    indices, row = row_of(batch["lengths"], batch["tokens"].shape[1], multiple)
    within = dict(batch)
    if "positions" in batch:
        within["positions"] = batch["positions"] + row.firsts[:, None]
    # Reading weights on a GPU would wait for it: there, predictions of weight 0 stay.
    on_host = batch["weights"].device.type == "cpu"
    chosen = batch["weights"].flatten() > 0 if on_host else slice(None)
    row = row.to(device, non_blocking=True)
    values: dict[str, Any] = {}
    rows = [row.places]
    for name, size in fields.sizes.items():
        value = batch[name]
        if size == "BS":
            value = value.flatten()[indices][None]
        elif size == "BP":
            own = within[name].flatten()[chosen]
            value = fill_up(own, PREDICTIONS_MULTIPLE)[None]
        values[name] = value.to(device, non_blocking=True)
        if size in ("BS", "BP"):
            rows.append(values[name])
    values["lengths"] = row
    named = {}
    if dropout_seeds is not None:
        here = indices.to(dropout_seeds.device, non_blocking=True)
        named["dropout_seeds"] = dropout_seeds.flatten(0, 1)[here][None]
    # if a model is compiled: one graph for rows of every length
    if "torch._dynamo" in sys.modules:
        for x in (*rows, *named.values()):
            torch._dynamo.maybe_mark_dynamic(x, 1)
    return tuple(values[name] for name in fields.names), named
