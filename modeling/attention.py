"""Dense attention's core, softmax(q k' / sqrt(D)) v, and the choice of its kernel.

    sdpa    torch's scaled_dot_product_attention: on GPUs, where its kernels are the fastest there are, and
            on a CPU in other precisions and for long sequences
    blocks  on a CPU in bf16: products of whole matrices in both passes, one block of queries after
            another, so that scores live for one block. torch's kernel makes the backward pass of small
            products, and with dropout holds all scores in fp32

`choose` rests on what was measured on a CPU (docs/benchmarks.md); nothing was measured on CUDA.

Shapes: B samples, N heads, S positions, D head size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.hidden_dropout import mixed

Kernel = Literal["sdpa", "blocks"]

QUERIES = 256  # of a block; a causal block leaves out the keys behind its last query
LONGEST = 512  # positions up to which blocks are faster than SDPA without dropout
_WORD = 1 << 32


def choose(
    device: str, dtype: torch.dtype, dropout: float, positions: int, compiled: bool
) -> Kernel:
    """Return the kernel for a training step.

    `dropout` is the probability on attention weights; `compiled` says whether torch.compile traces the step.
    """
    # fp16 could not hold products that are not scaled yet
    if device != "cpu" or dtype != torch.bfloat16:
        return "sdpa"
    if dropout:
        return "blocks"
    # In eager mode the operations between two products take longer than all of torch's kernel.
    return "blocks" if compiled and positions <= LONGEST else "sdpa"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v for q, k, v (B, N, S, D).

    Args:
        mask: (B, 1, 1, S), True for visible keys, at least one a sample; None: all are visible.
        dropout_p: probability on the weights; draws from the current random stream.
    """
    compiled = torch.compiler.is_compiling()
    kernel = choose(q.device.type, q.dtype, dropout_p, q.shape[-2], compiled)
    if kernel == "sdpa" or not (
        torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    ):
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout_p, is_causal=causal
        )
    rows = dropout_rows(q) if dropout_p else None
    # a Function's apply has no types
    return _Blocks.apply(q, k, v, mask, rows, causal, dropout_p)  # type: ignore[no-any-return]


