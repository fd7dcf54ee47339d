"""A micro-batch from the loader's form to what the plain engine and the pipeline engine take.

GPT-2: tokens, labels, weights (B, S). BERT: tokens, token_types (B, S); lengths (B,); positions, labels, weights (B, P);
sentence_labels, sentence_weights (B,).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from modeling.parallel.process_grid import ProcessGrid

MicroBatch = dict[str, torch.Tensor]

BERT_INPUTS = ("tokens", "token_types", "lengths", "positions")
BERT_TARGETS = ("labels", "weights", "sentence_labels", "sentence_weights")
LENGTH_MULTIPLE = 8  # trimmed samples stay a multiple of this, which matrix units want


def is_bert(batch: MicroBatch) -> bool:
    return "token_types" in batch


def normalised(batches: Sequence[MicroBatch], grid: ProcessGrid, device) -> Sequence[MicroBatch]:
    """The micro-batches of one step with weights that make the mean of the loss over micro-batches and ranks its mean over the
    step's predicted tokens. Collective over the data-parallel ranks for a BERT, whose samples predict different numbers of tokens."""
    if not is_bert(batches[0]):
        return batches
    predicted = torch.stack([b["weights"].sum() for b in batches]).sum().to(device)
    if grid.dp > 1:
        dist.all_reduce(predicted, group=grid.data_group)
    scale = len(batches) * grid.dp / predicted
    return [{**b, "weights": b["weights"].to(device) * scale} for b in batches]


def normalised_steps(
    steps: Sequence[Sequence[MicroBatch]], grid: ProcessGrid, device
) -> list[Sequence[MicroBatch]]:
    """The same over several steps taken together, as in a validation."""
    flat = iter(normalised([b for batches in steps for b in batches], grid, device))
    return [[next(flat) for _ in batches] for batches in steps]


def for_plain(batch: MicroBatch, device) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the plain model, on `device`.

    A BERT's samples are cut after the longest of the micro-batch, and lengths are None where then nothing is padded: no work
    is wasted on columns of padding, and attention needs no mask.
    """
    if not is_bert(batch):
        return tuple(batch[key].to(device, non_blocking=True) for key in ("tokens", "labels", "weights"))
    lengths, kept = batch["lengths"], trimmed_length(batch["lengths"], batch["tokens"].shape[1])
    values: dict[str, torch.Tensor | None] = dict(batch)
    values |= {key: batch[key][:, :kept] for key in ("tokens", "token_types")}
    if bool((lengths == kept).all()):
        values["lengths"] = None
    ordered = (values[key] for key in (*BERT_INPUTS, *BERT_TARGETS))
    return tuple(None if value is None else value.to(device, non_blocking=True) for value in ordered)


def trimmed_length(lengths: torch.Tensor, positions: int) -> int:
    """Columns that hold every sample of the micro-batch, rounded up to LENGTH_MULTIPLE."""
    longest = int(lengths.max())
    return min(positions, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


def for_pipeline(batch: MicroBatch):
    """(inputs of the first stage, targets of the last), of full length: stages exchange tensors of one shape."""
    if not is_bert(batch):
        return batch["tokens"], (batch["labels"], batch["weights"])
    return tuple(batch[key] for key in BERT_INPUTS), tuple(batch[key] for key in BERT_TARGETS)
