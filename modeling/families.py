"""The families that there are."""

from __future__ import annotations

from collections.abc import Mapping

from modeling import bert, gpt2
from modeling.family import Family
from modeling.layer_list import ModelShape
from recipes.schema import Model, Recipe

FAMILIES: Mapping[str, Family] = {family.name: family for family in (gpt2.FAMILY, bert.FAMILY)}


def family_of(model: Model) -> Family:
    """The family of a recipe's model."""
    return FAMILIES[model.family]


def model_shape(recipe: Recipe, padded_vocab: int) -> ModelShape:
    """The shape of a recipe's model with `padded_vocab` rows of the embedding."""
    return family_of(recipe.model).shape(recipe, padded_vocab)
