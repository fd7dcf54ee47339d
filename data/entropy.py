"""Reference points for a loss: what models that learned nothing, or only token frequencies, would reach."""

from __future__ import annotations

import numpy as np


def unigram_cross_entropy(counts: np.ndarray, labels: np.ndarray) -> float:
    """Nats per token of `labels` under token frequencies with add-one smoothing: p(t) = (count(t) + 1) / (N + V).

    Args:
        counts: (V,) occurrences in the training tokens.
        labels: any shape, token ids below V.
    """
    frequencies = np.asarray(counts, dtype=np.float64) + 1.0
    logarithms = np.log(frequencies) - np.log(frequencies.sum())
    return float(-logarithms[np.asarray(labels)].mean())
