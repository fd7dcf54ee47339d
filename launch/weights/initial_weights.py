"""Check before a start that given weights fit a recipe, by their configuration and headers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_configs.findings import Notice
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.weights import unread_kinds
from launch.weights.foreign_weights import (
    KEY,
    ConfigWeights,
    RunWeights,
    Saved,
    TransformersWeights,
    read,
    saved_in,
)
from modeling.formats.deepspeed.files import elsewhere
from modeling.formats.huggingface.config_forms import ConfigForm, form_of
from modeling.formats.megatron.checkpoint import UNREAD
from modeling.lazy_weights import LazyWeights
from recipes.families import FAMILIES, OF_CONFIG, PUBLISHED_VOCABULARIES
from recipes.files import FileError
from recipes.key_paths import flatten
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Model, Recipe
from recipes.yaml_lines import parse

SAVED = "give a directory that save_pretrained or export_hf.py wrote, a run, or a checkpoint of Megatron"
TOKENIZERS = {size: kind for kind, size in PUBLISHED_VOCABULARIES.items()}
SHARED = "model.shared_layers"
KIND = "data.tokenizer.kind"
ARGUMENTS = "--weights_args"
# of a size in a config.json, so that a product of two is still an integer of torch
LARGEST = 10**8


@dataclass(frozen=True)
class GivenModel:
    """The model of given weights, by config.json or arguments. `shape`: key of a recipe -> its value."""

    form: ConfigForm
    shape: Mapping[str, int]
    shared_layers: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], forms: Sequence[ConfigForm]) -> GivenModel:
        """Read it from a description in one of the forms. Raises FileError if it describes no model."""
        kind = config.get("model_type")
        known = {form.model_type: form for form in forms}
        form = known.get(kind) if isinstance(kind, str) else None
        if form is None:
            came = f"is a model of type {shown(kind)}"
            if kind is None:
                came = "config.json names no model_type"
            raise FileError.of(
                KEY,
                came,
                fix=f"the types that can be trained here are {', '.join(known)}",
            )
        sizes = {}
        said = {}
        problems = list[Problem]()
        for key, (theirs, default) in form.shape.items():
            size = sizes[key] = config.get(theirs, default)
            said[key] = f"{theirs}={shown(size)}"
            if config.get(theirs, default or UNREAD) == UNREAD:
                problems.append(
                    Problem(
                        KEY,
                        f"does not say {theirs}",
                        "nothing else decides it",
                        f"state it with {ARGUMENTS} {theirs}=N",
                    )
                )
            elif type(size) is not int or not 0 < size <= LARGEST:
                problems.append(
                    Problem(
                        KEY,
                        f"{form.says} {said[key]}",
                        f"it is a whole number from 1 to {LARGEST:,}",
                        SAVED,
                    )
                )
        if not problems and sizes["model.hidden"] % sizes["model.heads"]:
            problems.append(
                Problem(
                    KEY,
                    f"{form.says} {said['model.hidden']} and {said['model.heads']}",
                    "the first is divisible by the second",
                    SAVED,
                )
            )
        if problems:
            raise FileError(problems)
        return cls(form, sizes, config.get(SHARED, False))

    @property
    def model_values(self) -> dict[str, Any]:
        """Values for a recipe's model."""
        values: dict[str, Any] = {
            key.partition(".")[2]: size for key, size in self.shape.items()
        }
        own = {"family": self.form.family, "layer_norm": self.form.layer_norm}
        return {**values, **own, "shared_layers": self.shared_layers}

    def as_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this model, in dense layers, for samples of all its positions.

        The recipe decides about a sentence head.
        """
        values = {**self.model_values, "attention": ("dense",)}
        values |= dict.fromkeys(("attention_window", "attention_columns"))
        values["layer_norm"] = self.form.layer_norm or recipe.model.layer_norm
        if self.form.family != recipe.model.family:
            values["sentence_head"] = "none"
        model = recipe.model.model_copy(update=values)
        return recipe.model_copy(
            update={"model": model, "sequence_length": model.positions}
        )

    def differences(
        self, recipe: Recipe, own: ConfigForm | None, advice: str
    ) -> list[Problem]:
        """Return its differences from a recipe, whose form is `own`; the last has the flags that mend all."""
        values = dict(flatten(recipe.model_dump()))
        values["model.positions"] = recipe.positions
        problems = []
        if self.form != own:
            problems.append(_other_kind(self.form.model_type, recipe.model, own))
        sets: dict[str, Any] = self._settings(values)
        shares = self.shared_layers != values[SHARED]
        if shares:
            problems.append(
                Problem(
                    KEY,
                    f"has {SHARED}={self.shared_layers}, and the recipe {values[SHARED]}",
                    "layers that share their parameters are not layers of their own",
                )
            )
        for key, size in self.shape.items():
            if size != values[key]:
                follows = key == "model.positions" and recipe.model.positions is None
                here = f"{'sequence_length' if follows else key} is {values[key]}"
                problems.append(
                    Problem(
                        KEY,
                        f"{self.form.shape[key][0]}={size}, but the recipe's {here}",
                    )
                )
                sets[key] = size
        positions = sets.get("model.positions", recipe.positions)
        if positions < recipe.sequence_length:  # samples end with the positions
            sets |= {"model.positions": None, "sequence_length": positions}
            if recipe.model.positions is None:
                del sets["model.positions"]
        if shares:
            sets[SHARED] = self.shared_layers
        asked = " ".join(
            f"--set {key}={_setting(value)}" for key, value in sets.items()
        )
        fix = advice.format(flags=asked, keys=", ".join(sets))
        if problems:
            problems[-1] = replace(problems[-1], fix=fix)
        return problems

    def _settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a recipe with these values for a model of this form, besides its shape."""
        form = self.form
        vocabulary = self.shape["model.vocab_size"]
        wanted = dict[str, Any]()
        if form.layer_norm:
            wanted["model.layer_norm"] = form.layer_norm
        if form.family != values["model.family"]:
            facts = FAMILIES[form.family]
            wanted |= {"model.family": form.family, **facts.settings}
            wanted[KIND] = TOKENIZERS.get(vocabulary, facts.trained)
        elif vocabulary != values["model.vocab_size"] and vocabulary in TOKENIZERS:
            wanted[KIND] = TOKENIZERS[vocabulary]
        return {key: value for key, value in wanted.items() if values[key] != value}

    def fixed(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield problems of settings in a description that our models have without a switch."""
        width, standard = self.form.width
        wide = 4 * self.shape["model.hidden"]
        fixed = {**self.form.fixed, width: (wide,) if standard else (wide, None)}
        defaults = {width: standard}
        for key, allowed in fixed.items():
            value = config.get(key, defaults.get(key, allowed[0]))
            if value not in allowed:
                fix = "give other weights"
                if value == UNREAD:
                    fix = f"state it with {ARGUMENTS} {key}=VALUE"
                yield Problem(
                    KEY,
                    f"{key}={shown(value)}",
                    f"our {self.form.family} has {shown(allowed[0])}, and no switch",
                    fix,
                )


def _other_kind(kind: str, model: Model, own: ConfigForm | None) -> Problem:
    ours = model.family
    if own is None or own.layer_norm:
        ours += f" with model.layer_norm={model.layer_norm}"
    which = f"only {own.model_type}" if own else "none of Megatron"
    return Problem(
        KEY,
        f"is a model of type {shown(kind)}",
        f"{which} can be given to model.family={ours}",
    )


@dataclass(frozen=True)
class InitialWeights:
    """Weights in a directory, for a run to start from.

    Attributes:
        key: the flag that names the directory.
        stated: values of --weights_args, which the weights themselves lack.
    """

    directory: str
    key: str = KEY
    stated: Sequence[str] = ()

    @property
    def advice(self) -> str:
        """The fix of differences from a recipe."""
        return "to train a model of this shape add {flags}"

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the weights fit the recipe; return remarks on them.

        Reads config.json, or arguments, and the headers of the weights; the first process of a machine also
        reads tied tensors. Raises ProblemsError with every mismatch and the flags that mend it.
        """
        saved = self.saved()
        problems = list[Problem]()
        whole = recipe
        if not isinstance(saved, ConfigWeights):
            given, config = self._given(saved, recipe.model.vocab_size)
            own = form_of(recipe.model, saved.forms)
            problems += given.differences(recipe, own, self.advice)
            problems += given.fixed(config)
            families = {given.form.family, recipe.model.family}
            if len(families) > 1 and families & {*OF_CONFIG}:
                raise self.error(replace(problems[0], fix="leave --recipe out"))
            whole = given.as_recipe(recipe)
        try:
            problems += saved.problems(whole)
        except FileError as error:
            problems += error.problems
        if problems:
            raise self.error(*problems)
        remarks = (f"those of {self.directory}", *saved.remarks(recipe))
        return tuple(
            Notice("init_from", f"initial weights: {text}") for text in remarks
        )

    def model(self, vocabulary: int | None = None) -> GivenModel:
        """Read the model; `vocabulary`: number of its tokens, if the user gave one.

        Raises ProblemsError: no weights, or a broken description of the model. `check` finds other faults.
        """
        return self._given(self.saved(), vocabulary)[0]

    def resolved(self) -> InitialWeights:
        """Replace a run by its newest whole checkpoint, so that later ones change nothing."""
        checkpoint = self.checkpoint()
        if checkpoint is None:
            return self
        return replace(self, directory=str(checkpoint.directory))

    def record(self) -> dict[str, Any]:
        """Return the values that a run keeps to make the same choice again, as plain data."""
        directory = os.path.abspath(self.directory)
        return {"directory": directory, "stated": list(self.stated)}

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of one of our runs; None: other weights."""
        saved = saved_in(self.directory)
        return saved.checkpoint if isinstance(saved, RunWeights) else None

    def read(self, recipe: Recipe) -> LazyWeights:
        """Return canonical weights, read on demand. Raises ValueError as `foreign_weights.read`."""
        return read(self.directory, recipe)

    def saved(self) -> Saved:
        """Recognize the kind of weights. Raises ProblemsError if there is no directory."""
        path = Path(self.directory)
        came, fix = unread_kinds.named(path)
        if came:
            raise self.error(Problem(KEY, came, fix=fix))
        saved = None
        other = None
        try:
            if path.is_dir():
                saved = saved_in(path)
            if isinstance(saved, TransformersWeights):
                other = elsewhere(path, KEY)
            came = "is a file" if path.exists() else "does not exist"
        except (OSError, ValueError) as error:  # a name too long, a NUL, no permission
            came = f"cannot be read ({error})"
        if other:
            raise self.error(Problem(KEY, *other))
        if saved:
            return saved
        name = str(path)
        hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not path.suffix
        fix = SAVED
        if hub and "exist" in came:
            fix += f"; weights of the hub are downloaded first, hf download {name} --local-dir DIR"
        raise self.error(Problem(KEY, came, fix=fix))

    def _given(
        self, saved: Saved, vocabulary: int | None
    ) -> tuple[GivenModel, Mapping[str, Any]]:
        """Return the stated model and its description. Raises ProblemsError if it is unclear."""
        try:
            config = self._completed(dict(saved.config(vocabulary)), saved.forms)
            return GivenModel.of(config, saved.forms), config
        except FileError as error:
            problems = [
                replace(problem, fix=problem.fix or SAVED) for problem in error.problems
            ]
            raise self.error(*problems) from None

    def _completed(
        self, config: dict[str, Any], forms: Sequence[ConfigForm]
    ) -> dict[str, Any]:
        """Add what the user stated to a description. Raises FileError if it says otherwise."""
        known = {form.model_type: form.keys for form in forms}.get(
            config.get("model_type", ""), set()
        )
        for text in self.stated:
            key, _, written = text.partition("=")
            where = f"{ARGUMENTS} {text}"
            if key not in known:
                fix = did_you_mean(key, known)
                raise FileError.of(
                    ARGUMENTS, "is no KEY=VALUE of the weights", fix=fix, where=where
                )
            value = parse(written, where).value
            theirs = config.get(key, UNREAD)
            if theirs not in (UNREAD, value):
                raise FileError.of(
                    ARGUMENTS,
                    f"the weights say {key}={shown(theirs)}",
                    fix="leave it out",
                    where=where,
                )
            config[key] = value
        return config

    def error(self, *problems: Problem) -> ProblemsError:
        where = f"{self.key} {self.directory[:200]}"
        return ProblemsError(
            replace(problem, where=problem.where or where) for problem in problems
        )


def shown(value: Any) -> str:
    """Write a value as config.json does, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _setting(value: Any) -> str:
    """Write a value for --set."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value)
