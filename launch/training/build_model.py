"""Building the model of this rank from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules

from ds_configs.plan import Plan
from launch.ranks import processes
from modeling import cost
from modeling.families import family_of, model_shape
from modeling.fusing import has_gpu_compiler
from modeling.initialization import DTYPES, Init
from modeling.layer_list import Definitions, Pipeline, Stack, share_draws, stage_bounds
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import TransformerLayer


def band_kernel(plan: Plan) -> str | None:
    """Name the kernels that train the sparse layers on this machine's accelerator; None: all are dense.

    The text gives the reason, and says whether a kernel saves scores and whether its speed is known.
    """
    recipe = plan.recipe
    if recipe.model.attention_window is None:
        return None
    from modeling.sparse_attention import choose, computes_fewer_scores

    device = processes.device()
    dtype = DTYPES[plan.precision]
    dropout = recipe.dropout.attention
    length = recipe.sequence_length
    head_size = recipe.model.hidden // recipe.model.heads
    compiler = device.own_memory and has_gpu_compiler()
    said = []
    for window in dict.fromkeys(recipe.model.windows):
        if window is None:
            continue
        kernel, why = choose(
            device.name, dtype, dropout, length, window, head_size, compiler=compiler
        )
        said.append(f"{kernel} ({why})")
        if not computes_fewer_scores(kernel, length, window):
            said.append("counted, not timed: no fewer scores than in dense layers")
    if said and device.own_memory:
        said.append("not measured on a GPU")
    return "; ".join(said) or None


def build_module(
    plan: Plan,
    grid: ProcessGrid,
    given: Mapping[str, torch.Tensor] | None = None,
    *,
    drawn: bool = True,
) -> Stack | Pipeline:
    """Build the model of this rank with its initial weights, partitioned at once under ZeRO-3.

    `given`: full tensors by canonical name, instead of random ones; `drawn` False: no initial weights, since
    a checkpoint will be read into the model. Collective: data-parallel ranks share the draws.
    """
    recipe = plan.recipe
    family = family_of(plan.recipe.model)
    shape = model_shape(recipe, plan.padded_vocab)
    group = grid.tensor_group
    init = Init(
        recipe.seed, recipe.init_std, recipe.model.layers, given=given, drawn=drawn
    )
    if plan.zero_stage == 3:
        init = replace(init, dtype=DTYPES[plan.precision])
    stages = (
        cost.stages_of(recipe, plan.padded_vocab, grid.pp)
        if grid.pp > 1
        else (recipe.model.layers,)
    )
    if drawn and grid.dp > 1:

        def own_layers(init: Init) -> Definitions:
            layers = family.layer_list(shape, group=group, init=init)
            bounds = stage_bounds(layers, stages)
            return layers[bounds[grid.at.pp] : bounds[grid.at.pp + 1]]

        init = share_draws(init, own_layers, grid.data_group, processes.device().name)
    if grid.pp > 1:
        return family.pipeline(shape, grid=grid, group=group, init=init, stages=stages)
    if plan.zero_stage < 3:
        return family.plain(shape, group=group, init=init)
    with deepspeed.zero.Init(
        data_parallel_group=grid.data_group, config_dict_or_path=plan.ds, mpu=grid
    ):
        module = family.plain(shape, group=group, init=init)
    if not processes.device().asynchronous and not recipe.model.shared_layers:
        # Gather a layer's parameters at once, by one set of hooks instead of one for each of its leaves.
        # Not where gathering runs beside computation: DeepSpeed gathers no such layer ahead of its use. Nor
        # shared layers: their gradients would be reduced after each use.
        set_z3_leaf_modules(module, [TransformerLayer])
    return module
