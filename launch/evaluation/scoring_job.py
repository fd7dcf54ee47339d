"""Prepare a scoring job: the model, its plan for loading, and a task with its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import corpus
from data.tasks.rows import FLAG, is_plain_text, local_file
from data.tasks.scored_text import WIKITEXT103, Variant, documents, held_out, lambada, wikitext103
from data.tasks.windows import TaskData, TaskName
from data.text.vocabulary import vocabulary_size
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from launch.evaluation import trained_model
from launch.evaluation.trained_model import TrainedModel
from launch.training import deepspeed_judgement
from launch.weights.initial_weights import InitialWeights
from recipes import validation
from recipes.families import TRAINED
from recipes.problems import Problem, ProblemsError
from recipes.schema import Batch, Dropout, Parallel, Recipe, Tokenizer
from recipes.validation import validate
from recipes.yaml_lines import Document

STRIDE = 32  # tokens; of WikiText-103 (arXiv 1909.08053, appendix E.1)
MOST_PADDING = 1024  # rows of an embedding beyond its vocabulary


@dataclass(frozen=True)
class ScoredModel:
    """A model to score.

    Attributes:
        given: its directory as the user typed it.
        recipe: for scoring, with other batches and no dropout.
    """

    given: str
    trained: TrainedModel
    recipe: Recipe


@dataclass(frozen=True)
class Wishes:
    """Options for loading a model. `batch`: windows per forward pass and data-parallel rank."""

    precision: str
    batch: int
    world: int
    settings: Sequence[str] = ()
    tokenizer: str | None = None


def open_model(given: str, wishes: Wishes) -> ScoredModel:
    """Open the model in a directory and check it by its headers. Raises ProblemsError."""

    def check(recipe: Recipe) -> None:
        if recipe.model.facts.masked:
            came, rule = f"is a {recipe.model.family.upper()}", "these tasks are about the next token"
            raise ProblemsError([Problem(trained_model.KEY, came, rule, "give a GPT-2", where=given)])

    opened = trained_model.open_model(given, wishes.tokenizer, check)
    tokens, size = vocabulary_size(opened.tokenizer), opened.recipe.model.vocab_size
    if size - tokens >= MOST_PADDING:
        came = f"the vocabulary has {tokens:,} tokens, the model {size:,}"
        fix = "name the directory of the model's own with --tokenizer DIR"
        raise ProblemsError([Problem(trained_model.TOKENIZER, came, "they are of one vocabulary", fix)])
    recipe = _scoring_recipe(opened.recipe, wishes, opened.vocabulary_at)
    InitialWeights(str(opened.weights)).check(recipe)  # with the user's settings
    return ScoredModel(given, opened, recipe)


def _scoring_recipe(base: Recipe, wishes: Wishes, vocabulary_at: Path | None) -> Recipe:
    """Return the model's recipe for scoring, without training settings and with the requested batch."""
    # Positions come from the weights, not from sequence_length.
    kept = {"implementation": "megarecipes", "positions": base.positions}
    plain = base.model_copy(
        update=dict(
            model=base.model.model_copy(update=kept),
            parallel=Parallel(),
            # As many micro-batches as stages, under every layout.
            batch=Batch.model_validate({"micro": wishes.batch, "global": wishes.batch * wishes.world}),
            dropout=Dropout(),
            activation_checkpointing="none",
            precision=wishes.precision,
        )
    )
    if base.data.tokenizer.kind in TRAINED:  # training it on another text would change it
        own = Tokenizer(kind="file", path=str(vocabulary_at)) if vocabulary_at else Tokenizer(kind="gpt2")
        plain = plain.model_copy(update={"data": plain.data.model_copy(update={"tokenizer": own})})
    changed = validation.apply(plain.model_dump(by_alias=True), wishes.settings)
    return validate(changed.values, base.title, Document("--set", {}), ((),), changed)


