"""The largest model that nodes train, for each place of the model states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ds_configs.findings import ConfigError
from launch.planning.prediction.forecast import largest_number
from launch.planning.search import candidates, shapes
from launch.planning.search.candidates import WAYS, Candidate, Choice, SearchQuestion
from recipes.problems import Problem, ProblemsError

STEP = 128  # of the hidden size, times tensor ranks: whole heads on each
MOST = 1024  # steps of the hidden size, or layers of a stage


class Largest(NamedTuple):
    """The largest model of a way; None: none fits, or every layout has `problems`."""

    way: str
    best: Candidate | None
    problems: tuple[Problem, ...]


def largest(question: SearchQuestion) -> list[Largest]:
    """Find the largest model of each way; the recipe states a micro-batch. Raises ProblemsError."""
    of_ways = [of_way(question, way) for way in WAYS]
    fewest = min((each.problems for each in of_ways), key=len)
    if fewest:
        raise ProblemsError(fewest)
    return of_ways


def of_way(question: SearchQuestion, way: str) -> Largest:
    """Find the widest model of a way under any layout, then the deepest of that width."""
    best = None
    for wider in (True, False):
        for choice in candidates.choices(question):
            if wider or best:
                best = larger(question, way, choice, best, wider=wider) or best
    if best is None:
        try:
            candidates.search(shaped(question, STEP * question.ranks, MOST), [way])
        except ConfigError as refused:
            return Largest(way, None, refused.problems)
    return Largest(way, best, ())


def larger(
    question: SearchQuestion,
    way: str,
    choice: Choice,
    best: Candidate | None,
    *,
    wider: bool,
) -> Candidate | None:
    """Find the widest or the deepest model of a layout that fits and exceeds `best`."""
    model = best and best.plan.recipe.model
    hidden = model.hidden if model else 0
    depth = model.layers if model else 0
    step = STEP * choice.tp

    def fitting(more: int) -> Candidate | None:
        width = hidden
        of_a_stage = depth // choice.pp + more
        if wider:
            width = step * (hidden // step + more)
            of_a_stage = math.ceil(shapes.usual_layers(width) / choice.pp)
        grown = shaped(question, width, of_a_stage * choice.pp)
        try:
            candidate = next(candidates.of_choice(grown, way, choice))
        except ConfigError:
            return None
        return candidate if candidate.forecast.verdict == "fits" else None

    more = largest_number(lambda number: fitting(number) is not None, MOST)
    return fitting(more) if more else None


def shaped(question: SearchQuestion, hidden: int, layers: int) -> SearchQuestion:
    """Set layers and hidden size of the recipe's model, with heads as GPT-3 has them."""
    heads = hidden // (128 if hidden >= shapes.WIDE else 64)
    shape = {"hidden": hidden, "layers": layers, "heads": heads}
    model = question.recipe.model.model_copy(update=shape)
    return replace(question, recipe=question.recipe.model_copy(update={"model": model}))
