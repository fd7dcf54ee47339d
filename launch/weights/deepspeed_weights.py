"""Weights and moments that DeepSpeed saved of a model of transformers, Megatron-DeepSpeed or gpt-neox."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.checkpoints.names import MOMENTS, WEIGHT
from launch.weights.foreign_weights import (
    MegatronWeights,
    MessageWords,
    Saved,
    TransformersWeights,
)
from modeling.families import conversion_of
from modeling.formats.deepspeed import states
from modeling.formats.deepspeed.files import CONFIG, expect, whole_optimizer
from modeling.formats.huggingface.config_forms import FORMS
from modeling.formats.megatron.checkpoint import (
    UNREAD,
    MegatronCheckpoint,
    of_universal,
)
from modeling.formats.megatron.names import is_qkv
from modeling.lazy_weights import LazyWeights
from recipes.files import is_file, read_json_object, refuse
from recipes.schema import Model, Recipe

# DeepSpeed's names of our kinds of tensors
NAMES = dict(zip((WEIGHT, *MOMENTS), states.KINDS, strict=True))
# model_type -> names of its embeddings of tokens and positions
KNOWN_BY = {
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight"),
    "bert": (
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
    ),
}
LAYER = re.compile(r"(?:transformer\.h|bert\.encoder\.layer)\.(\d+)\.")
PRE_NORM = "bert.encoder.ln.weight"  # of a MegatronBert


class OfDeepSpeed(Saved):
    """Those of a run in a state.

    Attributes:
        stated: the config.json of the model, or its arguments; {}: there are none.
    """

    stated: Mapping[str, Any]

    def __init__(self, directory: Path, state: states.DeepSpeedState):
        super().__init__(directory)
        self.state = state

    def canonical(self, recipe: Recipe, kind: str) -> LazyWeights:
        """Return canonical tensors of weights or a moment, by DeepSpeed's name of the kind."""
        raise NotImplementedError


class DeepSpeedWeights(OfDeepSpeed, TransformersWeights):
    """Those of a model of `transformers`."""

    @cached_property
    def stated(self) -> Mapping[str, Any]:  # type: ignore[override]
        for place in (self.directory, self.directory.absolute().parent):
            if is_file(place / CONFIG):
                return read_json_object(place / CONFIG)
        return {}

    @cached_property
    def _config(self) -> dict[str, Any]:
        if self.stated:
            return dict(self.stated)
        return _config_by_shapes(self.directory, self.state.parameters)

    @property
    def _state_dict(self) -> Mapping[str, states.TheirParameter]:  # type: ignore[override] # read on use
        return self.state.parameters

    def words(self, model: Model) -> MessageWords:
        kind = conversion_of(model).class_name(model)
        source = CONFIG if self.stated else "its embeddings"
        return MessageWords(f"a {kind}", source, f"give a run of a whole {kind}")

    def untied(self, model: Model) -> Iterable[tuple[str, str]]:
        """Return each copy that the optimizer has apart from its tied tensor."""
        return conversion_of(model).select(self._state_dict).copies

    def canonical(self, recipe: Recipe, kind: str) -> LazyWeights:
        return conversion_of(recipe.model).to_canonical(
            self._state_dict, recipe.model, lambda parameter: parameter.read(kind)
        )


class DeepSpeedMegatronWeights(OfDeepSpeed, MegatronWeights):
    """Those of a GPT of Megatron-DeepSpeed or gpt-neox, from a universal checkpoint."""

    @cached_property
    def checkpoint(self) -> MegatronCheckpoint:
        return self._of(states.WEIGHT)

    @property
    def stated(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.checkpoint.arguments

    def canonical(self, recipe: Recipe, kind: str) -> LazyWeights:
        return self._of(kind).weights(recipe.model)

    def _of(self, kind: str) -> MegatronCheckpoint:
        state = self.state
        tensors = {name: each.read(kind) for name, each in state.parameters.items()}
        return of_universal(state.where, state.stated, tensors, state.slices > 1)


def open_run(directory: Path) -> OfDeepSpeed:
    """Open the save in a directory, of DeepSpeed the newest. Raises FileError."""
    optimizer = whole_optimizer(directory)
    if optimizer is not None:
        from launch.weights import whole_saves

        return DeepSpeedWeights(directory, whole_saves.read(directory, optimizer))
    state = states.read(directory)
    megatrons = any(map(is_qkv, state.parameters))
    if megatrons and not is_file(directory / CONFIG):
        return DeepSpeedMegatronWeights(directory, state)
    expect(
        state.slices == 1,
        state.where,
        f"holds {state.slices} tensor-parallel ranks",
        "of transformers' models, such ranks are read from universal checkpoints",
        "make one with DeepSpeed's ds_to_universal.py, and give its directory",
    )
    return DeepSpeedWeights(directory, state)


def _config_by_shapes(
    directory: Path, parameters: Mapping[str, states.TheirParameter]
) -> dict[str, Any]:
    """Describe a model by its tensors; they do not say the number of heads. Raises FileError."""
    for kind, (words, positions) in KNOWN_BY.items():
        if words not in parameters or positions not in parameters:
            continue
        named = "megatron-bert" if PRE_NORM in parameters else kind
        form = next(each for each in FORMS if each.model_type == named)
        layers = {match[1] for match in map(LAYER.match, parameters) if match}
        rows, hidden = parameters[words].shape
        sizes = {
            "model.layers": len(layers),
            "model.hidden": hidden,
            "model.heads": UNREAD,
            "model.vocab_size": rows,
            "model.positions": parameters[positions].shape[0],
        }
        config = {form.shape[key][0]: size for key, size in sizes.items()}
        return {"model_type": named, form.width[0]: 4 * hidden, **config}
    refuse(
        directory,
        "holds no GPT-2, BERT or MegatronBert of transformers",
        f"there is no {CONFIG}, and its tensors have other names",
        f"put the model's {CONFIG} next to them",
    )
