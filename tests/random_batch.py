"""A random micro-batch, for counts and checks that need no text."""

from __future__ import annotations

import math

import torch

from data.loader import MicroBatch
from modeling.cost.parameter_count import SENTENCE_CLASSES, TOKEN_TYPES
from recipes.families import MicroBatchFields


def random_batch(
    fields: MicroBatchFields, samples: int, length: int, predictions: int, vocabulary: int
) -> MicroBatch:
    """Make a random micro-batch; each sample predicts `predictions` tokens, the last is padded."""
    sizes = {"B": samples, "S": length, "P": predictions}
    shortest = length - length // 4
    below = {"token_types": TOKEN_TYPES, "positions": shortest, "sentence_labels": SENTENCE_CLASSES}
    values = {}
    for name, dimensions in fields.sizes.items():
        size = [sizes[dimension] for dimension in dimensions]
        if name.endswith("weights"):
            values[name] = torch.ones(size) / math.prod(size)
        elif name == "lengths":
            values[name] = torch.tensor([length] * (sizes["B"] - 1) + [shortest])
        else:
            values[name] = torch.randint(below.get(name, vocabulary), size)
    return values
