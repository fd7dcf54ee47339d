"""Parameters of a row's model, counted on its modules at every rank."""

from __future__ import annotations

from ds_configs.sections.transformers_modules import embedding_rows
from launch.training.build_model import model_shape
from modeling import bert, cost, counting, gpt2
from modeling.counting import RankCounts
from recipes.schema import Recipe

LAYER_LISTS = {"gpt2": gpt2.layer_list, "bert": bert.layer_list}


def counts(recipe: Recipe) -> RankCounts:
    """Of one replica, tp x pp ranks. Raises AssertionError where the ranks cannot share the model."""
    model, (tp, pp) = recipe.model, recipe.parallel.model_parallel
    if model.implementation == "transformers":
        return counting.count_transformers(model, recipe.sequence_length)
    shape = model_shape(recipe, embedding_rows(recipe, tp))
    return counting.count(LAYER_LISTS[model.family], shape, tp, pp)


def arithmetic(recipe: Recipe) -> RankCounts:
    """The same from modeling/cost.py, stages of equally many layers."""
    model, (tp, pp) = recipe.model, recipe.parallel.model_parallel
    padded = embedding_rows(recipe, tp)
    layers = model.layers // pp
    held = tuple(
        (
            cost.parameters_per_rank(
                model,
                recipe.sequence_length,
                padded,
                tp,
                layers=layers,
                first=stage == 0,
                last=stage == pp - 1,
            ),
        )
        * tp
        for stage in range(pp)
    )
    return RankCounts(held, cost.parameters(model, recipe.sequence_length), (layers,) * pp)
