"""A run's rates, from the seconds of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ds_configs.plan import Plan
from launch.records.metrics import StepRecord
from modeling import cost

# Steps of a launch left out of its throughput: allocation, compilation and caches make them slower.
WARMUP_STEPS = 5


class Throughput:
    """The rates of a plan from the seconds of an optimizer step."""

    def __init__(self, plan: Plan) -> None:
        recipe, samples, length = plan.recipe, plan.layout.global_batch, plan.recipe.sequence_length
        published, exact = cost.tflops(
            recipe.model,
            length,
            samples,
            1.0,
            plan.layout.world,
            padded_vocab=plan.padded_vocab,
            checkpointing=recipe.checkpoint_interval > 0,
            predictions=recipe.predictions,
        )
        tokens = samples * recipe.model.sequences * length
        # Of a step of one second; a longer one performs proportionally fewer.
        self._of_a_second = dict(
            samples_per_s=samples, tokens_per_s=tokens, tflops=published, exact_tflops=exact
        )

    def rates(self, seconds: float, samples: int | None = None) -> dict[str, Any]:
        """Return samples/s and tokens/s over all ranks, and TFLOPS per rank; `samples`: None: the batch's."""
        share = 1.0 if samples is None else samples / self._of_a_second["samples_per_s"]
        return {name: share * number / seconds for name, number in self._of_a_second.items()}


def steady_seconds(steps: Sequence[StepRecord]) -> tuple[float, int, int] | None:
    """Return the median seconds per step, their number, and the left-out steps of each launch; or None.

    Profiled steps do not count. A run that is too short for WARMUP_STEPS leaves out its first step only.
    """
    for left_out in (WARMUP_STEPS, 1, 0):
        late = (record for record in steps if record.launch_step > left_out)
        if steady := [record.seconds for record in late if not record.profiled]:
            return statistics.median(steady), len(steady), left_out
    return None