def self_attention(
    qkv: Tensor, *, causal: bool, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Return `attention` of qkv (B, S, N, 3, D) as (B, S, N, D)."""
    q, k, v = heads_first(qkv)
    out = attention(q, k, v, causal=causal, mask=mask, dropout_p=dropout_p)
    return out.transpose(1, 2)


def heads_first(qkv: Tensor) -> tuple[Tensor, ...]:
    """(B, S, N, 3, D) -> three (B, N, S, D)."""
    return qkv.permute(3, 0, 2, 1, 4).unbind(0)


# Opaque to torch.compile, whose own generator would draw other numbers than an eager run.
@torch.library.custom_op("megarecipes::dropout_rows", mutates_args=())
def dropout_rows(q: Tensor) -> Tensor:
    """Draw two random words (B, N, S, 2) int32 for each row of scores, the input of `_keep_mask`."""
    size = (*q.shape[:-1], 2)
    return torch.randint(
        -(_WORD // 2), _WORD // 2, size, dtype=torch.int32, device=q.device
    )


@dropout_rows.register_fake
def _(q: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], 2), dtype=torch.int32)


# Opaque, too: fused into a loop over scores, it would be computed again for every score.
@torch.library.custom_op("megarecipes::dropout_columns", mutates_args=())
def dropout_columns(rows: Tensor, keys: int) -> Tensor:
    """Return a fixed word (keys,) int32 for every key, on the device of `rows`."""
    return mixed(torch.arange(keys, device=rows.device), 0).to(torch.int32)


@dropout_columns.register_fake
def _(rows: Tensor, keys: int) -> Tensor:
    return rows.new_empty(keys, dtype=torch.int32)


def _keep_mask(rows: Tensor, keys: int, p: float) -> Tensor:
    """Turn rows (..., 2) into a mask (..., keys): False (probability p) where (a c + b) mod 2^32 < p 2^32.

    Within a row, any two keys are dropped independently of each other (Dietzfelbinger 1996, as in
    `modeling/hidden_dropout.py`); rows have words of their own.
    """
    words: Tensor = rows[..., :1] * dropout_columns(rows, keys) + rows[..., 1:]
    return words >= round(p * _WORD) - _WORD // 2


class _Blocks(torch.autograd.Function):
    """Attention by blocks of queries. The backward pass computes the weights again.

    It keeps queries, keys, values, the output, and of each query's scores the largest and the sum of their
    exponentials (Dao et al. 2022, arXiv 2205.14135, section 3.1). torch.compile finds the same weights in
    both passes, and keeps them; they are bf16 in both, so that it keeps half of what fp32 would take.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes every tensor as an argument of its own
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rows: Tensor | None,
        causal: bool,
        p: float,
    ) -> Tensor:
        ctx.causal = causal
        ctx.p = p
        outs = []
        largests = []
        totals = []
        for start in range(0, q.shape[-2], QUERIES):
            block, seen = _block(start, q.shape[-2], causal)
            scores = _scores(q[..., block, :], k[..., seen, :], mask, start, causal)
            largest = scores.amax(-1, keepdim=True)
            exponentials = torch.exp(scores - largest)
            total = exponentials.sum(-1, keepdim=True)
            weights = (exponentials / total).to(v.dtype)
            if rows is not None:
                weights = _dropped(weights, rows[..., block, :], p)
            outs.append(weights @ v[..., seen, :])
            largests.append(largest)
            totals.append(total)
        out, largest, total = (torch.cat(each, -2) for each in (outs, largests, totals))
        ctx.save_for_backward(q, k, v, mask, rows, out, largest, total)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, rows, out, largest, total = ctx.saved_tensors
        S = q.shape[-2]
        scale = q.shape[-1] ** -0.5
        along = (gradient.float() * out.float()).sum(-1, keepdim=True)
        of_q: list[Tensor] = []
        of_k = of_v = torch.empty(0)
        # the last block, which sees all keys, first
        for start in reversed(range(0, S, QUERIES)):
            block, seen = _block(start, S, ctx.causal)
            queries = q[..., block, :]
            keys = k[..., seen, :]
            incoming = gradient[..., block, :]
            scores = _scores(queries, keys, mask, start, ctx.causal)
            exponentials = torch.exp(scores - largest[..., block, :])
            weights = (exponentials / total[..., block, :]).to(v.dtype)
            kept_weights = weights
            of_weights = (incoming @ v[..., seen, :].mT).float()
            if rows is not None:
                of_block = rows[..., block, :]
                kept_weights = _dropped(weights, of_block, ctx.p)
                of_weights = _dropped(of_weights, of_block, ctx.p)
            of_scores = (weights * (of_weights - along[..., block, :]) * scale).to(
                q.dtype
            )
            of_q.insert(0, of_scores @ keys)
            of_keys = of_scores.mT @ queries
            of_values = kept_weights.mT @ incoming
            if not of_k.numel():
                wide = torch.float32 if S > QUERIES else k.dtype  # several are added up
                of_k = of_keys.to(wide)
                of_v = of_values.to(wide)
            else:
                of_k[..., seen, :] += of_keys
                of_v[..., seen, :] += of_values
        return (
            torch.cat(of_q, -2),
            of_k.to(k.dtype),
            of_v.to(v.dtype),
            None,
            None,
            None,
            None,
        )


def _dropped(weights: Tensor, rows: Tensor, p: float) -> Tensor:
    """Apply dropout to weights (..., keys), with the words (..., 2) of their rows."""
    return weights * _keep_mask(rows, weights.shape[-1], p) * (1 / (1 - p))


def _block(start: int, positions: int, causal: bool) -> tuple[slice, slice]:
    """Return the slices of the block's queries, from `start` on, and of the keys visible to it."""
    end = min(start + QUERIES, positions)
    last_key = end if causal else positions
    return slice(start, end), slice(0, last_key)


def _scores(
    queries: Tensor, keys: Tensor, mask: Tensor | None, start: int, causal: bool
) -> Tensor:
    """Return the fp32 scores of the queries from `start` on, -inf at hidden keys."""
    scores: Tensor = (queries @ keys.mT).float() * queries.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        # In 32 bits: compiled for a CPU, the comparison of 64 takes as long as the softmax.
        positions = torch.arange(keys.shape[-2], dtype=torch.int32, device=keys.device)
        last = torch.arange(queries.shape[-2], dtype=torch.int32, device=keys.device)
        scores = scores.masked_fill(positions > start + last[:, None], -torch.inf)
    return scores
