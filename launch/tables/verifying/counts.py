"""Parameters of a row's model, counted on its modules at every rank."""

from __future__ import annotations

from ds_configs.sections.transformers_modules import embedding_rows
from modeling import bert, cost, counting, gpt2
from modeling.counting import RankCounts
from modeling.families import model_shape
from recipes.schema import Recipe

LAYER_LISTS = {"gpt2": gpt2.layer_list, "bert": bert.layer_list}


def counts(recipe: Recipe) -> RankCounts:
    """Counts of one replica, tp x pp ranks. Raises AssertionError where the ranks cannot share the model."""
    model, (tp, pp) = recipe.model, recipe.parallel.model_parallel
    if model.implementation == "transformers":
        return counting.count_transformers(model, recipe.positions)
    shape = model_shape(recipe, embedding_rows(recipe, tp))
    layers = cost.stages_of(recipe, shape.padded_vocab, pp)
    return counting.count(LAYER_LISTS[model.family], shape, tp, layers)


def arithmetic(recipe: Recipe) -> RankCounts:
    """The same from modeling/cost/."""
    model, positions, (tp, pp) = recipe.model, recipe.positions, recipe.parallel.model_parallel
    padded = embedding_rows(recipe, tp)
    layers = cost.stages_of(recipe, padded, pp)

    def held(stage: int) -> int:
        ends = dict(first=stage == 0, last=stage == pp - 1)
        return cost.parameters_per_rank(model, positions, padded, tp, layers=layers[stage], **ends)

    stages = tuple((held(stage),) * tp for stage in range(pp))
    return RankCounts(stages, cost.parameters(model, positions), layers)
