"""The checked plan of a scoring: the model, its layout, and what it is scored on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data import corpus
from data.tasks.rows import FLAG, is_plain_text, local_file
from data.text.given_text import text_settings
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from launch.evaluation import trained_model
from launch.evaluation.protocols import TASKS, Variant, has_harness
from launch.evaluation.trained_model import TrainedModel
from launch.weights.initial_weights import InitialWeights
from recipes.families import TRAINED
from recipes.problems import Problem, ProblemsError
from recipes.schema import Batch, Dropout, Parallel, Recipe, Tokenizer
from recipes.validation import validate
from recipes.yaml_lines import YamlDocument

STRIDE = 32  # tokens; of WikiText-103 (arXiv 1909.08053, appendix E.1)
PERPLEXITY = "perplexity"  # the task that needs no lm-eval
INSTALL = "pip install -e .[evaluate]"


@dataclass(frozen=True)
class ScoringWishes:
    """What to score on what, from the flags; None: the task's default.

    Attributes:
        model: its directory as the user typed it.
        tasks: names of lm-eval's tasks, of ours, or "perplexity".
        text: file, directory or glob of the text that "perplexity" reads.
        data: local file of one of our tasks.
        window, stride: tokens of a window, and from one window to the next.
        limit: largest number of documents.
        batch: windows per forward pass and data-parallel rank.
        settings, weights_args: values of --set and --weights_args.
        from_scratch: draw the weights at random.
    """

    model: str
    tasks: Sequence[str] = (PERPLEXITY,)
    text: str | None = None
    variant: Variant | None = None
    data: str | None = None
    column: str | None = None
    include_path: str | None = None
    window: int | None = None
    stride: int | None = None
    limit: int | None = None
    from_scratch: bool = False
    batch: int = 8
    precision: str = "fp32"
    tokenizer: str | None = None
    settings: Sequence[str] = ()
    weights_args: Sequence[str] = ()

    @property
    def of_harness(self) -> list[str]:
        """Return the tasks that lm-eval runs."""
        return [task for task in self.tasks if task != PERPLEXITY]

    @property
    def held_out(self) -> bool:
        """Return True where the recipe's held-out samples are read."""
        return PERPLEXITY in self.tasks and self.text is None


@dataclass(frozen=True)
class ScoringJob:
    """A checked scoring job. `plan`: of the loaded model; `window`: tokens read at once."""

    wishes: ScoringWishes
    model: TrainedModel
    plan: Plan
    window: int

    def stride(self, task: str) -> int:
        """Return the tokens from one window to the next of a whole text."""
        usual = min(STRIDE, self.window) if task == "wikitext103" else self.window
        return self.wishes.stride or usual


def checked_job(wishes: ScoringWishes, world: int, machine: Machine) -> ScoringJob:
    """Open the model by its headers, check the tasks against it, and plan. Raises ValueError."""
    model = _open_model(wishes)
    recipe = _scoring_recipe(model, wishes, world)
    # With the user's settings.
    InitialWeights(str(model.weights), stated=wishes.weights_args).check(recipe)
    window = wishes.window or recipe.sequence_length
    problems = [*_unfit_tasks(wishes), *_unfit_windows(wishes, recipe, window)]
    if problems:
        raise ProblemsError(problems)
    # Without optimizer nothing is left for ZeRO to shard.
    return ScoringJob(wishes, model, resolve(recipe, "zero0", world, machine), window)


def _open_model(wishes: ScoringWishes) -> TrainedModel:
    def check(recipe: Recipe) -> None:
        if recipe.model.facts.masked:
            came = f"is a {recipe.model.family.upper()}"
            rule = "these tasks are about the next token"
            raise ProblemsError.of(
                trained_model.KEY, came, rule, "give a GPT-2", where=wishes.model
            )

    return trained_model.open_model(
        wishes.model, wishes.tokenizer, check, wishes.weights_args
    )


