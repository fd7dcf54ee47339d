"""Shapes of models by their size, as GPT-3's: Brown et al. 2020 (arXiv 2005.14165), table 2.1."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

RECIPE = "openwebtext/gpt2-124m"  # for models of other sizes
WIDE = 2048  # hidden size from which heads are of 128, as in GPT-3; below 64
LENGTH = 2048  # tokens of a sample (section 2.1)


class Size(NamedTuple):
    """A model by its size.

    Attributes:
        batch: samples of a step: the table's 0.5 to 3.2 million tokens in multiples of 256 samples.
        rate: peak learning rate.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    rate: float

    def settings(self, precision: str) -> list[str]:
        """Return the model as overrides of a recipe."""
        return [
            f"model.layers={self.layers}",
            f"model.hidden={self.hidden}",
            f"model.heads={self.heads}",
            f"sequence_length={LENGTH}",
            f"batch.global={self.batch}",
            f"optimizer.lr={self.rate}",
            f"precision={precision}",
        ]


# The table's 24 heads of 128 (XL) and hidden size of 5140 (13B) are slips: heads x their size is not hidden.
SIZES = {
    "125m": Size(12, 768, 12, 256, 6e-4),
    "345m": Size(24, 1024, 16, 256, 3e-4),  # GPT-2's label of the same shape
    "350m": Size(24, 1024, 16, 256, 3e-4),
    "760m": Size(24, 1536, 16, 256, 2.5e-4),
    "1.3b": Size(24, 2048, 16, 512, 2e-4),
    "2.7b": Size(32, 2560, 32, 512, 1.6e-4),
    "6.7b": Size(32, 4096, 32, 1024, 1.2e-4),
    "13b": Size(40, 5120, 40, 1024, 1e-4),
    "175b": Size(96, 12288, 96, 1536, 0.6e-4),
}


def usual_layers(hidden: int) -> int:
    """Interpolate the table's layers for a hidden size: even, at least 2."""
    rows = [(0, 0), *((size.hidden, size.layers) for size in SIZES.values())]
    for (low, few), (high, many) in pairwise(rows):
        if hidden < high:
            layers = few + (many - few) * (hidden - low) / (high - low)
            return max(2, 2 * round(layers / 2))
    return rows[-1][1]
