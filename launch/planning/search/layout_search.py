"""A search for the fastest layouts that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product

from ds_configs.findings import ConfigError
from launch.planning.prediction.forecast import Forecast, forecast
from launch.planning.prediction.workload import Workload
from launch.planning.search import candidates
from launch.planning.search.candidates import Degrees, SearchQuestion
from launch.planning.search.ways import WAYS, Way
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError


@dataclass(frozen=True)
class Candidate:
    """A layout with its forecast."""

    way: Way
    forecast: Forecast

    @property
    def work(self) -> Workload:
        return self.forecast.work

    @property
    def fits(self) -> bool:
        return self.forecast.verdict != "out of memory"

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.forecast.time, "the resolver takes a precision that the node has"
        return self.forecast.time.total

    @property
    def key(self) -> tuple[object, ...]:
        """The identity of a layout in a table of the best."""
        work = self.work
        return work.layout.tp, work.layout.pp, self.way, work.sequence_parallel


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search.

    Attributes:
        ranking: the layouts that fit, the fastest first; snug ones after all others.
        nearest: the layout that takes the smallest share of the memory.
        predicted: number of layouts with a predicted memory.
    """

    question: SearchQuestion
    ranking: list[Candidate]
    nearest: Candidate
    predicted: int

    @property
    def winner(self) -> Candidate | None:
        return self.ranking[0] if self.ranking else None

    def best_per_layout(self, most: int) -> list[Candidate]:
        """Return the first candidate of each layout, at most `most`."""
        firsts: dict[tuple[object, ...], Candidate] = {}
        for candidate in self.ranking:
            firsts.setdefault(candidate.key, candidate)
        return list(firsts.values())[:most]


def search(question: SearchQuestion) -> SearchAnswer:
    """Predict every layout's memory, and the time of fitting ones. Raises ProblemsError without a layout."""
    found = candidates.degrees(question)
    predicted = list[Candidate]()
    # refusals do not depend on the degrees
    refused: dict[tuple[Way, bool, bool], tuple[Problem, ...]] = {}
    for at, way, again in product(found, WAYS, question.recomputations):
        kind = (way, at.tp > 1, at.pp > 1)
        if kind not in refused:
            try:
                predicted += of_way(question, at, way, again)
            except ConfigError as error:
                refused[kind] = error.problems
    if not predicted:
        raise ProblemsError(sum(refused.values(), ()))
    fitting = [each for each in predicted if each.fits]
    fitting.sort(key=lambda each: (each.forecast.verdict == "snug", each.seconds))
    nearest = min(predicted, key=lambda each: each.forecast.binding.share)
    return SearchAnswer(question, fitting, nearest, len(predicted))


def of_way(
    question: SearchQuestion, at: Degrees, way: Way, again: str | int
) -> list[Candidate]:
    """Predict every micro-batch, up to the first one that is too large. Raises ConfigError."""
    found = list[Candidate]()
    total = question.recipe.batch.global_
    full = set[bool]()
    step = cache(partial(candidates.step, question, way, at, again))
    for micro in candidates.micro_batches(question, at):
        layout = Layout(*at, micro, total // (micro * at.dp), total)
        # sums of gradients are kept from the second on
        one = replace(step(min(2, layout.accumulation)), layout=layout)
        for cut in candidates.sequence_cuts(one):
            if cut not in full:
                work = replace(one, sequence_parallel=cut)
                found.append(Candidate(way, forecast(work, question.node)))
                if not found[-1].fits:
                    full.add(cut)
    return found
