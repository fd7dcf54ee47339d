"""The largest model that nodes train, for each way in which DeepSpeed keeps the model states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ds_configs.findings import ConfigError
from launch.planning.prediction.forecast import largest_number
from launch.planning.search import candidates, layout_search, shapes
from launch.planning.search.candidates import Degrees, SearchQuestion
from launch.planning.search.layout_search import Candidate
from launch.planning.search.ways import WAYS, Way
from recipes.problems import Problem, ProblemsError

STEP = 128  # of the hidden size, times tensor ranks: whole heads on each
MOST = 1024  # steps of the hidden size, or layers of a stage


class Largest(NamedTuple):
    """The largest model of a way; None: none fits, or every layout has `problems`."""

    way: Way
    best: Candidate | None
    problems: tuple[Problem, ...]


def largest(question: SearchQuestion) -> list[Largest]:
    """Find the largest model of each way; the recipe states a micro-batch. Raises ProblemsError."""
    divisible = shaped(question, STEP * question.ranks, question.ranks)
    layouts = candidates.degrees(divisible)
    found = [over_layouts(question, way, layouts) for way in WAYS]
    if all(each.problems for each in found):
        by_rule = {
            str(problem.rule): problem for each in found for problem in each.problems
        }
        raise ProblemsError(by_rule.values())
    return found


def over_layouts(question: SearchQuestion, way: Way, layouts: list[Degrees]) -> Largest:
    """Find the widest model of a way under any layout, then the deepest of that width."""
    best = None
    runs = False
    problems: dict[str, Problem] = {}
    for wider in (True, False):
        for at in layouts if wider or best else ():
            try:
                best = larger(question, way, at, best, wider=wider) or best
                runs = True
            except ConfigError as refused:
                problems |= {str(problem.rule): problem for problem in refused.problems}
    why_not = () if runs else tuple(problems.values())
    return Largest(way, best, why_not)


def larger(
    question: SearchQuestion,
    way: Way,
    at: Degrees,
    best: Candidate | None,
    *,
    wider: bool,
) -> Candidate | None:
    """Find the widest or the deepest model of a layout that fits and exceeds `best`. Raises ConfigError."""
    # every layer, which leaves the most room, unless it is pinned
    again = question.recomputations[-1]
    hidden, depth = (best.work.model.hidden, best.work.model.layers) if best else (0, 0)

    def fitting(more: int) -> Candidate | None:
        width = hidden
        of_a_stage = depth // at.pp + more
        if wider:
            width = STEP * at.tp * (hidden // (STEP * at.tp) + more)
            of_a_stage = math.ceil(shapes.usual_layers(width) / at.pp)
        each = layout_search.of_way(
            shaped(question, width, of_a_stage * at.pp), at, way, again
        )
        return next((one for one in each if one.forecast.verdict == "fits"), None)

    more = largest_number(lambda number: fitting(number) is not None, MOST)
    return fitting(more) if more else None


def shaped(question: SearchQuestion, hidden: int, layers: int) -> SearchQuestion:
    """Set layers and hidden size of the recipe's model, with heads as GPT-3 has them."""
    heads = hidden // (128 if hidden >= shapes.WIDE else 64)
    shape = {"hidden": hidden, "layers": layers, "heads": heads}
    model = question.recipe.model.model_copy(update=shape)
    return replace(question, recipe=question.recipe.model_copy(update={"model": model}))
