"""The products of column- and row-parallel layers, with f and g in them (Megatron-LM, 1909.08053, section 3).

A product and its collective form one autograd function: autograd itself would begin f's all-reduce only after
both products of the backward pass.

Shapes: N tokens in any number of dimensions, t ranks of the tensor group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling.parallel.collectives import (
    begin_gather,
    begin_scattered_sum,
    begin_sum,
    in_rank_order,
    in_sample_order,
    wait_for,
)
from modeling.parallel.process_grid import Group


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False
) -> Tensor:
    """Apply f; multiply x (N, inputs) with weight (outputs/t, inputs) and add the bias: (N, outputs/t).

    `sequence`: x has this rank's positions, (B, S/t, inputs), the result all, (t B, S/t, outputs/t).
    """
    if group is None:
        return F.linear(x, weight, bias)
    return (_SequenceColumn if sequence else _Column).apply(x, weight, bias, group)


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor, group: Group, sequence: bool = False, in_samples: bool = False
) -> Tensor:
    """Multiply x (N, inputs/t) with weight (outputs, inputs/t), apply g, add the bias once: (N, outputs).

    `sequence`: x has all positions, (t B, S/t, inputs/t), or `in_samples` (B, S, inputs/t); the result has
    this rank's, (B, S/t, outputs).
    """
    if group is None:
        return F.linear(x, weight, bias)
    if sequence:
        return _SequenceRow.apply(x, weight, bias, group, in_samples)
    return _Row.apply(x, weight, bias, group)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.biased = group, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = begin_sum(gradient @ weight, ctx.group)
        of_weight = _of_weight(gradient, x)  # while the ranks add up
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return wait_for(of_x), of_weight, of_bias, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wait_for(begin_sum(F.linear(x, weight), group)).add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, _of_weight(gradient, x), gradient.flatten(0, -2).sum(0), None


class _SequenceColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)  # not the gathered x, which is t times as large
        ctx.group, ctx.biased = group, bias is not None
        return F.linear(wait_for(begin_gather(x, group)), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        again = begin_gather(x, ctx.group)  # while the first product is computed
        of_whole = gradient @ weight
        whole = wait_for(again)
        of_x = begin_scattered_sum(of_whole, ctx.group)  # while the second is
        of_weight = _of_weight(gradient, whole)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return wait_for(of_x), of_weight, of_bias, None


class _SequenceRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup, in_samples: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # in attention's order: attention keeps the same tensor
        ctx.group, ctx.in_samples = group, in_samples
        x = in_rank_order(x, group) if in_samples else x
        return wait_for(begin_scattered_sum(F.linear(x, weight), group)).add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        whole = wait_for(begin_gather(gradient, ctx.group))
        of_x = whole @ weight
        if ctx.in_samples:
            x, of_x = in_rank_order(x, ctx.group), in_sample_order(of_x, ctx.group)
        # `whole` has the gradient of all positions, so the bias's needs no sum over the ranks.
        return of_x, _of_weight(whole, x), whole.flatten(0, -2).sum(0), None, None


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)
