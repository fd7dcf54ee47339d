"""Weights and moments of a `transformers` model that DeepSpeed saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.weights.foreign_weights import MessageWords, TransformersWeights
from modeling.families import conversion_of
from modeling.formats.deepspeed import states
from modeling.formats.deepspeed.states import DeepSpeedState, TheirParameter
from modeling.formats.huggingface.config_forms import FORMS
from modeling.formats.megatron.checkpoint import UNREAD
from modeling.lazy_weights import LazyWeights
from recipes.files import is_file, read_json_object, refuse
from recipes.schema import Model, Recipe

CONFIG = "config.json"
# model_type -> names of its embeddings of tokens and positions, and the beginning of its layers' names
KNOWN_BY = {
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h."),
    "bert": (
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.encoder.layer.",
    ),
}
PRE_NORM = "bert.encoder.ln.weight"  # of a MegatronBert


class DeepSpeedWeights(TransformersWeights):
    """The newest save of DeepSpeed in a directory."""

    @cached_property
    def state(self) -> DeepSpeedState:
        """The run. Raises FileError."""
        return states.read(self.directory)

    @cached_property
    def described(self) -> Path | None:
        """The config.json of the directory, or next to it; None: there is none."""
        places = (self.directory, self.directory.absolute().parent)
        return next((at / CONFIG for at in places if is_file(at / CONFIG)), None)

    @cached_property
    def _config(self) -> dict[str, Any]:
        if self.described is not None:
            return read_json_object(self.described)
        return _config_by_shapes(self.directory, self.state.parameters)

    @cached_property
    def _state_dict(self) -> Mapping[str, TheirParameter]:  # type: ignore[override] # read on use
        return self.state.parameters

    def words(self, model: Model) -> MessageWords:
        kind = conversion_of(model).class_name(model)
        source = CONFIG if self.described else "its embeddings"
        return MessageWords(f"a {kind}", source, f"give a run of a whole {kind}")

    def untied(self, model: Model) -> list[tuple[str, str]]:
        """Return each copy that the optimizer has apart from its tied tensor."""
        return [*conversion_of(model).select(self._state_dict).copies]

    def weights(self, recipe: Recipe) -> LazyWeights:
        return self.canonical(recipe, states.WEIGHT)

    def canonical(self, recipe: Recipe, kind: str) -> LazyWeights:
        """Return canonical tensors of weights or a moment, by DeepSpeed's name of the kind."""
        return conversion_of(recipe.model).to_canonical(
            self._state_dict, recipe.model, lambda parameter: parameter.read(kind)
        )


def _config_by_shapes(
    directory: Path, parameters: Mapping[str, TheirParameter]
) -> dict[str, Any]:
    """Describe a model by its tensors; they do not say the number of heads. Raises FileError."""
    for kind, (words, positions, layers) in KNOWN_BY.items():
        if words not in parameters or positions not in parameters:
            continue
        named = "megatron-bert" if PRE_NORM in parameters else kind
        form = next(each for each in FORMS if each.model_type == named)
        rows, hidden = parameters[words].shape
        sizes = {
            "model.layers": len(_layers(parameters, layers)),
            "model.hidden": hidden,
            "model.heads": UNREAD,
            "model.vocab_size": rows,
            "model.positions": parameters[positions].shape[0],
        }
        config = {form.shape[key][0]: size for key, size in sizes.items()}
        return {"model_type": named, form.width[0]: 4 * hidden, **config}
    came = "holds no GPT-2, BERT or MegatronBert of transformers"
    rule = f"there is no {CONFIG}, and its tensors have other names"
    refuse(directory, came, rule, f"put the model's {CONFIG} next to them")


def _layers(names: Iterable[str], beginning: str) -> set[str]:
    """Return the numbers of the layers in names."""
    found = set()
    for name in names:
        if name.startswith(beginning):
            found.add(name.removeprefix(beginning).split(".")[0])
    return found
