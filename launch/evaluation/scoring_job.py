"""Prepare a scoring job: the model, its plan for loading, and a task with its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import corpus
from data.tasks.rows import FLAG, is_plain_text, local_file
from data.tasks.scored_text import (
    WIKITEXT103,
    TaskData,
    TaskName,
    Variant,
    documents,
    held_out,
    lambada,
    wikitext103,
)
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from launch.evaluation import trained_model
from launch.evaluation.trained_model import TrainedModel
from launch.training import deepspeed_judgement
from launch.weights.initial_weights import InitialWeights
from recipes.families import TRAINED
from recipes.problems import Problem, ProblemsError
from recipes.schema import Batch, Dropout, Parallel, Recipe, Tokenizer
from recipes.validation import validate
from recipes.yaml_lines import Document

STRIDE = 32  # tokens; of WikiText-103 (arXiv 1909.08053, appendix E.1)


@dataclass(frozen=True)
class Wishes:
    """What to score on what, from the flags; None: the task's default.

    Attributes:
        model: its directory as the user typed it.
        window, stride: tokens of a window, and from one window to the next.
        limit: largest number of examples or windows.
        batch: windows per forward pass and data-parallel rank.
        settings, weights_args: values of --set and --weights_args.
        from_scratch: draw the weights at random.
    """

    model: str
    task: TaskName
    variant: Variant | None = None
    data: str | None = None
    column: str | None = None
    window: int | None = None
    stride: int | None = None
    limit: int | None = None
    from_scratch: bool = False
    ds_config: str = "zero0"
    batch: int = 8
    precision: str = "fp32"
    tokenizer: str | None = None
    settings: Sequence[str] = ()
    weights_args: Sequence[str] = ()


@dataclass(frozen=True)
class ScoringJob:
    """A checked scoring job. `plan`: for loading and scoring; `window`, `stride`: tokens."""

    wishes: Wishes
    model: TrainedModel
    plan: Plan
    window: int
    stride: int


def checked_job(wishes: Wishes, world: int, machine: Machine) -> ScoringJob:
    """Open the model by its headers, check the task against it, and plan. Raises ValueError."""
    model = _open_model(wishes)
    recipe = _scoring_recipe(model, wishes, world)
    # With the user's settings.
    InitialWeights(str(model.weights), stated=wishes.weights_args).check(recipe)
    window = wishes.window or recipe.sequence_length
    stride = wishes.stride or (min(STRIDE, window) if wishes.task == "wikitext103" else window)
    problems = [*_unfit(wishes, recipe, window, stride)]
    if problems:
        raise ProblemsError(problems)
    return ScoringJob(wishes, model, _plan_scoring(recipe, wishes.ds_config, world, machine), window, stride)


def _open_model(wishes: Wishes) -> TrainedModel:
    def check(recipe: Recipe) -> None:
        if recipe.model.facts.masked:
            came = f"is a {recipe.model.family.upper()}"
            rule = "these tasks are about the next token"
            raise ProblemsError([Problem(trained_model.KEY, came, rule, "give a GPT-2", where=wishes.model)])

    return trained_model.open_model(wishes.model, wishes.tokenizer, check, wishes.weights_args)


def _scoring_recipe(model: TrainedModel, wishes: Wishes, world: int) -> Recipe:
    """Return the model's recipe for scoring, without training settings and with the requested batch."""
    base = model.recipe
    # Positions come from the weights, not from sequence_length.
    kept = {"implementation": "megarecipes", "positions": base.positions}
    plain = base.model_copy(
        update=dict(
            model=base.model.model_copy(update=kept),
            parallel=Parallel(),
            # As many micro-batches as stages, under every layout.
            batch=Batch.model_validate({"micro": wishes.batch, "global": wishes.batch * world}),
            dropout=Dropout(),
            activation_checkpointing="none",
            precision=wishes.precision,
        )
    )
    if base.data.tokenizer.kind in TRAINED:  # training it on another text would change it
        place = model.vocabulary_at
        own = Tokenizer(kind="file", path=str(place)) if place else Tokenizer(kind="gpt2")
        plain = plain.model_copy(update={"data": plain.data.model_copy(update={"tokenizer": own})})
    values = plain.model_dump(by_alias=True)
    return validate(values, base.title, Document("--set", {}), ((),), wishes.settings)


