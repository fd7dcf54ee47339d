"""The verdict whether a recipe fits: its plan on given nodes, with the planner's memory of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ds_configs.findings import ConfigError
from ds_configs.plan import Plan
from launch.machine.memory import describe_states
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import Forecast, Verdict
from launch.planning.prediction.forecast_text import memory_error
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.resolved_plans import processes, resolve_on_machine
from recipes.layout import divisors
from recipes.problems import Problem, amount, counted
from recipes.schema import Recipe

BEST_FIRST = (*get_args(Verdict), "refused")
UNCOUNTED = Problem(
    "model.config",
    "a model of transformers by its config",
    "its activations are not counted, so nothing says what fits or how long a step takes",
    "plan.py --recipe TABLE/ROW --hardware NODE, without other questions, shows what is counted",
)


@dataclass(frozen=True)
class Fit:
    """Whether a recipe fits nodes, and how it is run there.

    Attributes:
        recipe: as it was given.
        gpus: of all nodes; 0: they have none.
        plan, forecast: under the layout that it has there; None: it has none, by `problems`.
    """

    recipe: Recipe
    gpus: int
    plan: Plan | None = None
    forecast: Forecast | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def verdict(self) -> Verdict | Literal["refused"]:
        return self.forecast.verdict if self.forecast else "refused"

    @property
    def fits(self) -> bool:
        """True also where it is snug."""
        return self.verdict in ("fits", "snug")

    @property
    def world(self) -> int:
        """Processes of the layout that it has there; 0: none."""
        return self.plan.layout.world if self.plan else 0


def fit(
    recipe: Recipe, node: Node, nodes: int = 1, ds_config: str | Path | None = None
) -> Fit:
    """Tell whether a recipe fits `nodes` such nodes.

    All of it stays as it is written, but for the number of data-parallel ranks. That is the stated one, or
    the largest smaller one that the batch can be shared by and the memory holds; where none is stated, the
    largest for which there are GPUs. Without GPUs the processes may be as many as stated, or else one.
    """
    file = ds_config or recipe.ds_config
    gpus = nodes * node.gpus
    if recipe.model.config:
        return Fit(recipe, gpus, problems=(UNCOUNTED,))
    tp, pp = recipe.parallel.model_parallel
    shared = tp * pp
    if gpus and shared > gpus:
        return Fit(
            recipe,
            gpus,
            problems=(
                Problem(
                    "--nodes",
                    f"tp {tp} x pp {pp} on {counted(gpus, 'GPU')}",
                    f"each of the {shared} processes has a GPU of its own",
                    f"--nodes {math.ceil(shared / node.gpus)}",
                ),
            ),
        )
    tried = list[Fit]()
    stated = recipe.parallel.dp
    most = min((bound for bound in (gpus // shared, stated) if bound), default=1)
    ranks = {dp for dp in divisors(recipe.batch.unit) if dp < most}
    for dp in sorted({*ranks, most}, reverse=True):
        try:
            plan = resolve_on_machine(
                _with_dp(recipe, dp), file, dp * shared, node.machine
            )
        except ConfigError as error:
            tried.append(Fit(recipe, gpus, problems=error.problems))
            # of the recipe as it is written
            if dp == stated:
                break
            continue
        predicted = Forecast(workload.of_plan(plan), node, unit=recipe.batch.unit)
        tried.append(Fit(recipe, gpus, plan, predicted))
        if predicted.verdict == "fits":
            break
    return min(tried, key=lambda each: BEST_FIRST.index(each.verdict))


def _with_dp(recipe: Recipe, dp: int) -> Recipe:
    """Set the data-parallel degree, as `how` says."""
    if recipe.parallel.dp in (None, dp):
        return recipe
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    batch = recipe.batch.model_copy(update={"accumulation": None})
    return recipe.model_copy(update={"parallel": parallel, "batch": batch})


def how(placed: Fit) -> str:
    """Say how a recipe that fits is run: as it is, or with which settings."""
    recipe = placed.recipe
    snug = ", snug" if placed.verdict == "snug" else ""
    count = counted(placed.world, "process")
    stated = processes(recipe)
    if recipe.parallel.dp is None:
        return f"on {count}{snug}"
    if placed.world == stated:
        guessed = any(
            key.partition(".")[0] in ("model", "parallel", "batch")
            for key in recipe.unknown
        )
        printed = recipe.published and not guessed
        return f"{'as published' if printed else f'as it is, on {count}'}{snug}"
    assert placed.plan
    sets = f"--set parallel.dp={placed.plan.layout.dp}"
    if recipe.batch.accumulation:
        sets += " --set batch.accumulation=null"
    return f"with {sets}: {placed.world} of {stated} processes{snug}"


def memory_of_plan(plan: Plan) -> RankMemory:
    """Predict the memory of a rank of the fullest pipeline stage, on the recipe's hardware if it names some."""
    own = plan.recipe.hardware
    node = hardware.find((own and own.node) or hardware.USUAL)
    return Forecast(workload.of_plan(plan), node).fullest_rank


def describe(plan: Plan) -> str:
    """Describe the memory of a process of the fullest pipeline stage, by kind and place."""
    if plan.recipe.model.config:
        return describe_states(plan)
    rank = memory_of_plan(plan)
    kinds = (
        ("model states", rank.states),
        ("activations", rank.activations + rank.working),
        ("loss", rank.logits),
        ("kept by torch's allocator", rank.fragmentation),
        ("other", rank.buffers + rank.context),
    )
    split = ", ".join(f"{name} {amount(size)}" for name, size in kinds if size)
    away = ((rank.host, "in host memory"), (rank.nvme, "on NVMe"))
    more = "".join(f"; {amount(size)} {place}" for size, place in away if size)
    return f"{amount(rank.total)} per process, as predicted ({split}; {memory_error(plan.precision)}){more}"
