"""A recipe's GPT-2 as modules of `transformers`, with the initial weights that our own model would have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed

from launch.machine import processes
from modeling import cost, gpt2
from modeling.huggingface.conversion import Form
from modeling.huggingface.gpt2 import CONVERSION
from modeling.initialization import Init, canonical_name, label
from recipes.schema import Recipe

LARGE = 500_000_000  # parameters, from which on initial weights take many seconds, so that progress is said


@dataclass(frozen=True)
class Converted:
    """How a parameter of transformers becomes its canonical tensor, in the place of a `Shard`."""

    form: Form
    heads: int
    size: int = 1  # tensor-parallel ranks that share it

    def join(self, slices: list[torch.Tensor]) -> torch.Tensor:
        """The canonical tensor of the one whole tensor in `slices`."""
        return self.form.to_ours(slices, self.heads).contiguous()

    def of(self, canonical: torch.Tensor) -> torch.Tensor:
        """The tensor of transformers."""
        (whole,) = self.form.to_theirs(canonical, self.heads)
        return whole


def build(
    recipe: Recipe, initial_weights: str | None = None, say: Callable[[str], None] = lambda text: None
) -> GPT2LMHeadModel:
    """GPT2LMHeadModel of the recipe; under ZeRO-3 partitioned as it is built, as Trainer's script does it.

    Collective. Its parameters carry the canonical names, so that checkpoints hold the same layout-free
    weights as those of our own model. transformers sees that it has to partition by the DeepSpeed
    configuration of the newest `TrainingArguments`, which have to be made before and kept. `initial_weights`:
    directory of a GPT-2 to start from instead of random weights. `say` hears how far the weights of a large
    model are.

    Where nothing is partitioned, ranks other than 0 have no weights yet: DeepSpeed's engine broadcasts those
    of rank 0.
    """
    model = recipe.model
    dropout = dict(hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention)
    config = CONVERSION.config(model, positions=recipe.sequence_length, **dropout)
    config.use_cache = False
    with _no_draws():
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    built.tie_weights()  # part of what was left out
    _fill(built, recipe, initial_weights, say)
    if recipe.checkpoint_interval:
        # The name that both pinned versions of transformers have.
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


@contextlib.contextmanager
def _no_draws() -> Iterator[None]:
    """Let transformers make models without drawing weights, under ZeRO-3 without gathering them.

    `_fill` has better ones.
    """
    drawn = hf_deepspeed.initialize_weights_zero3
    hf_deepspeed.initialize_weights_zero3 = lambda model: None
    try:
        with no_init_weights():
            yield
    finally:
        hf_deepspeed.initialize_weights_zero3 = drawn


@torch.no_grad()
def _fill(
    model: GPT2LMHeadModel, recipe: Recipe, initial_weights: str | None, say: Callable[[str], None]
) -> None:
    """Name the parameters and give them their initial weights, one at a time."""
    places = {entry.ours: entry for entry in CONVERSION.name_map(recipe.model)}
    partitioned = any(is_zero_param(parameter) for parameter in model.parameters())
    sources = processes.world_size() if partitioned and not initial_weights else 1
    progress = Progress(cost.parameters(recipe.model, recipe.sequence_length), say)
    for name, canonical, source in _canonical_weights(recipe, initial_weights, sources):
        _, (theirs,), form = places.pop(name)
        parameter, converted = model.get_parameter(theirs), Converted(form, recipe.model.heads)
        label(parameter, name, converted)
        _copy(converted.of(canonical), parameter, source)
        progress.add(canonical.numel())
    nameless = [
        name for name, parameter in model.named_parameters() if not hasattr(parameter, "canonical_name")
    ]
    assert not places and not nameless, f"without a counterpart: {[*places, *nameless]}"


def _copy(full: torch.Tensor, parameter: torch.nn.Parameter, source: int) -> None:
    """Every rank takes the weights of rank `source`; `full` is on the meta device elsewhere."""
    with deepspeed.zero.GatheredParameters(
        [parameter], modifier_rank=source
    ):  # does nothing where nothing is partitioned
        if not full.is_meta:
            parameter.copy_(full)


def _canonical_weights(
    recipe: Recipe, directory: str | None, sources: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(canonical name, full tensor, source) of every parameter; on the meta device on ranks but the source.

    The first `sources` ranks draw at the same time, each the whole of every `sources`-th layer: memory holds
    one layer per rank.
    """
    mine = processes.rank()
    given = CONVERSION.read(directory, recipe.model) if directory and mine < sources else None
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=given)
    shape = gpt2.shape_of(recipe, padded_vocab=recipe.model.vocab_size)
    drawn, shapes = (
        {d.name: d for d in gpt2.layer_list(shape, group=None, init=replace(init, meta=meta))}
        for meta in (False, True)
    )
    names = list(drawn)
    for start in range(0, len(names), sources):
        block = [
            (drawn if source == mine else shapes)[name]
            for source, name in enumerate(names[start : start + sources])
        ]
        yield from _weights([definition.kind(**definition.arguments) for definition in block])


def _weights(modules: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """A module by a source; nothing holds on to them afterwards."""
    for source, module in enumerate(modules):
        for parameter in module.parameters():
            yield canonical_name(parameter), parameter.detach(), source


class Progress:
    """Says every tenth of `total` numbers, of a large model."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.say = total, say
        self.done = 0
        self._started = time.perf_counter()

    def add(self, numbers: int) -> None:
        tenths = 10 * self.done // self.total
        self.done += numbers
        reached = 10 * self.done // self.total
        if self.total >= LARGE and reached > tenths:
            rate = self.done / (time.perf_counter() - self._started)
            self.say(
                f"initial weights: {10 * reached} % of {self.total / 1e9:.3g}B, {rate / 1e6:,.0f} million "
                "per second"
            )
