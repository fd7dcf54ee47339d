"""A recipe's model in modules of `transformers`: a GPT-2 with our initial weights, or that of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed

from launch.ranks import processes
from launch.training.job import InitialWeights
from modeling import gpt2
from modeling.families import conversion_of, drawn_parameters
from modeling.formats.huggingface import auto_model
from modeling.formats.huggingface.conversion import SAME, Form
from modeling.formats.huggingface.gpt2 import CONVERSION
from modeling.initialization import Init, canonical_name, label
from modeling.layer_list import share_draws
from recipes.families import parts_of
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
    recipe: Recipe,
    initial_weights: InitialWeights | None = None,
    *,
    drawn: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Build the recipe's model; under ZeRO-3 partitioned at once, as in Trainer's script.

    Collective. Parameters carry canonical names, so that checkpoints hold the same layout-free weights as
    those of our own model. transformers partitions by the DeepSpeed configuration of the newest
    `TrainingArguments`: make them before, and keep them.

    `initial_weights`: to start from instead of random ones. `drawn` False: no initial weights, since a
    checkpoint will be read into the model. `tokenizer`: names special tokens.
    """
    model = recipe.model
    convert = conversion_of(model)
    config = convert.config(model, recipe.positions, recipe.dropout, tokenizer)
    config.use_cache = False
    # transformers draws no weights, and gathers none under ZeRO-3: they are filled in.
    with (
        mock.patch.object(hf_deepspeed, "initialize_weights_zero3", lambda model: None),
        no_init_weights(),
    ):
        built = auto_model.from_config(model, config)
    built.loss_parts = parts_of(model.figures)  # type: ignore[assignment]
    given = initial_weights.read(recipe) if initial_weights and drawn else None
    if model.config:
        # under ZeRO-3 the first rank alone draws
        elsewhere = hf_deepspeed.is_deepspeed_zero3_enabled() and processes.rank()
        if drawn and given is None and not elsewhere:
            given = drawn_parameters(recipe, tokenizer)
        _fill_by_name(built, recipe, given, drawn)
    else:
        init = Init(
            recipe.seed, recipe.init_std, model.layers, given=given, meta=not drawn
        )
        _fill(built, recipe, init)
    if recipe.checkpoint_interval:
        # The name that both pinned versions of transformers have.
        built.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return built


@torch.no_grad()
def _fill_by_name(
    model: PreTrainedModel,
    recipe: Recipe,
    given: Mapping[str, Tensor] | None,
    drawn: bool,
) -> None:
    """Name the parameters as transformers does, and give them the given weights, on the first rank at least."""
    for name, parameter in model.named_parameters():
        label(parameter, name, TransformersForm(SAME, recipe.model.heads))
        with deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0, enabled=drawn
        ):
            if given is not None:
                parameter.copy_(given[name])


@torch.no_grad()
def _fill(model: PreTrainedModel, recipe: Recipe, init: Init) -> None:
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
