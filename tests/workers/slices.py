"""Tensor-parallel slices put together again."""

import torch


def joined(shard, slices):
    """The full, unpadded tensor of the slices of all ranks in rank order."""
    full = torch.cat(list(slices), shard.dim).narrow(shard.dim, 0, shard.entries)
    return full.clone(memory_format=torch.contiguous_format)
