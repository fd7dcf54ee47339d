"""What a model's logits on a split come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Scored:
    """Metrics by name, in shares of 1 (none where labels are hidden), and the files of a submission."""

    metrics: Mapping[str, float]
    files: Mapping[str, str] = field(repr=False)


def accuracy(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Share of right guesses, both (n,)."""
    return float((guesses == labels).sum()) / len(labels)


def f1(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Harmonic mean of precision and recall of label 1: 2 tp / (2 tp + fp + fn); 0 where it is in neither."""
    true, found = labels == 1, guesses == 1
    both, sizes = int((true & found).sum()), int(true.sum()) + int(found.sum())
    return 2 * both / sizes if sizes else 0.0
