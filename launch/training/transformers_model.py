"""A recipe's GPT-2 in modules of `transformers`, with the initial weights of our own model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed

from launch.ranks import processes
from launch.training.job import InitialWeights
from modeling import cost, gpt2
from modeling.formats.huggingface.conversion import SAME, Form
from modeling.formats.huggingface.gpt2 import CONVERSION
from modeling.initialization import Init, canonical_name, label
from recipes.schema import Recipe

LARGE = 500_000_000  # parameters; initial weights of such a model take many seconds, with progress lines


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
    say: Callable[[str], None] = lambda text: None,
    *,
    drawn: bool = True,
) -> GPT2LMHeadModel:
    """Build the recipe's GPT2LMHeadModel; under ZeRO-3 partitioned at once, as in Trainer's script.

    Collective. Parameters carry canonical names, so that checkpoints hold the same layout-free weights as
    those of our own model. transformers partitions by the DeepSpeed configuration of the newest
    `TrainingArguments`: make them before, and keep them. Without partitions only rank 0 has weights, and
    DeepSpeed's engine broadcasts them.

    `initial_weights`: a GPT-2 to start from instead of random weights. `say` prints the progress of a large
    model's weights. `drawn` False: no initial weights, since a checkpoint will be read into the model.
    """
    config = CONVERSION.config(recipe.model, recipe.positions, recipe.dropout)
    config.use_cache = False
    # transformers draws no weights, and gathers none under ZeRO-3: `_fill` sets ours.
    draw, hf_deepspeed.initialize_weights_zero3 = hf_deepspeed.initialize_weights_zero3, lambda model: None
    try:
        with no_init_weights():
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        hf_deepspeed.initialize_weights_zero3 = draw
    built.tie_weights()  # from_config leaves this out, too, without its weights
    _fill(built, recipe, initial_weights if drawn else None, say, drawn)
    if recipe.checkpoint_interval:
        # The name that both pinned versions of transformers have.
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


@torch.no_grad()
def _fill(
    model: GPT2LMHeadModel,
    recipe: Recipe,
    initial_weights: InitialWeights | None,
    say: Callable[[str], None],
    drawn: bool,
) -> None:
    """Name the parameters and give them their initial weights, one at a time."""
    places = {entry.ours: entry for entry in CONVERSION.name_map(recipe.model)}
    partitioned = any(is_zero_param(parameter) for parameter in model.parameters())
    sources = processes.world_size() if partitioned and not initial_weights else 1
    total, done, started = cost.parameters(recipe.model, recipe.positions), 0, time.perf_counter()
    for name, canonical, source in _canonical_weights(recipe, initial_weights, sources if drawn else 0):
        _, (theirs,), form = places.pop(name)
        parameter, heads = model.get_parameter(theirs), recipe.model.heads
        label(parameter, name, TransformersForm(form, heads))
        if not drawn:
            continue
        # Every rank takes the source's weights; without partitions nothing is gathered.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=source):
            if not canonical.is_meta:
                (whole,) = form.to_theirs(canonical, heads)
                parameter.copy_(whole)
        tenths, done = 10 * done // total, done + canonical.numel()
        if total >= LARGE and 10 * done // total > tenths:
            reached, rate = 10 * (10 * done // total), done / (time.perf_counter() - started)
            say(f"initial weights: {reached} % of {total / 1e9:.3g}B, {rate / 1e6:,.0f} million per second")
    nameless = [name for name, p in model.named_parameters() if not hasattr(p, "canonical_name")]
    assert not places and not nameless, f"without a counterpart: {[*places, *nameless]}"


def _canonical_weights(
    recipe: Recipe, initial_weights: InitialWeights | None, sources: int
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (canonical name, full tensor, source rank) of every parameter; meta tensors on other ranks.

    The first `sources` ranks draw at the same time, each every `sources`-th layer, and hold one layer each.
    With 0 no rank draws.
    """
    mine = processes.rank()
    given = initial_weights.read(recipe) if initial_weights and mine < sources else None
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=given)
    shape = gpt2.shape_of(recipe, padded_vocab=recipe.model.vocab_size)
    drawn, shapes = (
        {d.name: d for d in gpt2.layer_list(shape, group=None, init=replace(init, meta=meta))}
        for meta in (False, True)
    )
    names = list(drawn)
    for start in range(0, len(names), sources or 1):
        block = enumerate(names[start : start + (sources or 1)])
        layers = [(drawn if sources and source == mine else shapes)[name] for source, name in block]
        modules = [layer.kind(**layer.arguments) for layer in layers]
        for source, module in enumerate(modules):
            for parameter in module.parameters():
                yield canonical_name(parameter), parameter.detach(), source
        del modules, module, parameter  # before the next ones are made