def _scoring_recipe(model: TrainedModel, wishes: ScoringWishes, world: int) -> Recipe:
    """Return the model's recipe for scoring, without training settings and with the requested batch."""
    base = model.recipe
    # Positions come from the weights, not from sequence_length.
    kept = {"implementation": "megarecipes", "positions": base.positions}
    plain = base.model_copy(
        update=dict(
            model=base.model.model_copy(update=kept),
            parallel=Parallel(),
            batch=Batch.model_validate(
                {"micro": wishes.batch, "global": wishes.batch * world}
            ),
            dropout=Dropout(),
            activation_checkpointing="none",
            precision=wishes.precision,
        )
    )
    # training it on another text would change it
    if base.data.tokenizer.kind in TRAINED:
        place = model.vocabulary_at
        own = (
            Tokenizer(kind="file", path=str(place)) if place else Tokenizer(kind="gpt2")
        )
        plain = plain.model_copy(
            update={"data": plain.data.model_copy(update={"tokenizer": own})}
        )
    values = plain.model_dump(by_alias=True)
    laid = {} if wishes.text is None else text_settings(wishes.text, wishes.column)
    return validate(
        values, base.title, YamlDocument("--set", {}), ((),), wishes.settings, laid
    )


def _unfit_tasks(wishes: ScoringWishes) -> Iterator[Problem]:
    """Yield every option unfit for the tasks."""
    if wishes.of_harness and not has_harness():
        came = ", ".join(wishes.of_harness)
        rule = "lm-evaluation-harness runs every task but perplexity, and it is not installed"
        yield Problem("--tasks", came, rule, INSTALL)
    for flag, value in (
        ("--text", wishes.text),
        ("--column", wishes.column if wishes.text else None),
    ):
        if value and PERPLEXITY not in wishes.tasks:
            came = f"{flag} with --tasks {','.join(wishes.tasks)}"
            yield Problem(
                flag,
                came,
                "perplexity reads a text of your own",
                "add the task perplexity",
            )
    if wishes.variant and "lambada" not in wishes.tasks:
        came = f"--variant {wishes.variant} with --tasks {','.join(wishes.tasks)}"
        yield Problem("--variant", came, "only LAMBADA has variants", "leave it out")
    if wishes.stride and wishes.text is None and "wikitext103" not in wishes.tasks:
        came = f"--stride with --tasks {','.join(wishes.tasks)}"
        rule = "other tasks and held-out samples are read once"
        yield Problem("--stride", came, rule, "leave it out, or give --text PATH")
    own = [task for task in wishes.tasks if task in TASKS]
    if wishes.include_path is not None:
        yield from _unfit_folder(wishes, wishes.include_path)
    if wishes.data is not None and len(own) != 1:
        came = f"{FLAG} {wishes.data} with --tasks {','.join(wishes.tasks)}"
        fix = "name one of them" if own else "give your own text with --text PATH"
        yield Problem(FLAG, came, f"it is the text of {' or '.join(TASKS)}", fix)
    yield from _unfit_column(wishes, own)


def _unfit_folder(wishes: ScoringWishes, folder: str) -> Iterator[Problem]:
    if not Path(folder).is_dir():
        rule = f"no such directory (seen from {Path.cwd()})"
        yield Problem(
            "--include_path",
            f"--include_path {folder}",
            rule,
            "give one with task files",
        )
    elif not {*wishes.tasks} - {*TASKS, PERPLEXITY}:
        came = f"--include_path with --tasks {','.join(wishes.tasks)}"
        yield Problem(
            "--include_path", came, "none of them is of its files", "name a task of it"
        )


def _unfit_column(wishes: ScoringWishes, own: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with a column. `own`: the tasks with local texts."""
    try:
        place = local_file(wishes.data) if wishes.data is not None else None
        plain = place is not None and is_plain_text(place)
        if wishes.column and wishes.text is None and (plain or not own):
            rule = (
                f"{wishes.data} is plain text"
                if plain
                else "it is a field of --text or --data"
            )
            yield Problem("--column", f"--column {wishes.column}", rule, "leave it out")
    except ProblemsError as error:
        yield from error.problems


def _unfit_windows(
    wishes: ScoringWishes, recipe: Recipe, window: int
) -> Iterator[Problem]:
    """Yield every option unfit for the model."""
    if window > recipe.positions:
        rule = f"the model has {recipe.positions:,} positions"
        yield Problem(
            "--window", f"--window {window}", rule, f"give {recipe.positions} or less"
        )
    if (wishes.stride or 0) > window:
        rule = "tokens between two windows would be left out"
        came = f"--stride {wishes.stride} with a window of {window}"
        yield Problem("--stride", came, rule, f"give {window} or less")
    if wishes.held_out:
        if window != recipe.sequence_length:
            rule = f"held-out samples have {recipe.sequence_length:,} tokens"
            yield Problem(
                "--window",
                f"--window {window}",
                rule,
                "leave it out, or give --text PATH",
            )
        try:
            corpus.check_sources(recipe)
        except ProblemsError as error:
            yield from error.problems
