"""Cross-entropy over a vocabulary that is cut over a tensor-parallel group, without gathering the logits.

Three all-reduces of (B, S) numbers replace an all-gather of (B, S, V) (Megatron-LM, 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling.parallel.process_grid import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """ln sum_j exp(z_j) - z_target for logits z of which each rank holds a block of columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup
    ) -> Tensor:  # (B, S, V/t) float32, (B, S)
        columns = logits.shape[-1]
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)

        local = targets - dist.get_rank(group) * columns
        foreign = (local < 0) | (local >= columns)
        local = local.masked_fill(foreign, 0)
        target_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(target_logit, group=group)

        softmax = shifted.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(total, group=group)
        softmax = softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, foreign)
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # (B, S)
        softmax, local, foreign = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, local.unsqueeze(-1), -own) * gradient.unsqueeze(-1), None, None


def token_losses(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Logits (B, S, V/t) of any precision, targets (B, S) -> cross-entropy (B, S) in nats, float32."""
    logits = logits.float()
    if group is None:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return _VocabParallelCrossEntropy.apply(logits, targets, group)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Sum of token losses times `weights` (B, S), by which micro-batches average to the step's mean."""
    return (token_losses(logits, targets, group) * weights).sum()
