"""Make the recipe of a fine-tuning from a task, a pretrained model, and RoBERTa's settings by default.

Liu et al. 2019 (arXiv 1907.11692), table 10: Adam with betas 0.9 and 0.98, eps 1e-6, weight decay 0.1, linear
decay after a warm-up over 6 % of the steps; batches of 16 or 32, learning rates of 1e-5, 2e-5 and 3e-5.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine
from recipes.key_paths import key_of
from recipes.problems import ProblemsError
from recipes.schema import Recipe
from recipes.tasks import SPLITS, TASKS
from recipes.validation import validate
from recipes.yaml_lines import YamlDocument

WARMUP = 0.06  # share of the steps


def recipe_of(
    args: argparse.Namespace,
    model: Mapping[str, Any],
    vocabulary: Path,
    machine: Machine,
    examples: int | None = None,
) -> Recipe:
    """Make the recipe of a fine-tuning from the flags. Raises ProblemsError with every problem.

    `model`: family, shape and placement of LayerNorm; `vocabulary`: directory of the model's vocabulary;
    `examples`: number of training samples, which decides the steps; None: not counted yet.
    """
    facts = TASKS[args.task]
    batch = args.batch or facts.batch
    precision = "fp32"
    if machine.device.own_memory:
        precision = "bf16" if machine.bf16 else "fp16"
    values: dict[str, Any] = {
        "title": f"{facts.title}, {args.epochs:g} epochs",
        "model": {
            **model, "implementation": "transformers",
            "task_head": facts.head, "head_classes": facts.classes,
        },
        "sequence_length": args.sequence_length or min(facts.sequence_length, model["positions"]),
        "batch": {"global": batch},
        "steps": 1,
        "optimizer": {
            "lr": args.lr or facts.lr, "betas": [0.9, 0.98], "eps": 1e-6,
            "weight_decay": 0.1, "clip": 1.0,
        },
        "schedule": {"kind": "linear"},
        "dropout": {"hidden": 0.1, "attention": 0.1},
        "precision": precision,
        "seed": args.seed,
        "data": {"tokenizer": {"kind": "file", "path": str(vocabulary)}},
        "task": {"name": args.task, "epochs": float(args.epochs)},
        "run": {"keep_checkpoints": 1, "validation_samples": 1},
    }  # fmt: skip
    values["task"] |= {split: getattr(args, split) for split in SPLITS}
    name = f"finetune/{args.task}"
    of = (name, YamlDocument("", {}), ((),), args.set)
    recipe = validate(values, *of)
    if recipe.model.implementation != "transformers":
        key = "model.implementation"
        raise ProblemsError.of(
            key,
            f"{key}={recipe.model.implementation}",
            "heads of tasks are those of transformers",
            f"leave --set {key} out",
            where=name,
        )
    if examples is None:
        return recipe
    per_epoch = examples / recipe.batch.global_
    steps = recipe.steps  # as asked by --set
    if "steps" not in map(key_of, args.set):
        steps = max(1, math.ceil(per_epoch * args.epochs))
    every = max(1, round(per_epoch))
    values["steps"] = steps
    values["run"] |= {"validate_every": every, "save_every": every}
    values["schedule"]["warmup_steps"] = min(math.ceil(WARMUP * steps), steps - 1)
    return validate(values, *of)
