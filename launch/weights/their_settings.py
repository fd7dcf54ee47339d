"""What a DeepSpeed run states of its own recipe: its configuration, optimizer, arguments, Trainer's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from ds_configs import following
from ds_configs.findings import lookup
from modeling.formats.deepspeed.files import COPY
from modeling.formats.deepspeed.states import DeepSpeedState
from modeling.formats.pickles import StandIn, is_sound, load
from recipes.files import FileError, is_file, read_json_object, refuse
from recipes.key_paths import flatten
from recipes.problems import some
from recipes.schema import Change, Recipe, Schedule

ADAM = ("adam", "adamw")
# Trainer's names of AdamW, its argument `optim`
ADAMW = ("adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
# of a JSON's optimizer -> Trainer's arguments
TRAINERS = {
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
# of torch's and DeepSpeed's Adams each group has one of these keys
OF_ADAM = {"amsgrad", "bias_correction", "correct_bias"}
# of a JSON's optimizer -> of a group; schedules of DeepSpeed's own keep no `initial_lr`
STATED = {
    "lr": "initial_lr",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
}
# Trainer's arguments by which another loss is trained
OTHER_LOSSES = ("label_smoothing_factor", "neftune_noise_alpha")
WEIGHTS_ALONE = "take its weights alone with --init_from; zero_to_fp32.py writes those of a DeepSpeed save"
# from this release on DeepSpeed clips to 1 without the key (runtime/constants.py); before, not at all
CLIPS = Version("0.19.3")
HALVES = ("fp16", "bf16")
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# schedules of transformers and Megatron -> ours
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
# keys in the state of Megatron-DeepSpeed's scheduler, which counts samples, and of gpt-neox's
MEGATRON_SCHEDULES = (
    "lr_decay_style num_steps max_lr min_lr lr_warmup_steps lr_decay_steps",
    "decay_style num_iters start_lr min_lr warmup_iter end_iter",
)
BY_TOKENS = ("lr_warmup_tokens", "lr_decay_tokens")
# dropout of transformers' GPT-2 and BERT, and of Megatron: at all places of the residual stream; of attention
DROPOUT = (
    (("resid_pdrop", "embd_pdrop"), "attn_pdrop"),
    (("hidden_dropout_prob",), "attention_probs_dropout_prob"),
    (("hidden_dropout",), "attention_dropout"),
)
# of the recipe, in what `checkpoint.py export` writes, since DeepSpeed takes it from its own JSON
TOLD = ("batch", "optimizer", "schedule", "steps", "seed", "precision")
# of Megatron's arguments -> ours
ARGUMENTS = {"train_iters": "steps", "seq_length": "sequence_length"}


@dataclass(frozen=True)
class TheirSettings:
    """The files of a run. `model`: its model's config, or arguments; {} where there are none."""

    directory: Path
    state: DeepSpeedState
    model: Mapping[str, Any]

    @cached_property
    def exported(self) -> Mapping[str, Any]:
        """What `checkpoint.py export` has told of the recipe of a run of ours; {} of others."""
        path = self.directory / "export.json"
        told = read_json_object(path) if is_file(path) else {}
        return {key: told[key] for key in TOLD if key in told}

    @cached_property
    def trainer(self) -> Mapping[str, Any]:
        """Trainer's state; {} without one. Raises FileError: it is at another step."""
        path = self.directory / "trainer_state.json"
        trainer = read_json_object(path) if is_file(path) else {}
        step = trainer.get("global_step", self.state.steps)
        if step != self.state.steps:
            refuse(
                path,
                f"says global_step={step}",
                f"{self.state.where} is after step {self.state.steps}",
                COPY,
            )
        return trainer

    @property
    def steps(self) -> int | None:
        """The last step by Trainer's state; None: none says it."""
        return self.trainer.get("max_steps")

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Trainer's arguments; {} without them, or where their file cannot be read.

        Raises FileError: the file is damaged.
        """
        path = self.directory / "training_args.bin"
        if not (is_file(path) and is_sound(path)):
            return {}
        try:
            return dict(vars(load(path)))
        except (FileError, TypeError):
            return {}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration, completed by Trainer's arguments. Raises FileError: another loss."""
        said = self.arguments
        if not said:
            return self.state.config
        for key in OTHER_LOSSES:
            if said.get(key):
                refuse(
                    self.directory,
                    f"was trained with {key}={said[key]}",
                    "our loss is the cross-entropy alone",
                    WEIGHTS_ALONE,
                )
        kind = _name(said.get("optim"))
        params = {key: said.get(theirs) for key, theirs in TRAINERS.items()}
        params["betas"] = [said.get("adam_beta1"), said.get("adam_beta2")]
        kind = "adamw" if kind in ADAMW else kind
        told: dict[str, Any] = {"optimizer": {"type": kind, "params": params}}
        if not self.state.config:
            told["gradient_clipping"] = said.get("max_grad_norm") or 0.0
            for half in HALVES:
                told[half] = {"enabled": said.get(half)}
        return {**told, **self.state.config}

    @property
    def default_clip(self) -> float | None:
        """DeepSpeed's own clipping, where its JSON has none; None: it has, or no file says the release."""
        config = self.state.config
        if config and lookup(config, "gradient_clipping") is None:
            with suppress(InvalidVersion, TypeError):
                release = Version(self.state.stated.get("ds_version", ""))
                return following.CLIP if release >= CLIPS else 0.0
        return None

    @cached_property
    def stated(self) -> str:
        """The optimizer's type by the files, in lower case; "" where none states it."""
        kind = lookup(self.config, "optimizer.type") or self.model.get("optimizer")
        return str(kind or "").lower()

    @property
    def is_adamw(self) -> bool:
        """True if files state it, and each group has what groups of an Adam have."""
        looks = all(OF_ADAM & group.keys() for group in self.state.groups)
        return bool(self.exported or (self.stated and looks))

    @cached_property
    def group(self) -> Mapping[str, Any]:
        """The optimizer's settings for decayed parameters. Raises FileError: it is no Adam of ours."""
        ours = self.exported.get("optimizer") or {}
        groups = self.state.groups
        own = max(groups, key=lambda group: group.get("weight_decay", 0.0))
        merged = {**ours, "initial_lr": ours.get("lr"), **own}
        params = lookup(self.config, "optimizer.params") or {}
        added = self.stated == "adam" and params.get("adam_w_mode") is False
        added = added or own.get("decoupled_weight_decay") is False
        others = "decoupled_weight_decay" in own and "amsgrad" not in own
        faults = {
            f"was trained with {self.stated}": self.stated not in ("", *ADAM),
            "has groups as RAdam and NAdam of torch have": others,
            "was trained with amsgrad": merged.get("amsgrad"),
            "was trained with maximize": merged.get("maximize"),
            "adds weight decay to gradients": added and merged.get("weight_decay"),
            "states no betas of its Adam": "betas" not in merged,
        }
        for key, held in STATED.items():
            stated = _plain(params.get(key))
            values = [_plain(group[held]) for group in groups if held in group]
            came = f"states {key}={stated}, and its groups have {values}"
            faults[came] = values and stated not in (None, "auto", *values)
        for came, fault in faults.items():
            if fault:
                refuse(
                    self.state.where,
                    came,
                    "AdamW's moments are taken, with their betas, without amsgrad",
                    WEIGHTS_ALONE,
                )
        return merged

    @property
    def rate(self) -> float:
        """The learning rate of its next step."""
        return float(self.group["lr"])

    @property
    def batch(self) -> int | None:
        """Samples of a step; None: they were not always the same, or no file states them."""
        processes = getattr(self.arguments.get("distributed_state"), "num_processes", 0)
        micro = self.trainer.get("train_batch_size")
        if micro and processes and not self.state.samples:
            passes = self.arguments["gradient_accumulation_steps"]
            return int(micro * processes * passes)
        each, rest = divmod(self.state.samples, max(1, self.state.steps))
        if rest:
            return None
        return each or None

    def settings(self, base: Recipe) -> dict[str, Any]:
        """Return what its files state, by the recipe's keys. `base`: the recipe of all else."""
        group = self.group
        config = self.config
        settings: dict[str, Any] = {
            "optimizer.name": "adamw",
            "optimizer.betas": [*group["betas"]],
            "optimizer.eps": group.get("eps", base.optimizer.eps),
            "optimizer.weight_decay": group.get("weight_decay", 0.0),
            "optimizer.bias_correction": bool(group.get("bias_correction", True)),
            "optimizer.lr": self._peak(),
        }
        if config:
            clip = lookup(config, "gradient_clipping")
            clip = self.default_clip if clip is None else clip
            if clip is not None:
                settings["optimizer.clip"] = float(clip)
        if self.batch is not None:
            settings["batch.global"] = self.batch
            for key in ("micro", "accumulation", "rampup"):
                settings[f"batch.{key}"] = None
        for theirs, ours in ARGUMENTS.items():
            if type(self.model.get(theirs)) is int:
                settings[ours] = self.model[theirs]
        if self.steps is not None:
            settings["steps"] = self.steps
        settings |= self._model_settings()
        settings |= self._schedule(base)
        if self.exported:
            settings |= dict(flatten(self.exported))
        return settings

    def _model_settings(self) -> dict[str, Any]:
        """Return precision and dropout."""
        settings: dict[str, Any] = {}
        config = self.config
        module = self.state.module.values()
        types = {PRECISIONS.get(tensor.dtype) for tensor in module}
        if config:
            types = {"fp32"}
        for half in HALVES:
            if lookup(config, f"{half}.enabled") is True:
                types = {half}
        if lookup(config, "torch_autocast.enabled") is True:
            types = set()
        if len(types) == 1:
            settings["precision"] = types.pop()
        for hidden, attention in DROPOUT:
            rates = {self.model[key] for key in hidden if key in self.model}
            if len(rates) == 1:
                settings["dropout.hidden"] = rates.pop()
                settings["dropout.attention"] = self.model.get(attention, 0.0)
        return settings

    def _peak(self) -> float:
        """Return the peak learning rate: where a schedule began with it, or what an optimizer got."""
        stated = self.group.get("initial_lr")
        stated = stated or lookup(self.config, "optimizer.params.lr")
        if isinstance(stated, (int, float)):
            return float(stated)
        return self.rate

    def _schedule(self, base: Recipe) -> dict[str, Any]:
        """Return all keys of the schedule; {}: no file says which it is."""
        if lookup(self.state.config, "scheduler"):
            values = {
                each.key: each.value
                for each in following.numbers(self.state.config, base)
                if each.key.startswith(("schedule.", "optimizer.lr"))
            }
            if "schedule.kind" not in values:
                return {}
            return {**_laid(Schedule()), **values}
        scheduler = self.state.stated.get("lr_scheduler") or {}
        for names in MEGATRON_SCHEDULES:
            keys = names.split()
            if scheduler.keys() >= {*keys}:
                return self._megatron_schedule([scheduler[key] for key in keys])
        kind = _name(self.arguments.get("lr_scheduler_type"))
        # a number of steps, or a share of all
        warmup = 0
        for key in ("warmup_ratio", "warmup_steps"):
            warmup = self.arguments.get(key) or warmup
        if warmup < 1:
            warmup = math.ceil(warmup * (self.steps or 0))
        return _of(kind, int(warmup), self.steps)

    def _megatron_schedule(self, stated: Sequence[Any]) -> dict[str, Any]:
        """Return the schedule of values by MEGATRON_SCHEDULES; {}: not in whole steps."""
        scheduler = self.state.stated["lr_scheduler"]
        kind, count, rate, lowest, warmup, end = stated
        each = count / max(1, self.state.steps - self.state.skipped)
        if not each or any(scheduler.get(key) for key in BY_TOKENS):
            return {}
        if warmup / each % 1 or end / each % 1:
            return {}
        schedule = _of(kind, int(warmup / each), int(end / each))
        if schedule:
            schedule["schedule.min_lr"] = lowest
            schedule["optimizer.lr"] = rate
        return schedule

    def changes(self) -> tuple[Change, ...]:
        """Return what of its optimizer is otherwise here."""
        groups = self.state.groups
        if self.exported:
            return ()
        changes = []
        for key in ("lr", "betas", "eps", "bias_correction"):
            values = {}
            for group in groups:
                value = group.get(key)
                values[str(value)] = value
            if len(values) > 1:
                was = [*values.values()]
                now = self.group.get(key)
                changes.append(Change(key=f"optimizer.{key}", was=was, now=now))
        decay = self.group.get("weight_decay", 0.0)
        odd = {}
        for name, parameter in self.state.parameters.items():
            number = self.state.numbered.get(name)
            theirs = "unknown"
            if number is not None or not decay:
                theirs = groups[number or 0].get("weight_decay", 0.0)
            if theirs != (len(parameter.shape) > 1) * decay:
                odd[name] = theirs
        if odd:
            key = f"optimizer.weight_decay of {some([*odd], 3)}"
            now = f"{decay:g} of matrices, none of vectors"
            changes.append(Change(key=key, was=[*{*odd.values()}], now=now))
        return tuple(changes)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*value]
    return value


def _name(kind: Any) -> Any:
    """Return the value of a member of an enumeration."""
    if isinstance(kind, StandIn):
        return next(iter(kind.arguments), None)
    return kind


def _of(kind: Any, warmup: int, end: int | None) -> dict[str, Any]:
    """Return all keys of a schedule of theirs; {}: it is none of ours."""
    ours = SCHEDULES.get(str(kind))
    if ours is None:
        return {}
    values = {"kind": ours, "warmup_steps": warmup * (kind != "constant")}
    if ours != "constant":
        values["decay_steps"] = end
    return _laid(Schedule.model_validate(values))


def _laid(schedule: Schedule) -> dict[str, Any]:
    return {f"schedule.{key}": value for key, value in schedule.model_dump().items()}
