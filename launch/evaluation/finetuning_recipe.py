"""Make the recipe of a fine-tuning from a task, a pretrained model, and RoBERTa's settings by default.

Liu et al. 2019 (arXiv 1907.11692), table 10: Adam with betas 0.9 and 0.98, eps 1e-6, weight decay 0.1, linear
decay after a warm-up over 6 % of the steps; batches of 16 or 32, learning rates of 1e-5, 2e-5 and 3e-5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine
from recipes.key_paths import key_of
from recipes.problems import ProblemsError
from recipes.schema import Recipe, TaskName
from recipes.tasks import TASKS
from recipes.validation import validate
from recipes.yaml_lines import YamlDocument

WARMUP = 0.06  # share of the steps
OPTIMIZER: dict[str, Any] = {
    "betas": [0.9, 0.98],
    "eps": 1e-6,
    "weight_decay": 0.1,
    "clip": 1.0,
}


@dataclass(frozen=True)
class Wishes:
    """Options of a fine-tuning from the flags; None: the task's default.

    `files`: split -> path; `settings`: values of --set, which override everything else.
    """

    task: TaskName
    files: Mapping[str, str]
    sequence_length: int | None = None
    epochs: float = 3.0
    batch: int | None = None
    lr: float | None = None
    seed: int = 1234
    settings: Sequence[str] = ()


def recipe_of(
    wishes: Wishes,
    model: Mapping[str, Any],
    vocabulary: Path,
    machine: Machine,
    examples: int | None = None,
) -> Recipe:
    """Make the recipe of a fine-tuning. Raises RecipeError with every problem.

    `model`: family, shape and placement of LayerNorm; `vocabulary`: directory of the model's vocabulary;
    `examples`: number of training samples, which decides the steps; None: not counted yet.
    """
    facts = TASKS[wishes.task]
    batch = wishes.batch or facts.batch
    precision = "fp32"
    if machine.device.own_memory:
        precision = "bf16" if machine.bf16 else "fp16"
    values: dict[str, Any] = {
        "title": f"{facts.title}, {wishes.epochs:g} epochs",
        "model": {
            **model, "implementation": "transformers",
            "task_head": facts.head, "head_classes": facts.classes,
        },
        "sequence_length": wishes.sequence_length or min(facts.sequence_length, model["positions"]),
        "batch": {"global": batch},
        "steps": 1,
        "optimizer": {"lr": wishes.lr or facts.lr, **OPTIMIZER},
        "schedule": {"kind": "linear"},
        "dropout": {"hidden": 0.1, "attention": 0.1},
        "precision": precision,
        "seed": wishes.seed,
        "data": {"tokenizer": {"kind": "file", "path": str(vocabulary)}},
        "task": {"name": wishes.task, "epochs": float(wishes.epochs), **wishes.files},
        "run": {"keep_checkpoints": 1, "validation_samples": 1},
    }  # fmt: skip
    first = _validated(values, wishes)
    if examples is None:
        return first
    per_epoch = examples / first.batch.global_
    asked = {key_of(text) for text in wishes.settings}
    values["steps"] = (
        first.steps
        if "steps" in asked
        else max(1, math.ceil(per_epoch * wishes.epochs))
    )
    every = max(1, round(per_epoch))
    values["run"] |= {"validate_every": every, "save_every": every}
    values["schedule"]["warmup_steps"] = min(
        math.ceil(WARMUP * values["steps"]), values["steps"] - 1
    )
    return _validated(values, wishes)


def _validated(values: Mapping[str, Any], wishes: Wishes) -> Recipe:
    name = f"finetune/{wishes.task}"
    recipe = validate(values, name, YamlDocument("", {}), ((),), wishes.settings)
    if recipe.model.implementation != "transformers":
        key = "model.implementation"
        came = f"{key}={recipe.model.implementation}"
        rule = "heads of tasks are those of transformers"
        raise ProblemsError.of(key, came, rule, f"leave --set {key} out", where=name)
    return recipe
