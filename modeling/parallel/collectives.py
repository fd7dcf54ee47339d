"""The conjugate pair f and g of Megatron-LM (arXiv 1909.08053, section 3, figure 3).

f stands before a column-parallel layer: identity forward, all-reduce of the gradient backward.
g stands after a row-parallel layer: all-reduce forward, identity backward.
Both are the identity, and vanish, in a group of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.parallel.process_grid import Group


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Autograd may hold the original for another use.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """f: enter a tensor-parallel region. Every rank of `group` holds the same `x`."""
    return x if group is None else _F.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """g: leave a tensor-parallel region. Every rank of `group` holds one summand; every rank gets the sum."""
    return x if group is None else _G.apply(x, group)
