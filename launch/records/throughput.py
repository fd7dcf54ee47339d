"""A run's rates, from the seconds of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_configs.plan import Plan
from launch.records.metrics import StepRecord
from modeling import cost
from recipes.problems import counted

# Steps of a launch left out of its throughput: allocation, compilation and caches make them slower.
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Rates:
    """samples/s and tokens/s over all ranks; TFLOPS per rank by the published formula and by exact count."""

    samples_per_s: float
    tokens_per_s: float
    tflops: float
    exact_tflops: float


class Throughput:
    """The rates of a plan from the seconds of an optimizer step."""

    def __init__(self, plan: Plan) -> None:
        recipe = plan.recipe
        self._samples, self._length = plan.layout.global_batch, recipe.sequence_length
        self._tokens = self._samples * recipe.model.sequences * self._length
        # For a step of one second; a longer one performs proportionally fewer.
        self._published, self._exact = cost.tflops(
            recipe.model,
            self._length,
            self._samples,
            1.0,
            plan.layout.world,
            padded_vocab=plan.padded_vocab,
            checkpointing=recipe.checkpoint_interval > 0,
            predictions=recipe.predictions,
        )

    def rates(self, seconds: float) -> Rates:
        samples, tokens = self._samples / seconds, self._tokens / seconds
        return Rates(samples, tokens, self._published / seconds, self._exact / seconds)


@dataclass(frozen=True)
class SteadySeconds:
    """The median seconds of `steps` steps, without the first `left_out` of every launch."""

    seconds: float
    steps: int
    left_out: int

    def __str__(self) -> str:
        left_out = f", the first {self.left_out} of each launch left out" if self.left_out else ""
        return f"median of {counted(self.steps, 'step')}{left_out}"


def steady_seconds(steps: Sequence[StepRecord]) -> SteadySeconds | None:
    """Return the time per step without the first WARMUP_STEPS of every launch; None without steps.

    A run that is too short leaves out its first step only.
    """
    for left_out in (WARMUP_STEPS, 1, 0):
        if steady := [record.seconds for record in steps if record.launch_step > left_out]:
            return SteadySeconds(statistics.median(steady), len(steady), left_out)
    return None
