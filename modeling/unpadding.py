"""Samples without their padding, one after the other in a single row.

B samples of up to S positions with T tokens in all become a row of about T. Embeddings, LayerNorms,
projections, MLPs and dropout treat every token by itself. Attention keeps to the samples
(`unpadded_attention`).
Copies of the first token fill T up to a multiple of ROW_MULTIPLE. They form an unused sample, which changes
no loss and no gradient.

Shapes: B samples, S positions, T tokens of the row, L of one sample, N heads of this rank, D their size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.attention import self_attention

MOST_WEIGHTS = 2**21  # attention weights computed at once: few enough for a cache
# matrix units want it, and few different sizes keep torch's memory in one piece
ROW_MULTIPLE = 64
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD_SIZE = 256  # the largest that FlashAttention takes
VARLEN_CAPABILITY = (8, 0)  # the least of a GPU for it


class PackedRow(NamedTuple):
    """Places of the samples in the row."""

    places: Tensor  # (1, T) int64 of each token in its sample; 0 in the filling
    # (B + 2,) int32: where each sample begins, then the filling, then T
    offsets: Tensor
    longest: int  # length of the longest sample
    # offsets where the host reads them without waiting for a device; of documents
    on_host: Tensor | None = None

    @property
    def firsts(self) -> Tensor:
        """Index (B,) of each sample's first token, [CLS]."""
        return self.offsets[:-2]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedRow:
        """Move the row's tensors, as `Tensor.to` does."""
        places, offsets = (
            each.to(device, non_blocking=non_blocking)
            for each in (self.places, self.offsets)
        )
        return self._replace(places=places, offsets=offsets)


def row_of(
    lengths: Tensor, positions: int, multiple: int = ROW_MULTIPLE
) -> tuple[Tensor, PackedRow]:
    """Return (indices (T,) of the row's tokens among the B x S padded ones, the row); lengths (B,) from 1 on.

    T is a multiple of `multiple`.
    """
    is_real = torch.arange(positions) < lengths[:, None]
    real = is_real.flatten().nonzero().squeeze(1)
    indices = fill_up(real, multiple)
    offsets = F.pad(lengths.cumsum(0), (1, 1))
    offsets[-1] = indices.numel()
    return indices, PackedRow(
        (indices % positions)[None], offsets.int(), int(lengths.max())
    )


def fill_up(x: Tensor, multiple: int) -> Tensor:
    """Fill x (n,) up with zeros to a multiple above 0."""
    count = x.numel()
    padded = round_up(max(1, count), multiple)
    return F.pad(x, (0, padded - count))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def attention_within_samples(
    qkv: Tensor, lengths: Tensor | PackedRow | None, dropout: float
) -> Tensor:
    """Attend from every token to all of its sample, (B, S, N, 3, D) -> (B, S, N, D).

    lengths: (B,), or None where nothing is padded; a Row's B is 1, and S the tokens of the row.
    """
    if isinstance(lengths, PackedRow):
        return unpadded_attention(qkv[0], lengths, dropout)[None]
    mask = None if lengths is None else padding_mask(lengths, qkv.shape[1])
    return self_attention(qkv, causal=False, mask=mask, dropout_p=dropout)


def unpadded_attention(qkv: Tensor, row: PackedRow, dropout: float = 0.0) -> Tensor:
    """Attend from every token to all of its sample: qkv (T, N, 3, D) -> (T, N, D).

    On GPUs without FlashAttention, in fp32 there, and with dropout on a CPU no kernel takes samples of
    different lengths: q, k and v are then padded again.
    """
    if dropout == 0 and qkv.device.type == "cpu":
        # torch's operators have no types
        return attention_of_samples(qkv, row.offsets)  # type: ignore[no-any-return]
    if has_varlen(qkv):
        return varlen_attention(qkv, row, dropout, causal=False)
    return _padded_attention(qkv, row, dropout)


def varlen_attention(
    qkv: Tensor, row: PackedRow, dropout: float, *, causal: bool
) -> Tensor:
    """Attend within each sample by FlashAttention, (T, N, 3, D) -> (T, N, D).

    The operator of torch's `varlen_attn`, which has no argument for dropout.
    """
    places = (row.offsets, row.offsets, row.longest, row.longest)
    # torch's operators have no types
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        *qkv.unbind(2), *places, dropout, causal, False
    )[0]


