"""Check before a start that given weights fit a recipe, by their configuration and headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_configs.findings import Notice
from launch.weights.foreign_weights import RunWeights, Saved, read, saved_in
from modeling.formats.huggingface.config_forms import ConfigForm, Forms, family_of, form_of
from modeling.lazy_weights import LazyWeights
from recipes.families import FAMILIES, PUBLISHED_VOCABULARIES
from recipes.files import FileError
from recipes.key_paths import flatten
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

KEY = "--init_from"
SAVED = "give a directory that save_pretrained or export_hf.py wrote, a run, or a checkpoint of Megatron"
TOKENIZERS = {size: kind for kind, size in PUBLISHED_VOCABULARIES.items()}
SHARED = "model.shared_layers"
LARGEST = 10**8  # of a size in a config.json, so that a product of two is still an integer of torch


@dataclass(frozen=True)
class GivenModel:
    """The model of given weights, by config.json or arguments. `shape`: key of a recipe -> its value."""

    form: ConfigForm
    shape: Mapping[str, int]
    shared_layers: bool = False

    @property
    def family(self) -> str:
        return family_of(self.form)

    @property
    def model_values(self) -> dict[str, Any]:
        """Values for a recipe's model."""
        values: dict[str, Any] = {key.partition(".")[2]: size for key, size in self.shape.items()}
        own = {"family": self.family, "layer_norm": self.form.layer_norm}
        return {**values, **own, "shared_layers": self.shared_layers}

    def as_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this model, in dense layers, for samples of all its positions.

        The recipe decides about a sentence head.
        """
        values = self.model_values | {
            "attention": ("dense",),
            "attention_window": None,
            "attention_columns": None,
        }
        values["layer_norm"] = self.form.layer_norm or recipe.model.layer_norm
        if self.family != recipe.model.family:
            values["sentence_head"] = "none"
        model = recipe.model.model_copy(update=values)
        return recipe.model_copy(update={"model": model, "sequence_length": model.positions})


@dataclass(frozen=True)
class InitialWeights:
    """Weights in a directory, for a run to start from. `key`: the flag that names it."""

    directory: str
    key: str = KEY

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the weights fit the recipe; return remarks on them.

        Reads config.json, or arguments, and the headers of the weights; the first process of a machine also
        reads tied tensors. Raises ProblemsError with every mismatch and the flags that mend it.
        """
        saved = self.saved()
        given, problems = self._model(saved, recipe)
        if problems := [*problems, *saved.problems(given.as_recipe(recipe) if given else None)]:
            raise self.error(problems)
        remarks = (f"those of {self.directory}", *saved.remarks(recipe))
        return tuple(Notice("init_from", f"initial weights: {text}") for text in remarks)

    def described(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with the weights' model, for samples of all its positions.

        Raises ProblemsError: no weights, or a broken description of the model. `check` finds other faults.
        """
        given, problems = self._model(self.saved(), recipe)
        if given is None:
            raise self.error(problems)
        return given.as_recipe(recipe)

    def resolved(self) -> InitialWeights:
        """Replace a run by its newest whole checkpoint, so that later ones change nothing."""
        saved = saved_in(self.directory)
        if not isinstance(saved, RunWeights):
            return self
        return replace(self, directory=str(saved.checkpoint.directory))

    def read(self, recipe: Recipe) -> LazyWeights:
        """Return canonical weights, read on demand. Raises ValueError as `foreign_weights.read`."""
        return read(self.directory, recipe)

    def vocabulary(self) -> Path:
        """Return the directory of their vocabulary: in the run, or next to the weights."""
        saved = saved_in(self.directory)
        if isinstance(saved, RunWeights):
            return (saved.checkpoint.directory.parent.parent / "tokenizer").resolve()
        return Path(self.directory).resolve()

    def saved(self) -> Saved:
        """Recognize the kind of weights. Raises ProblemsError if there is no directory."""
        if problems := list(_no_directory(Path(self.directory))):
            raise self.error(problems)
        return saved_in(self.directory)

    def _model(self, saved: Saved, recipe: Recipe) -> tuple[GivenModel | None, Sequence[Problem]]:
        """Return the stated model, or None if it is unclear, and its problems for the recipe."""
        try:
            found = _Config(saved.config(recipe), recipe, saved.forms)
        except FileError as error:
            return None, [replace(problem, fix=problem.fix or SAVED) for problem in error.problems]
        return found.given, found.problems

    def error(self, problems: Iterable[Problem]) -> ProblemsError:
        where = f"{self.key} {self.directory[:200]}"
        return ProblemsError(replace(problem, where=problem.where or where) for problem in problems)


def _no_directory(path: Path) -> Iterator[Problem]:
    try:
        if path.is_dir():
            return
        came = "is a file" if path.exists() else "does not exist"
    except (OSError, ValueError) as error:  # a name too long, a NUL, no permission
        came = f"cannot be read ({error})"
    name = str(path)
    hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not path.suffix and "exist" in came
    fetch = f"; weights of the hub are downloaded first, hf download {name} --local-dir DIR" if hub else ""
    yield Problem(KEY, came, fix=f"{SAVED}{fetch}")


class _Config:
    """Comparison of a config with a recipe: the described model, None if unclear, and the problems."""

    def __init__(self, config: Mapping[str, Any], recipe: Recipe, forms: Forms):
        self.config, self.recipe, self.forms = config, recipe, forms
        self.values = {**dict(flatten(recipe.model_dump())), "model.positions": recipe.positions}
        self.given: GivenModel | None = None
        self.problems = list(self._find())

    def _find(self) -> Iterator[Problem]:
        kind, own = self.config.get("model_type"), form_of(self.recipe.model, self.forms)
        known = {form.model_type: form for forms in self.forms.values() for form in forms}
        form = known.get(kind) if isinstance(kind, str) else None
        differing = [] if form is own else [self._other_kind(kind, own)]
        if form is None:
            fix = f"the types that can be trained here are {', '.join(known)}"
            yield from (replace(problem, fix=fix) for problem in differing)
            return
        sizes = {key: self.config.get(theirs, default) for key, (theirs, default) in form.shape.items()}
        odd = [key for key, size in sizes.items() if type(size) is not int or not 0 < size <= LARGEST]
        for key in odd:
            came = f"{form.says} {form.shape[key][0]}={shown(sizes[key])}"
            yield Problem(KEY, came, f"it is a whole number from 1 to {LARGEST:,}", SAVED)
        sizes = {key: size for key, size in sizes.items() if key not in odd}
        shared = self.config.get(SHARED, False)  # of a run
        if shared != self.values[SHARED]:
            rule = "layers that share their parameters are not layers of their own"
            differing.append(
                Problem(KEY, f"has {SHARED}={shared}, and the recipe {self.values[SHARED]}", rule)
            )
        if not odd and sizes["model.hidden"] % sizes["model.heads"]:
            hidden, heads = (f"{form.shape[key][0]}={sizes[key]}" for key in ("model.hidden", "model.heads"))
            rule = "the first is divisible by the second"
            yield Problem(KEY, f"{form.says} {hidden} and {heads}", rule, SAVED)
        elif not odd:
            self.given = GivenModel(form, sizes, shared)
        other = {key: size for key, size in sizes.items() if size != self.values[key]}
        for key, size in other.items():
            follows = key == "model.positions" and self.recipe.model.positions is None
            here = f"{'sequence_length' if follows else key} is {self.values[key]}"
            differing.append(Problem(KEY, f"{form.shape[key][0]}={size}, but the recipe's {here}"))
        if differing and self.given:
            sets = {**self._settings(form, sizes["model.vocab_size"]), **self._of_this_shape(other)}
            sets |= {} if shared == self.values[SHARED] else {SHARED: shared}
            asked = " ".join(f"--set {key}={_setting(value)}" for key, value in sets.items())
            differing[-1] = replace(differing[-1], fix=f"to train a model of this shape add {asked}")
        # A damaged model differs from every recipe; one that states no heads has the recipe's.
        sound = self.given or sizes.get("model.heads") == self.values["model.heads"]
        yield from differing if sound else ()
        yield from self._fixed(form, sizes.get("model.hidden"))

    def _of_this_shape(self, other: Mapping[str, int]) -> dict[str, int | None]:
        """Return the recipe's settings for other sizes; samples end with the positions."""
        sets: dict[str, int | None] = dict(other)
        positions = other.get("model.positions", self.recipe.positions)
        if positions < self.recipe.sequence_length:
            sets |= {"model.positions": None, "sequence_length": positions}
            if self.recipe.model.positions is None:
                del sets["model.positions"]
        return sets

    def _other_kind(self, kind: Any, own: ConfigForm | None) -> Problem:
        model = self.recipe.model
        placed = own is None or own.layer_norm
        ours = model.family + (f" with model.layer_norm={model.layer_norm}" if placed else "")
        rule = (
            f"{f'only {own.model_type}' if own else 'none of Megatron'} can be given to model.family={ours}"
        )
        came = "config.json names no model_type" if kind is None else f"is a model of type {shown(kind)}"
        return Problem(KEY, came, rule)

    def _settings(self, form: ConfigForm, vocabulary: int) -> dict[str, Any]:
        """Return the recipe's settings for a model of this form, besides the shape."""
        family = family_of(form)
        wanted: dict[str, Any] = {"model.layer_norm": form.layer_norm} if form.layer_norm else {}
        if family != self.recipe.model.family:
            facts = FAMILIES[family]
            kind = TOKENIZERS.get(vocabulary, facts.trained)
            wanted |= {"model.family": family, **facts.settings, "data.tokenizer.kind": kind}
        elif vocabulary != self.recipe.model.vocab_size and vocabulary in TOKENIZERS:
            wanted["data.tokenizer.kind"] = TOKENIZERS[vocabulary]
        return {key: value for key, value in wanted.items() if self.values[key] != value}

    def _fixed(self, form: ConfigForm, hidden: int | None) -> Iterator[Problem]:
        """Yield problems of settings that our models have without a switch."""
        allowed_by_key = {key: (allowed, allowed[0]) for key, allowed in form.fixed.items()}
        width, standard = form.width
        if hidden is not None:
            allowed_by_key[width] = ((4 * hidden,) if standard else (4 * hidden, None), standard)
        for key, (allowed, default) in allowed_by_key.items():
            if (value := self.config.get(key, default)) not in allowed:
                rule = f"our {family_of(form)} has {shown(allowed[0])}, and no switch"
                yield Problem(KEY, f"{key}={shown(value)}", rule, "give other weights")


def shown(value: Any) -> str:
    """Write a value as config.json does, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _setting(value: Any) -> str:
    """Write a value for --set."""
    return "null" if value is None else f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)
