"""The place of a rank's parameter in its canonical tensor, or in the tensor of `transformers`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from launch.checkpoints.geometry import Cut
from launch.checkpoints.manifest import Form
from modeling.initialization import Shard, canonical_name, padded_slice, shard_of


class Placement(NamedTuple):
    """A slice of a full tensor; `shape`: of the full tensor, unpadded; `cut` None: all of it."""

    name: str
    form: Form
    shape: tuple[int, ...]
    cut: Cut | None

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> Placement:
        """Return the place of a parameter with a label by `modeling.initialization.label`."""
        name, shard = canonical_name(parameter), shard_of(parameter)
        # ZeRO-3 leaves an empty tensor behind.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if shard is None:
            return cls(name, "canonical", shape, None)
        if not isinstance(shard, Shard):
            return cls(name, "canonical" if shard.is_canonical else "transformers", shape, None)
        length = shape[shard.dim]
        full = (*shape[: shard.dim], shard.entries, *shape[shard.dim + 1 :])
        return cls(name, "canonical", full, Cut(shard.dim, shard.rank * length, length))

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Cut the slice from a full tensor; padding is zero."""
        return full if self.cut is None else padded_slice(full, *self.cut)
