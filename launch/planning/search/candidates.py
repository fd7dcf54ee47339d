"""Possible layouts of a recipe on a number of GPUs, and the reasons against the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from ds_configs import known_keys
from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import put
from ds_configs.sections import transformers_modules
from ds_configs.sections.sizes import sizes, sums
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
STUDIED = ("megatron", "megatron-deepspeed", "megatron-core")  # other systems that have all degrees

Dimension = Literal[
    "tensor", "pipeline", "data", "model states", "recomputation", "micro-batch", "sequence", "chunks"
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
class Question:
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


@dataclass
class Exclusions:
    """Layouts ruled out, with the reasons.

    Attributes:
        indivisible: value -> the rule against it.
        refused: (way, (tensor, pipeline parallelism)) -> the resolver's problems.
    """

    indivisible: dict[Value, str] = field(default_factory=dict)
    refused: dict[tuple[Way, tuple[bool, bool]], tuple[Problem, ...]] = field(default_factory=dict)


def degrees(question: Question, exclusions: Exclusions) -> list[Degrees]:
    """Return every tp x pp x dp of all processes with divisible heads, layers and batch."""
    recipe, found = question.recipe, []
    model, batch, pinned = recipe.model, recipe.batch.unit, recipe.parallel
    for tp in divisors(question.ranks) if pinned.tp is None else [pinned.tp]:
        if model.heads % tp:
            exclusions.indivisible["tensor", tp] = f"{model.heads} heads are not divisible by it"
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
                exclusions.indivisible["pipeline", pp] = f"there are {model.layers} layers"
            elif batch % dp:
                exclusions.indivisible["data", dp] = f"a batch of {batch} is not divisible by it"
            else:
                found.append(Degrees(tp, pp, dp))
    return found


class Templates:
    """Resolved steps of each way of keeping model states, with and without recomputation."""

    def __init__(self, question: Question, kinds: set[tuple[bool, bool]], exclusions: Exclusions):
        """Resolve each way for each kind of parallelism; refusals go to `exclusions`."""
        self.question = question
        self.plans: dict[tuple[Way, tuple[bool, bool], Any], Plan] = {}
        pinned = [question.recipe.activation_checkpointing]
        self.recomputations = pinned if question.recomputation else ["none", "full"]
        for way, kind in product(ways_of(question.software), sorted(kinds)):
            try:
                for again in self.recomputations:
                    self.plans[way, kind, again] = self._plan(way, kind, again)
            except ConfigError as error:
                exclusions.refused[way, kind] = error.problems

    def _plan(self, way: Way, kind: tuple[bool, bool], again: Any) -> Plan:
        """Resolve a stand-in for a kind of parallelism: refusals do not depend on the degrees."""
        recipe = self.question.recipe
        kind = kind if self.question.software is OURS else (False, False)
        tp = next(d for d in divisors(recipe.model.heads) if d > 1) if kind[0] else 1
        parallel = recipe.parallel.model_copy(update={"tp": tp, "pp": 2 if kind[1] else 1, "dp": None})
        batch = recipe.batch.model_copy(update={"micro": 1, "accumulation": 1, "global_": 1, "rampup": None})
        changed = {"parallel": parallel, "batch": batch, "activation_checkpointing": again}
        document = ways.config(way, self.question.base)
        return ways.resolved(document, recipe.model_copy(update=changed), None, self.question.node.machine)

    def step(self, way: Way, at: Degrees, again: Any, accumulation: int) -> Workload | None:
        """Return the workload of one-sample micro-batches under these degrees; None: refused."""
        plan = self.plans.get((way, at.kind, again))
        if plan is None:
            return None
        layout = Layout(*at, 1, accumulation, accumulation * at.dp)
        question = self.question
        config = ways.config(way, question.base)
        work = workload.of_plan(resized(plan, config, layout, question.node.machine))
        if question.software is not OURS:
            work = workload.on_system(work, question.software.name)
        return replace(work, padded_vocab=transformers_modules.embedding_rows(question.recipe, at.tp))


def half_precision(node: Node) -> str:
    """Return the node's half precision for training; fp32 if it has none."""
    return next((kind for kind in ("bf16", "fp16") if kind in node.gpu.tflops), "fp32")


def ways_of(software: Software) -> tuple[Way, ...]:
    """Return the ways of a system; other systems have their own states, or those of ZeRO-0 and -1."""
    if software is OURS:
        return WAYS
    return WAYS[:1] if software.states else WAYS[:2]


def micro_batches(question: Question, at: Degrees) -> list[int]:
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
    software, layout = work.software, work.layout
    both = software.has_sequence_parallelism
    cuts = both and layout.tp > 1 and work.sequence_length % layout.tp == 0
    again = both and software.keeps_scores and not work.recomputed
    for sequence in _choices(work.sequence_parallel, cuts):
        for selective in _choices(work.selective, again):
            for chunks in chunk_counts(work):
                yield replace(work, sequence_parallel=sequence, selective=selective, interleave=chunks)


def _choices(demanded: bool, possible: bool) -> list[bool]:
    """Return the values of an option: the recipe's demand, or both if there is a choice."""
    return [True] if demanded else [False, True] if possible else [False]


def chunk_counts(work: Workload) -> list[int]:
    """Return the possible chunks per stage: equal ones, for micro-batches in whole rounds."""
    layout, layers = work.layout, work.model.layers
    plain = layout.pp == 1 or layers % layout.pp or layout.accumulation % layout.pp
    if plain or not work.software.has_interleaving:
        return [1]
    return divisors(layers // layout.pp)


def resized(plan: Plan, config: Mapping[str, Any], layout: Layout, machine: Machine) -> Plan:
    """Return the plan of `config` under another layout, with its sizes and data types."""
    values = sizes(plan.recipe, layout, machine) | sums(config, plan.precision, layout)
    open_ = {key: value for key, value in values.items() if known_keys.lookup(config, key) == "auto"}
    ds = copy.deepcopy(plan.ds)
    for key, value in open_.items():
        put(ds, key, value)
    return replace(plan, layout=layout, ds=ds)
