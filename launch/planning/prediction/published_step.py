"""The step that a published row timed: as its source ran it, and how long it took."""

from __future__ import annotations

from typing import Literal

from ds_configs.plan import Plan
from launch.planning.prediction import workload
from launch.planning.prediction.workload import Workload
from modeling import cost
from recipes.schema import Published, Recipe

Counted = Literal["formula", "exact", "model"]


def as_published(plan: Plan) -> Workload | None:
    """The step of the row's plan on the system that its source ran; None: no source, or none known."""
    published = plan.recipe.published
    if published is None or published.software is None:
        return None
    return workload.as_run_by(workload.of_plan(plan), published.software)


def printed_seconds(recipe: Recipe, published: Published) -> float | None:
    """Seconds of an iteration as printed, or as the printed samples/s give them."""
    if published.time_per_iteration_s is None and published.samples_per_s:
        return recipe.batch.global_ / published.samples_per_s
    return published.time_per_iteration_s


def published_seconds(recipe: Recipe, published: Published, work: Workload | None) -> float | None:
    """The same, and where only TFLOPS are printed what these give of the step."""
    seconds, tflops = printed_seconds(recipe, published), published.tflops
    gpus = published.printed.get("hardware.gpus", recipe.hardware.gpus if recipe.hardware else None)
    if seconds is None and tflops and work and isinstance(gpus, int):
        return seconds_of(work, tflops, gpus, published.tflops_by)
    return seconds


def seconds_of(work: Workload, tflops: float, gpus: int, counted: Counted) -> float:
    """Seconds of an iteration from TFLOPS per GPU.

    counted: "exact", all products of weights and attention, recomputed ones too; "model", without
    recomputation; "formula", two operations per parameter, token and pass.
    """
    layout, model, length = work.layout, work.model, work.sequence_length
    recomputed = work.recomputed > 0
    if counted == "formula":
        size = cost.parameters(model, work.positions)
        return cost.published_tflops(
            size, length, layout.global_batch, 1.0, gpus, checkpointing=recomputed
        ) / tflops  # fmt: skip
    flops = cost.exact_flops_per_step(
        model, length, layout.global_batch, padded_vocab=work.padded_vocab,
        checkpointing=recomputed and counted == "exact", predictions=work.predicted,
    )  # fmt: skip
    return cost.exact_tflops(flops, 1.0, gpus) / tflops
