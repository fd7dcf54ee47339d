"""What the planner predicts of a run on the machine that it ran on, where that machine is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_configs.plan import Plan
from launch.machine import rates
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast
from launch.records.result import Result


@dataclass(frozen=True)
class Predicted:
    """A step as the planner sees it; None: not known.

    Attributes:
        node: of the catalogue, or "this": measured by `plan.py --hardware this` before.
        bytes_per_process: on the fullest rank.
        mfu: share of the peak rate, without recomputation (Chowdhery et al. 2022, appendix B).
        available_bytes: memory of a GPU, or a process's part of the host's.
    """

    node: str | None = None
    seconds_per_step: float | None = None
    bytes_per_process: float | None = None
    mfu: float | None = None
    available_bytes: float | None = None

    def reached_mfu(self, seconds: float | None) -> float | None:
        """Share of the peak rate of steps of so many seconds, with the operations of the predicted step."""
        if not seconds or self.mfu is None or self.seconds_per_step is None:
            return None
        return self.mfu * self.seconds_per_step / seconds

    def left_by(self, used: float | None) -> float | None:
        """Share of the memory that a process leaves which takes `used` bytes, negative where it swaps."""
        return 1 - used / self.available_bytes if used and self.available_bytes else None


def of_run(plan: Plan | None, machine: Mapping[str, Any], result: Result) -> Predicted:
    """Empty where speed and memory were measured on steps that the newest plan did not make."""
    if plan is None or any(each.kind == "measured" for each in result.deviations):
        return Predicted()
    return predicted(plan, machine)


def predicted(plan: Plan, machine: Mapping[str, Any]) -> Predicted:
    """Without measuring. `machine`: `description.describe()` of the machine that the run was on."""
    try:
        found = _predicted(plan, machine)
    except (ValueError, KeyError):  # no such machine is known, or the file does not describe it
        found = Predicted()
    return replace(found, available_bytes=_available(plan, machine))


def _predicted(plan: Plan, machine: Mapping[str, Any]) -> Predicted:
    name, count = str(machine["accelerator"]), machine["accelerators"]
    node = (hardware.recognised(name, count) if count else None) or _measured(machine)
    found = forecast(workload.of_plan(plan), node.shared_by(plan.layout.world))
    memory = found.fullest.total
    if found.time is None or found.speed is None:
        return Predicted(node.name, bytes_per_process=memory)  # no rate of that precision is known
    return Predicted(node.name, found.time.total, memory, found.speed.mfu)


def _measured(machine: Mapping[str, Any]) -> hardware.Node:
    """This machine. Raises ValueError: the run was on another, or this one is not measured."""
    here = rates.machine()
    if any(machine[key] != here[key] for key in ("host", "cpu", "cores")):
        raise ValueError("another machine")
    return hardware.this(measure=False)


def _available(plan: Plan, machine: Mapping[str, Any]) -> float | None:
    if (each := machine.get("accelerator_memory_gb")) is not None:
        return float(each) * 1e9
    whole = machine.get("memory_gb")
    return None if whole is None else float(whole) * 1e9 / plan.layout.world
