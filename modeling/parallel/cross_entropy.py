"""Cross-entropy over a whole vocabulary, or one cut over a tensor group, without gathering the logits.

Logits are held once, in their own precision: the backward pass writes their gradient in their place. Only a
block of rows is in fp32, or a register where torch.compile fuses the loop. DeepSpeed 0.19.8 has each half of
this: `chunked_cross_entropy` works in blocks on one rank, `vocab_sequence_parallel_cross_entropy` on a
vocabulary cut over ranks, in fp32 throughout.

Two all-reduces of numbers per token replace an all-gather of the logits (Megatron-LM, 1909.08053, section 3).

Shapes: B samples, S positions, T = B S tokens, V/t columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.parallel.collectives import wait_for
from modeling.parallel.process_grid import Group

BLOCK_ELEMENTS = 1 << 22  # logits in fp32 at once: 16 MiB


class _CrossEntropy(torch.autograd.Function):
    """ln sum_j exp(z_j) - z_target for logits z; each rank holds a block of their columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:  # (T, V/t), (T,)
        columns = logits.shape[-1]
        local = targets if group is None else targets - dist.get_rank(group) * columns
        foreign = (local < 0) | (local >= columns)
        local = local.masked_fill(foreign, 0).unsqueeze(-1)
        largest = logits.amax(-1).float()
        if group is not None:
            largest = reduce_columns(largest, "max", group)
        sums = [(z.float() - largest[rows, None]).exp_().sum(-1) for rows, z in _blocks(logits)]
        target = (logits.gather(-1, local).squeeze(-1).float() - largest).masked_fill(foreign, 0.0)
        both = torch.stack([torch.cat(sums), target])
        if group is not None:
            both = reduce_columns(both, "sum", group)
        logarithm = both[0].log()
        # Saved apart: in their sum, large logits would round off the logarithm.
        ctx.save_for_backward(logits, local, foreign, largest, logarithm)
        return logarithm - both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # (T,)
        logits, local, foreign, largest, logarithm = ctx.saved_tensors
        own = gradient.masked_fill(foreign, 0.0).unsqueeze(-1)
        of_logits = []
        for rows, z in _blocks(logits):
            scores = (z.float() - largest[rows, None]).sub_(logarithm[rows, None])
            of_rows = scores.exp_().mul_(gradient[rows, None])
            if torch.compiler.is_compiling():
                # A traced graph changes nothing in place, and a scattered sum would be a tensor in fp32.
                targets = torch.arange(z.shape[-1], device=z.device) == local[rows]
                of_logits.append(torch.where(targets, of_rows - own[rows], of_rows).to(z.dtype))
            else:
                of_logits.append(z.copy_(of_rows.scatter_add_(-1, local[rows], -own[rows])))
        return of_logits[0] if torch.compiler.is_compiling() else logits, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows; under torch.compile one block, since the compiler fuses the loop."""
    if torch.compiler.is_compiling():
        yield slice(None), logits  # a `range` over the rows would make a graph for each number of rows
        return
    tokens, columns = logits.shape
    rows = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, tokens, rows):
        block = slice(start, min(start + rows, tokens))
        yield block, logits[block]


def reduce_columns(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    return wait_for(torch.ops._c10d_functional.all_reduce(x, operation, group.group_name))


def token_losses(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Return the cross-entropy (B, S), in nats and float32, of logits (B, S, V/t) and targets (B, S).

    The backward pass overwrites the logits with their gradient.
    """
    return _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), group).view_as(targets)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Return the sum of token losses times `weights` (B, S); its mean over micro-batches is the step's."""
    return (token_losses(logits, targets, group) * weights).sum()