def plan_scoring(model: ScoredModel, ds_config: str, world: int, machine: Machine) -> Plan:
    """Plan loading and scoring: the training plan without the optimizer. Raises ValueError.

    Without optimizer states and gradients, ZeRO stages 1 and 2 shard nothing and become stage 0. Stage 3
    shards and offloads parameters as in training.
    """
    plan = resolve(model.recipe, ds_config, world, machine)
    tp = plan.layout.tp
    if plan.recipe.parallel.sequence and plan.recipe.positions % tp:
        came, rule = f"{plan.recipe.positions} positions, tp={tp}", "tensor ranks share positions out evenly"
        fix = "leave it out: scores are the same"
        raise ProblemsError([Problem("parallel.sequence", came, rule, fix)])
    deepspeed_judgement.check(plan, ds_config)
    ds = {key: value for key, value in plan.ds.items() if key not in ("optimizer", "scheduler")}
    zero = {key: v for key, v in (ds.get("zero_optimization") or {}).items() if key != "offload_optimizer"}
    sharded = plan.zero_stage == 3
    if not sharded:
        zero = {"stage": 0}
        # Half precision needs no master weights here: the parameters themselves are converted.
        ds |= {half: {"enabled": False} for half in ("fp16", "bf16")}
    ds["zero_optimization"] = zero
    offload = plan.offload if "offload_param" in zero else "none"
    return replace(plan, ds=ds, zero_stage=3 if sharded else 0, offload=offload)


@dataclass(frozen=True)
class ScoringTask:
    """The task to score, from the flags; None: the task's default.

    Attributes:
        window, stride: tokens of a window, and from one window to the next.
        limit: largest number of examples or windows.
    """

    task: TaskName
    variant: Variant | None = None
    data: str | None = None
    column: str | None = None
    window: int | None = None
    stride: int | None = None
    limit: int | None = None

    def check(self, model: ScoredModel) -> tuple[int, int]:
        """Return window and stride. Raises ProblemsError with every option unfit for the model."""
        window = self.window or model.recipe.sequence_length
        stride = self.stride or (min(STRIDE, window) if self.task == "wikitext103" else window)
        if problems := [*self._unfit(model.recipe, window, stride)]:
            raise ProblemsError(problems)
        return window, stride

    def _unfit(self, recipe: Recipe, window: int, stride: int) -> Iterator[Problem]:
        own_text = self.task == "perplexity" and self.data is None
        if window > recipe.positions:
            rule, fix = f"the model has {recipe.positions:,} positions", f"give {recipe.positions} or less"
            yield Problem("--window", f"--window {window}", rule, fix)
        if stride > window:
            rule = "tokens between two windows would be left out"
            came, fix = f"--stride {stride} with a window of {window}", f"give {window} or less"
            yield Problem("--stride", came, rule, fix)
        if self.stride and (self.task == "lambada" or own_text):
            rule = "passages and held-out samples are read once"
            yield Problem("--stride", f"--stride with --task {self.task}", rule, "leave it out")
        if own_text and window != recipe.sequence_length:
            rule = f"held-out samples have {recipe.sequence_length:,} tokens"
            fix = f"leave it out, or give text with {FLAG} FILE"
            yield Problem("--window", f"--window {window}", rule, fix)
        if self.variant and self.task != "lambada":
            came = f"--variant {self.variant} with --task {self.task}"
            yield Problem("--variant", came, "LAMBADA alone has variants", "leave it out")
        try:
            place = local_file(self.data) if self.data is not None else None
            if self.column and (own_text or (place and is_plain_text(place))):
                rule = "the recipe's text has data.column" if own_text else f"{self.data} is plain text"
                yield Problem("--column", f"--column {self.column}", rule, "leave it out")
            if own_text:
                corpus.check_sources(recipe)
        except ProblemsError as error:
            yield from error.problems


def read_task(
    task: ScoringTask, model: ScoredModel, window: int, stride: int, say: Callable[[str], None]
) -> TaskData:
    """Read the task's data as windows. Raises ValueError if it is unreadable or nothing is left to score."""
    place = Path(local_file(task.data)) if task.data is not None else None
    tokenizer, column, limit = model.trained.tokenizer, task.column or "text", task.limit
    if task.task == "wikitext103":
        data = wikitext103(tokenizer, window, stride, place or WIKITEXT103, column, limit)
    elif task.task == "lambada":
        data = lambada(tokenizer, window, task.variant or "original", place, column, limit)
    elif place:
        data = documents(tokenizer, window, stride, place, column, limit)
    else:
        built = corpus.build(model.recipe, say=say)
        data = held_out(built.validation, str(built.summary["source"]), limit)
    if not data.windows:
        first = f", the first: {data.broken[0]}" if data.broken else ""
        came, rule = f"{data.source}: nothing is left to score", f"{len(data.broken)} broken examples{first}"
        raise ProblemsError([Problem(FLAG, came, rule, "give another file")])
    return data
