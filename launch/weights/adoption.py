"""The adoption of a DeepSpeed run: what its files decide, and what has to be said besides."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_configs.findings import Notice
from ds_configs.plan import Plan
from launch.weights.deepspeed_weights import DeepSpeedWeights
from launch.weights.foreign_weights import Saved
from launch.weights.initial_weights import ARGUMENTS, TOKENIZERS, InitialWeights
from launch.weights.starting_model import NAME_IT, StartingModel
from launch.weights.their_settings import TheirSettings
from modeling.formats.deepspeed.states import DeepSpeedState
from modeling.formats.megatron.checkpoint import UNREAD
from recipes import catalog
from recipes.files import FileError
from recipes.key_paths import is_part
from recipes.problems import Problem, ProblemsError
from recipes.schema import Branch, Recipe

RateAfter = Callable[[Recipe, int], float]
KEY = "--adopt"
DATA_FROM = "--data_from"
FIRST, NEXT = "first", "next"
HEAD = 64  # usual channels of an attention head
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

    def saved(self) -> Saved:
        if Path(self.directory).is_dir():
            return self._weights
        return super().saved()

    @cached_property
    def _weights(self) -> DeepSpeedWeights:
        return DeepSpeedWeights(Path(self.directory))

    @property
    def state(self) -> DeepSpeedState:
        """The run's state. Raises FileError."""
        return self._weights.state

    @property
    def recipe_name(self) -> str | Path:
        return self.named or super().recipe_name

    @cached_property
    def theirs(self) -> TheirSettings:
        """What its files state of its recipe."""
        family = self.model().form.family
        described = self._weights.described is not None
        config = self._weights._config if described else {}
        return TheirSettings(Path(self.directory), self.state, family, config)

    def settings(self, texts: Sequence[str], text: bool = False) -> dict[str, Any]:
        """Return the keys of a recipe that the files decide, and their values.

        `texts`: of --set; `text`: a text is given. Raises ProblemsError: of all that no file states and
        nobody says, with a command line that would do.
        """
        if not Path(self.directory).is_dir():
            self.saved()
        heads = self._weights._config.get(self._heads_key)
        if heads == UNREAD and not any(
            each.startswith(self._heads_key) for each in self.stated
        ):
            asked = f"{ARGUMENTS} {self._heads_key}={max(1, self._hidden // HEAD)}"
            self._ask(
                [Problem(KEY, "no file states the number of heads", fix=asked)],
                texts,
                text,
                [asked],
            )
        base = catalog.load(self.recipe_name)
        found = {**super().settings(texts), **self.theirs.settings(base)}
        self._ask([], texts, text, [], found)
        return found

    @property
    def _hidden(self) -> int:
        config = self._weights._config
        return int(config.get("n_embd") or config.get("hidden_size") or HEAD)

    @property
    def _heads_key(self) -> str:
        return (
            "n_head"
            if self._weights._config.get("model_type") == "gpt2"
            else "num_attention_heads"
        )

    def _ask(
        self, problems: Sequence[Problem], texts: Sequence[str], text: bool, flags: Sequence[str],
        found: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Raise ProblemsError unless everything is stated."""
        keys = [each.partition("=")[0].strip() for each in texts]
        missing = [*problems]
        line = [*flags]
        reads = (
            text
            or self.named is not None
            or any(is_part(key, ("data",)) for key in keys)
        )
        if not reads:
            missing.append(
                Problem("--text", "no file states what text it read", fix="--text PATH")
            )
        if self.data_from is None:
            fix = f"{DATA_FROM} {FIRST} reads it from its beginning, {NEXT} after as many samples as were read"
            came = "no file states where in our order of a text it stands"
            missing.append(Problem(DATA_FROM, came, fix=fix))
        if found is not None:
            for problem, flag in self._open(found, keys):
                missing.append(problem)
                line.append(flag)
        if not missing:
            return
        state = self.state
        line = [
            "python launch/pretrain.py", KEY, shlex.quote(self.directory), "--out RUN",
            "" if reads else "--text PATH", "" if self.data_from else f"{DATA_FROM} {FIRST}", *line,
        ]  # fmt: skip
        came = f"is {state.form} after step {state.steps}, and states {_listed(found or {})}"
        whole = " ".join(part for part in line if part)
        missing.append(
            Problem(KEY, came, "the rest has to be said", f"such as: {whole}")
        )
        raise self.error(missing)

    def _open(
        self, found: Mapping[str, Any], keys: Sequence[str]
    ) -> Iterator[tuple[Problem, str]]:
        """Yield a problem and a flag for each key that no file states; `keys`: of --set."""
        for key, (what, example) in OPEN.items():
            said = key in found or any(
                is_part(key, (each,)) or each == key for each in keys
            )
            if not said and not any(
                is_part(each, (key.partition(".")[0],)) for each in keys
            ):
                flag = f"--set {key}={example}"
                yield Problem(key, f"no file states {what}", fix=flag), flag
        if "data.tokenizer" not in found and not any(
            is_part(each, ("data.tokenizer",)) for each in keys
        ):
            rows = self.model().shape["model.vocab_size"]
            if rows not in TOKENIZERS:
                flag = "--set data.tokenizer.kind=file --set data.tokenizer.path=DIR"
                yield Problem("data.tokenizer", "holds no tokenizer", fix=NAME_IT), flag

    def begun(
        self, texts: Sequence[str], laid: Mapping[str, Any], steps: int | None
    ) -> Recipe:
        """Return the recipe of the run that goes on: `laid` and the files' settings, then `texts` over it.

        `laid`: the settings of a given text; {} without one. Raises ProblemsError with every problem.
        """
        laid = {**laid, **self.settings(texts, text=bool(laid))}
        recipe = catalog.load(self.recipe_name, texts, steps=steps, laid=laid)
        state = self.state
        each = self.theirs.batch or recipe.batch.global_
        read = each * state.steps
        if recipe.steps <= state.steps:
            came = f"steps={recipe.steps}, and the run has made {state.steps}"
            raise self.error(
                [Problem("steps", came, fix=f"--set steps={state.steps + 1} or more")]
            )
        branch = Branch(
            run=str(Path(self.directory).absolute()),
            step=state.steps,
            stretches=((0, 0, each),),
            data_from=read if self.data_from == FIRST else 0,
            more_updates=state.updates - state.steps + state.skipped,
        )
        return recipe.model_copy(update={"branch": branch})

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the run fits the recipe; return remarks."""
        InitialWeights.check(self, recipe)
        problems = list(self._vocabulary_problems(recipe))
        if problems:
            raise self.error(problems)
        state = self.state
        said = [
            f"{state.form} of {self.directory}, after step {state.steps} and {state.samples:,} samples"
        ]
        said += self.saved().remarks(recipe)
        said += self.theirs.remarks()
        return tuple(Notice("adopt", f"adopted: {each}") for each in said)

    def write(self, plan: Plan, checkpoints: Path, corpus: str) -> None:
        """Write its state as the first checkpoint of a run; see `adopted_checkpoint.write`."""
        from launch.weights import adopted_checkpoint

        adopted_checkpoint.write(self._weights, plan, checkpoints, corpus)

    def noted(self, plan: Plan, texts: Sequence[str], rate_after: RateAfter) -> Plan:
        """Return the plan with remarks on the run. Raises ProblemsError: it does not fit the plan's recipe.

        `texts`: of --set; `rate_after`: (recipe, completed steps) -> the next learning rate.
        """
        recipe = plan.recipe
        rate = rate_after(recipe, self.state.steps - self.state.skipped)
        notices = (*self.check(recipe), *self._other_rate(recipe, texts, rate))
        return replace(plan, notices=(*plan.notices, *notices))

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
        keys = [each.partition("=")[0].strip() for each in texts]
        if not any(is_part(key, ("schedule", "optimizer", "steps")) for key in keys):
            fix = "say the schedule with --set schedule.kind=... and its other keys"
            raise self.error(
                [Problem("schedule", came, "its files state another schedule", fix)]
            )
        yield Notice("adopt", f"adopted: {came}")


def _listed(found: Mapping[str, Any]) -> str:
    """List the settings that files state, but for those that are usual."""
    shown = []
    for key, value in found.items():
        if value is not None and key.split(".")[0] in (
            "batch",
            "optimizer",
            "schedule",
            "precision",
            "steps",
        ):
            shown.append(f"{key}={value}")
    return ", ".join(shown) or "no settings"


def open_adoption(
    directory: str, stated: Sequence[str], named: str | None, data_from: str | None
) -> Adoption:
    """Find the DeepSpeed run in a directory. Raises ProblemsError."""
    found = Adoption(directory, stated=stated, named=named, data_from=data_from)
    try:
        found.saved()
        if Path(directory).is_dir():
            _ = found.state
    except FileError as error:
        raise ProblemsError(error.problems) from None
    return found
