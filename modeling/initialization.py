"""Initial weights as a function of (seed, parameter name), never of the layout.

A rank draws the full tensor of a parameter and keeps its slice, so that one recipe starts from the same
weights under every layout. The draw comes from numpy's counter-based Philox generator keyed by the seed and
the name: it does not depend on the order in which layers are built, nor on the rank that draws, and
`deepspeed.zero.Init`, which replaces torch's constructors, cannot reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from modeling.parallel.process_grid import Group

# by the names of recipes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# beginnings of the canonical names of a task head's new parameters
NEW_HEADS = ("head.",)
Size = tuple[int, ...]
# of a rank's slice of the parameter of this name
Draw = tuple[str, Size, torch.dtype, Callable[[], Tensor]]


def shared_draws(
    draws: Sequence[Draw], group: Group, device: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and slices of these draws on the CPU, each drawn by one rank of `group`. Collective.

    All ranks draw one each, then send them in turn, on `device`.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    for start in range(0, len(draws), size):
        block = draws[start : start + size]
        own = [draw() for *_, draw in block[rank : rank + 1]]
        for source, (name, shape, dtype, _) in enumerate(block):
            sent = (
                own.pop()
                if source == rank
                else torch.from_numpy(np.empty(shape, np.float32)).to(dtype)
            )
            sent = sent.to(device)
            dist.broadcast(sent, group=group, group_src=source)
            yield name, sent.cpu()


@dataclass(frozen=True)
class Init:
    """Names and draws the parameters of one module; `child` goes one level down."""

    seed: int
    std: float
    layers: int
    name: str = ""
    # of the parameters; drawn in float32 whatever it is
    dtype: torch.dtype = torch.float32
    meta: bool = False  # shapes only, on the meta device
    # full tensors, instead of draws
    given: Mapping[str, Tensor] | None = field(default=None, repr=False)
    # beginnings of names that are drawn where the given tensors lack them
    new: tuple[str, ...] = ()
    # False: zeros, of a model whose weights are read from a checkpoint
    drawn: bool = True
    # gets all draws of a model with `meta`
    draws: list[Draw] | None = field(default=None, repr=False)
    shared: Iterator[tuple[str, Tensor]] | None = field(
        default=None, repr=False
    )  # their slices, by other ranks too

    def child(self, name: str) -> Init:
        whole = f"{self.name}.{name}" if self.name else name
        return replace(self, name=whole)

    @property
    def residual_std(self) -> float:
        """Standard deviation of projections onto the residual stream (GPT-2 report, section 2.3)."""
        return float(self.std / (2 * self.layers) ** 0.5)

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return np.random.Generator(
            np.random.Philox(key=int.from_bytes(digest[:16], "little"))
        )

    def _normal(self, name: str, shape: Size, std: float) -> Tensor:
        values = self._generator(name).standard_normal(size=shape, dtype=np.float32)
        values *= np.float32(std)
        return torch.from_numpy(values)

    def words(self, leaf: str, count: int) -> Tensor:
        """Draw (count,) int64 of random bits, the same on every rank; they are no parameter."""
        if self.meta:
            return torch.empty(count, dtype=torch.int64, device="meta")
        bits = self._generator(self.child(leaf).name).integers(
            0, 2**64, count, np.uint64
        )
        return torch.from_numpy(bits.view(np.int64))

    def normal(
        self, leaf: str, shape: Size, std: float, *, shard: Shard | None = None
    ) -> Parameter:
        """Draw N(0, std^2) of the full `shape` and keep this rank's slice."""
        return self._parameter(
            leaf, shape, shard, lambda name: self._normal(name, shape, std), True
        )

    def zeros(self, leaf: str, shape: Size, *, shard: Shard | None = None) -> Parameter:
        return self._parameter(
            leaf,
            shape,
            shard,
            lambda name: torch.from_numpy(np.zeros(shape, np.float32)),
        )

    def ones(self, leaf: str, shape: Size) -> Parameter:
        return self._parameter(
            leaf, shape, None, lambda name: torch.from_numpy(np.ones(shape, np.float32))
        )

    def _parameter(
        self,
        leaf: str,
        shape: Size,
        shard: Shard | None,
        fill: Callable[[str], Tensor],
        drawn: bool = False,
    ) -> Parameter:
        name = self.child(leaf).name
        size = shard.local_shape(shape) if shard else shape
        lacking = self.given is None or (
            name.startswith(self.new or ("\0",)) and name not in self.given
        )

        def own_slice() -> Tensor:
            full = fill(name) if lacking else self._given(name, shape)
            return (shard.of(full) if shard else full).to(self.dtype)

        if self.meta:
            local = torch.empty(size, dtype=self.dtype, device="meta")
            if self.draws is not None and drawn and lacking:
                self.draws.append((name, size, self.dtype, own_slice))
        elif not self.drawn:
            local = torch.from_numpy(np.zeros(size, np.float32)).to(self.dtype)
        else:
            sent, local = (
                next(self.shared)
                if self.shared and drawn and lacking
                else (name, own_slice())
            )
            assert sent == name, f"{name} is built where {sent} was recorded"
        parameter = Parameter(local)
        own = None if shard is None else replace(shard, entries=shape[shard.dim])
        label(parameter, name, own)
        if shard is not None and shard.size > 1:
            # DeepSpeed counts parameters without this mark once per tensor group in the gradient norm.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        return parameter

    def _given(self, name: str, shape: Size) -> Tensor:
        """Return a given weight; ValueError if it is absent or has another shape."""
        assert self.given is not None
        full = self.given.get(name)
        if full is None or tuple(full.shape) != tuple(shape):
            came = "lack it" if full is None else f"have shape {tuple(full.shape)}"
            raise ValueError(
                f"{name} has shape {tuple(shape)} in this model, but the given weights {came}"
            )
        return full.float()


