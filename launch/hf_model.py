"""A recipe's GPT-2 as modules of `transformers`, with the initial weights that our own model would have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from launch.build_model import model_shape
from modeling.convert_hf import FORMS, config_of, name_map, read_hf
from modeling.gpt2 import layer_list
from modeling.initialization import Init
from recipes.schema import Recipe


@dataclass(frozen=True)
class Form:
    """In the place of `modeling.initialization.Shard`: how a parameter of transformers becomes its canonical tensor."""

    kind: str  # a key of modeling.convert_hf.FORMS
    heads: int
    size: int = 1  # tensor-parallel ranks that share it

    def join(self, slices: list[torch.Tensor]) -> torch.Tensor:
        """The canonical tensor of the one whole tensor in `slices`."""
        (whole,) = slices
        return FORMS[self.kind][1](whole, self.heads).contiguous()

    def of(self, canonical: torch.Tensor) -> torch.Tensor:
        return FORMS[self.kind][0](canonical, self.heads)


def build(recipe: Recipe, initial_weights: str | None = None) -> GPT2LMHeadModel:
    """GPT2LMHeadModel of the recipe; under ZeRO-3 partitioned as it is built, as Trainer's script does it. Collective.

    Its parameters carry the canonical names, so that checkpoints hold the same layout-free weights as those of our own model.
    transformers sees that it has to partition by the DeepSpeed configuration of the newest `TrainingArguments`, which have to be
    made before and kept. `initial_weights`: directory of a GPT-2 to start from instead of random weights.
    """
    model = recipe.model
    config = config_of(
        model, positions=recipe.sequence_length, hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention
    )
    config.use_cache = False
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(built, recipe, initial_weights)
    if recipe.checkpoint_interval:
        # The name that both pinned versions of transformers have.
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


@torch.no_grad()
def _fill(model: GPT2LMHeadModel, recipe: Recipe, initial_weights: str | None) -> None:
    """Name the parameters and give them their initial weights, one at a time."""
    places = {ours: (theirs, Form(kind, recipe.model.heads)) for ours, theirs, kind in name_map(recipe.model.layers)}
    for name, canonical in _canonical_weights(recipe, initial_weights):
        theirs, form = places.pop(name)
        parameter = model.get_parameter(theirs)
        parameter.canonical_name, parameter.shard = name, form  # type: ignore[attr-defined]
        _copy(form.of(canonical), parameter)
    nameless = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "canonical_name")]
    assert not places and not nameless, f"without a counterpart: {[*places, *nameless]}"


def _copy(full: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):  # does nothing where nothing is partitioned
        parameter.copy_(full)


def _canonical_weights(recipe: Recipe, directory: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(canonical name, full tensor) of every parameter of our GPT-2. Its layers are built in turn: memory holds one of them."""
    given = read_hf(directory, recipe.model) if directory else None
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=given)
    shape = model_shape(recipe, padded_vocab=recipe.model.vocab_size)
    built = set()
    for layer in layer_list(shape, group=None, init=init):
        if layer.name not in built:
            built.add(layer.name)
            for parameter in layer.kind(**layer.arguments).parameters():
                yield parameter.canonical_name, parameter.detach()
