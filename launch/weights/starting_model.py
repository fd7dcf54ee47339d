"""The model that a pretraining takes from given weights: shape, positions and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.text.vocabulary import build_vocabulary, vocabulary_size
from data.text.vocabulary_files import read_tokenizer
from ds_configs.findings import Notice
from launch.weights.foreign_weights import KEY, ConfigWeights, RunWeights
from launch.weights.initial_weights import TOKENIZERS, GivenModel, InitialWeights
from recipes import catalog
from recipes.families import PUBLISHED_VOCABULARIES, TRAINED
from recipes.key_paths import key_of
from recipes.problems import Problem
from recipes.schema import Recipe

INSIST = "--new_vocabulary"
# `TrainingArguments.learning_rate` of transformers 5, with which its run_clm.py and run_mlm.py go on from given
# weights; their linear schedule ends at 0.
GIVEN_RATE = 5e-5
NAME_IT = (
    "name theirs with --set data.tokenizer.kind=file --set data.tokenizer.path=DIR"
)
_FILES = ("tokenizer.json", "vocab.txt", "merges.txt")
# of a run's model
_NOT_TAKEN = {"implementation", "vocab_divisible_by", "task_head", "head_classes"}


@dataclass(frozen=True)
class StartingModel(InitialWeights):
    """Weights in a directory, and what a pretraining takes from it besides.

    Attributes:
        recipe: the one that the user named, whose shape is compared with the weights'; None: theirs is taken.
        insists: the user wants another vocabulary than theirs.
    """

    recipe: str | Path | None = None
    insists: bool = False

    def record(self) -> dict[str, Any]:
        return {**super().record(), "insists": self.insists}

    @property
    def advice(self) -> str:
        if self.recipe is None:
            return "the weights decide: leave out {keys}"
        return f"{super().advice}, or leave --recipe out: the weights decide then"

    @cached_property
    def tokenizer(self) -> Path | None:
        """The directory of their tokenizer; None: they have none."""
        saved = self.saved()
        place = Path(self.directory)
        if isinstance(saved, RunWeights):
            place = saved.checkpoint.directory.parent.parent / "tokenizer"
        if any((place / name).is_file() for name in _FILES):
            return place
        return None

    @property
    def recipe_name(self) -> str | Path:
        """The recipe of everything that the weights do not decide."""
        if self.recipe:
            return self.recipe
        saved = self.saved()
        if isinstance(saved, ConfigWeights):
            named = str(saved.model["config"].get("architectures"))
            return catalog.BY_FAMILY["bert" if "ForMaskedLM" in named else "gpt2"]
        family = self.model().form.family
        return catalog.BY_FAMILY.get(family, catalog.DEFAULT_RECIPE)

    @cached_property
    def named_recipe(self) -> catalog.NamedRecipe:
        """That recipe. Raises RecipeError."""
        return catalog.find(self.recipe_name)

    def rate(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the settings of the rate of given weights; {}: the user says a recipe or a rate.

        `texts`: of --set.
        """
        own = ("optimizer", "schedule")
        said = any(key_of(text).startswith(own) for text in texts)
        if said or self.recipe is not None:
            return {}
        return {"optimizer.lr": GIVEN_RATE, "schedule.min_lr": 0.0}

    def settings(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the keys of a recipe that the weights decide, and their values; `texts`: of --set.

        A vocabulary that the user asks for wins over every other one, then see `_tokenizer`.

        Raises ProblemsError: the weights do not say their shape, or have a tokenizer of another size.
        """
        saved = self.saved()
        asked = any(text.strip().startswith("data.tokenizer") for text in texts)
        if isinstance(saved, ConfigWeights):
            own = {"model": saved.model, "init_std": 0.02, "dropout": {}}
            values = {} if self.recipe else own
            if self.tokenizer and not (self.insists or asked):
                theirs = {"kind": "file", "path": str(self.tokenizer)}
                values["data.tokenizer"] = theirs
            return values
        size = None
        if self.tokenizer and not self.insists:
            size = vocabulary_size(read_tokenizer(self.tokenizer))
        given = self.model(size)
        values = self._shape(given) if self.recipe is None else {}
        rows = given.shape["model.vocab_size"]
        for kind, known in PUBLISHED_VOCABULARIES.items():
            if f"data.tokenizer.kind={kind}" in texts and known != rows:
                raise self.error(
                    Problem(
                        "data.tokenizer.kind",
                        f"data.tokenizer.kind={kind} has {known:,} tokens, and they have {rows:,} rows",
                        fix="leave data.tokenizer out: their tokenizer is taken",
                    )
                )
        if not (self.insists or asked):
            values |= self._tokenizer(size, rows)
        return values

    def _tokenizer(self, size: int | None, rows: int) -> dict[str, Any]:
        """Return the setting of the tokenizer; {}: that of the recipe wins.

        Without a tokenizer beside the weights a named recipe's wins, else a published one that has a token for
        each of the `rows`. With one, a named recipe's wins unless it would be trained, else the weights' own.
        """
        if size is None:
            published = None if self.recipe else TOKENIZERS.get(rows)
            return {"data.tokenizer": {"kind": published}} if published else {}
        if self.recipe is not None:
            if self.named_recipe.recipe.data.tokenizer.kind not in TRAINED:
                return {}
        elif size != rows:
            raise self.error(
                Problem(
                    KEY,
                    f"its tokenizer has {size:,} tokens, and its embedding {rows:,} rows",
                    "at most 1,023 rows pad",
                    NAME_IT,
                )
            )
        return {"data.tokenizer": {"kind": "file", "path": str(self.tokenizer)}}

    def _shape(self, given: GivenModel) -> dict[str, Any]:
        """Return the keys of the whole model."""
        saved = self.saved()
        if isinstance(saved, RunWeights):
            model = saved.recipe.model.model_copy(
                update={"positions": saved.recipe.positions}
            )
            length = saved.recipe.sequence_length
            left = _NOT_TAKEN - ({"implementation"} if model.config else set())
            values = model.model_dump(exclude=left)
        else:
            recipe = given.as_recipe(self.named_recipe.recipe)
            model = recipe.model
            length = recipe.sequence_length
            values = dict(given.model_values, layer_norm=model.layer_norm)
            if not any(
                name.startswith(saved.sentence_head) for name in saved.stored(model)
            ):
                values["sentence_head"] = "none"
        return {
            "sequence_length": length,
            **{f"model.{key}": value for key, value in values.items()},
        }

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check besides that the vocabulary is theirs, and say what is taken from where."""
        notices = super().check(recipe)
        problems = list(self._vocabulary_problems(recipe))
        if problems:
            raise self.error(*problems)
        theirs = [] if self.recipe else ["shape", "positions"]
        settings = recipe.data.tokenizer
        said = [f"all else is of {self.recipe_name}"]
        if settings.kind == "file" and settings.path == str(self.tokenizer):
            theirs.append("tokenizer")
        else:
            said.append(f"the vocabulary is {settings.kind}")
        if self.insists:
            said.append(f"the loss starts high, since they know another one ({INSIST})")
        said.append(self._rate_of(recipe))
        taken = "; ".join([f"theirs are weights{', '.join(['', *theirs])}", *said])
        return (
            *notices,
            Notice("init_from", f"initial weights: {taken}", differs=False),
        )

    def _rate_of(self, recipe: Recipe) -> str:
        """Say the learning rate, and whose it is."""
        rate = recipe.optimizer.lr
        if rate == GIVEN_RATE:
            return f"optimizer.lr={rate:g}, the default for given weights, falls to {recipe.schedule.min_lr:g}"
        own = rate == self.named_recipe.recipe.optimizer.lr
        whose = f"of {self.recipe_name}, " if own else ""
        return f"optimizer.lr={rate:g} is {whose}{rate / GIVEN_RATE:g} times the default for given weights"

    def _vocabulary_problems(self, recipe: Recipe) -> Iterator[Problem]:
        kind = recipe.data.tokenizer.kind
        key = "data.tokenizer.kind"
        rule = "weights know their own tokens"
        if self.insists:
            return
        if kind in TRAINED:
            fix = "leave data.tokenizer out" if self.tokenizer else NAME_IT
            has = "" if self.tokenizer else "holds no tokenizer, and "
            yield Problem(
                key,
                f"{has}{key}={kind} trains a new vocabulary",
                rule,
                f"{fix}, or insist with {INSIST}",
            )
        elif self.tokenizer:
            ours = build_vocabulary(recipe, (), Path(), lambda line: None).get_vocab()
            theirs = read_tokenizer(self.tokenizer).get_vocab()
            other = sum(ours.get(token) != number for token, number in theirs.items())
            if other:
                yield Problem(
                    key,
                    f"{key}={kind} differs from {self.tokenizer} in {other:,} of {len(theirs):,} tokens",
                    rule,
                    f"leave data.tokenizer out, or insist with {INSIST}",
                )
