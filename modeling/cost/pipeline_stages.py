"""Numbers of transformer layers of the pipeline stages."""

from __future__ import annotations

from functools import lru_cache

from modeling.cost.operation_count import pairs
from modeling.cost.parameter_count import head_operations
from recipes.schema import Model, Recipe


def stages_of(recipe: Recipe, padded_vocab: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage of a recipe's model in training."""
    recomputed = recipe.checkpoint_interval > 0
    predictions = recipe.predictions if recipe.model.facts.masked else None
    return stages_by_time(recipe.model, recipe.sequence_length, padded_vocab, predictions, recomputed, pp)


@lru_cache(maxsize=1024)  # a search of layouts calls it ten times for each
def stages_by_time(
    model: Model, length: int, padded_vocab: int, predictions: int | None, recomputed: bool, pp: int
) -> tuple[int, ...]:
    """Return the layers of each stage, balanced with the output layer's time from `head_in_layers`."""
    head = head_in_layers(model, length, padded_vocab, predictions, recomputed)
    return tuple(balanced_stages(model.layers, pp, head))


def equal_stages(layers: int, pp: int) -> list[int]:
    """Split the layers as equally as possible; the first stages have one more."""
    each, over = divmod(layers, pp)
    return [each + (stage < over) for stage in range(pp)]


def balanced_stages(layers: int, pp: int, head: float) -> list[int]:
    """Split the layers so that the slowest stage takes least time.

    `head`: time of the output layer, in layers. The stages before the last share the rest equally. Among
    splits with the same time the most equal one is taken; every stage has a layer.
    """
    if pp == 1:
        return [layers]

    def split(last: int) -> list[int]:
        return [*equal_stages(layers - last, pp - 1), last]

    most = min(layers // pp, layers - (pp - 1))
    splits = [split(last) for last in range(most, 0, -1)]
    return min(splits, key=lambda found: max(found[0], found[-1] + head))


def head_in_layers(
    model: Model, length: int, padded_vocab: int, predictions: int | None, recomputed: bool
) -> float:
    """Return the output layer's time in layers' times, by the count of `exact_flops_per_step`."""
    scores = sum(pairs(length, window) for window in model.windows) / model.layers
    layer = 24 * length * model.hidden**2 + 4 * model.hidden * scores
    head = head_operations(model, length, padded_vocab, predictions)
    return 3 * head / ((4 if recomputed else 3) * layer)
