"""The conjugate pair f and g of Megatron-LM (arXiv 1909.08053, section 3, figure 3), and what layers add up.

f stands before a column-parallel layer: identity forward, all-reduce of the gradient backward.
g stands after a row-parallel layer: all-reduce forward, identity backward.
Both are the identity, and vanish, in a group of one rank.

A collective is begun and finished in two calls, so that work between them overlaps with it. These are torch's
functional collectives, which torch.compile keeps in its graph, and which run on gloo and NCCL alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.parallel.process_grid import Group

_ops = torch.ops._c10d_functional


def begin_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to add up `x` over the ranks, in its place: it is contiguous, and nobody else's.

    `finished` makes the result readable.
    """
    # A traced graph changes nothing in place; the compiler does, where the value has no other use.
    op = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
    return op(x, "sum", group.group_name)


def finished(begun: Tensor) -> Tensor:
    """The result of a collective: on a GPU the current stream waits for it, and not the host."""
    return _ops.wait_tensor(begun)


def _sum_of_copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of an `x` that belongs to somebody else."""
    return finished(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Autograd may hold the original for another use.
        return _sum_of_copy(gradient, ctx.group), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum_of_copy(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """f: enter a tensor-parallel region. Every rank of `group` holds the same `x`."""
    return x if group is None else _F.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """g: leave a tensor-parallel region. Every rank of `group` holds one summand; every rank gets the sum."""
    return x if group is None else _G.apply(x, group)
