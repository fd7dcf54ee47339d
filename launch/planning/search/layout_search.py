"""The fastest layouts that fit, and what every other choice would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from launch.planning.prediction import rank_memory
from launch.planning.prediction.constants import Constants, fitted
from launch.planning.prediction.forecast import Speed, Verdict, speed, verdict_of
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.prediction.step_time import StepTime, step_time
from launch.planning.prediction.workload import Workload
from launch.planning.search import candidates
from launch.planning.search.candidates import Degrees, Dimension, Excluded, Question, Templates, Value
from launch.planning.search.ways import Way
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError, some

# Of the fastest one's time: what a simpler layout may take and still be preferred.
WORTH = 1.05
NAMED: dict[int, str] = {0: "nothing", 1: "every layer"}


@dataclass(frozen=True)
class Tried:
    """A layout and what is predicted of it.

    Attributes:
        memory: of the fullest rank.
        missing: bytes that a GPU lacks, or else the node's host memory; 0: none.
        time: None where it does not fit.
    """

    way: Way
    work: Workload
    memory: RankMemory
    verdict: Verdict
    missing: float
    on_host: bool
    time: StepTime | None = None

    @property
    def seconds(self) -> float:
        assert self.time is not None, "a layout that does not fit has no time"
        return self.time.total

    @property
    def key(self) -> tuple[object, ...]:
        """What rows of a table of layouts differ in."""
        work = self.work
        return work.layout.tp, work.layout.pp, self.way, work.sequence_parallel, work.interleave > 1

    @property
    def values(self) -> list[Value]:
        """What it has of each dimension."""
        work, layout = self.work, self.work.layout
        found: list[Value] = [
            ("tensor", layout.tp), ("pipeline", layout.pp), ("data", layout.dp),
            ("model states", self.way.name), ("recomputation", recomputation(work)),
            ("micro-batch", layout.micro),
        ]  # fmt: skip
        if work.software.has_sequence_parallelism:
            found.append(("sequence", "parallel" if work.sequence_parallel else "whole"))
        if work.software.has_interleaving:
            found.append(("chunks", work.interleave))
        return found


Why = Literal["best", "dominated", "memory", "divisibility", "DeepSpeed cannot"]


@dataclass(frozen=True)
class Family:
    """All layouts with one value of a dimension, and what became of them.

    Attributes:
        best: the fastest that fits, or the one that misses least; None: there is none to try.
        slower: its time over the winner's.
        rule: that excludes it, for divisibility and for what DeepSpeed cannot.
    """

    dimension: Dimension
    value: object
    why: Why
    best: Tried | None = None
    slower: float = 1.0
    rule: str = ""


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        ranked: that fit, the winner first, then by time.
        tried: number of layouts whose memory was predicted.
    """

    question: Question
    ranked: list[Tried]
    families: list[Family]
    tried: int

    @property
    def winner(self) -> Tried | None:
        return self.ranked[0] if self.ranked else None

    def best_of_each(self, most: int) -> list[Tried]:
        """The first of each layout of degrees and model states, `most` of them."""
        firsts: dict[tuple[object, ...], Tried] = {}
        for tried in self.ranked:
            firsts.setdefault(tried.key, tried)
        return list(firsts.values())[:most]

    def speed(self, tried: Tried) -> Speed:
        """Its rates."""
        return speed(tried.work, self.question.node, tried.seconds)


def search(question: Question, constants: Constants | None = None) -> Answer:
    """Predict every layout's memory, and the time of those that fit. Raises ProblemsError: there is none."""
    constants, excluded = constants or fitted(question.node.measured), Excluded()
    found = candidates.degrees(question, excluded)
    if not found:
        raise ProblemsError([_no_layout(question, excluded)])
    templates = Templates(question, {at.kind for at in found}, excluded)
    if not templates.plans:
        raise ProblemsError([problem for problems in excluded.refused.values() for problem in problems])
    tried = [each for at in found for each in _of_degrees(question, at, templates, constants)]
    if not tried:
        came = f"batch.global={question.recipe.batch.global_} on {question.ranks} GPUs"
        rule = "no micro-batch and accumulation as pinned make that batch"
        raise ProblemsError(
            [Problem("batch", came, rule, "pin fewer of them, or give another --global-batch")]
        )
    fitting = ranked([each for each in tried if each.time])
    return Answer(question, fitting, _families(tried, fitting, excluded), len(tried))


def _no_layout(question: Question, excluded: Excluded) -> Problem:
    pinned = {key: value for key, value in question.recipe.parallel.degrees.items() if value}
    came = f"{question.ranks} GPUs" + "".join(f", parallel.{key}={value}" for key, value in pinned.items())
    values: dict[tuple[str, str], list[str]] = {}
    for (name, value), why in excluded.indivisible.items():
        values.setdefault((name, why), []).append(str(value))
    whys = (f"{name} {some(found, 4)}: {why}" for (name, why), found in values.items())
    rule = "; ".join(whys) or "the degrees' product is the number of GPUs"
    return Problem("--nodes", came, rule, "give another number of --nodes, or another --global-batch")


