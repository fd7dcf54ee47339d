"""Parameters that each (tensor, pipeline) rank holds, by building its real modules on the meta device.

`modeling.cost` has the same numbers as closed forms. Here they are counted on the modules that train: the
family's list of layers, cut into stages by DeepSpeed's own partition, each layer made by the constructor that
a run calls, with the rank and the size of a tensor-parallel group. No parameter has memory, so 193e9 of them
on 256 ranks take a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import partition_balanced
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from modeling.huggingface import gpt2
from modeling.initialization import Init, canonical_name, full_shape
from modeling.layer_list import LayerDefinition, LayerList, ModelShape
from modeling.transformer import TransformerLayer
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
    def stages(self) -> tuple[int, ...]:
        """Sum over the tensor-parallel ranks of each stage: the size that Megatron-LM prints at one stage."""
        return tuple(sum(ranks) for ranks in self.held)

    @property
    def all_ranks(self) -> int:
        """Sum over all ranks; the last stage's copy of the tied embedding counts again."""
        return sum(self.stages)


@cache
def count(layer_list: LayerList, shape: ModelShape, tp: int, pp: int) -> RankCounts:
    """Build every rank of a replica and count.

    Raises:
        AssertionError: a dimension that the ranks cannot share (the recipe's layout is wrong), or parameters
            that do not make up the same tensor on every rank (our bug).
    """
    ranks = [_stages_of_rank(layer_list, shape, rank, tp, pp) for rank in range(tp)]
    whole: dict[str, int] = {}
    for stage in (stage for stages in ranks for stage in stages):
        for name, size in stage.whole.items():
            assert whole.setdefault(name, size) == size, f"{name} has another size on another rank"
    held = tuple(tuple(stage.held for stage in stages) for stages in zip(*ranks, strict=True))
    return RankCounts(held, sum(whole.values()), tuple(stage.layers for stage in ranks[0]))


@dataclass(frozen=True)
class _Stage:
    """One rank's part of one stage: parameters held, the full size of each by name, transformer layers."""

    held: int
    whole: dict[str, int]
    layers: int


def bounds(definitions: Sequence[LayerDefinition], pp: int) -> list[int]:
    """First layer of every stage, and the end: what DeepSpeed chooses for `pipeline_module`."""
    if pp == 1:
        return [0, len(definitions)]
    return list(_partition(tuple(int(d.kind is TransformerLayer) for d in definitions), pp))


@cache
def _partition(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    return tuple(int(bound) for bound in partition_balanced(list(weights), parts))


def _stages_of_rank(layer_list: LayerList, shape: ModelShape, rank: int, tp: int, pp: int) -> list[_Stage]:
    """Every stage on one tensor-parallel rank."""
    init = Init(seed=0, std=1.0, layers=shape.layers, meta=True)
    with tensor_rank(rank, tp) as group:
        definitions = layer_list(shape, group=group, init=init)
        cuts = bounds(definitions, pp)
        return [_stage(definitions[start:stop]) for start, stop in zip(cuts, cuts[1:], strict=False)]


def _stage(definitions: Sequence[LayerDefinition]) -> _Stage:
    """Entries of one name share a module within a stage, as `Stack` and `PipelineModule` have it."""
    held, layers, whole = 0, 0, {}
    for d in {d.name: d for d in reversed(definitions)}.values():
        module = d.kind(**d.arguments)
        layers += isinstance(module, TransformerLayer)
        for p in module.parameters():
            assert p.device == torch.device("meta"), (
                f"{d.name}: a parameter has memory: it was not made by Init"
            )
            held += p.numel()
            whole[canonical_name(p)] = prod(full_shape(p))
    return _Stage(held, whole, layers)


@contextmanager
def tensor_rank(rank: int, size: int) -> Iterator[dist.ProcessGroup | None]:
    """A tensor-parallel group whose `rank` this process is, though the others do not exist; None for size 1.

    Raises:
        RuntimeError: this process is in a real process group.
    """
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError(
            "the ranks of a layout cannot be counted inside a process group: count before it is started"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@cache
def count_transformers(model: Model, positions: int) -> RankCounts:
    """The GPT-2 of `transformers` on its one rank (ZeRO alone shards it), built on the meta device."""
    with torch.device("meta"):
        built = gpt2.CONVERSION.model_class(model)(gpt2.config(model, positions=positions))
    parameters = sum(p.numel() for p in built.parameters())
    return RankCounts(((parameters,),), parameters, (len(built.transformer.h),))
