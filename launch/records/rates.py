"""The rates of a step: samples, tokens and operations a second."""

from __future__ import annotations

from typing import Any

from ds_configs.plan import Plan
from modeling import cost


def rates(plan: Plan, seconds: float, samples: int | None = None) -> dict[str, Any]:
    """Return samples/s and tokens/s over all ranks, and TFLOPS per rank, of a step of so many seconds.

    `samples`: those of the step; None: the batch's.
    """
    recipe = plan.recipe
    samples = samples or plan.layout.global_batch
    published, exact = cost.tflops(
        recipe, plan.padded_vocab, samples, seconds, plan.layout.world
    )
    tokens = samples * recipe.model.sequences * recipe.sequence_length
    return dict(
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        tflops=published,
        exact_tflops=exact,
    )
