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

from modeling import fusing
from modeling.parallel.collectives import own_rows, wait_for
from modeling.parallel.process_grid import Group

BLOCK_ELEMENTS = 1 << 22  # logits in fp32 at once on a CPU: 16 MiB
# on a GPU without a compiler, which starts a dozen kernels for each block
DEVICE_BLOCK_ELEMENTS = 1 << 26


class _CrossEntropy(torch.autograd.Function):
    """ln sum_j exp(z_j) - z_target for logits z; each rank holds a block of their columns."""

    @staticmethod
    # (T, V/t), (T,)
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        ctx.first = 0 if group is None else dist.get_rank(group) * logits.shape[-1]
        if group is None:
            blocks = [
                fusing.fused(_statistics, z, targets[at]) for at, z in _blocks(logits)
            ]
            losses: Tensor
            losses, largest, logarithm = (
                blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
            )
        else:
            largest = _reduce_columns(logits.amax(-1).float(), "max", group)
            sums = [
                fusing.fused(_sums, z, targets[at], largest[at], ctx.first)
                for at, z in _blocks(logits)
            ]
            both = _reduce_columns(torch.cat(sums, 1), "sum", group)
            logarithm = both[0].log()
            losses = logarithm - both[1]
        # Saved apart: in their sum, large logits would round off the logarithm.
        ctx.save_for_backward(logits, targets, largest, logarithm)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # (T,)
        logits, *kept = ctx.saved_tensors
        of_tokens = [*kept, gradient]
        if torch.compiler.is_compiling():  # a traced graph changes nothing in place
            return _gradient(logits, ctx.first, *of_tokens), None, None
        for at, z in _blocks(logits):
            fusing.fused(_overwrite, z, ctx.first, *(each[at] for each in of_tokens))
        return logits, None, None


def _statistics(z: Tensor, targets: Tensor) -> Tensor:
    """Return (3, T) where all columns are here: losses, largest logits, ln of the sum of exp(z - largest)."""
    largest = z.amax(-1).float()
    sums, target = _sums(z, targets, largest, 0)
    return torch.stack([sums.log() - target, largest, sums.log()])


def _sums(z: Tensor, targets: Tensor, largest: Tensor, first: int) -> Tensor:
    """Return (2, T): sums of exp(z - largest), and z - largest of the targets, 0 of another rank's."""
    sums = (z.float() - largest[:, None]).exp_().sum(-1)
    local, foreign = own_rows(targets, first, z.shape[-1])
    target = z.gather(-1, local[:, None]).squeeze(-1).float() - largest
    return torch.stack([sums, target.masked_fill(foreign, 0.0)])


def _gradient(
    z: Tensor,
    first: int,
    targets: Tensor,
    largest: Tensor,
    logarithm: Tensor,
    gradient: Tensor,
) -> Tensor:
    """Return the gradient of z (T, V/t) from that of the losses."""
    rows = largest[:, None], logarithm[:, None], gradient[:, None]
    of_rows = _probabilities(z, *rows)
    local, foreign = own_rows(targets, first, z.shape[-1])
    at = local[:, None]
    own = gradient.masked_fill(foreign, 0.0)[:, None]
    if not torch.compiler.is_compiling():
        return of_rows.scatter_add_(-1, at, -own)
    # In fused loops; a scattered sum would be a tensor in fp32.
    # to look for the target in each column takes as long as the exponentials
    if z.device.type == "cpu":
        of_target = _probabilities(z.gather(-1, at), *rows) - own
        return of_rows.to(z.dtype).scatter(-1, at, of_target.to(z.dtype))
    at_target = torch.arange(z.shape[-1], device=z.device) == at
    return torch.where(at_target, of_rows - own, of_rows).to(z.dtype)


def _probabilities(
    z: Tensor, largest: Tensor, logarithm: Tensor, gradient: Tensor
) -> Tensor:
    """Return the probabilities of logits z, times the gradient of each row's loss."""
    return (z.float() - largest).sub_(logarithm).exp_().mul_(gradient)


def _overwrite(z: Tensor, *arguments: Any) -> None:
    z.copy_(_gradient(z, *arguments))


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows; one block where a compiler fuses the loop."""
    if torch.compiler.is_compiling() or fusing.fuses(logits):
        # a `range` over the rows would make a graph for each number of rows
        yield slice(None), logits
        return
    most = BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    rows = max(1, most // logits.shape[1])
    yield from (
        (slice(at, at + rows), logits[at : at + rows])
        for at in range(0, len(logits), rows)
    )


def _reduce_columns(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    return wait_for(
        torch.ops._c10d_functional.all_reduce(x, operation, group.group_name)
    )


def token_losses(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Return the cross-entropy (B, S), in nats and float32, of logits (B, S, V/t) and targets (B, S).

    The backward pass overwrites the logits with their gradient.
    """
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), group)
    return losses.view_as(targets)


def weighted_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, group: Group
) -> Tensor:
    """Return the sum of token losses times `weights` (B, S); its mean over micro-batches is the step's."""
    return (token_losses(logits, targets, group) * weights).sum()
