"""Parameters of a row's model, counted on its modules at every rank."""

from __future__ import annotations

from ds_configs.implementation import embedding_rows
from launch.build_model import model_shape
from modeling import bert, cost, gpt2, rank_modules
from modeling.rank_modules import RankCounts
from recipes.schema import Recipe

LAYER_LISTS = {"gpt2": gpt2.layer_list, "bert": bert.layer_list}


def counts(recipe: Recipe) -> RankCounts:
    """Of one replica, tp x pp ranks. Raises AssertionError where the ranks cannot share the model."""
    model, parallel = recipe.model, recipe.parallel
    if model.implementation == "transformers":
        return rank_modules.count_transformers(model, recipe.sequence_length)
    shape = model_shape(recipe, embedding_rows(recipe, parallel.tp))
    return rank_modules.count(LAYER_LISTS[model.family], shape, parallel.tp, parallel.pp)


def arithmetic(recipe: Recipe) -> RankCounts:
    """The same from modeling/cost.py, stages of equally many layers."""
    model, (tp, pp) = recipe.model, (recipe.parallel.tp, recipe.parallel.pp)
    padded = embedding_rows(recipe, tp)
    layers = model.layers // pp
    held = tuple(
        (cost.parameters_per_rank(model, recipe.sequence_length, padded, tp, layers=layers, first=stage == 0, last=stage == pp - 1),) * tp
        for stage in range(pp)
    )
    return RankCounts(held, cost.parameters(model, recipe.sequence_length), (layers,) * pp)
