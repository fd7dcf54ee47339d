"""The timeline of a pipeline's step: every stage's forward and backward passes under 1F1B."""

from __future__ import annotations

from typing import Literal, NamedTuple

from launch.planning.prediction.constants import Constants
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.node_rates import NodeRates
from launch.planning.prediction.step_time import StageTimes
from launch.planning.prediction.workload import Workload

Pass = Literal["forward", "backward"]


class Span(NamedTuple):
    """A pass of a micro-batch on a stage, in seconds from the start of the step."""

    stage: int
    micro_batch: int
    kind: Pass
    start: float
    seconds: float


def order(stage: int, stages: int, count: int) -> list[tuple[Pass, int]]:
    """Return a stage's passes in their order (Narayanan et al. 2021, section 2.2.1)."""
    ahead, found = min(stages - stage - 1, count), list[tuple[Pass, int]]()
    for number in range(-ahead, count):
        if number + ahead < count:
            found.append(("forward", number + ahead))
        if number >= 0:
            found.append(("backward", number))
    return found


def timeline(work: Workload, node: Node, constants: Constants) -> list[Span]:
    """Predict when each pass begins: after the stage's last one, and the neighbour's of this micro-batch."""
    times, stages = StageTimes(work, NodeRates(node, constants, work.layout.world)), work.layout.pp
    # A backward pass is two forward ones, and a third where it recomputes.
    of_stage = [times.of_stage(stage).total for stage in range(stages)]
    forward = [seconds / (3 + times.again) for seconds in of_stage]
    waiting = [order(stage, stages, work.layout.accumulation)[::-1] for stage in range(stages)]
    ends: dict[tuple[int, Pass, int], float] = {}
    free, found = [0.0] * stages, []
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                kind, number = passes[-1]
                before = stage - 1 if kind == "forward" else stage + 1
                ready = ends.get((before, kind, number)) if 0 <= before < stages else 0.0
                if ready is None:
                    break
                start = max(free[stage], ready)
                seconds = forward[stage] if kind == "forward" else of_stage[stage] - forward[stage]
                found.append(Span(stage, number, kind, start, seconds))
                free[stage] = ends[stage, kind, number] = start + seconds
                passes.pop()
    return found
