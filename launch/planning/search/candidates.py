"""Every layout of a recipe on given nodes with its forecast, the best first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ds_configs.findings import ConfigError
from ds_configs.plan import Plan
from launch.planning.memory_fit import BEST_FIRST
from launch.planning.prediction import workload
from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.hardware import Node
from launch.planning.resolved_plans import resolve_on_machine
from recipes.layout import divisors
from recipes.schema import Recipe

MOST_MICRO = 128  # samples
# Places of the model states, by the JSON of ds_configs/.
WAYS = {
    "ZeRO-0": "zero0",
    "ZeRO-1": "zero1",
    "ZeRO-1 offload": "zero1_offload",
    "ZeRO-2": "zero2",
    "ZeRO-2 offload": "zero2_offload",
    "ZeRO-3": "zero3",
    "ZeRO-3 offload": "zero3_offload_optimizer",
    "ZeRO-3 offload all": "zero3_offload",
}


@dataclass(frozen=True)
class SearchQuestion:
    """The question of a search: recipe and nodes.

    Attributes:
        name: of the recipe.
        settings: the user's overrides of it, by key, as key=value.
        recipe: its stated degrees, micro-batch and accumulation are pinned.
        recomputations: the values of activation_checkpointing that are open.
    """

    name: str
    settings: dict[str, str]
    recipe: Recipe
    node: Node
    nodes: int
    recomputations: tuple[str | int, ...]

    @property
    def ranks(self) -> int:
        return self.nodes * self.node.gpus


class Choice(NamedTuple):
    """What a layout has besides its batch and the place of its model states.

    Attributes:
        sequence: the value of parallel.sequence.
        again: the value of activation_checkpointing.
    """

    tp: int
    pp: int
    sequence: bool
    again: str | int


@dataclass(frozen=True)
class Candidate:
    """A layout with its forecast. `way`: a key of WAYS."""

    way: str
    plan: Plan
    forecast: Forecast

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.forecast.time, "the resolver takes a precision that the node has"
        return self.forecast.time.total

    @property
    def fits(self) -> bool:
        """True also where it is snug."""
        return self.forecast.verdict != "out of memory"

    @property
    def place(self) -> tuple[int, float]:
        """The key by which candidates are sorted: verdict, then time, or share of the memory."""
        last = self.seconds if self.fits else self.forecast.binding.share
        return BEST_FIRST.index(self.forecast.verdict), last


def choices(question: SearchQuestion) -> list[Choice]:
    """Return all choices, also those that the resolver refuses.

    Tensor ranks stay inside a node unless the recipe states their number.
    """
    ranks = question.ranks
    stated = question.recipe.parallel
    pipeline = [stated.pp] if stated.pp else divisors(ranks)
    inside = [tp for tp in divisors(ranks) if question.node.holds_groups(tp, 1, ranks)]
    tensor = [stated.tp] if stated.tp else inside
    cuts = sorted({stated.sequence, True})
    every = product(tensor, pipeline, cuts, question.recomputations)
    return [Choice(*each) for each in every]


def search(question: SearchQuestion, ways: Iterable[str] = WAYS) -> list[Candidate]:
    """Predict every layout; the best stands first. Raises ConfigError: none can be run."""
    candidates = list[Candidate]()
    refused = list[ConfigError]()
    for way, choice in product(ways, choices(question)):
        try:
            candidates += of_choice(question, way, choice)
        except ConfigError as error:
            refused.append(error)
    if not candidates:
        raise min(refused, key=lambda error: len(error.problems))
    return sorted(candidates, key=lambda each: each.place)


def of_choice(
    question: SearchQuestion, way: str, choice: Choice
) -> Iterator[Candidate]:
    """Predict every micro-batch, up to the first one that is too large. Raises ConfigError."""
    recipe = question.recipe
    batch = recipe.batch
    node = question.node
    share = batch.unit * choice.tp * choice.pp // question.ranks
    sizes: list[int | None] = [batch.micro]
    if not (batch.micro or batch.accumulation):
        sizes = [size for size in divisors(share) if size <= MOST_MICRO] or [1]
    degrees = {"tp": choice.tp, "pp": choice.pp, "sequence": choice.sequence}
    changed: dict[str, Any] = {
        "parallel": recipe.parallel.model_copy(update=degrees),
        "activation_checkpointing": choice.again,
    }
    for micro in sizes:
        changed["batch"] = batch.model_copy(update={"micro": micro})
        own = recipe.model_copy(update=changed)
        plan = resolve_on_machine(own, WAYS[way], question.ranks, node.machine)
        candidate = Candidate(way, plan, Forecast(workload.of_plan(plan), node))
        yield candidate
        if not candidate.fits:
            return
