"""The adoption of a DeepSpeed run: what its files decide, and what has to be said besides."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_configs.findings import FOLDER, Notice, find, lookup
from ds_configs.plan import Plan
from launch.checkpoints import run_checkpoints
from launch.console.arguments import check_outside, stated
from launch.ranks import processes
from launch.weights.deepspeed_weights import OfDeepSpeed, open_run
from launch.weights.initial_weights import ARGUMENTS, TOKENIZERS
from launch.weights.starting_model import StartingModel
from launch.weights.their_settings import TheirSettings
from modeling.formats.deepspeed.states import DeepSpeedState
from modeling.formats.megatron.checkpoint import UNREAD
from recipes import catalog
from recipes.consistency import schedule_problems
from recipes.files import path_of, read_settings, refuse
from recipes.key_paths import is_part, key_of
from recipes.problems import Problem
from recipes.schema import Branch, Recipe

RateAfter = Callable[[Recipe, int], float]
KEY = "--adopt"
DATA_FROM = "--data_from"
OPTIMIZER = "--adopt_optimizer"
REGROUP = "--regroup"
FIRST = "first"
NEXT = "next"
KIND = "schedule.kind"
LR = "optimizer.lr"
HEAD = 64  # usual channels of an attention head
RATE = 1e-6  # relative difference of one learning rate in two computations
# of a JSON's fp16 -> of DeepSpeed's loss scaler
SCALING = {
    "loss_scale_window": "scale_window",
    "hysteresis": "delayed_shift",
    "min_loss_scale": "min_scale",
    "consecutive_hysteresis": "consecutive_hysteresis",
}
# Keys that the files may leave open -> what nothing states, and an example of a value. The rate stays as it is.
OPEN = {
    "batch.global": ("samples of a step", "256"),
    "optimizer.clip": ("whether gradients are clipped", "1.0"),
    "precision": ("the precision", "bf16"),
    "steps": ("the last step", "{later}"),
    "dropout.hidden": ("dropout of the residual stream", "0.1"),
    "dropout.attention": ("dropout of attention", "0.1"),
    KIND: ("the learning rate's schedule", "constant"),
    "schedule.warmup_steps": ("its warm-up", "0"),
    "schedule.min_lr": ("the rate at which it ends", "0"),
}


@dataclass(frozen=True)
class Adoption(StartingModel):
    """A DeepSpeed run in a directory, which goes on as a run of ours.

    Attributes:
        key: the flag that names the directory.
        named: the recipe of what the files leave open; None: the default one of the family.
        data_from: FIRST: our order of the data is read from its beginning; NEXT: after as many samples as the
            run has read. None: not said yet.
        adamw: the user says that its optimizer is AdamW.
        regroups: the user wants the rate and the decay of our optimizer where its groups have others.
        typed: the command line.
    """

    key: str = KEY
    named: str | Path | None = None
    data_from: str | None = None
    adamw: bool = False
    regroups: bool = False
    typed: Sequence[str] = ("launch/pretrain.py",)

    @cached_property
    def _weights(self) -> OfDeepSpeed:
        return open_run(Path(self.directory))

    @classmethod
    def of(cls, directory: str, args: argparse.Namespace) -> Adoption:
        """Open the run in a directory by the flags of a command. Raises ProblemsError."""
        path = path_of(directory, KEY)
        if not path.is_dir():
            refuse(path, "no such directory", fix="name that of the run")
        check_outside("--out", args.out, directory)
        named = args.recipe if "recipe" in args.given else None
        return cls(
            directory,
            stated=args.weights_args,
            named=named,
            data_from=args.data_from,
            adamw=args.adopt_optimizer is not None,
            regroups=args.regroup,
            typed=tuple(sys.argv),
        )

    def saved(self) -> OfDeepSpeed:
        return self._weights

    @property
    def state(self) -> DeepSpeedState:
        """The run's state. Raises FileError."""
        return self._weights.state

    @property
    def recipe_name(self) -> str | Path:
        kind = str(self._weights.config(None).get("model_type"))
        family = "bert" if kind.endswith("bert") else "gpt2"
        return self.named or catalog.BY_FAMILY[family]

    @cached_property
    def theirs(self) -> TheirSettings:
        """What its files state of its recipe."""
        return TheirSettings(Path(self.directory), self.state, self._weights.stated)

    def settings(
        self, texts: Sequence[str], text: bool = False, steps: int | None = None
    ) -> dict[str, Any]:
        """Return the keys of a recipe that the files decide, and their values.

        Args:
            texts: of --set.
            text: a text is given.
            steps: of --steps.

        Raises ProblemsError: of all that no file states and nobody says, with a command line that would do.
        """
        keys = [key_of(each) for each in texts]
        lacking = dict[str, str]()  # flag -> what it says
        of_data = [key for key in keys if is_part(key, ("data",))]
        if not (text or self.named or of_data):
            lacking["--text PATH"] = "what text it read"
        if self.data_from is None:
            lacking[f"{DATA_FROM} {FIRST}"] = (
                f"where in our order of a text it stands ({NEXT}: after the samples that it read)"
            )
        if not (self.adamw or self.theirs.is_adamw):
            lacking[f"{OPTIMIZER} adamw"] = "that its optimizer is AdamW"
        told = self._untold()
        for each, what in told.items():
            lacking[f"{ARGUMENTS} {each}"] = what
        whole = replace(self, stated=(*self.stated, *told))
        base = self.named_recipe.recipe
        found = super(Adoption, whole).settings(texts)
        found |= self.theirs.settings(base)
        if stated(texts, KIND) == "constant":
            found.setdefault("schedule.min_lr", 0.0)  # which has no effect there
        said = {*found, *keys}
        if steps is not None:
            said.add("steps")
        asked = whole._open(said)
        lacking |= asked
        rate = self.theirs.rate
        kind = f"--set {KIND}={OPEN[KIND][1]}"
        if kind in asked and rate != found[LR] and LR not in keys:
            what = f"the schedule by which the learning rate is {rate:g} now"
            lacking[f"--set {LR}={rate!r}"] = what
        changed = () if self.regroups else self.theirs.changes()
        if not (lacking or changed):
            return found
        problems = [
            Problem(KEY, f"no file states {what}", fix=flag)
            for flag, what in lacking.items()
        ]
        for change in changed:
            fix = f"insist with {REGROUP}"
            problems.append(
                Problem(
                    KEY,
                    f"its groups of parameters differ in {change.key}: {change.was}",
                    f"our optimizer has {change.now}",
                    f"{fix}, or take its weights with --init_from",
                )
            )
            lacking[REGROUP] = ""
        line = f"python {shlex.join(self.typed)} {' '.join(lacking)}"
        state = self.state
        known = {key: value for key, value in found.items() if value is not None}
        came = f"is {state.form} after step {state.steps}, and states {_listed(known)}"
        last = Problem(KEY, came, "the rest has to be said", f"such as: {line}")
        raise self.error(*problems, last)

    def _untold(self) -> dict[str, str]:
        """Return the --weights_args of what the model's description leaves open, and what each says."""
        config = self._weights.config(None)
        kind = config.get("model_type")
        said = [text.partition("=")[0] for text in self.stated]
        found = {}
        for form in self._weights.forms:
            if form.model_type != kind:
                continue
            heads = form.shape["model.heads"][0]
            hidden = config.get(form.shape["model.hidden"][0], HEAD)
            examples = {heads: math.gcd(hidden, max(1, hidden // HEAD))}
            for key, allowed in form.fixed.items():
                examples[key] = allowed[0]
            for key, value in examples.items():
                held = config.get(key)
                what = f"its {key}"
                if key == heads:
                    held = config.get(key, UNREAD)
                    what = "the number of heads"
                if held == UNREAD and key not in said:
                    written = json.dumps(value).strip('"')
                    found[f"{key}={written}"] = what
        return found

    def _open(self, said: Collection[str]) -> dict[str, str]:
        """Return the flags of keys that nothing states; `said`: keys that are stated."""
        found = {}
        for key, (what, example) in OPEN.items():
            if not any(is_part(key, (each,)) for each in said):
                value = example.format(later=2 * self.state.steps)
                found[f"--set {key}={value}"] = what
        tokenizer = any(is_part(each, ("data.tokenizer",)) for each in said)
        if not tokenizer and self.model().shape["model.vocab_size"] not in TOKENIZERS:
            key = "data.tokenizer"
            found[f"--set {key}.kind=file --set {key}.path=DIR"] = "its tokenizer"
        return found

    def begun(
        self, texts: Sequence[str], of_text: Mapping[str, Any], steps: int | None
    ) -> Recipe:
        """Return the recipe of the run that goes on: `of_text` and the files' settings, then `texts` over it.

        `of_text`: the settings of a given text; {} without one. Raises ProblemsError with every problem.
        """
        own = self.settings(texts, text=bool(of_text), steps=steps)
        settings = {**of_text, **own}
        recipe = self.named_recipe.changed(texts, False, steps, settings, trained=False)
        state = self.state
        each = self.theirs.batch or recipe.batch.global_
        begins = 0
        if self.data_from == FIRST:
            begins = each * state.steps
        branch = Branch(
            run=str(Path(self.directory).absolute()),
            step=state.steps,
            changed=self.theirs.changes(),
            stretches=((0, 0, each),),
            data_from=begins,
            more_updates=state.updates - state.steps + state.skipped,
        )
        recipe = recipe.model_copy(update={"branch": branch})
        problems = [*schedule_problems(recipe, "", cut=steps is not None)]
        if problems:
            raise self.error(*problems)
        return recipe

    @property
    def scaling(self) -> dict[str, Any]:
        """Rules of its fp16 loss scaler, by a JSON's keys; {} in other precisions."""
        held = self.state.scaler
        rules = {key: held[name] for key, name in SCALING.items() if name in held}
        fixed = lookup(self.theirs.config, "fp16.loss_scale")
        if lookup(self.theirs.config, "fp16.enabled") is True and fixed:
            rules["loss_scale"] = fixed
        return rules

    def with_scaling(self, ds_config: str) -> str:
        """Return a DeepSpeed JSON that scales losses as the run did: the given one, or a copy.

        Raises ProblemsError: a JSON of one's own has other rules.
        """
        path = find(ds_config)
        config = read_settings(path)
        scaled = config.get("fp16") or {}
        other = {}
        for key, each in self.scaling.items():
            if scaled.get(key) != each:
                other[key] = each
        if not other:
            return ds_config
        own = [f"fp16.{key}={scaled[key]}" for key in other if key in scaled]
        if own and path.parent != FOLDER:
            raise self.error(
                Problem(
                    "fp16",
                    f"--ds_config {ds_config} has {', '.join(own)}",
                    f"the run's loss scaler has {_listed(other)}",
                    "write these numbers there",
                )
            )
        config["fp16"] = {**scaled, **other}
        copy = Path(tempfile.mkdtemp()) / path.name
        copy.write_text(json.dumps(config, indent=2))
        return str(copy)

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the run fits the recipe; return remarks."""
        super().check(recipe)
        state = self.state
        at = f"after step {state.steps}"
        if state.samples:
            at += f" and {state.samples:,} samples"
        said = [f"{state.form} of {self.directory}, {at}"]
        said += self.saved().remarks(recipe)
        clip = self.theirs.default_clip
        if clip == recipe.optimizer.clip:
            by = f"DeepSpeed {state.stated['ds_version']} without gradient_clipping"
            said.append(f"optimizer.clip={clip:g} by {by}")
        if self.scaling and recipe.precision == "fp16":
            said.append(f"its loss scaler has fp16 of {_listed(self.scaling)}")
        return (Notice("adopt", f"adopted: {'; '.join(said)}"),)

    def write(self, plan: Plan, checkpoints: Path, corpus: str) -> None:
        """Write its state as the first checkpoint of a run on rank 0, unless there is one.

        Raises as `adopted_checkpoint.write`.
        """
        from launch.weights import adopted_checkpoint

        if processes.rank() == 0 and run_checkpoints.newest(checkpoints) is None:
            betas = self.theirs.group["betas"]
            adopted_checkpoint.write(self._weights, betas, plan, checkpoints, corpus)

    def with_remarks(
        self, plan: Plan, texts: Sequence[str], rate_after: RateAfter
    ) -> Plan:
        """Return the plan with remarks on the run, also where the schedule's next learning rate is another.

        Raises ProblemsError: it does not fit the plan's recipe, or the files alone decided the schedule.
        `texts`: of --set; `rate_after`: (recipe, completed steps) -> the next learning rate.
        """
        recipe = plan.recipe
        rate = rate_after(recipe, self.state.steps - self.state.skipped)
        notices = [*plan.notices]
        notices += self.check(recipe)
        theirs = self.theirs.rate
        if abs(rate - theirs) > RATE * abs(theirs):
            gives = f"{recipe.schedule.kind} gives {rate:.7g}"
            came = f"the learning rate of its next step is {theirs:.7g}, and {gives}"
            keys = map(key_of, texts)
            if not any(
                is_part(key, ("schedule", "optimizer", "steps")) for key in keys
            ):
                raise self.error(
                    Problem(
                        "schedule",
                        came,
                        "its files state another schedule",
                        "say the schedule with --set schedule.kind=... and its other keys",
                    )
                )
            notices.append(Notice("adopt", f"adopted: {came}"))
        return replace(plan, notices=tuple(notices))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
