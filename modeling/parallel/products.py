"""The products of column- and row-parallel layers, with f and g in them (Megatron-LM, 1909.08053, section 3).

A product and its collective are one autograd function each, since autograd would begin f's all-reduce when
both products of the backward pass are done.

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
    finished,
    in_rank_order,
    in_sample_order,
)
from modeling.parallel.process_grid import Group


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False
) -> Tensor:
    """f, then x (N, inputs) times weight (outputs/t, inputs) plus bias: (N, outputs/t).

    `sequence`: x is this rank's (B, S/t, inputs), and the result all positions', (t B, S/t, outputs/t).
    """
    if group is None:
        return F.linear(x, weight, bias)
    return (_SequenceColumn if sequence else _Column).apply(x, weight, bias, group)


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor, group: Group, sequence: bool = False, in_samples: bool = False
) -> Tensor:
    """x (N, inputs/t) times weight (outputs, inputs/t), then g; the bias once: (N, outputs).

    `sequence`: x is all positions', (t B, S/t, inputs/t), or `in_samples` (B, S, inputs/t), and the result
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
        return finished(of_x), of_weight, of_bias, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        return finished(begin_sum(F.linear(x, weight), group)).add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, _of_weight(gradient, x), gradient.flatten(0, -2).sum(0), None


class _SequenceColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)  # and not what is gathered: 1/t of it
        ctx.group, ctx.biased = group, bias is not None
        return F.linear(finished(begin_gather(x, group)), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        again = begin_gather(x, ctx.group)  # while the first product is computed
        of_whole = gradient @ weight
        whole = finished(again)
        of_x = begin_scattered_sum(of_whole, ctx.group)  # while the second is
        of_weight = _of_weight(gradient, whole)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return finished(of_x), of_weight, of_bias, None


class _SequenceRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup, in_samples: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # as attention keeps it, too, and not in another order besides
        ctx.group, ctx.in_samples = group, in_samples
        x = in_rank_order(x, group) if in_samples else x
        return finished(begin_scattered_sum(F.linear(x, weight), group)).add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        whole = finished(begin_gather(gradient, ctx.group))
        of_x = whole @ weight
        if ctx.in_samples:
            x, of_x = in_rank_order(x, ctx.group), in_sample_order(of_x, ctx.group)
        # The bias was added to this rank's positions, and every rank has the gradient of all of them here.
        return of_x, _of_weight(whole, x), whole.flatten(0, -2).sum(0), None, None


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)
