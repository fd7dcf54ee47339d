"""Canonical weights read on demand, so that a model is never in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor


def same_numbers(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Check that two tensors of any types hold the same numbers, `rows` rows at a time."""
    if one.shape != other.shape:
        return False
    parts = (
        zip(one.split(rows), other.split(rows), strict=True)
        if one.dim()
        else ((one, other),)
    )
    return all(torch.equal(a.float(), b.float()) for a, b in parts)


class LazyWeights(Mapping[str, Tensor]):
    """Canonical name -> the full float32 tensor, read anew at each access from memory-mapped files.

    Each tensor is a copy: later changes of the files do not reach a model.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]):
        self._names = dict.fromkeys(names)
        self._read = read

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read it

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._read(name).to(
            torch.float32, copy=True, memory_format=torch.contiguous_format
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def not_finite(self) -> list[str]:
        """Return the names of tensors with NaN or infinity. Reads all tensors, one after the other."""
        return [name for name in self if not self._read(name).isfinite().all()]
