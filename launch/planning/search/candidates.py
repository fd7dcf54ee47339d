"""The question of a search, and the layouts that it goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from launch.planning.prediction import workload
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.workload import Workload
from launch.planning.search import ways
from launch.planning.search.ways import Way
from recipes.layout import divisors
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

MOST_MICRO = 128  # samples


class Degrees(NamedTuple):
    """Tensor, pipeline and data-parallel degree of a number of processes."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class SearchQuestion:
    """The question of a search: recipe, nodes, pinned values.

    Attributes:
        recipe: its stated degrees, micro-batch and accumulation are pinned.
        base: the user's DeepSpeed JSON; stage and offload are replaced. None: those of ds_configs/.
        recomputations: the values of activation_checkpointing that are open.
    """

    recipe: Recipe
    node: Node
    nodes: int
    base: dict[str, Any] | None = None
    recomputations: tuple[str | int, ...] = ("none", "full")

    @property
    def ranks(self) -> int:
        return self.nodes * self.node.gpus


def degrees(question: SearchQuestion) -> list[Degrees]:
    """Return every tp x pp x dp of all processes under which the batch can be made.

    Tensor ranks stay inside a node unless the recipe states their number. Raises ProblemsError: there are none.
    """
    recipe = question.recipe
    found = []
    for at in _products(question):
        cut = recipe.sequence_length if recipe.parallel.sequence else 0
        shared = not (recipe.model.heads % at.tp or cut % at.tp)
        if shared and at.pp <= recipe.model.layers and micro_batches(question, at):
            found.append(at)
    if not found:
        raise ProblemsError([_no_layout(question)])
    return found


def _products(question: SearchQuestion) -> Iterator[Degrees]:
    """Yield the degrees whose product is the number of processes, with those that the recipe states."""
    stated = question.recipe.parallel
    ranks = question.ranks
    for tp in [stated.tp] if stated.tp else divisors(ranks):
        if not stated.tp and not question.node.holds_groups(tp, 1, ranks):
            continue
        for pp in [stated.pp] if stated.pp else divisors(ranks // tp):
            dp, over = divmod(ranks, tp * pp)
            if not over and stated.dp in (None, dp):
                yield Degrees(tp, pp, dp)


def _no_layout(question: SearchQuestion) -> Problem:
    recipe = question.recipe
    batch = recipe.batch
    pinned = {f"parallel.{key}": at for key, at in recipe.parallel.degrees.items()}
    pinned["batch.micro"] = batch.micro
    pinned["batch.accumulation"] = batch.accumulation
    came = [f"{question.ranks} GPUs"]
    came += [f"{key}={value}" for key, value in pinned.items() if value]
    rule = (
        f"tensor ranks inside a node share {recipe.model.heads} heads, pipeline stages {recipe.model.layers} "
        f"layers, and data-parallel ranks x micro x accumulation make a batch of {batch.unit}"
    )
    fix = "pin fewer of them, or give another number of --nodes, or another --global-batch"
    return Problem("--nodes", ", ".join(came), rule, fix)


def micro_batches(question: SearchQuestion, at: Degrees) -> list[int]:
    """Return the possible micro-batches: divisors of a rank's share of the batch, ascending."""
    batch = question.recipe.batch
    share, over = divmod(batch.unit, at.dp)
    if over:
        return []
    sizes = [size for size in divisors(share) if size <= MOST_MICRO]
    if batch.micro:
        sizes = [size for size in [batch.micro] if share % size == 0]
    whole = batch.global_ // at.dp
    return [size for size in sizes if batch.accumulation in (None, whole // size)]


def step(
    question: SearchQuestion, way: Way, at: Degrees, again: Any, accumulation: int
) -> Workload:
    """Return the workload of one-sample micro-batches under these degrees. Raises ConfigError.

    again: the recipe's value for recomputation.
    """
    recipe = laid_out(
        question.recipe, at, 1, accumulation, activation_checkpointing=again
    )
    document = ways.config(way, question.base)
    machine = question.node.machine
    return workload.of_plan(ways.resolved(document, recipe, question.ranks, machine))


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


def sequence_cuts(work: Workload) -> list[bool]:
    """Return whether the residual stream can be whole, and cut over tensor ranks."""
    if work.sequence_parallel:
        return [True]
    tp = work.layout.tp
    able = work.software.has_sequence_parallelism and tp > 1
    return [False, True] if able and work.sequence_length % tp == 0 else [False]
