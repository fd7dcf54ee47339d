"""From the fields of samples to the tensors that an engine takes, and the hash of a step's batch.

`recipes.micro_batch.FIELDS` names the tensors. The loss of a micro-batch is sum(cross_entropy * weights). A
GPT's weights make its mean over micro-batches and ranks the mean over all tokens of the global batch. A
BERT's samples predict different numbers of tokens, so its weights are 1 for a prediction and 0 for filling,
and the engine divides by the number of predictions of the whole step; its sentence weights need no such
division.
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
    """The tensors of B samples; `row_weights` (B,) as for `Fields.micro_batch`."""
    arrays = fields.micro_batch(row_weights)
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}


def batch_digest(batches: Iterable[MicroBatch]) -> str:
    """SHA-256 of a step's micro-batches, given in the order of their rows in the global batch.

    How the batch is cut does not matter. Weights count as real or filling: their values depend on the
    micro-batch.
    """
    joined: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for key, tensor in batch.items():
            values = tensor.numpy() if key not in _WEIGHTS else tensor.numpy() > 0
            joined.setdefault(key, []).append(values.astype("<i8"))
    digest = hashlib.sha256()
    for key in sorted(joined):
        found = np.concatenate(joined[key])
        digest.update(f"{key} {found.shape}\n".encode() + found.tobytes())
    return digest.hexdigest()