def has_varlen(qkv: Tensor) -> bool:
    """Check that torch's FlashAttention for samples of different lengths takes `qkv`."""
    sizes = qkv.shape[-1] <= VARLEN_HEAD_SIZE and qkv.shape[-1] % 8 == 0
    return qkv.dtype in VARLEN_DTYPES and sizes and _has_flash(qkv.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Check that torch has FlashAttention for `device`; AMD's GPUs, not tried yet, count as without."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= VARLEN_CAPABILITY


def _padded_attention(qkv: Tensor, row: PackedRow, dropout: float) -> Tensor:
    """Attend by a kernel for padded samples, with a mask."""
    T, N, _, D = qkv.shape
    # with the filling, whose tokens are equal: all at its first place
    samples = row.offsets.numel() - 1
    sample = torch.bucketize(
        torch.arange(T, device=qkv.device), row.offsets[1:-1], right=True
    )
    at = sample * row.longest + row.places[0]
    padded = qkv.new_zeros(samples * row.longest, N, 3, D).index_put((at,), qkv)
    padded = padded.view(samples, row.longest, N, 3, D)
    lengths = row.offsets.diff().clamp(1, row.longest)
    mask = padding_mask(lengths, row.longest)
    out = self_attention(padded, causal=False, mask=mask, dropout_p=dropout)
    return out.reshape(-1, N, D)[at]


def padding_mask(lengths: Tensor, positions: int) -> Tensor:
    """Return the mask (B, 1, 1, S) of lengths (B,): True for a sample's first `lengths` keys."""
    return (torch.arange(positions, device=lengths.device) < lengths[:, None])[
        :, None, None, :
    ]


# An op, so that torch.compile makes one graph for all lengths, which are numbers in a tensor.
@torch.library.custom_op("megarecipes::attention_of_samples", mutates_args=())
def attention_of_samples(qkv: Tensor, offsets: Tensor) -> Tensor:
    """Attend within each sample, on a CPU: (T, N, 3, D), offsets -> (T, N, D).

    Plain products and a softmax take less time than torch's fused kernel: 38 ms a layer instead of 61,
    forward and backward (8 samples of 512 tokens, 6 heads of 64, bf16, two cores). No weights are kept: the
    backward pass computes them again.
    """
    T, N, _, D = qkv.shape
    out = qkv.new_empty(T, N, D)
    for rows, count in _equal_runs(offsets, N):
        q, k, v = _heads_first(qkv[rows], count)
        _tokens_first(out[rows], count).copy_(
            (_weights(q, k) @ v).view(count, N, -1, D)
        )
    return out


@torch.library.custom_op("megarecipes::attention_of_samples_backward", mutates_args=())
def _backward(gradient: Tensor, qkv: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of qkv from the output's `gradient` (T, N, D)."""
    _, N, _, D = qkv.shape
    out = torch.empty_like(qkv)
    for rows, count in _equal_runs(offsets, N):
        q, k, v = _heads_first(qkv[rows], count)
        weights = _weights(q, k)
        upper = _tokens_first(gradient[rows], count).reshape(count * N, -1, D)
        of_weights = upper @ v.transpose(1, 2)
        of_scores = torch.ops.aten._softmax_backward_data(
            of_weights, weights, -1, q.dtype
        )
        of_q = _scaled_product(of_scores, k, D)
        of_k = _scaled_product(of_scores.transpose(1, 2), q, D)
        gradients = of_q, of_k, weights.transpose(1, 2) @ upper
        for part, each in zip(out[rows].unbind(2), gradients, strict=True):
            _tokens_first(part, count).copy_(each.view(count, N, -1, D))
    return out


@attention_of_samples.register_fake
def _(qkv: Tensor, offsets: Tensor) -> Tensor:
    T, N, _, D = qkv.shape
    return qkv.new_empty(T, N, D)


@_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, offsets: Tensor) -> Tensor:
    return torch.empty_like(qkv)


def _keep(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
) -> tuple[Tensor, None]:
    return _backward(gradient, *ctx.saved_tensors), None  # type: ignore[attr-defined]


attention_of_samples.register_autograd(_differentiate, setup_context=_keep)


def _equal_runs(offsets: Tensor, heads: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of consecutive samples of equal length: the slice of their tokens, and their number."""
    ends = offsets.tolist()
    for length, alike in itertools.groupby(
        itertools.pairwise(ends), lambda pair: pair[1] - pair[0]
    ):
        starts = [start for start, _ in alike]
        most = max(1, MOST_WEIGHTS // (heads * length * length)) if length else 0
        for first in range(0, len(starts), most) if length else ():
            count = min(most, len(starts) - first)
            yield slice(starts[first], starts[first] + count * length), count


def _heads_first(qkv: Tensor, count: int) -> tuple[Tensor, ...]:
    """(count x L, N, 3, D) -> three (count x N, L, D)."""
    _, N, _, D = qkv.shape
    return (
        qkv.view(count, -1, N, 3, D)
        .permute(3, 0, 2, 1, 4)
        .reshape(3, count * N, -1, D)
        .unbind(0)
    )


def _tokens_first(x: Tensor, count: int) -> Tensor:
    """(count x L, N, D) as (count, N, L, D)."""
    return torch.unflatten(x, 0, (count, -1)).transpose(1, 2)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights (count x N, L, L)."""
    return torch.softmax(_scaled_product(q, k.transpose(1, 2), q.shape[-1]), -1)


def _scaled_product(x: Tensor, y: Tensor, head_size: int) -> Tensor:
    """Multiply x with y and scale as for attention's scores, with one rounding."""
    return torch.baddbmm(x.new_empty(()), x, y, beta=0, alpha=1 / math.sqrt(head_size))
