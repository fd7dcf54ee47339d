"""Linear layers and the embedding, cut over a tensor-parallel group, and the random state of such a cut.

As in Megatron-LM (arXiv 1909.08053, section 3). A product and its collective, f or g, form one autograd
function: autograd itself would begin f's all-reduce only after both products of the backward pass.

Shapes: B samples, S positions, V vocabulary padded to a multiple of 128 x tp, H hidden size, t ranks of the
tensor group. `group` is None when t = 1. Every parameter is drawn inside the leaf module that holds it,
because `deepspeed.zero.Init` partitions parameters as soon as that module's constructor returns.

The random state of attention dropout is a function of only (seed, step, rank's place). The attention kernel
draws from a stream of the device, so its dropout follows the layout; dropout of the residual stream does not
(`modeling/hidden_dropout.py`). There are two streams, as in Megatron-LM (appendix B.2). Tensor ranks hold
different heads: each draws from its own stream in DeepSpeed's RNG tracker. A process with all heads draws from
the accelerator's default stream, and so does all dropout of `transformers`' modules. DeepSpeed's activation
checkpointing saves and restores both. Reseeding at every step makes resuming exact without storing any state,
which matters because DeepSpeed's checkpoints do not hold the tracker.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import (
    get_cuda_rng_tracker,
)
from torch import Tensor, nn

from modeling.initialization import Init, Shard
from modeling.parallel.collectives import (
    begin_gather,
    begin_scattered_sum,
    begin_sum,
    gather_positions,
    in_rank_order,
    in_sample_order,
    own_rows,
    reduce_from_tensor_parallel,
    scatter_sum,
    wait_for,
)
from modeling.parallel.process_grid import Group
from recipes.layout import Coordinates

# the name that DeepSpeed's tracker forks by default
TENSOR_PARALLEL_STREAM = "model-parallel-rng"


def group_size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


class _Column(torch.autograd.Function):
    """f, then the product; `sequence`: x has only this rank's positions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        sequence: bool,
    ) -> Tensor:
        # not the gathered x, which is t times as large
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.sequence = sequence
        ctx.biased = bias is not None
        whole = wait_for(begin_gather(x, group)) if sequence else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        # while the first product is computed
        again = begin_gather(x, ctx.group) if ctx.sequence else None
        of_whole = gradient @ weight
        whole = x if again is None else wait_for(again)
        begin = begin_scattered_sum if ctx.sequence else begin_sum
        of_x = begin(of_whole, ctx.group)
        of_weight = _of_weight(gradient, whole)  # while the ranks add up
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return wait_for(of_x), of_weight, of_bias, None, None


class _Row(torch.autograd.Function):
    """The product, then g; `sequence`: the result has only this rank's positions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        group: dist.ProcessGroup,
        sequence: bool,
        in_samples: bool,
    ) -> Tensor:
        # in attention's order: attention keeps the same tensor
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.sequence = sequence
        ctx.in_samples = in_samples
        x = in_rank_order(x, group) if in_samples else x
        begin = begin_scattered_sum if sequence else begin_sum
        return wait_for(begin(F.linear(x, weight), group)).add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = (
            wait_for(begin_gather(gradient, ctx.group)) if ctx.sequence else gradient
        )
        of_x = whole @ weight
        if ctx.in_samples:
            x = in_rank_order(x, ctx.group)
            of_x = in_sample_order(of_x, ctx.group)
        # `whole` has the gradient of all positions, so the bias's needs no sum over the ranks.
        return of_x, _of_weight(whole, x), whole.flatten(0, -2).sum(0), None, None, None


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False
) -> Tensor:
    """Apply f; multiply x (..., inputs) with weight (outputs/t, inputs) and add the bias: (..., outputs/t).

    `sequence`: x has this rank's positions, (B, S/t, inputs), the result all, (t B, S/t, outputs/t).
    """
    if group is None:
        return F.linear(x, weight, bias)
    # a Function's apply has no types
    return _Column.apply(x, weight, bias, group, sequence)  # type: ignore[no-any-return]


class ColumnParallelLinear(nn.Module):
    """Y_i = X A_i + b_i: the output features are cut; the input is whole on every rank. Begins with f.

    With `sequence` the input's positions are cut, too: (B, S/t, inputs) -> (t B, S/t, outputs/t), rank order.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        group: Group,
        init: Init,
        sequence: bool = False,
    ):
        super().__init__()
        self.group = group
        self.sequence = sequence
        shard = Shard.over(group, 0)
        # (outputs/t, inputs)
        self.weight = init.normal("weight", (outputs, inputs), init.std, shard=shard)
        self.bias = init.zeros("bias", (outputs,), shard=shard)  # (outputs/t,)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, inputs) -> (B, S, outputs/t)
        return column_parallel(x, self.weight, self.bias, self.group, self.sequence)


