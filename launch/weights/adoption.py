"""The adoption of a DeepSpeed run: what its files decide, and what has to be said besides."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_configs.findings import Notice
from ds_configs.plan import Plan
from launch.checkpoints import run_checkpoints
from launch.ranks import processes
from launch.weights.deepspeed_weights import OfDeepSpeed, open_run
from launch.weights.initial_weights import ARGUMENTS, TOKENIZERS
from launch.weights.starting_model import StartingModel
from launch.weights.their_settings import TheirSettings
from modeling.formats.deepspeed.states import DeepSpeedState
from modeling.formats.megatron.checkpoint import UNREAD
from recipes import catalog
from recipes.consistency import schedule_problems
from recipes.key_paths import is_part, key_of
from recipes.problems import Problem
from recipes.schema import Branch, Recipe

RateAfter = Callable[[Recipe, int], float]
KEY = "--adopt"
DATA_FROM = "--data_from"
FIRST = "first"
NEXT = "next"
HEAD = 64  # usual channels of an attention head
HEADS = ("n_head", "num_attention_heads")
RATE = 1e-6  # relative difference of one learning rate in two computations
# Keys that the files may leave open -> what nothing states, and an example of a value.
OPEN = {
    "batch.global": ("samples of a step", "256"),
    "optimizer.clip": ("whether gradients are clipped", "1.0"),
    "precision": ("the precision", "bf16"),
    "steps": ("the last step", "100000"),
    "dropout.hidden": ("dropout of the residual stream", "0.1"),
    "dropout.attention": ("dropout of attention", "0.1"),
    "schedule.kind": ("the learning rate's schedule", "constant"),
}


@dataclass(frozen=True)
class Adoption(StartingModel):
    """A DeepSpeed run in a directory, which goes on as a run of ours.

    Attributes:
        key: the flag that names the directory.
        named: the recipe of what the files leave open; None: the default one of the family.
        data_from: FIRST: our order of the data is read from its beginning; NEXT: after as many samples as the
            run has read. None: not said yet.
    """

    key: str = KEY
    named: str | Path | None = None
    data_from: str | None = None

    @cached_property
    def _weights(self) -> OfDeepSpeed:
        return open_run(Path(self.directory))

    @classmethod
    def of(cls, directory: str, args: argparse.Namespace) -> Adoption:
        """Open the run in a directory by the flags of a command. Raises ProblemsError."""
        named = args.recipe if "recipe" in args.given else None
        how = {"stated": args.weights_args, "data_from": args.data_from}
        return cls(directory, named=named, **how)

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

    def settings(self, texts: Sequence[str], text: bool = False) -> dict[str, Any]:
        """Return the keys of a recipe that the files decide, and their values.

        `texts`: of --set; `text`: a text is given. Raises ProblemsError: of all that no file states and
        nobody says, with a command line that would do.
        """
        keys = [key_of(each) for each in texts]
        lacking = dict[str, str]()  # flag -> what it says
        if not (text or self.named or any(is_part(key, ("data",)) for key in keys)):
            lacking["--text PATH"] = "what text it read"
        if self.data_from is None:
            lacking[f"{DATA_FROM} {FIRST}"] = (
                f"where in our order of a text it stands ({NEXT}: after the samples that it read)"
            )
        config = self._weights.config(None)
        heads = next((key for key in HEADS if config.get(key) == UNREAD), None)
        found = dict[str, Any]()
        if heads and not any(each.startswith(heads) for each in self.stated):
            hidden = config.get("n_embd", config.get("hidden_size"))
            flag = f"{ARGUMENTS} {heads}={max(1, int(hidden or HEAD) // HEAD)}"
            lacking[flag] = "the number of heads"
        else:
            base = catalog.load(self.recipe_name)
            found = {**super().settings(texts), **self.theirs.settings(base)}
            lacking |= self._open({*found, *keys})
        if not lacking:
            return found
        problems = [
            Problem(KEY, f"no file states {what}", fix=flag)
            for flag, what in lacking.items()
        ]
        line = f"{KEY} {shlex.quote(self.directory)} --out RUN {' '.join(lacking)}"
        state = self.state
        stated = [f"{key}={found[key]}" for key in found if found[key] is not None]
        came = f"is {state.form} after step {state.steps}"
        came += f", and states {', '.join(stated)}"
        such = f"such as: python launch/pretrain.py {line}"
        last = Problem(KEY, came, "the rest has to be said", such)
        raise self.error([*problems, last])

    def _open(self, said: Collection[str]) -> dict[str, str]:
        """Return the flags of keys that nothing states; `said`: keys that files or --set state."""
        found = {}
        for key, (what, example) in OPEN.items():
            if not any(is_part(key, (each,)) for each in said):
                found[f"--set {key}={example}"] = what
        tokenizer = any(is_part(each, ("data.tokenizer",)) for each in said)
        if not tokenizer and self.model().shape["model.vocab_size"] not in TOKENIZERS:
            key = "data.tokenizer"
            found[f"--set {key}.kind=file --set {key}.path=DIR"] = "its tokenizer"
        return found

    def begun(
        self, texts: Sequence[str], laid: Mapping[str, Any], steps: int | None
    ) -> Recipe:
        """Return the recipe of the run that goes on: `laid` and the files' settings, then `texts` over it.

        `laid`: the settings of a given text; {} without one. Raises ProblemsError with every problem.
        """
        laid = {**laid, **self.settings(texts, text=bool(laid))}
        recipe = catalog.load(
            self.recipe_name, texts, steps=steps, laid=laid, trained=False
        )
        state = self.state
        each = self.theirs.batch or recipe.batch.global_
        read = each * state.steps
        branch = Branch(
            run=str(Path(self.directory).absolute()),
            step=state.steps,
            changed=self.theirs.changes(),
            stretches=((0, 0, each),),
            data_from=read if self.data_from == FIRST else 0,
            more_updates=state.updates - state.steps + state.skipped,
        )
        recipe = recipe.model_copy(update={"branch": branch})
        problems = [*schedule_problems(recipe, "", cut=steps is not None)]
        if problems:
            raise self.error(problems)
        return recipe

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the run fits the recipe; return remarks."""
        super().check(recipe)
        state = self.state
        at = f"after step {state.steps} and {state.samples:,} samples"
        said = [f"{state.form} of {self.directory}, {at}"]
        said += self.saved().remarks(recipe)
        return tuple(Notice("adopt", f"adopted: {each}") for each in said)

    def write(self, plan: Plan, checkpoints: Path, corpus: str) -> None:
        """Write its state as the first checkpoint of a run on rank 0, unless there is one.

        Raises as `adopted_checkpoint.write`.
        """
        from launch.weights import adopted_checkpoint

        if processes.rank() == 0 and run_checkpoints.newest(checkpoints) is None:
            betas = self.theirs.group["betas"]
            adopted_checkpoint.write(self._weights, betas, plan, checkpoints, corpus)

    def noted(self, plan: Plan, texts: Sequence[str], rate_after: RateAfter) -> Plan:
        """Return the plan with remarks on the run. Raises ProblemsError: it does not fit the plan's recipe.

        `texts`: of --set; `rate_after`: (recipe, completed steps) -> the next learning rate.
        """
        recipe = plan.recipe
        rate = rate_after(recipe, self.state.steps - self.state.skipped)
        notices = [*plan.notices]
        notices += self.check(recipe)
        notices += self._other_rate(recipe, texts, rate)
        return replace(plan, notices=tuple(notices))

    def _other_rate(
        self, recipe: Recipe, texts: Sequence[str], rate: float
    ) -> Iterator[Notice]:
        """Yield a remark where the schedule's next learning rate is not the run's.

        Raises ProblemsError where the files alone decided the schedule.
        """
        theirs = self.theirs.rate
        if abs(rate - theirs) <= RATE * abs(theirs):
            return
        gives = f"{recipe.schedule.kind} gives {rate:.7g}"
        came = f"the learning rate of its next step is {theirs:.7g}, and {gives}"
        keys = [key_of(each) for each in texts]
        if not any(is_part(key, ("schedule", "optimizer", "steps")) for key in keys):
            fix = "say the schedule with --set schedule.kind=... and its other keys"
            rule = "its files state another schedule"
            raise self.error([Problem("schedule", came, rule, fix)])
        yield Notice("adopt", f"adopted: {came}")