def _of_degrees(question: Question, at: Degrees, templates: Templates, constants: Constants) -> list[Tried]:
    """Every way, recomputation and micro-batch; those larger than one that does not fit are left out."""
    found = []
    for way in candidates.ways_of(question.software):
        for again in templates.recomputations:
            once, often = (templates.step(way, at, again, accumulation) for accumulation in (1, 2))
            if once is None or often is None:
                continue
            full: set[tuple[object, ...]] = set()
            for micro in candidates.micro_batches(question, at):
                total = question.recipe.batch.global_
                layout = Layout(*at, micro, total // (micro * at.dp), total)
                one = often if layout.accumulation > 1 else once
                for work in candidates.variants(replace(one, layout=layout)):
                    kind = (work.sequence_parallel, work.selective, work.interleave)
                    if kind in full:
                        continue
                    tried = _predicted(question, way, work, constants)
                    found.append(tried)
                    if tried.time is None:
                        full.add(kind)
    return found


def _predicted(question: Question, way: Way, work: Workload, constants: Constants) -> Tried:
    """Memory first; the time only of what fits."""
    node = question.node
    # The first stage holds most micro-batches, the last one the logits: none between is fuller than both.
    ends = [rank_memory.of_stage(work, stage, node.gpu, constants) for stage in {0, work.layout.pp - 1}]
    fullest = max(ends, key=lambda rank: rank.total)
    host = min(question.ranks, node.gpus) * max(rank.host for rank in ends)
    verdict = verdict_of(ends, host, node)
    over = fullest.total - node.gpu.memory_bytes
    if verdict == "out of memory":
        missing = over if over > 0 else host - node.form.host.memory_gb * 1e9
        return Tried(way, work, fullest, verdict, missing, over <= 0)
    return Tried(way, work, fullest, verdict, 0.0, False, step_time(work, node, constants))


def ranked(fitting: list[Tried]) -> list[Tried]:
    """By time, but for the first: it is the simplest of those that take hardly longer than the fastest.

    It fits with a margin, offloads nothing, has the least model parallelism: in this order, where one does.
    """
    by_time = sorted(fitting, key=lambda tried: tried.seconds)
    close = [tried for tried in by_time if tried.seconds <= WORTH * by_time[0].seconds]
    if not close:
        return []
    winner = min(close, key=_complexity)
    return [winner, *(tried for tried in by_time if tried is not winner)]


def _complexity(tried: Tried) -> tuple[bool, bool, int, float]:
    work, layout = tried.work, tried.work.layout
    offloaded = (work.optimizer_at, work.weights_at) != ("gpu", "gpu")
    return tried.verdict != "fits", offloaded, layout.tp * layout.pp, tried.seconds


def _families(tried: list[Tried], fitting: list[Tried], excluded: Excluded) -> list[Family]:
    """What became of each value of each dimension, and of what the resolver refuses."""
    best: dict[Value, Tried] = {}
    for each in fitting:
        for value in each.values:
            best.setdefault(value, each)
    nearest: dict[Value, Tried] = {}
    for each in sorted((each for each in tried if not each.time), key=lambda each: each.missing):
        for value in each.values:
            nearest.setdefault(value, each)
    found: list[Family] = []
    for value in {**best, **nearest}:
        if value in best:
            slower = best[value].seconds / fitting[0].seconds
            why: Why = "best" if value in fitting[0].values else "dominated"
            found.append(Family(*value, why, best[value], slower))
        else:
            found.append(Family(*value, "memory", nearest[value]))
    known = {(family.dimension, family.value) for family in found}
    found += [
        Family(*value, "divisibility", rule=rule)
        for value, rule in excluded.indivisible.items()
        if value not in known
    ]
    return found + _refused(excluded)


def _refused(excluded: Excluded) -> list[Family]:
    """What the resolver refuses: a rule for pipelines holds for those of several tensor ranks as well."""
    found: dict[tuple[Way, str], Family] = {}
    for (way, (tensor, pipeline)), problems in excluded.refused.items():
        parts = " and ".join(["tensor"] * tensor + ["pipeline"] * pipeline)
        value = f"{way.name} with {parts}" if parts else way.name
        rule = "; ".join(dict.fromkeys(str(problem.rule or problem.came) for problem in problems))
        found.setdefault((way, rule), Family("model states", value, "DeepSpeed cannot", rule=rule))
    return list(found.values())


def recomputation(work: Workload) -> str:
    """What is recomputed, in words."""
    if work.selective:
        return "scores"
    return NAMED.get(work.recomputed, f"chunks of {work.recomputed}")
