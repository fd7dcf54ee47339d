"""Modules under tensor parallelism against the same modules without, on the ranks of one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from slices import joined as join
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modeling.initialization import Init, Shard

Group = dist.ProcessGroup | None
Build = Callable[[Group, Init], nn.Module]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same normal numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Equal up to `tolerance`, as the L2 norm of the difference relative to that of `expected`."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert float(expected.norm()) > 0, f"{what}: nothing to compare, all is zero"
    difference = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert difference <= tolerance, (
        f"{what} differs by {difference:.1e} (relative L2 norm), more than {tolerance:.0e}"
    )


def gathered(local: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The tensors of all ranks of `group`, in rank order."""
    if group is None:
        return [local]
    local = local.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return parts


def equal_on_all_ranks(local: torch.Tensor, group: Group) -> bool:
    return all(torch.equal(part, local) for part in gathered(local, group))


def joined(parameter: nn.Parameter, tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """What a group holds of a parameter or its gradient: one full tensor if it is cut, else all copies."""
    shard: Shard | None = parameter.shard
    parts = gathered(tensor, group)
    return parts if shard is None else [join(shard, parts)]


def given_weights(build: Build, *, std: float = 0.3, dtype: torch.dtype = torch.float64) -> Init:
    """An Init of random numbers: zero biases and unit LayerNorms would hide what is done to them.

    `std` is large enough for attention far from uniform, so that queries and keys matter.
    """
    dense = build(None, Init(seed=1, std=std, layers=1, meta=True))
    weights = {}
    for i, parameter in enumerate(dense.parameters()):
        shape = list(parameter.shape)
        if parameter.shard is not None:
            shape[parameter.shard.dim] = parameter.shard.entries
        weights[parameter.canonical_name] = std * randn(*shape, seed=1000 + i, dtype=dtype)
    return _Given(seed=1, std=std, layers=1, dtype=dtype, given=weights)


class _Given(Init):
    """Does not round what is given to float32, so that comparisons can be tight."""

    def _given(self, name, shape):
        super()._given(name, shape)
        return self.given[name]


@dataclass
class Passed:
    """One forward and backward pass."""

    output: torch.Tensor
    input_gradient: torch.Tensor | None
    gradients: dict[str, list[torch.Tensor]]  # by canonical name: the joined tensor, or each rank's copy


def both_passes(module: nn.Module, x: torch.Tensor, cotangent: torch.Tensor, group: Group) -> Passed:
    """Forward of `x`, backward of `cotangent`; the gradients of the parameters joined over `group`."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = module(x)
    output.backward(cotangent)
    return Passed(output.detach(), x.grad, gradients(module, group))


def gradients(module: nn.Module, group: Group) -> dict[str, list[torch.Tensor]]:
    return {p.canonical_name: joined(p, p.grad, group) for p in module.parameters()}


def same_gradients(
    actual: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]], tolerance: float = 1e-10
) -> None:
    """Every copy of every gradient of a tensor-parallel module is that of the dense one."""
    assert actual.keys() == expected.keys()
    for name, copies in actual.items():
        for copy in copies:
            close(copy, expected[name][0], f"gradient of {name}", tolerance)


class Collectives(TorchDispatchMode):
    """Records (operation, elements of the largest tensor) of every collective, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if function.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            tensors = [
                t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
            ]
            self.seen.append((name, max(t.numel() for t in tensors)))
        return function(*args, **(kwargs or {}))


class Order(TorchDispatchMode):
    """Records the names of collectives, of their ends, and of matrix products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if function.namespace == "_c10d_functional" or name in ("mm", "addmm"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    with Collectives() as mode:
        yield mode.seen