def _unfit(wishes: Wishes, recipe: Recipe, window: int, stride: int) -> Iterator[Problem]:
    """Yield every option unfit for the model."""
    task = wishes.task
    own_text = wishes.task == "perplexity" and wishes.data is None
    if window > recipe.positions:
        rule = f"the model has {recipe.positions:,} positions"
        fix = f"give {recipe.positions} or less"
        yield Problem("--window", f"--window {window}", rule, fix)
    if stride > window:
        rule = "tokens between two windows would be left out"
        came = f"--stride {stride} with a window of {window}"
        fix = f"give {window} or less"
        yield Problem("--stride", came, rule, fix)
    if wishes.stride and (task == "lambada" or own_text):
        rule = "passages and held-out samples are read once"
        yield Problem("--stride", f"--stride with --task {task}", rule, "leave it out")
    if own_text and window != recipe.sequence_length:
        rule = f"held-out samples have {recipe.sequence_length:,} tokens"
        fix = f"leave it out, or give text with {FLAG} FILE"
        yield Problem("--window", f"--window {window}", rule, fix)
    if wishes.variant and task != "lambada":
        came = f"--variant {wishes.variant} with --task {task}"
        yield Problem("--variant", came, "LAMBADA alone has variants", "leave it out")
    try:
        place = local_file(wishes.data) if wishes.data is not None else None
        if wishes.column and (own_text or (place and is_plain_text(place))):
            rule = "the recipe's text has data.column" if own_text else f"{wishes.data} is plain text"
            yield Problem("--column", f"--column {wishes.column}", rule, "leave it out")
        if own_text:
            corpus.check_sources(recipe)
    except ProblemsError as error:
        yield from error.problems


def _plan_scoring(recipe: Recipe, ds_config: str, world: int, machine: Machine) -> Plan:
    """Plan loading and scoring: the training plan without the optimizer. Raises ValueError.

    Without optimizer states and gradients, ZeRO stages 1 and 2 shard nothing and become stage 0. Stage 3
    shards and offloads parameters as in training.
    """
    plan = resolve(recipe, ds_config, world, machine)
    tp = plan.layout.tp
    if plan.recipe.parallel.sequence and plan.recipe.positions % tp:
        came = f"{plan.recipe.positions} positions, tp={tp}"
        rule = "tensor ranks share positions out evenly"
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


def read_task(job: ScoringJob, say: Callable[[str], None]) -> TaskData:
    """Read the task's data as windows. Raises ValueError if it is unreadable or nothing is left to score."""
    wishes = job.wishes
    tokenizer = job.model.tokenizer
    window = job.window
    stride = job.stride
    place = Path(local_file(wishes.data)) if wishes.data is not None else None
    column = wishes.column or "text"
    limit = wishes.limit
    if wishes.task == "wikitext103":
        data = wikitext103(tokenizer, window, stride, place or WIKITEXT103, column, limit)
    elif wishes.task == "lambada":
        data = lambada(tokenizer, window, wishes.variant or "original", place, column, limit)
    elif place:
        data = documents(tokenizer, window, stride, place, column, limit)
    else:
        built = corpus.build(job.plan.recipe, say=say)
        data = held_out(built.validation, str(built.summary["source"]), limit)
    if not data.windows:
        first = f", the first: {data.broken[0]}" if data.broken else ""
        came = f"{data.source}: nothing is left to score"
        rule = f"{len(data.broken)} broken examples{first}"
        raise ProblemsError([Problem(FLAG, came, rule, "give another file")])
    return data
