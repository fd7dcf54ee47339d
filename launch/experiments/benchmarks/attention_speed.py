"""How fast a banded layer's attention is next to a dense one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Shape:
    """What all cases have in common."""

    batch: int
    heads: int
    head_size: int
    dropout: float  # on attention weights
    rounds: int  # passes that are timed


@dataclass(frozen=True)
class Row:
    """One case. Seconds are means over the rounds; None: not measured, `status` says why."""

    dtype: str
    positions: int
    window: int  # positions that each one sees
    kernel: str
    why: str
    scores: float  # share of the dense triangle that lies in the band: its inverse bounds what can be gained
    dense_s: float | None = None
    banded_s: float | None = None
    masked_s: float | None = None
    status: str = "measured"


def measure_dtype(
    shape: Shape, dtype: str, positions: Sequence[int], windows: Sequence[int], device: str, longest_s: float
) -> Iterator[Row]:
    """The rows of one dtype; longer sequences are left out once one pass takes longer than `longest_s`."""
    for length in sorted(positions):
        slowest = 0.0
        for window in (w for w in windows if w < length):
            row = measure(shape, dtype, length, window, device)
            slowest = max(slowest, row.dense_s or 0.0, row.banded_s or 0.0, row.masked_s or 0.0)
            yield row
        if slowest > longest_s:
            return


def measure(shape: Shape, dtype: str, positions: int, window: int, device: str) -> Row:
    """Forward and backward of dense, banded and masked attention on random tensors, laid out as a layer's."""
    import torch
    import torch.nn.functional as F
    import torch.utils.benchmark as timing

    from modeling import banded_attention as band
    from modeling.cost import band as pairs

    kind, dropout = getattr(torch, DTYPES[dtype]), shape.dropout
    compiler = device == "cuda" and band.has_gpu_compiler()
    kernel, why = band.choose(device, kind, dropout, positions, window, shape.head_size, compiler=compiler)
    scores = pairs(positions, window) / pairs(positions, positions)

    def seconds(attention: Callable[..., torch.Tensor]) -> float:
        size = (shape.batch, positions, shape.heads, 3, shape.head_size)
        qkv = torch.randn(size, dtype=kind, device=device, requires_grad=True)
        gradient = torch.randn(size[0], size[2], positions, size[4], dtype=kind, device=device)

        def both() -> None:
            torch.autograd.grad(attention(*qkv.permute(3, 0, 2, 1, 4).unbind(0)), qkv, gradient)

        timer = timing.Timer("both()", globals={"both": both}, num_threads=torch.get_num_threads())
        return timer.timeit(shape.rounds).mean  # after a warm-up of its own, and waiting for the GPU

    row = Row(dtype, positions, window, kernel, why, scores)
    dense = partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
    try:
        return replace(
            row,
            dense_s=seconds(dense),
            banded_s=seconds(lambda q, k, v: band.banded_attention(q, k, v, window, dropout)),
            masked_s=seconds(lambda q, k, v: band.by_dense_mask(q, k, v, window, dropout)),
        )
    except torch.OutOfMemoryError:
        return replace(row, status="out of memory")


def not_measured(
    dtypes: Sequence[str], positions: Sequence[int], windows: Sequence[int], device: str, rows: Sequence[Row]
) -> list[str]:
    """What a reader could take for measured."""
    found = []
    if device != "cuda":
        found.append("flex_attention and GPUs: this machine has no CUDA device")
    elif not any(row.kernel == "flex_attention" for row in rows):
        found.append(f"flex_attention: {rows[-1].why}" if rows else "flex_attention: no case ran")
    done = {(row.dtype, row.positions, row.window) for row in rows}
    for dtype, length in product(dtypes, sorted(positions)):
        case = f"{dtype}, {length} positions with windows of "
        if whole := [str(w) for w in windows if w >= length]:
            found.append(f"{case}{', '.join(whole)}: such a band is the whole triangle")
        if left := [str(w) for w in windows if w < length and (dtype, length, w) not in done]:
            found.append(f"{case}{', '.join(left)}: a pass at fewer positions took longer than --seconds")
    return found
