"""What the planner predicts of a run on the machine that it runs on, where that machine is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_configs.plan import Plan
from launch.machine.memory import host_memory
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast
from launch.ranks.processes import local_world_size
from launch.records.metrics import Finite
from recipes.problems import ProblemsError


@dataclass(frozen=True)
class Predicted:
    """A step as the planner sees it; all None where `why_not` says why there is no prediction.

    Attributes:
        node: of the catalogue, or "this": measured by `plan.py --hardware this` before.
        bytes_per_process: on the fullest rank.
        mfu: share of the peak rate, without recomputation (Chowdhery et al. 2022, appendix B).
        available_bytes: memory of a GPU, or a process's part of the host's.
    """

    node: str | None = None
    seconds_per_step: Finite | None = None
    bytes_per_process: Finite | None = None
    mfu: Finite | None = None
    available_bytes: Finite | None = None
    why_not: str | None = None


def predicted(plan: Plan, described: Mapping[str, Any]) -> Predicted:
    """Measures nothing and raises nothing: a run neither waits for the planner nor fails with it.

    `described`: `description.describe()`.
    """
    try:
        found = _predicted(plan, described)
    except ProblemsError as error:
        found = Predicted(why_not="; ".join(str(problem) for problem in error.problems))
    except Exception as error:
        found = Predicted(why_not=f"the planner broke: {type(error).__name__}: {error}")
    return replace(found, available_bytes=_available(described))


def _predicted(plan: Plan, described: Mapping[str, Any]) -> Predicted:
    world, name = plan.layout.world, str(described["accelerator"])
    node = hardware.recognised(name, described["accelerators"]) if described["accelerators"] else None
    node = node or hardware.this(measure=False)
    found = forecast(workload.of_plan(plan), node.shared_by(world) if node.is_cpu else node)
    memory = found.fullest.total
    if found.time is None or found.speed is None:
        why = f"no rate of {plan.precision} is known of {node.gpu.title}"
        return Predicted(node.name, bytes_per_process=memory, why_not=why)
    return Predicted(node.name, found.time.total, memory, found.speed.mfu)


def _available(described: Mapping[str, Any]) -> float | None:
    if (each := described.get("accelerator_memory_gb")) is not None:
        return float(each) * 1e9
    return host_memory() / local_world_size()
