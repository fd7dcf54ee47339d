"""A search for the fastest fitting layouts, with the cost of every other choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product

from ds_configs.findings import ConfigError
from launch.planning.prediction.forecast import Forecast, forecast
from launch.planning.prediction.workload import Workload
from launch.planning.search import candidates
from launch.planning.search.candidates import (
    Degrees,
    Dimension,
    Exclusions,
    SearchQuestion,
    Value,
)
from launch.planning.search.ways import Way
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError, some

# Of the fastest one's time: what a simpler layout may take and still be preferred.
WORTH = 1.05
NAMED: dict[int, str] = {0: "nothing", 1: "every layer"}


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
        return sum(self.split.values())

    @property
    def split(self) -> dict[str, float]:
        """Seconds by cause."""
        assert self.forecast.time, "the resolver takes a precision that the node has"
        return self.forecast.time.split

    @property
    def error(self) -> float:
        """The error, in the median, of predicted seconds like these."""
        return self.forecast.time_error.median

    @property
    def shortage(self) -> float:
        """Bytes missing on a GPU, or else in the node's host memory."""
        return self.forecast.binding.missing

    @property
    def key(self) -> tuple[object, ...]:
        """The identity of a layout in a table of the best."""
        work = self.work
        return (
            work.layout.tp,
            work.layout.pp,
            self.way,
            work.sequence_parallel,
            work.interleave > 1,
        )

    @property
    def values(self) -> list[Value]:
        """The layout's value of each dimension."""
        work = self.work
        layout = self.work.layout
        found: list[Value] = [
            ("tensor", layout.tp),
            ("pipeline", layout.pp),
            ("data", layout.dp),
            ("model states", self.way.name),
            ("recomputation", recomputation(work)),
            ("micro-batch", layout.micro),
        ]
        if work.software.has_sequence_parallelism:
            found.append(
                ("sequence", "parallel" if work.sequence_parallel else "whole")
            )
        if work.software.has_interleaving:
            found.append(("chunks", work.interleave))
        return found


