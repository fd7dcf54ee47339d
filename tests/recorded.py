"""A small plan, and what a recorder makes of steps, for the tests of runs."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

from ds_configs.plan import Plan
from launch.records.directory import RunDirectory
from launch.records.recorder import Recorder
from recipes.layout import Layout
from recipes.schema import Recipe

DESCRIBED = {"cpu": "Some CPU", "cores": 2, "accelerators": 0, "accelerator": "cpu"}


@dataclass(frozen=True)
class Outcome:
    """What a step came to, as training hands it over."""

    loss: float
    parts: dict[str, float] = field(default_factory=dict)
    lr: float = 1e-3
    grad_norm: float | None = 1.5
    loss_scale: float = 1.0
    skipped: bool = False


@dataclass(frozen=True)
class Facts:
    """What a corpus says of itself."""

    uniform_entropy: float = 5.7
    unigram_entropy: float = 5.0
    summary: dict = field(default_factory=lambda: {"source": "some text", "validation_samples": 64})


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
    path: Path, plan_: Plan, *, start: int = 0, stream: io.StringIO | None = None, **facts
) -> Recorder:
    given = {"original": None, "tiny": False, "emulated": False, "described": DESCRIBED, **facts}
    return Recorder(
        RunDirectory(path),
        plan_,
        name="table/small",
        corpus_facts=Facts(),
        start_step=start,
        progress=stream is not None,
        stream=stream,
        **given,
    )


def run_steps(
    path: Path,
    plan_: Plan,
    steps: int,
    *,
    start: int = 0,
    stream: io.StringIO | None = None,
    seconds: float = 0.5,
    **outcome,
) -> RunDirectory:
    """A run of `steps` steps, whose loss falls by 0.1 in each."""
    with recorder(path, plan_, start=start, stream=stream) as records:
        for step in range(start + 1, start + steps + 1):
            records.step(step, Outcome(6.0 - 0.1 * step, **outcome), seconds, 0.0)
    return RunDirectory(path)
