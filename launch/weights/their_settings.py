"""What a DeepSpeed run states of its own recipe: in its configuration, its optimizer and Trainer's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_configs import following
from ds_configs.findings import lookup
from modeling.formats.deepspeed import files
from modeling.formats.deepspeed.states import DeepSpeedState
from recipes.files import FileError, is_file, read_json_object, refuse
from recipes.problems import some
from recipes.schema import Recipe, Schedule

ADAM = ("adam", "adamw")
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# transformers' schedules -> the keys of ours, if their warm-up and end are the run's
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"kind": "linear"},
    "cosine": {"kind": "cosine"},
    "cosine_with_min_lr": {"kind": "cosine"},
    "polynomial": {"kind": "polynomial", "power": 1.0, "min_lr": 1e-7},
    "constant": {"kind": "constant"},
    "constant_with_warmup": {"kind": "constant"},
    "inverse_sqrt": {"kind": "inverse_sqrt"},
}
ENDLESS = ("constant", "inverse_sqrt")
# keys of lr_scheduler_kwargs -> ours
SCHEDULE_KEYS = {"lr_end": "min_lr", "min_lr": "min_lr", "power": "power"}
# dropout in config.json: of the residual stream, at all its places, and of attention
DROPOUT = {
    "gpt2": (("resid_pdrop", "embd_pdrop"), "attn_pdrop"),
    "bert": (("hidden_dropout_prob",), "attention_probs_dropout_prob"),
}


@dataclass(frozen=True)
class TheirSettings:
    """The files of a run. `config`: of its model; `{}` where nothing states its dropout."""

    directory: Path
    state: DeepSpeedState
    family: str
    config: Mapping[str, Any]

    @cached_property
    def trainer(self) -> Mapping[str, Any]:
        """Trainer's state; {} without one. Raises FileError: it is at another step."""
        path = self.directory / "trainer_state.json"
        if not is_file(path):
            return {}
        found = read_json_object(path)
        if found.get("global_step") != self.state.steps:
            came = f"says global_step={found.get('global_step')}"
            rule = f"{self.state.where} is after step {self.state.steps}"
            refuse(path, came, rule, files.COPY)
        return found

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Trainer's arguments; {} without them, or where their file names more than plain settings."""
        path = self.directory / "training_args.bin"
        try:
            found = files.load(path, files.TRAINER) if is_file(path) else None
        except FileError:
            return {}
        return vars(found) if isinstance(found, files.StandIn) else {}

    @cached_property
    def group(self) -> Mapping[str, Any]:
        """The optimizer's settings for decayed parameters. Raises FileError: it is no Adam of ours."""
        groups = self.state.groups
        found = max(groups, key=lambda group: group.get("weight_decay", 0.0))
        kind = lookup(self.state.config, "optimizer.type")
        other = isinstance(kind, str) and kind.lower() not in ADAM
        came = None
        if other:
            came = f"was trained with {kind}"
        elif found.get("amsgrad"):
            came = "was trained with amsgrad"
        elif not isinstance(found.get("betas"), (tuple, list)):
            came = "states no betas of its Adam"
        if came is not None:
            rule = "AdamW's moments are taken, with their betas, without amsgrad"
            refuse(self.state.where, came, rule, "take its weights with --init_from")
        return found

    @property
    def rate(self) -> float:
        """The learning rate of its next step."""
        return float(self.group["lr"])

    @property
    def steps(self) -> int | None:
        """Its last step; None: no file says it."""
        planned = self.trainer.get("max_steps") or self.arguments.get("max_steps")
        return planned if type(planned) is int and planned > 0 else None

    @property
    def batch(self) -> int | None:
        """Samples of a step; None: they were not always the same."""
        each, rest = divmod(self.state.samples, max(1, self.state.steps))
        return None if rest or not each else each

    def settings(self, base: Recipe) -> dict[str, Any]:
        """Return what its files state, by the recipe's keys. `base`: the recipe of all else."""
        group = self.group
        config = self.state.config
        found: dict[str, Any] = {
            "optimizer.name": "adamw",
            "optimizer.betas": [*group["betas"]],
            "optimizer.eps": group.get("eps", base.optimizer.eps),
            "optimizer.weight_decay": group.get("weight_decay", 0.0),
            "optimizer.bias_correction": bool(group.get("bias_correction", True)),
            "optimizer.lr": self._peak(),
        }
        clip = lookup(config, "gradient_clipping")
        if config:
            found["optimizer.clip"] = float(clip or 0.0)
        found |= self._model_settings()
        if self.batch is not None:
            found |= {
                "batch.global": self.batch,
                "batch.micro": None,
                "batch.accumulation": None,
                "batch.rampup": None,
            }
        if self.steps is not None:
            found["steps"] = self.steps
        return found | self._schedule(base)

    def _model_settings(self) -> dict[str, Any]:
        """Return precision and dropout."""
        found: dict[str, Any] = {}
        on = [
            half
            for half in ("fp16", "bf16")
            if lookup(self.state.config, f"{half}.enabled") is True
        ]
        types = {tensor.dtype for tensor in self.state.module.values()}
        if on:
            found["precision"] = on[0]
        elif self.state.config:
            found["precision"] = "fp32"
        elif len(types) == 1:
            found["precision"] = PRECISIONS.get(types.pop(), "fp32")
        hidden, attention = DROPOUT[self.family]
        rates = {self.config.get(key, 0.1) for key in hidden}
        if self.config and len(rates) == 1:
            found["dropout.hidden"] = rates.pop()
            found["dropout.attention"] = self.config.get(attention, 0.1)
        return found

    def _peak(self) -> float:
        """Return the peak learning rate: where a schedule began with it, or what an optimizer got."""
        stated = (
            self.group.get("initial_lr"),
            self.arguments.get("learning_rate"),
            lookup(self.state.config, "optimizer.params.lr"),
        )
        return next(
            (float(rate) for rate in stated if isinstance(rate, (int, float))),
            self.rate,
        )

    def _schedule(self, base: Recipe) -> dict[str, Any]:
        """Return all keys of the schedule; {}: no file says which it is."""
        if lookup(self.state.config, "scheduler"):
            stated = following.numbers(self.state.config, base)
            taken = {each.key: each.value for each in stated}
            values = {k: v for k, v in taken.items() if k.startswith("schedule.")}
            peak = {k: v for k, v in taken.items() if k == "optimizer.lr"}
            return {**_laid(Schedule()), **values, **peak} if values else {}
        kind = self.arguments.get("lr_scheduler_type")
        if isinstance(kind, files.StandIn):
            kind = next(iter(kind.arguments), None)
        known = SCHEDULES.get(str(kind))
        given = dict(self.arguments.get("lr_scheduler_kwargs") or {})
        share = given.pop("min_lr_rate", None)
        if known is None or given.keys() - SCHEDULE_KEYS.keys():
            return {}
        values = {**known, "warmup_steps": self._warmup(str(kind))}
        values |= {SCHEDULE_KEYS[key]: value for key, value in given.items()}
        if known["kind"] not in ENDLESS:
            values["decay_steps"] = self.steps
        if share is not None:
            values["min_lr"] = share * self._peak()
        return _laid(Schedule.model_validate(values))

    def _warmup(self, kind: str) -> int:
        """Return the steps of warm-up, which Trainer takes as a number or as a share of all steps."""
        if kind == "constant":
            return 0
        steps = self.arguments.get("warmup_steps") or 0
        share = self.arguments.get("warmup_ratio") or 0.0
        if 0 < steps < 1:
            share, steps = steps, 0
        return int(steps) or math.ceil((self.steps or 0) * share)

    def remarks(self) -> list[str]:
        """Return what of its optimizer is otherwise here, in words."""
        said = []
        decay = self.group.get("weight_decay", 0.0)
        rates = {float(group["lr"]) for group in self.state.groups}
        if len(rates) > 1:
            named = some([f"{rate:g}" for rate in sorted(rates)])
            said.append(
                f"its groups of parameters have the rates {named}, here all have one"
            )
        odd = [
            name
            for name, parameter in self.state.parameters.items()
            if parameter.decay is not None
            and parameter.decay != (len(parameter.shape) > 1) * decay
        ]
        if odd:
            said.append(
                f"its weight decay differs on {some(odd, 3)}: here matrices have {decay:g}, vectors none"
            )
        return said


def _laid(schedule: Schedule) -> dict[str, Any]:
    return {f"schedule.{key}": value for key, value in schedule.model_dump().items()}
