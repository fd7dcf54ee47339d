"""The step of a published row on its source's system, with its printed and predicted time."""

from __future__ import annotations

from typing import Literal

from ds_configs.plan import Plan
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.workload import Workload
from launch.planning.resolved_plans import published_plan
from recipes import catalog
from recipes.schema import Published, Recipe

TflopsRule = Literal["formula", "exact", "model"]


def published_workload(plan: Plan) -> Workload | None:
    """Make the workload of a row's plan on its source's system; None: without a known system."""
    published = plan.recipe.published
    if published is None or published.software is None:
        return None
    return workload.on_system(workload.of_plan(plan), published.software)


def side_by_side(
    plan: Plan, node: hardware.Node
) -> list[tuple[str, float | str, float | str]]:
    """Return (quantity, predicted, published) for the row's own system and node; [] for another node."""
    recipe = plan.recipe
    step = published_workload(plan)
    published = recipe.published
    own = recipe.hardware.node if recipe.hardware else None
    if published is None or step is None or node.name != own:
        return []
    theirs = Forecast(step, node)
    seconds = theirs.time and theirs.time.total
    faster = published.speedup and _speedup(published, theirs)
    cached = theirs.fullest_rank.cached(node.gpu.memory_bytes) / hardware.GIB
    tflops = theirs.speed and (
        theirs.speed.tflops
        if published.tflops_by == "formula"
        else theirs.speed.exact_tflops
    )
    rows = (
        ("seconds per step", seconds, printed_seconds(recipe, published)),
        ("TFLOPS per GPU", tflops, published.tflops),
        ("cached, GiB per GPU", cached, published.cached_gb),
        (f"speed over {published.speedup_over}", faster, published.speedup),
        ("memory", theirs.verdict, published.oom and "out of memory"),
    )
    return [
        (quantity, ours, printed)
        for quantity, ours, printed in rows
        if ours and printed
    ]


def _speedup(published: Published, faster: Forecast) -> float | None:
    """Predict the time of the row that it was compared with, over the row's own."""
    other = catalog.load(published.speedup_over or "")
    slower = published_workload(published_plan(other))
    named = other.hardware and other.hardware.node
    time = Forecast(slower, hardware.find(named)).time if slower and named else None
    return time.total / faster.time.total if time and faster.time else None


def printed_seconds(recipe: Recipe, published: Published) -> float | None:
    """Return the seconds of an iteration as printed, or from printed samples/s."""
    if published.time_per_iteration_s is None and published.samples_per_s:
        return recipe.batch.global_ / published.samples_per_s
    return published.time_per_iteration_s


def seconds_of(work: Workload, tflops: float, gpus: int, counted: TflopsRule) -> float:
    """Return the seconds of an iteration from TFLOPS per GPU.

    counted: "exact", all products of weights and attention, recomputed ones too; "model", without
    recomputation; "formula", two operations per parameter, token and pass.
    """
    if counted == "formula":
        return work.published_tflops(1.0, gpus) / tflops
    return work.exact_tflops(1.0, gpus, recomputation=counted == "exact") / tflops
