"""The table of model families, their conversions to and from `transformers`, and models made from recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from modeling.initialization import Init, canonical_name
from modeling.layer_list import Family, ModelShape, Stack
from recipes.layout import padded_vocab
from recipes.schema import Model, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from modeling.formats.huggingface.conversion import Conversion


def _gpt2() -> Family:
    from modeling import gpt2

    return gpt2.FAMILY


def _bert() -> Family:
    from modeling import bert

    return bert.FAMILY


# Each family is imported where a model of it is made.
FAMILIES: dict[str, Callable[[], Family]] = {"gpt2": _gpt2, "bert": _bert}


def family_of(model: Model) -> Family:
    """Return the family of a recipe's model."""
    if model.task_head != "none":
        from modeling.bert import task_family

        return task_family(model)
    return FAMILIES[model.family]()


def conversion_of(model: Model) -> Conversion:
    """Return the conversion of the model's family; ValueError if `transformers` has no such family."""
    if model.family == "gpt2":
        from modeling.formats.huggingface import gpt2

        return gpt2.CONVERSION
    if model.config:
        from modeling.formats.huggingface import by_config

        return by_config.conversion_of(model)
    if model.family != "bert":
        raise ValueError(
            f"model.family={model.family}: there is no conversion to transformers"
        )
    from modeling.formats.huggingface import bert

    if model.task_head == "none":
        return bert.CONVERSION
    return replace(bert.CONVERSION, usage=bert.TASK_USAGE[model.task_head])


def model_shape(recipe: Recipe, padded_vocab: int) -> ModelShape:
    """Return the shape of a recipe's model, with `padded_vocab` rows of the embedding."""
    return family_of(recipe.model).shape(recipe, padded_vocab)


def drawn_parameters(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None, **how: Any
) -> dict[str, Parameter]:
    """Return every parameter of a recipe's model by its canonical name, unpadded, as its training draws it.

    `how`: of `Init`; with meta=True on the meta device, without values. `tokenizer`: see `in_transformers`.
    """
    model = recipe.model
    if model.config:
        from modeling.formats.huggingface import auto_model, by_config

        if how.get("meta"):
            return dict(auto_model.on_meta(model).named_parameters())
        config = by_config.config(model, recipe.positions, tokenizer=tokenizer)
        drawn = auto_model.drawn(model, config, recipe.seed)
        return dict(drawn.named_parameters())
    made = _plain(recipe, model.vocab_size, **how)
    return {canonical_name(parameter): parameter for parameter in made.parameters()}


def meta_parameters(recipe: Recipe) -> dict[str, Parameter]:
    """Return every parameter by its canonical name, unpadded, on the meta device."""
    return drawn_parameters(recipe, meta=True)


def with_few_layers(recipe: Recipe, stored: int) -> Recipe:
    """Limit the recipe's layers to one more than `stored` tensors: a wrong number must not fill memory."""
    return _with_model(recipe, layers=min(recipe.model.layers, stored + 1))


def with_vocabulary(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe with a vocabulary of another size."""
    return _with_model(recipe, vocab_size=tokens)


def _with_model(recipe: Recipe, **changed: int) -> Recipe:
    model = recipe.model.model_copy(update=changed)
    return recipe.model_copy(update={"model": model})


def whole_model(recipe: Recipe, weights: Mapping[str, torch.Tensor]) -> Stack:
    """Build the model from canonical weights, in evaluation mode, in one process, on the CPU."""
    rows = padded_vocab(recipe.model.vocab_size, 1)
    return _plain(recipe, rows, given=weights).eval()


def _plain(recipe: Recipe, rows: int, **how: Any) -> Stack:
    """Build the model in one process; `rows`: of the embedding, `how`: of `Init`."""
    model = recipe.model
    init = Init(recipe.seed, recipe.init_std, model.layers, **how)
    shape = replace(model_shape(recipe, rows), sequence_parallel=False)
    return family_of(model).plain(shape, group=None, init=init)
