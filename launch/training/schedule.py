"""Megatron-LM's and DeepSpeed's learning-rate schedules, in the form that DeepSpeed steps and saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from recipes.schema import DEEPSPEED_SCHEDULES, Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of the optimizer step after `step` completed ones.

    Linear from 0 over `warmup_steps`, then a decay to `min_lr` at `decay_steps`, then constant (Megatron-LM,
    OptimizerParamScheduler). With x the share of the decay that is over, rate = min_lr + (lr - min_lr) y:

    - cosine: y = (1 + cos(pi x)) / 2; linear: y = 1 - x; polynomial: y = (1 - x)^power;
    - wsd (Hu et al. 2024, arXiv 2404.06395): decays over the last `wsd_decay_steps`, as these or
      y = 2 * 0.5^x - 1 (exponential) or 1 - sqrt(x) (minus_sqrt);
    - inverse_sqrt (Vaswani et al. 2017, arXiv 1706.03762): lr sqrt(warmup_steps / step), at least min_lr.
    """
    chosen = recipe.schedule
    if chosen.kind in DEEPSPEED_SCHEDULES:
        return _deepspeed_rate(recipe, step - 1)
    end_step = recipe.decay_steps
    count = recipe.sizes.samples if chosen.counts == "samples" else int
    peak = recipe.optimizer.lr
    low = chosen.min_lr
    step = count(step)
    warmup = count(chosen.warmup_steps)
    if warmup and step <= warmup:
        return peak * step / warmup
    if chosen.kind == "inverse_sqrt":
        first = max(count(1), warmup)
        now = max(count(1), step)
        return max(low, peak * math.sqrt(first / now))
    if end_step is None:
        return peak
    end = count(end_step)
    if step > end:
        return low
    shape: str = chosen.kind
    length = max(1, end - warmup)
    if shape == "wsd":
        shape = chosen.wsd_decay_style or "exponential"
        begin = end_step - (chosen.wsd_decay_steps or 1)
        length = end - count(begin)
    left: Callable[[float], float] = {
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "linear": lambda x: 1 - x,
        "polynomial": lambda x: (1 - x) ** (chosen.power or 1),
        "exponential": lambda x: 2 * 0.5**x - 1,
        "minus_sqrt": lambda x: 1 - math.sqrt(x),
    }[shape]
    return low + (peak - low) * left(max(0, length - (end - step)) / length)


def _deepspeed_rate(recipe: Recipe, iteration: int) -> float:
    """Return the learning rate by DeepSpeed's schedules (0.19.8, runtime/lr_schedules.py).

    Its engine steps them after the optimizer: the first step has iteration -1. The warm-up to lr takes
    `warmup_steps`, at least 2, by the logarithm of the iteration or linearly; then WarmupLR stays,
    WarmupDecayLR goes back linearly to min_lr at `decay_steps`, WarmupCosineLR goes to it by a cosine.
    """
    chosen = recipe.schedule
    cosine = chosen.kind == "WarmupCosineLR"
    peak = recipe.optimizer.lr
    first = (chosen.warmup_min_lr or 0.0) if cosine else chosen.min_lr
    warmup = max(2, chosen.warmup_steps)
    if iteration < 0:
        return 0.0 if cosine else first
    if iteration < warmup:
        linear = chosen.warmup_type == "linear"
        share = (
            iteration / warmup if linear else math.log(iteration + 1) / math.log(warmup)
        )
        return first + (peak - first) * share
    if recipe.decay_steps is None:
        return peak
    length = max(1, recipe.decay_steps - warmup)
    if cosine:
        over = min(1.0, (iteration - warmup + 1) / length)
        return (
            chosen.min_lr + (peak - chosen.min_lr) * (1 + math.cos(math.pi * over)) / 2
        )
    return first + (peak - first) * max(0.0, (recipe.decay_steps - iteration) / length)


class LearningRateSchedule:
    """Set the learning rate of every parameter group; DeepSpeed does not step it in skipped steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe):
        self.optimizer = optimizer
        self.recipe = recipe
        self.completed = 0
        self._apply()

    def _apply(self) -> None:
        rate = learning_rate(self.recipe, self.completed)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)

    def step(self, *_: Any, **__: Any) -> None:
        self.completed += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [learning_rate(self.recipe, self.completed)] * len(
            self.optimizer.param_groups
        )

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"completed": self.completed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.completed = state["completed"]
        self._apply()
