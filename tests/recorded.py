"""A small plan, and what a recorder makes of steps, for the tests of runs."""

from __future__ import annotations

import io
from pathlib import Path

from ds_configs.plan import Plan
from launch.ranks.joining import StartClock
from launch.records.directory import RunDirectory
from launch.records.facts import Entropies, RunFacts, StepRecord, finite
from launch.records.recorder import Recorder
from recipes.layout import Layout
from recipes.schema import Recipe

DESCRIBED = {"cpu": "Some CPU", "cores": 2, "accelerators": 0, "accelerator": "cpu"}


def outcome(loss: float, parts: dict[str, float] | None = None, **changes) -> StepRecord:
    """What a step, or a validation, came to."""
    known = dict(
        step=1, lr=1e-3, grad_norm=1.5, loss_scale=1.0, skipped=False, seconds=0.5, parts=parts or {}
    )
    return StepRecord(loss=finite(loss), **{**known, **changes})


DATA = {"source": "some text", "validation_samples": 64}


def facts(plan_: Plan, **changes) -> RunFacts:
    """What is known of a run of `plan_`."""
    known = {"name": "table/small", "machine": DESCRIBED, "data": DATA, "entropies": Entropies(5.7, 5.0)}
    return RunFacts(plan_, **{**known, **changes})


def recipe(**changes) -> Recipe:
    values = {
        "title": "small",
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300},
        "sequence_length": 16,
        "batch": {"micro": 2, "global": 8},
        "steps": 20,
        "optimizer": {"lr": 1e-3},
        "ds_config": "zero1",
    }
    return Recipe(**{**values, **changes})


def plan(recipe_: Recipe | None = None, **changes) -> Plan:
    facts = {
        "recipe": recipe_ or recipe(),
        "layout": Layout(tp=1, pp=1, dp=2, micro=2, accumulation=2, global_batch=8),
        "ds": {"zero_optimization": {"stage": 1}},
        "zero_stage": 1,
        "offload": "none",
        "precision": "fp32",
        "padded_vocab": 384,
        "notices": (),
        "ds_name": "zero1",
    }
    return Plan(**{**facts, **changes})


def recorder(
    path: Path,
    plan_: Plan,
    *,
    start: int = 0,
    stream: io.StringIO | None = None,
    clock: StartClock | None = None,
    **changes,
) -> Recorder:
    return Recorder(RunDirectory(path), facts(plan_, **changes), start, clock, stream)


def run_steps(
    path: Path,
    plan_: Plan,
    steps: int,
    *,
    start: int = 0,
    stream: io.StringIO | None = None,
    seconds: float = 0.5,
    **changes,
) -> RunDirectory:
    """A run of `steps` steps, whose loss falls by 0.1 in each."""
    with recorder(path, plan_, start=start, stream=stream) as records:
        for step in range(start + 1, start + steps + 1):
            records.step(outcome(6.0 - 0.1 * step, **changes, step=step, seconds=seconds, data_seconds=0.0))
    return RunDirectory(path)
