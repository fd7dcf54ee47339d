"""Losses of tokens with the likeliest ones, for a vocabulary that is cut over a tensor group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from modeling.parallel.cross_entropy import reduce_columns, token_losses
from modeling.parallel.process_grid import Group


def token_scores(logits: Tensor, targets: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy (B, S) of targets (B, S), and True for each that is the likeliest token.

    Among equal logits the first token counts as the likeliest, as in `argmax`. Without gradients.
    """
    first = logits.argmax(-1, keepdim=True)
    if group is None:
        return token_losses(logits, targets, group), first.squeeze(-1) == targets
    own = logits.gather(-1, first).squeeze(-1).float()
    columns = logits.shape[-1]
    token = first.squeeze(-1) + dist.get_rank(group) * columns
    foreign = own < reduce_columns(own, "max", group)
    beyond = columns * dist.get_world_size(group)
    likeliest = reduce_columns(token.masked_fill(foreign, beyond), "min", group)
    return token_losses(logits, targets, group), likeliest == targets
