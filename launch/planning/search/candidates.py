"""Possible layouts of a recipe on a number of GPUs, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ds_configs.findings import ConfigError
from ds_configs.plan import Plan
from launch.planning.prediction import workload
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.software import OURS, Software
from launch.planning.prediction.workload import Workload
from launch.planning.search import ways
from launch.planning.search.ways import WAYS, Way
from recipes.layout import Layout, divisors
from recipes.problems import Problem
from recipes.schema import Recipe

MOST_MICRO = 128  # samples
# other systems that have all degrees
STUDIED = ("megatron", "megatron-deepspeed", "megatron-core")

Dimension = Literal[
    "tensor",
    "pipeline",
    "data",
    "model states",
    "recomputation",
    "micro-batch",
    "sequence",
    "chunks",
]
Value = tuple[Dimension, object]  # a value of a dimension


class Degrees(NamedTuple):
    """Tensor, pipeline and data-parallel degree of a number of processes."""

    tp: int
    pp: int
    dp: int

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether there is tensor, and whether there is pipeline parallelism."""
        return self.tp > 1, self.pp > 1


@dataclass(frozen=True)
class SearchQuestion:
    """The question of a search: recipe, nodes, pinned values.

    Attributes:
        recipe: its stated degrees, micro-batch and accumulation are pinned.
        recomputation: the recipe's recomputation is pinned.
        base: the user's DeepSpeed JSON; stage and offload are replaced. None: those of ds_configs/.
    """

    recipe: Recipe
    node: Node
    nodes: int
    recomputation: bool = False
    base: dict[str, Any] | None = None
    software: Software = OURS

    @property
    def ranks(self) -> int:
        return self.nodes * self.node.gpus

    @property
    def recomputations(self) -> list[str | int]:
        """Values of the recipe's recomputation that are open."""
        return (
            [self.recipe.activation_checkpointing]
            if self.recomputation
            else ["none", "full"]
        )


@dataclass
class Exclusions:
    """Layouts ruled out, with the reasons.

    Attributes:
        indivisible: value -> the rule against it.
        refused: (way, (tensor, pipeline parallelism)) -> the resolver's problems.
    """

    indivisible: dict[Value, str] = field(default_factory=dict)
    refused: dict[tuple[Way, tuple[bool, bool]], tuple[Problem, ...]] = field(
        default_factory=dict
    )


def degrees(question: SearchQuestion, exclusions: Exclusions) -> list[Degrees]:
    """Return every tp x pp x dp of all processes with divisible heads, layers and batch."""
    recipe = question.recipe
    found = []
    model = recipe.model
    batch = recipe.batch.unit
    pinned = recipe.parallel
    for tp in divisors(question.ranks) if pinned.tp is None else [pinned.tp]:
        if model.heads % tp:
            exclusions.indivisible["tensor", tp] = (
                f"{model.heads} heads are not divisible by it"
            )
            continue
        if pinned.sequence and recipe.sequence_length % tp:
            rule = f"{recipe.sequence_length} positions are not divisible by it"
            exclusions.indivisible["tensor", tp] = rule
            continue
        for pp in divisors(question.ranks // tp) if pinned.pp is None else [pinned.pp]:
            dp, over = divmod(question.ranks, tp * pp)
            if over or pinned.dp not in (None, dp):
                continue
            if pp > model.layers:
                exclusions.indivisible["pipeline", pp] = (
                    f"there are {model.layers} layers"
                )
            elif batch % dp:
                exclusions.indivisible["data", dp] = (
                    f"a batch of {batch} is not divisible by it"
                )
            else:
                found.append(Degrees(tp, pp, dp))
    return found


def step(
    question: SearchQuestion, way: Way, at: Degrees, again: Any, accumulation: int
) -> Workload:
    """Return the workload of one-sample micro-batches under these degrees. Raises ConfigError.

    again: the recipe's value for recomputation.
    """
    try:
        plan = _plan(question, way, at, again, accumulation)
    except ConfigError:
        if question.software is OURS:
            raise
        # Another system may have it, and what it keeps does not depend on our pipeline.
        plan = _plan(
            question, way, Degrees(at.tp, 1, at.pp * at.dp), again, accumulation
        )
        plan = replace(plan, layout=Layout(*at, 1, accumulation, accumulation * at.dp))
    work = workload.of_plan(plan)
    return (
        work
        if question.software is OURS
        else workload.on_system(work, question.software.name)
    )


def _plan(
    question: SearchQuestion, way: Way, at: Degrees, again: Any, accumulation: int
) -> Plan:
    document = ways.config(way, question.base)
    recipe = laid_out(
        question.recipe, at, 1, accumulation, activation_checkpointing=again
    )
    return ways.resolved(document, recipe, question.ranks, question.node.machine)


def laid_out(
    recipe: Recipe, at: Degrees, micro: int, accumulation: int, **changed: Any
) -> Recipe:
    """Return the recipe under these degrees, with the batch that they make, and `changed` otherwise."""
    total = micro * accumulation * at.dp
    batch = {
        "micro": micro,
        "accumulation": accumulation,
        "global_": total,
        "rampup": None,
    }
    changed["parallel"] = recipe.parallel.model_copy(update=at._asdict())
    return recipe.model_copy(
        update={**changed, "batch": recipe.batch.model_copy(update=batch)}
    )


def half_precision(node: Node) -> str:
    """Return the node's half precision for training; fp32 if it has none."""
    return next((kind for kind in ("bf16", "fp16") if kind in node.gpu.tflops), "fp32")


def ways_of(software: Software) -> tuple[Way, ...]:
    """Return the ways of a system; other systems have their own states, or those of ZeRO-0 and -1."""
    if software is OURS:
        return WAYS
    return WAYS[:1] if software.states else WAYS[:2]


def micro_batches(question: SearchQuestion, at: Degrees) -> list[int]:
    """Return the possible micro-batches: divisors of a rank's share of the batch, ascending."""
    batch = question.recipe.batch
    share = batch.global_ // at.dp
    sizes = [size for size in divisors(batch.unit // at.dp) if size <= MOST_MICRO]
    if batch.micro:
        sizes = [size for size in [batch.micro] if batch.unit // at.dp % size == 0]
    return [size for size in sizes if batch.accumulation in (None, share // size)]


def variants(work: Workload) -> Iterator[Workload]:
    """Yield the step with each combination of its system's optional features.

    Sequence parallelism and selective recomputation came together (Korthikanti et al. 2022); a kernel that
    keeps no scores gains nothing by the latter.
    """
    software = work.software
    layout = work.layout
    both = software.has_sequence_parallelism
    cuts = both and layout.tp > 1 and work.sequence_length % layout.tp == 0
    again = both and software.keeps_scores and not work.recomputed
    for sequence in _choices(work.sequence_parallel, cuts):
        for selective in _choices(work.selective, again):
            for chunks in chunk_counts(work):
                yield replace(
                    work,
                    sequence_parallel=sequence,
                    selective=selective,
                    interleave=chunks,
                )


def _choices(demanded: bool, possible: bool) -> list[bool]:
    """Return the values of an option: the recipe's demand, or both if there is a choice."""
    if demanded:
        return [True]
    return [False, True] if possible else [False]


def chunk_counts(work: Workload) -> list[int]:
    """Return the possible chunks per stage: equal ones, for micro-batches in whole rounds."""
    layout = work.layout
    layers = work.model.layers
    plain = layout.pp == 1 or layers % layout.pp or layout.accumulation % layout.pp
    if plain or not work.software.has_interleaving:
        return [1]
    return divisors(layers // layout.pp)
