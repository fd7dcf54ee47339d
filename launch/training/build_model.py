"""From a recipe to a model: the one place that knows which families there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ds_configs.plan import Plan
from modeling.banded_attention import choose, computes_fewer_scores, has_gpu_compiler
from modeling.bert import Bert, BertShape, bert_pipeline
from modeling.dtypes import DTYPES
from modeling.gpt2 import GPT2, GPT2Shape, gpt2_pipeline
from modeling.huggingface.gpt2 import read_hf
from modeling.initialization import Init
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import LayerShape
from recipes.layout import padded_vocab
from recipes.schema import Recipe

PLAIN = {"gpt2": GPT2, "bert": Bert}
PIPELINE = {"gpt2": gpt2_pipeline, "bert": bert_pipeline}


def model_shape(recipe: Recipe, padded_vocab: int) -> GPT2Shape | BertShape:
    m = recipe.model
    common = dict(
        layers=m.layers, hidden=m.hidden, heads=m.heads, vocab=m.vocab_size, padded_vocab=padded_vocab,
        positions=recipe.sequence_length, hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention,
        checkpoint_interval=recipe.checkpoint_interval,
    )  # fmt: skip
    if m.family == "gpt2":
        return GPT2Shape(**common, windows=m.windows)
    return BertShape(**common, post_norm=m.layer_norm == "post", sentence_head=m.sentence_head)


def layer_kinds(shape: GPT2Shape | BertShape) -> dict[LayerShape, int]:
    """How many layers there are of each shape, in the order in which the shapes first occur."""
    layers = [shape.layer_at(i) if isinstance(shape, GPT2Shape) else shape.layer for i in range(shape.layers)]
    return {kind: layers.count(kind) for kind in dict.fromkeys(layers)}


def band_kernel(plan: Plan) -> str | None:
    """What computes the banded layers in training on this machine's accelerator, for the plan; None: all layers are dense.

    Says why, whether it computes fewer scores than dense layers would, and that speeds on CUDA are unknown.
    """
    recipe, window = plan.recipe, plan.recipe.model.attention_window
    if window is None:
        return None
    device, head_size = get_accelerator().device_name(), recipe.model.hidden // recipe.model.heads
    compiler = device == "cuda" and has_gpu_compiler()
    kernel, why = choose(
        device,
        DTYPES[plan.precision],
        recipe.dropout.attention,
        recipe.sequence_length,
        window,
        head_size,
        compiler=compiler,
    )
    said = [f"{kernel} ({why})"]
    if not computes_fewer_scores(kernel, recipe.sequence_length, window):
        said.append("counted, not timed: no fewer scores than in dense layers")
    if device == "cuda":
        said.append("not measured on CUDA")
    return "; ".join(said)


def build_module(plan: Plan, grid: ProcessGrid, initial_weights: str | None = None) -> torch.nn.Module:
    """The model of this rank, with its initial weights; partitioned as it is built under ZeRO-3.

    `initial_weights`: directory of a `transformers` model to start from instead of random weights.
    """
    recipe = plan.recipe
    family, shape = recipe.model.family, model_shape(recipe, plan.padded_vocab)
    group = grid.tensor_group if grid.tp > 1 else None
    given = read_hf(initial_weights, recipe.model) if initial_weights else None
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=given)
    if grid.pp > 1:
        return PIPELINE[family](shape, grid=grid, group=group, init=init)
    if plan.zero_stage < 3:
        return PLAIN[family](shape, group=group, init=init)
    with deepspeed.zero.Init(data_parallel_group=grid.data_group, config_dict_or_path=plan.ds, mpu=grid):
        return PLAIN[family](shape, group=group, init=replace(init, dtype=DTYPES[plan.precision]))


def whole_model(recipe: Recipe, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The model in one process with the given canonical weights, in float32 and in evaluation mode."""
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=weights)
    shape = model_shape(recipe, padded_vocab(recipe.model.vocab_size, 1))
    return PLAIN[recipe.model.family](shape, group=None, init=init).eval()
