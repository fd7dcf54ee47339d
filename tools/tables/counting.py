"""Parameter counts of each (tensor, pipeline) rank, by building its real modules on the meta device.

`modeling.cost` has the same numbers as closed forms. Here they are counted on the modules of a run: the
family's list of layers, the pipeline's cut into stages, and the layers' constructors with the rank and the
size of a tensor-parallel group. No parameter has memory, so 193e9 of them on 256 ranks take a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import nn

# registers the backend "fake"
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling.formats.huggingface import gpt2
from modeling.initialization import Init, canonical_name, shard_of
from modeling.layer_list import (
    LayerDefinition,
    LayerList,
    ModelShape,
    build,
    stage_bounds,
)
from modeling.parallel.process_grid import Group
from recipes.schema import Model


@dataclass(frozen=True)
class RankCounts:
    """Numbers of parameters of one replica of a model (tp x pp ranks).

    Attributes:
        held: [stage][tensor rank]: parameters on that rank, padding of the vocabulary included.
        once: parameters of the model, each counted once: no padding, no copy on a second rank or stage.
        layers: [stage]: transformer layers.
    """

    held: tuple[tuple[int, ...], ...]
    once: int
    layers: tuple[int, ...]

    @property
    def all_ranks(self) -> int:
        """Parameters of all ranks, as Megatron-LM prints; the last stage's tied embedding counts again."""
        return sum(map(sum, self.held))


@cache
def count(
    layer_list: LayerList, shape: ModelShape, tp: int, layers: tuple[int, ...]
) -> RankCounts:
    """Build every rank of a replica and count its parameters; `layers`: transformer layers of every stage.

    Raises:
        AssertionError: a dimension that the ranks cannot share (the recipe's layout is wrong), or parameters
            that do not make up the same tensor on every rank (our bug).
    """
    once: dict[str, int] = {}
    ranks = []  # [tensor rank][stage]: parameters
    for rank in range(tp):
        with tensor_rank(rank, tp) as group:
            init = Init(seed=0, std=1.0, layers=shape.layers, meta=True)
            definitions = layer_list(shape, group=group, init=init)
            bounds = pairwise(stage_bounds(definitions, layers))
            ranks.append([_count_stage(definitions[a:b], once) for a, b in bounds])
    return RankCounts(tuple(zip(*ranks, strict=True)), sum(once.values()), layers)


def _count_stage(stage: Sequence[LayerDefinition], once: dict[str, int]) -> int:
    """Count the parameters of a stage on one rank; write each one's full size into `once`."""
    held = 0
    for module in build(stage).values():
        for p in module.parameters():
            name = canonical_name(p)
            assert p.is_meta, f"{name} has memory: it was not made by Init"
            held += p.numel()
            size = prod(full_shape(p))
            same = once.setdefault(name, size) == size
            assert same, f"{name} has another size on another rank"
    return held


@contextmanager
def tensor_rank(rank: int, size: int) -> Iterator[Group]:
    """Give this process the place `rank` in a fake tensor-parallel group; None for size 1.

    Raises:
        RuntimeError: this process is in a real process group.
    """
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("count ranks before this process joins a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@cache
def count_transformers(model: Model, positions: int) -> RankCounts:
    """Count the GPT-2 of `transformers` on one rank (only ZeRO shards it), built on the meta device."""
    config = gpt2.config(model, positions=positions)
    with torch.device("meta"):
        built = gpt2.CONVERSION.model_class(model)(config)
    parameters = sum(p.numel() for p in built.parameters())
    return RankCounts(((parameters,),), parameters, (model.layers,))


def full_shape(parameter: nn.Parameter) -> list[int]:
    """Return the shape of the full, unpadded tensor of this rank's `parameter`."""
    shape = list(parameter.shape)
    shard = shard_of(parameter)
    if shard:
        shape[shard.dim] = shard.entries
    return shape
