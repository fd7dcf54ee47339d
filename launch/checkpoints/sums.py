"""Two sums in float64 that tell a tensor's numbers and their places, whatever the layout.

The first adds up all elements. The second multiplies each with a pseudo-random factor of its row and one of
its column. The tensor is the full canonical one, seen as a matrix: its first dimension by the rest. Elements
that are transposed, permuted, missing or there twice change the second sum. The sums of pieces are added.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from data.bit_sums import ODD
from launch.checkpoints.geometry import matrix, rectangles
from launch.checkpoints.stored import TensorPlacement
from modeling.initialization import shard_of

ON_HOST = 2**17  # elements of a block, which stay in a core's cache
ON_DEVICE = 2**22
# streams of factors
ROWS = 1
COLUMNS = 2


def sums_of(numbers: Tensor, parameter: torch.nn.Parameter, first: int) -> Tensor:
    """Return both sums (2,) in float64 of flat `numbers`, on their device.

    They are elements [first, first + len(numbers)) of this rank's slice of `parameter`; padding adds nothing.
    """
    place = TensorPlacement.of(parameter)
    if place.form != "canonical":
        return _of_other_form(numbers, place, shard_of(parameter), first)
    height, width = matrix(place.shape)
    device = numbers.device
    of_rows = factors(height, ROWS, device)
    of_columns = factors(width, COLUMNS, device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    most = ON_HOST if device.type == "cpu" else ON_DEVICE
    count = min(max(width, most), len(numbers))
    block = torch.empty(count, dtype=torch.float64, device=device)
    for part in rectangles(place.shape, place.cut, first, len(numbers)):
        columns = of_columns[:, part.left : part.right]
        length = columns.shape[1]
        added = torch.zeros_like(columns)
        for top in range(part.top, part.bottom, most // length):
            rows = of_rows[:, top : min(top + most // length, part.bottom)]
            count = rows.shape[1]
            at = numbers.storage_offset() + part.at + (top - part.top) * part.stride
            values = block[: count * length].view(count, length)
            values.copy_(numbers.as_strided((count, length), (part.stride, 1), at))
            added.addmm_(rows, values)
        total += added.mul_(columns).sum(1)
    return total


def _of_other_form(
    numbers: Tensor, place: TensorPlacement, shard: Any, first: int
) -> Tensor:
    """Return the sums of elements of a `transformers` tensor, with the factors in its order."""
    shape = shard.form.to_ours(
        [torch.empty(place.shape, device="meta")], shard.heads
    ).shape
    height, width = matrix(shape)
    host = torch.device("cpu")
    product = factors(height, ROWS, host)[1][:, None] * factors(width, COLUMNS, host)[1]
    (theirs,) = shard.form.to_theirs(product.view(shape), shard.heads)
    of_elements = theirs.reshape(-1)[first : first + len(numbers)].to(numbers.device)
    values = numbers.double()
    return torch.stack([values.sum(), values @ of_elements])


@functools.lru_cache(maxsize=64)
def factors(count: int, stream: int, device: torch.device) -> Tensor:
    """Return (2, count) float64: ones, and pseudo-random factors in [-1, 1), the same on every device."""
    bits = torch.arange(count, dtype=torch.int64, device=device) + (stream << 40)
    for shift in (29, 32):
        bits = (bits ^ (bits >> shift)) * ODD
    random = ((bits ^ (bits >> 31)) >> 11).double() * 2.0**-52
    return torch.stack([torch.ones_like(random), random])
