"""Cross-entropy over a vocabulary that may be cut over a tensor-parallel group, without gathering the logits.

Logits are held once, in their own precision: the backward pass writes their gradient in their place. What is
in fp32 is a block of rows, or a register where torch.compile makes one loop of it. `chunked_cross_entropy`
of DeepSpeed 0.19.8 does the same in blocks for one rank, and its `vocab_sequence_parallel_cross_entropy` for
a vocabulary that is cut, in fp32 throughout; neither does both.

Two all-reduces of numbers per token replace an all-gather of the logits (Megatron-LM, 1909.08053, section 3).

Shapes: B samples, S positions, T = B S tokens, V/t columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.parallel.collectives import finished
from modeling.parallel.process_grid import Group

BLOCK_ELEMENTS = 1 << 22  # of the logits that are in fp32 at once: 16 MiB


class _CrossEntropy(torch.autograd.Function):
    """ln sum_j exp(z_j) - z_target for logits z of which each rank holds a block of columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:  # (T, V/t), (T,)
        columns = logits.shape[-1]
        local = targets if group is None else targets - dist.get_rank(group) * columns
        foreign = (local < 0) | (local >= columns)
        local = local.masked_fill(foreign, 0).unsqueeze(-1)
        largest = logits.amax(-1).float()
        if group is not None:
            largest = _reduced(largest, "max", group)
        sums = [(z.float() - largest[rows, None]).exp_().sum(-1) for rows, z in _blocks(logits)]
        target = (logits.gather(-1, local).squeeze(-1).float() - largest).masked_fill(foreign, 0.0)
        both = torch.stack([torch.cat(sums), target])
        if group is not None:
            both = _reduced(both, "sum", group)
        logarithm = both[0].log()
        # Apart: their sum would round off the logarithm where logits are large.
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
                # Nothing is changed in place, and a scattered sum would be a tensor in fp32.
                targets = torch.arange(z.shape[-1], device=z.device) == local[rows]
                of_logits.append(torch.where(targets, of_rows - own[rows], of_rows).to(z.dtype))
            else:
                of_logits.append(z.copy_(of_rows.scatter_add_(-1, local[rows], -own[rows])))
        return of_logits[0] if torch.compiler.is_compiling() else logits, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows; one where they are traced, since the compiler makes none of it whole."""
    if torch.compiler.is_compiling():
        yield slice(None), logits  # a `range` over the rows would make a graph of its own for each number
        return
    tokens, columns = logits.shape
    rows = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, tokens, rows):
        block = slice(start, min(start + rows, tokens))
        yield block, logits[block]


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    return finished(torch.ops._c10d_functional.all_reduce(x, operation, group.group_name))


def token_losses(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Logits (B, S, V/t) of any precision, targets (B, S) -> cross-entropy (B, S) in nats, float32.

    The backward pass overwrites the logits with their gradient.
    """
    return _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), group).view_as(targets)


def token_scores(logits: Tensor, targets: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Logits (B, S, V/t), targets (B, S) -> their cross-entropy (B, S), and whether each is the likeliest.

    Of equal logits the first token is the likeliest, as of `argmax`. Without gradients.
    """
    first = logits.argmax(-1, keepdim=True)
    if group is None:
        return token_losses(logits, targets, group), first.squeeze(-1) == targets
    own = logits.gather(-1, first).squeeze(-1).float()
    columns = logits.shape[-1]
    token = first.squeeze(-1) + dist.get_rank(group) * columns
    foreign = own < _reduced(own, "max", group)
    beyond = columns * dist.get_world_size(group)
    likeliest = _reduced(token.masked_fill(foreign, beyond), "min", group)
    return token_losses(logits, targets, group), likeliest == targets


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Sum of token losses times `weights` (B, S), by which micro-batches average to the step's mean."""
    return (token_losses(logits, targets, group) * weights).sum()
