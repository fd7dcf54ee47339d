"""A tensor of one step as the ranks have it, next to the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from launch.experiments.proving.task import key, tensors_of


class Pieces:
    """A tensor that differs on a rank.

    Attributes:
        step: of the optimizer.
        whole: as one process has it, (n,), in double precision.
        before: the same a step earlier; None for gradients.
        own: by rank that differs, its numbers (m,).
        elements: by rank, the numbers (m,) of its elements in the whole.
        equal: ranks that have what one process has.
    """

    def __init__(
        self,
        out: Path,
        reference: Path,
        step: int,
        kind: str,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        self.step = step
        of = f"{kind}/{name}"
        self.name = of
        self.whole = read(tensors_of(reference, step), of)
        earlier = tensors_of(reference, step - 1)
        self.before = (
            read(earlier, of) if kind == "weight" and earlier.exists() else None
        )
        self.own = dict[int, Tensor]()
        self.elements = dict[int, Tensor]()
        self.equal = list[int]()
        for rank in ranks:
            file = out / f"rank-{rank}.safetensors"
            place = key(step, kind, name)
            own = read(file, place)
            if not len(own):
                self.equal.append(rank)
                continue
            self.own[rank] = own
            self.elements[rank] = read(file, f"{place}/elements").long()

    @property
    def assembled(self) -> Tensor:
        """Return the whole tensor with the numbers of the ranks that differ."""
        made = self.whole.clone()
        for rank, own in self.own.items():
            made[self.elements[rank]] = own
        return made

    @property
    def replicas(self) -> dict[tuple[int, int], list[int]]:
        """Return the ranks that differ by the elements that they share, told by the first and the last."""
        groups = dict[tuple[int, int], list[int]]()
        for rank, elements in self.elements.items():
            groups.setdefault((int(elements[0]), int(elements[-1])), []).append(rank)
        return groups


def read(file: Path, name: str) -> Tensor:
    """Return a tensor of a file, (n,), in double precision; an empty one if it is not there."""
    with safe_open(file, "pt") as stored:
        if name not in set(stored.keys()):
            return torch.empty(0)
        tensor: Tensor = stored.get_tensor(name)
    return tensor.double().flatten()
