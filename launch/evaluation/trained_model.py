"""Open a trained model in a directory: recipe, weights and vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from data.text.ready_made_vocabulary import gpt2_tokenizer
from data.text.vocabulary import missing_roles, vocabulary_size
from data.text.vocabulary_files import read_tokenizer
from launch.console import terminal
from launch.ranks import processes
from launch.records import vocabulary
from launch.records.directory import RunDirectory
from launch.weights import foreign_weights
from launch.weights.foreign_weights import RunWeights
from launch.weights.initial_weights import InitialWeights
from modeling.families import drawn_parameters
from modeling.generation import in_transformers
from recipes import catalog
from recipes.families import GPT2_VOCABULARY
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

KEY = "MODEL"  # name of the command's argument
TOKENIZER = "--tokenizer"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, ready to load.

    Attributes:
        run: directory of its run; None: `transformers`' or Megatron's weights.
        weights: their directory; for a run that of its newest complete checkpoint.
        step: completed optimizer steps of the run.
        vocabulary_at: directory of the vocabulary; None: GPT-2's published one.
        recipe: of the model without a sentence head; other sections matter only for training.
        remarks: on the weights, for the user.
    """

    weights: Path
    run: Path | None
    step: int | None
    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast
    vocabulary_at: Path | None
    remarks: tuple[str, ...] = ()

    @property
    def continues(self) -> bool:
        """Return True if the model continues prompts, False if it fills in masks."""
        return not self.recipe.model.facts.masked

    def loaded(self, dtype: torch.dtype, *, drawn: bool = False) -> Any:
        """Return the model as `transformers` has it, on the devices, and say which weights these are.

        `drawn`: not the trained weights, but those that the recipe's seed draws.
        """
        weights: Mapping[str, torch.Tensor]
        if drawn:
            weights = drawn_parameters(self.recipe, self.tokenizer)
        else:
            for remark in self.remarks or (str(self.weights),):
                terminal.say(f"weights: {remark}", sys.stderr)
            weights = foreign_weights.read(self.weights, self.recipe)
        return on_devices(in_transformers(self.recipe, weights, dtype, self.tokenizer))


def on_devices(model: Any) -> Any:
    """Put a model on the device; of one that is too large whole layers on the next ones, and the host."""
    if not processes.device().own_memory:
        return model
    import accelerate
    from deepspeed.accelerator import get_accelerator

    places = accelerate.infer_auto_device_map(
        model, no_split_module_classes=model._no_split_modules
    )
    if len({*places.values()}) > 1:
        return accelerate.dispatch_model(model, places)
    return model.to(get_accelerator().current_device_name())


def open_model(
    directory: str,
    tokenizer: str | None = None,
    check: Callable[[Recipe], None] = lambda recipe: None,
    stated: Sequence[str] = (),
) -> TrainedModel:
    """Open the model in a directory; check it by its headers. `tokenizer`: directory of its vocabulary.

    `check` raises ProblemsError for an unsuitable model, before the search for a vocabulary. `stated`: values
    of --weights_args. Raises ProblemsError for missing or incomplete weights, or for a foreign vocabulary.
    """
    given = InitialWeights(directory, KEY, stated)
    run = None
    step = None
    saved = given.saved()
    weights = Path(given.directory)
    near = tokenizer or (weights if _holds_vocabulary(weights) else None)
    tokens = vocabulary_size(read_tokenizer(near)) if near else None
    recipe = given.model(tokens).as_recipe(catalog.load())
    if isinstance(saved, RunWeights):
        recipe = saved.recipe
        weights = saved.checkpoint.directory
        step = saved.checkpoint.step
        around = RunDirectory.around(weights)
        run = around.path if around else None
    check(recipe)
    # The sentence head is unused; the weights may lack it.
    model = recipe.model.model_copy(update={"sentence_head": "none"})
    recipe = recipe.model_copy(update={"model": model})
    replace(given, directory=str(weights)).check(recipe)
    chosen, place = _tokenizer(weights, run, recipe, tokenizer)
    if not isinstance(saved, RunWeights):  # others' embeddings may have rows of padding
        recipe = given.model(vocabulary_size(chosen)).as_recipe(recipe)
    problems = list(_unfit(chosen, recipe))
    if problems:
        raise ProblemsError(problems)
    return TrainedModel(
        weights, run, step, recipe, chosen, place, tuple(saved.remarks(recipe))
    )


def _tokenizer(
    weights: Path, run: Path | None, recipe: Recipe, asked: str | None
) -> tuple[PreTrainedTokenizerFast, Path | None]:
    """Return the vocabulary and its directory."""
    if asked is not None:
        tokenizer = read_tokenizer(asked)
        said = vocabulary.foreign_tokens(weights, tokenizer)
        if said:
            raise ProblemsError.of(
                TOKENIZER,
                said,
                "the weights know the tokens of their own vocabulary alone",
                f"leave {TOKENIZER} out",
            )
        return tokenizer, Path(asked)
    if run is not None:
        return vocabulary.load(run), run / vocabulary.FOLDER
    if _holds_vocabulary(weights):
        return read_tokenizer(weights), weights
    if recipe.model.vocab_size == GPT2_VOCABULARY:
        return gpt2_tokenizer(), None
    raise ProblemsError.of(
        TOKENIZER,
        f"{weights} holds no vocabulary ({', '.join(vocabulary.VOCABULARY_FILES)})",
        "text becomes the model's tokens",
        f"name its directory with {TOKENIZER} DIR",
    )


def _holds_vocabulary(directory: Path) -> bool:
    return any((directory / name).is_file() for name in vocabulary.VOCABULARY_FILES)


def _unfit(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[Problem]:
    tokens = vocabulary_size(tokenizer)
    size = recipe.model.vocab_size
    pads = recipe.model.config and tokens < size
    if tokens != size and not pads:
        yield Problem(
            TOKENIZER,
            f"the vocabulary in {tokenizer.name_or_path or 'that directory'} has {tokens:,} tokens",
            f"the model has {size:,} (model.vocab_size)",
            f"name the directory of the model's own with {TOKENIZER} DIR",
        )
    if recipe.model.facts.masked and (missing := missing_roles(tokenizer)):
        yield Problem(
            TOKENIZER,
            f"the vocabulary names no {', '.join(missing)}",
            "masks are filled with them",
            f"name another with {TOKENIZER} DIR",
        )
