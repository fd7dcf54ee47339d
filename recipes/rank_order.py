"""The order of global ranks in the grid of tensor, pipeline and data coordinates.

The order is DeepSpeed's PipeModelDataParallelTopology: tensor fastest, pipeline slowest. With tp=2, dp=2,
pp=2:

                 stage 0                stage 1
              tp 0    tp 1           tp 0    tp 1
    dp 0   rank 0   rank 1        rank 4   rank 5
    dp 1   rank 2   rank 3        rank 6   rank 7

    tensor groups    [0 1] [2 3] [4 5] [6 7]    share every layer
    data groups      [0 2] [1 3] [4 6] [5 7]    hold the same slice, see other samples
    pipeline groups  [0 4] [1 5] [2 6] [3 7]    hold consecutive layers

Training makes its process groups in this order (`modeling/parallel/process_grid.py`), planning its maps.
"""

from __future__ import annotations

from typing import NamedTuple


class Coordinates(NamedTuple):
    """Place of one rank in the grid."""

    tp: int
    dp: int
    pp: int


def coordinates(rank: int, tp: int, dp: int) -> Coordinates:
    """Return the place of global `rank` in a grid of tensor degree `tp` and data degree `dp`."""
    return Coordinates(tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp))


def tensor_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    """List the global ranks of every tensor group."""
    return [list(range(start, start + tp)) for start in range(0, tp * pp * dp, tp)]


def data_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    """List the global ranks of every data group."""
    stage = tp * dp
    return [
        [s * stage + d * tp + t for d in range(dp)]
        for s in range(pp)
        for t in range(tp)
    ]


def pipeline_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    """List the global ranks of every pipeline group, by stage."""
    stage = tp * dp
    return [[s * stage + i for s in range(pp)] for i in range(stage)]


def model_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    """List the global ranks of every copy of the model: all tensor ranks of all stages."""
    stage = tp * dp
    return [
        [s * stage + d * tp + t for s in range(pp) for t in range(tp)]
        for d in range(dp)
    ]