@dataclass(frozen=True)
class Shard:
    """A cut of dimension `dim` over a tensor group; zeros first fill it up to `padded` entries."""

    dim: int
    rank: int
    size: int
    padded: int | None = None
    # of the full, unpadded tensor; set on the shard that a parameter carries
    entries: int = 0

    @staticmethod
    def over(group: Group, dim: int, padded: int | None = None) -> Shard:
        if group is None:
            return Shard(dim, 0, 1, padded)
        return Shard(dim, dist.get_rank(group), dist.get_world_size(group), padded)

    def local_shape(self, shape: Size) -> Size:
        entries = self.padded or shape[self.dim]
        assert entries % self.size == 0, (
            f"{entries} entries cannot be cut over {self.size} ranks"
        )
        return (*shape[: self.dim], entries // self.size, *shape[self.dim + 1 :])

    def of(self, full: Tensor) -> Tensor:
        """Return this rank's slice of a full, unpadded tensor (a copy)."""
        length = self.local_shape(tuple(full.shape))[self.dim]
        return padded_slice(full, self.dim, self.rank * length, length)


def padded_slice(full: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Copy `length` entries of a dimension from `start` on; zeros beyond the tensor's end."""
    start = min(start, full.shape[dim])
    kept = full.narrow(dim, start, min(length, full.shape[dim] - start))
    missing = list(kept.shape)
    missing[dim] = length - kept.shape[dim]
    return torch.cat([kept, kept.new_zeros(missing)], dim)


def label(parameter: Parameter, name: str, shard: Any) -> None:
    """Attach the canonical name and the cut (a `Shard`, a stand-in, or None) for checkpoints."""
    parameter.canonical_name = name  # type: ignore[attr-defined]
    parameter.shard = shard  # type: ignore[attr-defined]


def canonical_name(parameter: Parameter) -> str:
    """Return the name attached by `label`."""
    # torch's class does not know the attribute
    return parameter.canonical_name  # type: ignore[attr-defined, no-any-return]


def shard_of(parameter: Parameter) -> Any:
    """Return the shard, or its stand-in, attached by `label`; None: the parameter is not cut."""
    return parameter.shard  # type: ignore[attr-defined]
