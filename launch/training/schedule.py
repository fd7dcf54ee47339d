"""Megatron-LM's learning-rate schedules, in the form that DeepSpeed steps and saves."""

from __future__ import annotations

import math
from typing import Any

import torch

from recipes.schema import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of the optimizer step after `step` completed ones.

    Linear from 0 over `warmup_steps`, then cosine or linear decay to `min_lr` at `decay_steps`, then constant
    (Megatron-LM, OptimizerParamScheduler).
    """
    peak, low = recipe.optimizer.lr, recipe.schedule.min_lr
    warmup, end = recipe.schedule.warmup_steps, recipe.schedule.decay_steps or recipe.steps
    if warmup and step <= warmup:
        return peak * step / warmup
    if recipe.schedule.kind == "constant":
        return peak
    if step > end:
        return low
    done = (step - warmup) / max(1, end - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if recipe.schedule.kind == "cosine" else 1 - done
    return low + (peak - low) * left


class Schedule:
    """Set the learning rate of every parameter group; DeepSpeed does not step it in skipped steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe):
        self.optimizer, self.recipe, self.completed = optimizer, recipe, 0
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.completed)

    def step(self, *_: Any, **__: Any) -> None:
        self.completed += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [learning_rate(self.recipe, self.completed)] * len(self.optimizer.param_groups)

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"completed": self.completed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.completed = state["completed"]
        self._apply()