@dataclass(frozen=True)
class Alternative:
    """All layouts with a value of a dimension that the winner lacks.

    Attributes:
        best: the fastest fitting layout, or else the one nearest to fitting; None: there is none.
        rule: the rule against them all: divisibility, or a limit of DeepSpeed.
    """

    dimension: Dimension
    value: object
    best: Candidate | None = None
    rule: str = ""


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search.

    Attributes:
        ranking: fitting layouts, the winner first, then by time.
        predicted: number of layouts with a predicted memory.
    """

    question: SearchQuestion
    ranking: list[Candidate]
    alternatives: list[Alternative]
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
    exclusions = Exclusions()
    found = layouts(question, exclusions)
    predicted = list[Candidate]()
    for at, way, again in product(
        found, candidates.ways_of(question.software), question.recomputations
    ):
        # refusals do not depend on the degrees
        if (way, at.kind) not in exclusions.refused:
            try:
                predicted += of_way(question, at, way, again)
            except ConfigError as error:
                exclusions.refused[way, at.kind] = error.problems
    if not predicted:
        raise ProblemsError(
            [
                problem
                for problems in exclusions.refused.values()
                for problem in problems
            ]
        )
    fitting = ranking([each for each in predicted if each.fits])
    return SearchAnswer(
        question, fitting, _alternatives(predicted, fitting, exclusions), len(predicted)
    )


def layouts(question: SearchQuestion, exclusions: Exclusions) -> list[Degrees]:
    """Return the degrees under which the batch can be made. Raises ProblemsError: there are none."""
    found = candidates.degrees(question, exclusions)
    if not found:
        raise ProblemsError([_no_layout(question, exclusions)])
    if not any(candidates.micro_batches(question, at) for at in found):
        came = f"batch.global={question.recipe.batch.global_} on {question.ranks} GPUs"
        rule = "no micro-batch and accumulation as pinned make that batch"
        fix = "pin fewer of them, or give another --global-batch"
        raise ProblemsError([Problem("batch", came, rule, fix)])
    return found


def _no_layout(question: SearchQuestion, exclusions: Exclusions) -> Problem:
    pinned = {
        key: value for key, value in question.recipe.parallel.degrees.items() if value
    }
    came = f"{question.ranks} GPUs" + "".join(
        f", parallel.{key}={value}" for key, value in pinned.items()
    )
    values: dict[tuple[str, str], list[str]] = {}
    for (name, value), why in exclusions.indivisible.items():
        values.setdefault((name, why), []).append(str(value))
    whys = (f"{name} {some(found, 4)}: {why}" for (name, why), found in values.items())
    rule = "; ".join(whys) or "the degrees' product is the number of GPUs"
    return Problem(
        "--nodes",
        came,
        rule,
        "give another number of --nodes, or another --global-batch",
    )


def of_way(
    question: SearchQuestion, at: Degrees, way: Way, again: str | int
) -> list[Candidate]:
    """Predict every micro-batch, up to the first one that is too large. Raises ConfigError."""
    found = list[Candidate]()
    total = question.recipe.batch.global_
    full = set[tuple[object, ...]]()
    step = cache(partial(candidates.step, question, way, at, again))
    for micro in candidates.micro_batches(question, at):
        layout = Layout(*at, micro, total // (micro * at.dp), total)
        # sums of gradients are kept from the second on
        one = step(min(2, layout.accumulation))
        for work in candidates.variants(replace(one, layout=layout)):
            kind = (work.sequence_parallel, work.selective, work.interleave)
            if kind not in full:
                found.append(Candidate(way, forecast(work, question.node)))
                if not found[-1].fits:
                    full.add(kind)
    return found


def ranking(fitting: list[Candidate]) -> list[Candidate]:
    """Rank by time, but put first the simplest layout within `WORTH` of the fastest.

    It fits with what torch reserves, offloads nothing, has the least model parallelism: in this order, where
    one does.
    """
    by_time = sorted(fitting, key=lambda candidate: candidate.seconds)
    close = [
        candidate
        for candidate in by_time
        if candidate.seconds <= WORTH * by_time[0].seconds
    ]
    if not close:
        return []
    winner = min(close, key=_complexity)
    return [winner, *(candidate for candidate in by_time if candidate is not winner)]


def groups(candidates_: Sequence[Candidate]) -> list[int]:
    """Number the groups, from the fastest, whose times are closer than the planner's error in the median.

    Of two layouts the larger error counts, as of one whose GPUs wait for the host.
    """
    first: Candidate | None = None
    number = -1
    found = dict[int, int]()
    for place in sorted(
        range(len(candidates_)), key=lambda place: candidates_[place].seconds
    ):
        candidate = candidates_[place]
        if (
            first is None
            or candidate.seconds
            > (1 + max(first.error, candidate.error)) * first.seconds
        ):
            first = candidate
            number = number + 1
        found[place] = number
    return [found[place] for place in range(len(candidates_))]


def _complexity(candidate: Candidate) -> tuple[bool, bool, int, float]:
    work = candidate.work
    layout = candidate.work.layout
    offloaded = (work.optimizer_at, work.weights_at) != ("gpu", "gpu")
    return (
        candidate.forecast.verdict != "fits",
        offloaded,
        layout.tp * layout.pp,
        candidate.seconds,
    )


def _alternatives(
    predicted: list[Candidate], ranking: list[Candidate], exclusions: Exclusions
) -> list[Alternative]:
    """Return what is best for each value that the winner lacks, and what is ruled out."""
    by_missing = sorted(
        (each for each in predicted if not each.fits), key=lambda each: each.shortage
    )
    firsts = dict[Value, Candidate]()
    for candidate in (*ranking, *by_missing):
        for value in candidate.values:
            firsts.setdefault(value, candidate)
    won = ranking[0].values if ranking else []
    found = [
        Alternative(*value, best) for value, best in firsts.items() if value not in won
    ]
    for value, rule in exclusions.indivisible.items():
        if value not in firsts:
            found.append(Alternative(*value, rule=f"not divisible: {rule}"))
    # a rule for pipelines covers those with tensor ranks
    refused: dict[tuple[Way, str], str] = {}
    for (way, (tensor, pipeline)), problems in exclusions.refused.items():
        parts = " and ".join(["tensor"] * tensor + ["pipeline"] * pipeline)
        rule = "; ".join(
            dict.fromkeys(str(problem.rule or problem.came) for problem in problems)
        )
        called = f"{way.name} with {parts}" if parts else way.name
        refused.setdefault((way, rule), called)
    for (_, rule), called in refused.items():
        found.append(Alternative("model states", called, rule=f"cannot be run: {rule}"))
    return found


def recomputation(work: Workload) -> str:
    """Return the recomputed part in words."""
    if work.selective:
        return "scores"
    return NAMED.get(work.recomputed, f"chunks of {work.recomputed}")
