"""Linear layers and the embedding, cut over a tensor-parallel group (Megatron-LM, 1909.08053, section 3).

Shapes: B samples, S positions, V vocabulary padded to a multiple of 128 x tp, H hidden size, t ranks of the
tensor group. `group` is None when t = 1. Every parameter is drawn inside the leaf module that holds it,
because `deepspeed.zero.Init` partitions parameters as soon as that module's constructor returns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.initialization import Init, Shard
from modeling.parallel.collectives import (
    gather_positions,
    in_rank_order,
    own_rows,
    reduce_from_tensor_parallel,
    scatter_sum,
)
from modeling.parallel.process_grid import Group
from modeling.parallel.products import column_parallel, row_parallel


def group_size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


class ColumnParallelLinear(nn.Module):
    """Y_i = X A_i + b_i: the output features are cut; the input is whole on every rank. Begins with f.

    With `sequence` the input's positions are cut, too: (B, S/t, inputs) -> (t B, S/t, outputs/t), rank order.
    """

    def __init__(self, inputs: int, outputs: int, *, group: Group, init: Init, sequence: bool = False):
        super().__init__()
        self.group, self.sequence = group, sequence
        shard = Shard.over(group, 0)
        self.weight = init.normal("weight", (outputs, inputs), init.std, shard=shard)  # (outputs/t, inputs)
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
        self, inputs: int, outputs: int, *, group: Group, init: Init, sequence: bool = False,
        in_samples: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.group, self.sequence, self.in_samples = group, sequence, in_samples
        shard = Shard.over(group, 1)  # cut by columns
        self.weight = init.normal("weight", (outputs, inputs), init.residual_std, shard=shard)
        self.bias = init.zeros("bias", (outputs,))

    def forward(self, x: Tensor) -> Tensor:  # (B, S, inputs/t) -> (B, S, outputs)
        return row_parallel(x, self.weight, self.bias, self.group, self.sequence, self.in_samples)


class VocabParallelEmbedding(nn.Module):
    """Word embedding cut over the vocabulary; with `project=True` the tied output layer of the same weight.

    One forward serves both uses, since ZeRO-3 gathers a parameter for the module whose forward runs.
    Rows of padding are zero, get no gradient and no logit, so that the loss does not depend on the padding.
    """

    def __init__(self, vocab: int, padded: int, hidden: int, *, group: Group, init: Init):
        super().__init__()
        self.group = group
        shard = Shard.over(group, 0, padded)
        self.weight = init.normal("weight", (vocab, hidden), init.std, shard=shard)  # (V/t, H) on this rank
        self.rows = padded // shard.size
        self.first = shard.rank * self.rows  # first token of this rank
        self.valid = max(0, min(self.rows, vocab - self.first))  # rows that are tokens, not padding

    def forward(self, x: Tensor, project: bool = False, cut: bool = False) -> Tensor:
        """`cut`: the residual stream holds this rank's positions alone, (B, S/t, H)."""
        return self._logits(x, cut) if project else self._embed(x, cut)

    def _embed(self, tokens: Tensor, cut: bool) -> Tensor:  # (B, S) -> (B, S, H)
        if self.group is None:
            return F.embedding(tokens, self.weight)
        if cut:
            tokens = in_rank_order(tokens, self.group)
        local, foreign = own_rows(tokens, self.first, self.rows)
        embedded = F.embedding(local, self.weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return (scatter_sum if cut else reduce_from_tensor_parallel)(embedded, self.group)

    def _logits(self, x: Tensor, cut: bool) -> Tensor:  # (B, S, H) -> (B, S, V/t), -inf at padding
        # All rows take part: matrix units want whole tiles of columns, and 50257 has none.
        whole = gather_positions(x, self.group, summed=True) if cut else x  # samples in one piece
        logits = column_parallel(whole, self.weight, None, None if cut else self.group)
        if self.valid < self.rows:
            logits.detach()[..., self.valid :].fill_(-torch.inf)  # the gradient there is 0 anyway
        return logits
