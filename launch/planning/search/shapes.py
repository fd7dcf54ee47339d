"""Shapes of GPT-3's models, with interpolation for other sizes.

Brown et al. 2020 (arXiv 2005.14165), table 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

LENGTH = 2048  # tokens of a sample there (section 2.1)


class Shape(NamedTuple):
    """A row of the table.

    Attributes:
        batch: samples of a step: the table's 0.5 to 3.2 million tokens in multiples of 256 samples.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    rate: float


# The table's 24 heads of 128 (XL) and hidden size of 5140 (13B) are slips: heads x their size is not hidden.
SHAPES = {
    "125m": Shape(12, 768, 12, 256, 6e-4),
    "350m": Shape(24, 1024, 16, 256, 3e-4),
    "760m": Shape(24, 1536, 16, 256, 2.5e-4),
    "1.3b": Shape(24, 2048, 16, 512, 2e-4),
    "2.7b": Shape(32, 2560, 32, 512, 1.6e-4),
    "6.7b": Shape(32, 4096, 32, 1024, 1.2e-4),
    "13b": Shape(40, 5120, 40, 1024, 1e-4),
    "175b": Shape(96, 12288, 96, 1536, 0.6e-4),
}
NAMES = {**{name: name for name in SHAPES}, "345m": "350m"}  # GPT-2's label of the same shape


def settings(name: str, precision: str) -> list[str]:
    """Return the model of that name as overrides of a recipe."""
    shape = SHAPES[NAMES[name]]
    return [
        f"model.layers={shape.layers}",
        f"model.hidden={shape.hidden}",
        f"model.heads={shape.heads}",
        f"sequence_length={LENGTH}",
        f"batch.global={shape.batch}",
        f"optimizer.lr={shape.rate}",
        f"precision={precision}",
    ]


def usual_layers(hidden: int) -> int:
    """Interpolate the table's layers for a hidden size: even, at least 2."""
    rows = [(0, 0), *((shape.hidden, shape.layers) for shape in SHAPES.values())]
    if hidden >= rows[-1][0]:
        return rows[-1][1]
    above = next(index for index, row in enumerate(rows) if row[0] > hidden)
    (low, few), (high, many) = rows[above - 1], rows[above]
    return max(2, 2 * round((few + (many - few) * (hidden - low) / (high - low)) / 2))