class RowParallelLinear(nn.Module):
    """Y = sum_i X_i A_i + b: the input features are cut; the output is whole on every rank. Ends with g.

    The bias is added once, after the sum, and is duplicated. Initial weights have `residual_std`.
    With `sequence`: (t B, S/t, inputs/t), in rank order, or (B, S, inputs/t) `in_samples` -> this rank's
    positions, (B, S/t, outputs).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        group: Group,
        init: Init,
        sequence: bool = False,
        in_samples: bool = False,
    ):
        super().__init__()
        self.group = group
        self.sequence = sequence
        self.in_samples = in_samples
        shard = Shard.over(group, 1)  # cut by columns
        self.weight = init.normal(
            "weight", (outputs, inputs), init.residual_std, shard=shard
        )
        self.bias = init.zeros("bias", (outputs,))

    def forward(self, x: Tensor) -> Tensor:  # (B, S, inputs/t) -> (B, S, outputs)
        if self.group is None:
            return F.linear(x, self.weight, self.bias)
        in_samples = self.sequence and self.in_samples
        # a Function's apply has no types
        return _Row.apply(  # type: ignore[no-any-return]
            x, self.weight, self.bias, self.group, self.sequence, in_samples
        )


class VocabParallelEmbedding(nn.Module):
    """Word embedding cut over the vocabulary; with `project=True` the tied output layer of the same weight.

    One forward serves both uses, since ZeRO-3 gathers a parameter for the module whose forward runs.
    Rows of padding are zero, get no gradient and no logit, so that the loss does not depend on the padding.
    """

    def __init__(
        self, vocab: int, padded: int, hidden: int, *, group: Group, init: Init
    ):
        super().__init__()
        self.group = group
        shard = Shard.over(group, 0, padded)
        # (V/t, H) on this rank
        self.weight = init.normal("weight", (vocab, hidden), init.std, shard=shard)
        self.rows = padded // shard.size
        self.first = shard.rank * self.rows  # first token of this rank
        # rows that are tokens, not padding
        self.valid = max(0, min(self.rows, vocab - self.first))

    def forward(self, x: Tensor, project: bool = False, cut: bool = False) -> Tensor:
        """`cut`: the residual stream holds only this rank's positions, (B, S/t, H)."""
        return self._logits(x, cut) if project else self._embed(x, cut)

    def _embed(self, tokens: Tensor, cut: bool) -> Tensor:  # (B, S) -> (B, S, H)
        if self.group is None:
            return F.embedding(tokens, self.weight)
        if cut:
            tokens = in_rank_order(tokens, self.group)
        local, foreign = own_rows(tokens, self.first, self.rows)
        embedded = F.embedding(local, self.weight).masked_fill(
            foreign.unsqueeze(-1), 0.0
        )
        add_up = scatter_sum if cut else reduce_from_tensor_parallel
        return add_up(embedded, self.group)

    # (B, S, H) -> (B, S, V/t), -inf at padding
    def _logits(self, x: Tensor, cut: bool) -> Tensor:
        # All rows take part: matrix units want whole tiles of columns, and 50257 has none.
        # samples in one piece
        whole = gather_positions(x, self.group, summed=True) if cut else x
        group = None if cut else self.group
        logits = column_parallel(whole, self.weight, None, group)
        if self.valid < self.rows:
            # the gradient there is 0 anyway
            logits.detach()[..., self.valid :].fill_(-torch.inf)
        return logits


def _seed(*parts: object) -> int:
    return int.from_bytes(
        hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:7], "little"
    )


def seed_step(seed: int, step: int, at: Coordinates) -> None:
    """Set both streams for optimizer step `step` on the rank at `at`."""
    get_accelerator().manual_seed(_seed(seed, step, "outside", at.pp, at.dp))
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(
        TENSOR_PARALLEL_STREAM, _seed(seed, step, "inside", at.pp, at.dp, at.tp)
    )


def tensor_parallel_random(active: bool) -> contextlib.AbstractContextManager[Any]:
    """Draw from this tensor rank's own stream within; without `active`, from the default stream."""
    return (
        get_cuda_rng_tracker().fork(TENSOR_PARALLEL_STREAM)
        if active
        else contextlib.nullcontext()
    )
