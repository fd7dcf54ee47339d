"""A recipe's GPT-2 in modules of `transformers`, with the initial weights of our own model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed

from launch.ranks import processes
from launch.training.job import InitialWeights
from modeling import gpt2
from modeling.formats.huggingface.conversion import SAME, Form
from modeling.formats.huggingface.gpt2 import CONVERSION
from modeling.initialization import Init, canonical_name, label
from modeling.layer_list import share_draws
from recipes.schema import Recipe


@dataclass(frozen=True)
class TransformersForm:
    """The conversion of a transformers parameter to its canonical tensor, in the place of a `Shard`."""

    form: Form
    heads: int
    size: int = 1  # tensor-parallel ranks that share it

    @property
    def is_canonical(self) -> bool:
        """Whether parameter and canonical tensor are the same numbers in the same order."""
        return self.form is SAME


def build(
    recipe: Recipe, initial_weights: InitialWeights | None = None, *, drawn: bool = True
) -> GPT2LMHeadModel:
    """Build the recipe's GPT2LMHeadModel; under ZeRO-3 partitioned at once, as in Trainer's script.

    Collective. Parameters carry canonical names, so that checkpoints hold the same layout-free weights as
    those of our own model. transformers partitions by the DeepSpeed configuration of the newest
    `TrainingArguments`: make them before, and keep them.

    `initial_weights`: a GPT-2 to start from instead of random weights. `drawn` False: no initial weights,
    since a checkpoint will be read into the model.
    """
    config = CONVERSION.config(recipe.model, recipe.positions, recipe.dropout)
    config.use_cache = False
    # transformers draws no weights, and gathers none under ZeRO-3: `_fill` sets ours.
    with (
        mock.patch.object(hf_deepspeed, "initialize_weights_zero3", lambda model: None),
        no_init_weights(),
    ):
        built: GPT2LMHeadModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )
    built.tie_weights()  # from_config leaves this out, too, without its weights
    given = initial_weights.read(recipe) if initial_weights and drawn else None
    _fill(
        built,
        recipe,
        Init(
            recipe.seed,
            recipe.init_std,
            recipe.model.layers,
            given=given,
            meta=not drawn,
        ),
    )
    if recipe.checkpoint_interval:
        # The name that both pinned versions of transformers have.
        built.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return built


@torch.no_grad()
def _fill(model: GPT2LMHeadModel, recipe: Recipe, init: Init) -> None:
    """Name the parameters and give them their initial weights, a layer at a time."""
    places = {entry.ours: entry for entry in CONVERSION.name_map(recipe.model)}
    shape = gpt2.shape_of(recipe, padded_vocab=recipe.model.vocab_size)
    layers = partial(gpt2.layer_list, shape, group=None)
    if not init.meta and processes.world_size() > 1:
        init = share_draws(init, layers, dist.group.WORLD, processes.device().name)
    for layer in {layer.name: layer for layer in layers(init=init)}.values():
        for canonical in layer.kind(**layer.arguments).parameters():
            ours, (theirs,), form = places.pop(canonical_name(canonical))
            parameter = model.get_parameter(theirs)
            heads = recipe.model.heads
            label(parameter, ours, TransformersForm(form, heads))
            with deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=not init.meta
            ):
                if not init.meta:
                    (whole,) = form.to_theirs(canonical, heads)
                    parameter.copy_(whole)
    nameless = [
        name for name, p in model.named_parameters() if not hasattr(p, "canonical_name")
    ]
    assert not places and not nameless, f"without a counterpart: {[*places, *nameless]}"
