"""Collectives of tensor parallelism: f and g of Megatron-LM (arXiv 1909.08053, section 3, figure 3).

f stands before a column-parallel layer: identity forward, all-reduce of the gradient backward.
g stands after a row-parallel layer: all-reduce forward, identity backward.
Both are the identity, and vanish, in a group of one rank. f is in `layers.py`, with the layer's products.

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) each rank holds 1/t of
the positions between the tensor-parallel regions; f becomes an all-gather and g a reduce-scatter, each the
other's backward pass. Collectives join and cut the first dimension, so a gathered tensor is in *rank order*:
(t B, S/t, ...), all samples' positions of the first rank, then those of the next. Layers that treat
positions alike compute in that order; attention and loss need samples in one piece.

A collective is begun in one call and awaited in another; work between them overlaps with it. These are
torch's functional collectives: torch.compile keeps them in its graph, and they run on gloo and NCCL alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.parallel.process_grid import Group

# Torch's operators have no types: what they return is Any.
_ops = torch.ops._c10d_functional


def begin_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to add up a contiguous `x` over the ranks and overwrite it; `wait_for` returns the sum."""
    # A traced graph changes nothing in place; the compiler may, if the value has no other use.
    op = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
    return op(x, "sum", group.group_name)  # type: ignore[no-any-return]


def wait_for(begun: Tensor) -> Tensor:
    """Return the result of a collective; on a GPU the current stream waits for it, not the host."""
    return _ops.wait_tensor(begun)  # type: ignore[no-any-return]


def _sum_of_copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks and leave `x` as it is."""
    return wait_for(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def begin_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to collect (B, S/t, ...) of every rank as (t B, S/t, ...)."""
    return _ops.all_gather_into_tensor(  # type: ignore[no-any-return]
        x.contiguous(), dist.get_world_size(group), group.group_name
    )


def begin_scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to add up (t B, S/t, ...) over the ranks; each gets its own (B, S/t, ...) of the sum."""
    return _ops.reduce_scatter_tensor(  # type: ignore[no-any-return]
        x.contiguous(), "sum", dist.get_world_size(group), group.group_name
    )


def in_rank_order(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reorder (B, S, ...) to (t B, S/t, ...)."""
    cut = torch.unflatten(x, 1, (dist.get_world_size(group), -1))
    return cut.transpose(0, 1).flatten(0, 1)


def in_sample_order(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reorder (t B, S/t, ...) to (B, S, ...)."""
    cut = torch.unflatten(x, 0, (dist.get_world_size(group), -1))
    return cut.transpose(0, 1).flatten(1, 2)


def own_positions(x: Tensor, group: Group) -> Tensor:
    """Cut this rank's (B, S/t, ...) out of a (B, S, ...) of every rank; no gradient flows back."""
    if group is None:
        return x
    length = x.shape[1] // dist.get_world_size(group)
    # Contiguous, as stages of a pipeline send it.
    return x.narrow(1, dist.get_rank(group) * length, length).contiguous()


def own_rows(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens among this rank's `rows` from `first` on; 0 and True for foreign ones."""
    local = tokens - first
    foreign = (local < 0) | (local >= rows)
    return local.masked_fill(foreign, 0), foreign


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum_of_copy(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """g: leave a tensor-parallel region. Every rank of `group` holds one summand; every rank gets the sum."""
    return x if group is None else _G.apply(x, group)


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, summed: bool) -> Tensor:
        ctx.group = group
        ctx.summed = summed
        return in_sample_order(wait_for(begin_gather(x, group)), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        if ctx.summed:
            own = wait_for(begin_scattered_sum(in_rank_order(gradient, group), group))
        else:
            own = own_positions(gradient, group)
        return own, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return wait_for(begin_scattered_sum(x, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return wait_for(begin_gather(gradient, ctx.group)), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    # not *parameters: torch.compile would take the first for ctx, as ctx saves no tensor
    def forward(
        ctx: Any, first: Tensor, second: Tensor | None, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor | None]:
        ctx.group = group
        return first.view_as(first), None if second is None else second.view_as(second)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        there = [gradient for gradient in gradients if gradient is not None]
        joined = wait_for(
            begin_sum(torch.cat([gradient.flatten() for gradient in there]), ctx.group)
        )
        summed = joined.split([gradient.numel() for gradient in there])
        first, *second = (
            part.view_as(gradient) for part, gradient in zip(summed, there, strict=True)
        )
        return first, second[0] if second else None, None


def gather_positions(x: Tensor, group: Group, *, summed: bool) -> Tensor:
    """Gather x (B, S/t, ...) of every rank to (B, S, ...) on every rank.

    `summed`: the ranks' gradients are summands, since the next layer is cut; else all ranks have the same.
    """
    return x if group is None else _GatherPositions.apply(x, group, summed)


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region: summands (t B, S/t, ...) of every rank -> the sum, (B, S/t, ...)."""
    summed: Tensor = _ScatterSum.apply(x, group)
    return summed


def with_summed_gradients(
    group: Group, first: Tensor, second: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Apply f, which sums gradients, to parameters of every rank for its own positions."""
    parameters: tuple[Any, ...] = (
        (first, second) if group is None else _SumGradients.apply(first, second, group)
    )
    return parameters[:1] if second is None else parameters
