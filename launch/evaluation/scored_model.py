"""The model that is scored: where its weights and its vocabulary are, and the plan by which it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.vocabularies.published import gpt2_tokenizer, read_tokenizer
from data.vocabularies.vocabulary import vocabulary_size
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from launch.runs import vocabulary
from launch.training import deepspeed_judgement, given_tensors, initial_weights
from launch.training.given_tensors import RunWeights
from recipes import catalog, overrides
from recipes.problems import Problem, ProblemsError
from recipes.schema import Batch, Dropout, Parallel, Recipe, Tokenizer
from recipes.validation import validate
from recipes.vocabularies import GPT2_VOCABULARY, TRAINED
from recipes.yaml_lines import Document

MODEL = "MODEL"  # how the command calls its argument
MOST_PADDING = 1024  # rows of an embedding beyond its vocabulary


@dataclass(frozen=True)
class ScoredModel:
    """A model that can be scored.

    Attributes:
        given: as the user named it.
        weights: the directory that holds them: of a run that of its newest whole checkpoint.
        run: the run that they are of; None: `transformers`' or Megatron's.
        step: completed optimizer steps of that run.
        recipe: as it is scored, in batches of its own and without dropout.
    """

    given: str
    weights: Path
    run: Path | None
    step: int | None
    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast


@dataclass(frozen=True)
class Wishes:
    """How a model is to be loaded. `batch`: windows of a forward pass, of each data-parallel rank."""

    precision: str
    batch: int
    world: int
    settings: Sequence[str] = ()
    tokenizer: str | None = None


def open_model(given: str, wishes: Wishes) -> ScoredModel:
    """The model in a directory, checked as far as its headers tell. Raises ProblemsError."""
    try:
        return _open(given, wishes)
    except ProblemsError as error:
        raise ProblemsError(map(_of_this_command, error.problems)) from None


def _open(given: str, wishes: Wishes) -> ScoredModel:
    base = initial_weights.described(given, catalog.load())
    saved = given_tensors.saved_in(given)
    run = step = None
    weights = Path(given)
    if isinstance(saved, RunWeights):
        base, weights, step = saved.recipe, saved.checkpoint.directory, saved.checkpoint.step
        run = weights.parent.parent if weights.parent.name == "checkpoints" else None
    if base.model.family != "gpt2":
        came, rule = f"is a {base.model.family.upper()}", "these tasks are about the next token"
        raise ProblemsError([Problem(MODEL, came, rule, "give a GPT-2", where=given)])
    tokenizer, place = _tokenizer(weights, run, base, wishes.tokenizer)
    recipe = _as_scored(base, wishes, place)
    initial_weights.check(str(weights), recipe)
    return ScoredModel(given, weights, run, step, recipe, tokenizer)


def _of_this_command(problem: Problem) -> Problem:
    """What is said of weights in general, as of this command's argument."""
    return replace(problem, where=problem.where.removeprefix(f"{initial_weights.KEY} "))


def _as_scored(base: Recipe, wishes: Wishes, vocabulary_at: Path | None) -> Recipe:
    """The recipe of the model without what belongs to its training, in the batches that are wished for."""
    plain = base.model_copy(
        update=dict(
            model=base.model.model_copy(update={"implementation": "megarecipes"}),
            parallel=Parallel(),
            # As many micro-batches as stages, under every layout.
            batch=Batch(micro=wishes.batch, **{"global": wishes.batch * wishes.world}),
            dropout=Dropout(),
            activation_checkpointing="none",
            precision=wishes.precision,
        )
    )
    if base.data.tokenizer.kind in TRAINED:  # on another text it would become another one
        kept = Tokenizer(kind="file", path=str(vocabulary_at)) if vocabulary_at else Tokenizer(kind="gpt2")
        plain = plain.model_copy(update={"data": plain.data.model_copy(update={"tokenizer": kept})})
    changed = overrides.apply(plain.model_dump(by_alias=True), wishes.settings)
    return validate(changed.values, base.title, Document("--set", {}), ((),), changed)


def _tokenizer(
    weights: Path, run: Path | None, recipe: Recipe, asked: str | None
) -> tuple[PreTrainedTokenizerFast, Path | None]:
    """The vocabulary of the weights, and the directory that it is in. Raises ProblemsError."""
    place: Path | None
    size = recipe.model.vocab_size
    if asked is not None:
        place, tokenizer = Path(asked), read_tokenizer(asked)
        if said := vocabulary.foreign_tokens(weights, tokenizer):
            raise ProblemsError([Problem("--tokenizer", said, fix="leave --tokenizer out")])
    elif run is not None:
        place, tokenizer = run / vocabulary.FOLDER, vocabulary.load(run)
    elif any((weights / name).is_file() for name in vocabulary.KEPT_BY_OTHERS):
        place, tokenizer = weights, read_tokenizer(weights)
    elif size == GPT2_VOCABULARY:
        place, tokenizer = None, gpt2_tokenizer()
    else:
        came, rule = f"no tokenizer next to the weights in {weights}", "text has to become the model's tokens"
        raise ProblemsError([Problem("--tokenizer", came, rule, "name its directory with --tokenizer DIR")])
    tokens = vocabulary_size(tokenizer)
    if not 0 <= size - tokens < MOST_PADDING:
        came = f"the tokenizer{f' in {place}' if place else ''} has {tokens:,} tokens, the model {size:,}"
        fix = "name the directory of the model's own with --tokenizer DIR"
        raise ProblemsError([Problem("--tokenizer", came, "they are of one vocabulary", fix)])
    return tokenizer, place


def plan_scoring(model: ScoredModel, ds_config: str, world: int, machine: Machine) -> Plan:
    """How the model is loaded and run: the plan of its training, but for the optimizer. Raises ValueError.

    Without optimizer states and gradients, stages 1 and 2 of ZeRO have nothing to share out: they become
    stage 0. What stage 3 shares out, or keeps outside the GPU, stays as it is.
    """
    plan = resolve(model.recipe, ds_config, world, machine)
    deepspeed_judgement.check(plan, ds_config)
    ds = {key: value for key, value in plan.ds.items() if key not in ("optimizer", "scheduler")}
    zero = {key: v for key, v in (ds.get("zero_optimization") or {}).items() if key != "offload_optimizer"}
    sharded = plan.zero_stage == 3
    if not sharded:
        zero = {"stage": 0}
        # Half a model needs no master weights: its parameters are made so themselves.
        ds |= {half: {"enabled": False} for half in ("fp16", "bf16")}
    ds["zero_optimization"] = zero
    offload = plan.offload if "offload_param" in zero else "none"
    return replace(plan, ds=ds, zero_stage=3 if sharded else 0, offload=offload)
