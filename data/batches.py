"""From the fields of samples to the tensors that an engine eats, and the hash of a step's batch.

GPT: tokens, labels (B, T) int64; weights (B, T) float32.
BERT: tokens, token_types (B, S) int64; lengths (B,) int64; positions, labels (B, P) int64; weights (B, P) float32;
sentence_labels (B,) int64; sentence_weights (B,) float32.

The loss of a micro-batch is sum(cross_entropy * weights). A GPT's weights make its mean over micro-batches and ranks the mean
over all tokens of the global batch. A BERT's samples predict different numbers of tokens, so its weights are 1 for a
prediction and 0 for filling, and the engine divides by the number of predictions of the whole step; its sentence weights
need no such division.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from data.samples.fields import Fields

MicroBatch = dict[str, torch.Tensor]
_WEIGHTS = ("weights", "sentence_weights")


def micro_batch(fields: Fields, row_weights: np.ndarray) -> MicroBatch:
    """
    Args:
        fields: of B samples.
        row_weights: (B,) weight of a sample, so that a mean over micro-batches and ranks is one over samples; 0: filling.
    """
    arrays = _gpt(fields["window"], row_weights) if "window" in fields else _bert(fields, row_weights)
    return {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in arrays.items()}


def _gpt(windows: np.ndarray, row_weights: np.ndarray) -> Fields:
    length = windows.shape[1] - 1
    weights = np.repeat((row_weights / length).astype(np.float32)[:, None], length, axis=1)
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:], "weights": weights}


def _bert(fields: Fields, row_weights: np.ndarray) -> Fields:
    real = np.arange(fields["labels"].shape[1]) < fields["predicted"][:, None]
    kept = ("tokens", "token_types", "lengths", "positions", "labels", "sentence_labels")
    return {
        **{key: fields[key] for key in kept},
        "weights": (real & (row_weights > 0)[:, None]).astype(np.float32),
        "sentence_weights": row_weights.astype(np.float32),
    }


def batch_digest(batches: Iterable[MicroBatch]) -> str:
    """SHA-256 of a step's micro-batches, given in the order of their rows in the global batch; how they are cut does not matter.

    Weights count as real or filling: their values depend on the micro-batch.
    """
    joined: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for key, tensor in batch.items():
            values = tensor.numpy() if key not in _WEIGHTS else tensor.numpy() > 0
            joined.setdefault(key, []).append(values.astype("<i8"))
    digest = hashlib.sha256()
    for key in sorted(joined):
        values = np.concatenate(joined[key])
        digest.update(f"{key} {values.shape}\n".encode() + values.tobytes())
    return digest.hexdigest()
