"""Checks of initial weights, and of who draws them, under several layouts. Run by modeling_checks.py."""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.experiments.groups import temporary_groups
from launch.training.build_model import build_module
from modeling.families import family_of, model_shape
from modeling.initialization import Init, canonical_name, shard_of
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
CASES = {  # (tp, pp), DeepSpeed configuration, recipe, settings
    "dp4 zero0": ((1, 1), "zero0", "default/sotu", ()),
    "dp4 zero1 bf16": ((1, 1), "zero1", "default/sotu", ("precision=bf16",)),
    "dp4 zero3 bf16": ((1, 1), "zero3", "default/sotu", ("precision=bf16",)),
    "tp2 zero1": ((2, 1), "zero1", "default/sotu", ()),
    "tp2 zero3": ((2, 1), "zero3", "default/sotu", ()),
    "pp2, embedding on both stages": ((1, 2), "pipeline", "default/sotu", ()),
    "pp2 of BERT": ((1, 2), "pipeline", "bert/sotu", ()),
    "tp2 pp2, one copy": ((2, 2), "3d", "default/sotu", ()),
}


def same_weights_in_few_draws(tp: int, pp: int, ds_config: str, row: str, settings: tuple[str, ...]) -> None:
    of = [f"parallel.tp={tp}", f"parallel.pp={pp}", "precision=fp32", *settings]
    recipe = catalog.load(row, of, tiny=True, steps=1)
    plan = resolve(recipe, ds_config, dist.get_world_size(), CPU)
    shape, events = model_shape(recipe, plan.padded_vocab), []
    whole = family_of(recipe.model).plain(
        shape, group=None, init=Init(recipe.seed, recipe.init_std, recipe.model.layers)
    )
    expected = {canonical_name(p): p.detach() for p in whole.parameters()}

    def drawn(*of, draw=Init._normal):
        events.append("draw")
        return draw(*of)

    def sent(*of, broadcast=dist.broadcast, **how):
        events.append("broadcast")
        return broadcast(*of, **how)

    with temporary_groups():
        grid = ProcessGrid(tp, pp, dist.get_world_size() // (tp * pp))
        with mock.patch.object(Init, "_normal", drawn), mock.patch.object(dist, "broadcast", sent):
            module = build_module(plan, grid)
        parameters = list(module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            found = {canonical_name(p): (p.detach().clone(), shard_of(p)) for p in parameters}
        of_ranks = [0] * grid.dp
        dist.all_gather_object(of_ranks, events.count("draw"), group=grid.data_group)
    for name, (local, shard) in found.items():
        full = expected[name][: shard.entries] if shard else expected[name]
        assert torch.equal(local, (shard.of(full) if shard else full).to(local.dtype)), name
    matrices = sum(local.dim() > 1 for local, _ in found.values())
    assert sum(of_ranks) == matrices, of_ranks
    assert max(of_ranks) <= math.ceil(matrices / grid.dp), of_ranks
    assert grid.dp == 1 or events.index("broadcast") == (events[0] == "draw"), "all draw before any sends"


def no_name_twice() -> None:
    """Ranks that meet under the name of an earlier group may find its connections, and hang."""
    names = []
    for _ in range(3):
        with temporary_groups():
            grid = ProcessGrid(2, 1, 2)
            names += [group.group_name for group in (grid.tensor_group, grid.data_group)]
    assert len({*names}) == len(names), names


CHECKS = {"names of groups": no_name_twice}
CHECKS |= {
    f"draws, {name}": partial(same_weights_in_few_draws, *of[0], *of[1:]) for name, of in CASES.items()
}
