"""Sums of the bits of tensors: one flipped bit changes them, and they are equal where the bits are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

# bytes; torch adds up int64 at the speed of memory, narrower types thirty times slower
WORD = 8
BLOCK = 1024  # words
ODD = -7046029254386353131  # a factor that loses no bit modulo 2**64


def block_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Add up the bits of a tensor, read as int64, by blocks of BLOCK words; the last one may be shorter.

    Return (blocks,) int64, modulo 2**64.
    """
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.storage_offset() % WORD:  # no view of another type begins there
        octets = octets.clone()
    block = WORD * BLOCK  # octets
    whole = len(octets) // block * block
    sums = octets[:whole].view(torch.int64).view(-1, BLOCK).sum(1)
    if whole == len(octets):
        return sums
    missing = -len(octets) % WORD
    rest = F.pad(octets[whole:], (0, missing)).view(torch.int64)
    last = rest.sum().view(1)
    return torch.cat([sums, last])


def batch_sum(batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Add up the bits of a step's micro-batches, each where it lies; a scalar in int64, on the device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for batch in batches:
        for tensor in batch.values():
            sums.setdefault(tensor.device, []).append(block_sums(tensor).sum())
    totals = [torch.stack(each).sum() for each in sums.values()]
    if len(totals) == 1:
        return totals[0]
    on_host, on_device = sorted(totals, key=lambda total: total.device.type != "cpu")
    return on_device + on_host.item()
