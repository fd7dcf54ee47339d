"""Canonical weights that are read when they are asked for, so that a model never lies in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


def same_numbers(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Whether two tensors of any types hold the same numbers, of which few are held at a time."""
    if one.shape != other.shape:
        return False
    parts = zip(one.split(rows), other.split(rows), strict=True) if one.dim() else ((one, other),)
    return all(torch.equal(a.float(), b.float()) for a, b in parts)


class LazyWeights(Mapping[str, Tensor]):
    """Canonical name -> the full float32 tensor, made each time out of files that are mapped into memory.

    Each is a copy of its own: what becomes of the files afterwards does not reach a model.
    """

    def __init__(self, sources: Mapping[str, Callable[[], Tensor]]):
        self._sources = dict(sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources  # Mapping's own would read it

    def __getitem__(self, name: str) -> Tensor:
        stored = self._sources[name]()
        return stored.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def not_finite(self) -> list[str]:
        """Names of tensors with NaN or infinity. Reads all of them, one after the other."""
        return [name for name, source in self._sources.items() if not source().isfinite().all()]
