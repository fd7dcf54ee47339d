"""Rates of a run from the seconds of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from modeling import cost

WARMUP_STEPS = (
    5  # steps of a launch left out of its throughput: allocation, compilation and caches make them slower
)


class Throughput:
    """Rates of a plan from the seconds of an optimizer step."""

    def __init__(self, plan: Any) -> None:
        recipe, layout = plan.recipe, plan.layout
        self._samples, self._length = layout.global_batch, recipe.sequence_length
        # Of a step of one second: it takes longer, they are as many times fewer.
        self._published, self._exact = cost.tflops(
            recipe.model, self._length, self._samples, 1.0, layout.tp * layout.pp * layout.dp, padded_vocab=plan.padded_vocab,
            checkpointing=recipe.checkpoint_interval > 0, predictions=recipe.predictions,
        )  # fmt: skip

    def rates(self, seconds: float) -> dict[str, float]:
        """samples/s and tokens/s over all ranks; TFLOPS per rank by the published formula and by exact count."""
        return {
            "samples_per_s": self._samples / seconds,
            "tokens_per_s": self._samples * self._length / seconds,
            "tflops": self._published / seconds,
            "exact_tflops": self._exact / seconds,
        }


def steady_seconds(records: Sequence[dict[str, Any]]) -> tuple[float, str] | None:
    """(median seconds per step, which steps those are), the first WARMUP_STEPS of every launch left out.

    A run too short for that leaves out its first step only; None where no step was recorded.
    `records`: of metrics.jsonl.
    """
    steps = [record for record in records if record["kind"] == "step"]
    for left_out in (WARMUP_STEPS, 1, 0):
        steady = [record["seconds"] for record in steps if record["launch_step"] > left_out]
        if steady:
            which = f"median of {len(steady)} steps" + (
                f", the first {left_out} of each launch left out" if left_out else ""
            )
            return statistics.median(steady), which
    return None
