"""Weights that others saved: what they say of their model, whether they have its tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import TypeAdapter

from launch.checkpoints import inspection, manifest
from launch.checkpoints import run_checkpoints as checkpoints
from launch.checkpoints.manifest import WEIGHT
from launch.checkpoints.run_checkpoints import Damaged
from launch.checkpoints.stored import StoredTensors
from launch.ranks import processes
from modeling.families import family_of, meta_parameters, with_few_layers
from modeling.formats.huggingface.config_forms import FORMS, MEGATRON_FORMS, RUN_FORMS, Forms, form_of
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.formats.megatron import files, names
from modeling.formats.megatron.checkpoint import Checkpoint, open_checkpoint
from modeling.lazy_weights import LazyWeights
from modeling.transformer import BERT_NORM_EPS
from recipes.files import FileError, checked, read_json_object
from recipes.nested import flatten
from recipes.problems import Problem, some
from recipes.schema import Recipe
from recipes.vocabularies import PUBLISHED_VOCABULARIES

KEY = "--init_from"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHOWN = 3  # tensors of each problem
NEW_HEADS = ("head.",)  # canonical names of what a head for a task may draw anew
RESTORE = "restore it, or give another step-NNNNNN"


class Saved(Protocol):
    """A directory of weights."""

    forms: Forms

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        """What states the model, in one of `forms`. Raises FileError."""

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        """Everything wrong with the tensors, as of the model of `recipe`; None: it is not known.

        Of the tensors only headers are read, and those that have to be equal, by one process of a machine.
        """

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        """What a user should know of weights that fit."""

    def weights(self, recipe: Recipe) -> LazyWeights:
        """Canonical weights. Raises ValueError where they are not the recipe's model's."""

    def damage(self, weights: LazyWeights) -> list[Problem]:
        """What is wrong with their numbers, all of which are read."""


def saved_in(directory: str | Path) -> Saved:
    """The weights in a directory, of whatever kind."""
    path = Path(directory)
    if checkpoints.holds_ours(path):
        return RunWeights(path)
    return MegatronWeights(path) if files.is_checkpoint(path) else TransformersWeights(path)


def read(directory: str | Path, recipe: Recipe) -> LazyWeights:
    """Canonical weights, read when they are asked for.

    Raises ValueError where the directory holds none of the recipe's model, or numbers that are not finite,
    for which one process of a machine reads them all.
    """
    saved = saved_in(directory)
    weights = saved.weights(recipe)
    if problems := saved.damage(weights) if processes.local_rank() == 0 else []:
        raise FileError(problems)
    return weights


class TransformersWeights:
    """What `save_pretrained` wrote."""

    forms = FORMS

    def __init__(self, directory: Path):
        self.directory = directory

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        return read_json_object(self.directory / "config.json")

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        try:
            stored = read_state_dict(self.directory)
        except FileError as error:
            return list(error.problems)
        return [] if recipe is None else list(self._problems(stored, with_few_layers(recipe, len(stored))))

    def _problems(self, stored: dict[str, torch.Tensor], recipe: Recipe) -> Iterator[Problem]:
        conversion = family_of(recipe.model).conversion
        selected, kind = conversion.select(stored, recipe.model), conversion.class_name(recipe.model)
        shapes = {
            name: t.shape
            for name, t in conversion.to_transformers(meta_parameters(recipe), recipe.model).items()
        }
        if recipe.model.task_head != "none":  # its head is drawn where the weights have none
            entries = [each for each in conversion.name_map(recipe.model) if each.ours.startswith(NEW_HEADS)]
            new = {name for entry in entries for name in entry.theirs if name not in selected.tensors}
            shapes = {name: shape for name, shape in shapes.items() if name not in new}
        missing = [name for name in shapes if name not in selected.tensors]
        fix = f"give a directory in which save_pretrained wrote a whole {kind}"
        words = Words(f"a {kind} of this config.json", "config.json", fix)
        why = conversion.why_missing(missing, recipe.model)
        found = {name: (selected.stored[name], tensor) for name, tensor in selected.tensors.items()}
        yield from _differences(found, shapes, words, why)
        if selected.twice:
            came = f"holds {some(selected.twice, SHOWN)} under two names"
            yield Problem(KEY, came, "one of them would be lost", fix)
        yield from _untied(selected, recipe)

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from _trained_dense(recipe)

    def weights(self, recipe: Recipe) -> LazyWeights:
        return family_of(recipe.model).conversion.read(self.directory, recipe.model)

    def damage(self, weights: LazyWeights) -> list[Problem]:
        return _not_finite(self.directory, weights)


class MegatronWeights:
    """A checkpoint of Megatron-LM or Megatron-DeepSpeed."""

    forms = MEGATRON_FORMS

    def __init__(self, directory: Path):
        self.directory = directory

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.directory)

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        assert recipe is not None, "its arguments do not say all"
        return self.checkpoint.config(recipe.model, tuple(PUBLISHED_VOCABULARIES.values()))

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        if recipe is None:  # what hinders opening it was said where its config was asked for
            return []
        return list(self._problems(with_few_layers(recipe, self.checkpoint.layers)))

    def _problems(self, recipe: Recipe) -> Iterator[Problem]:
        model, found = recipe.model, self.checkpoint.tensors
        shapes = {name: parameter.shape for name, parameter in meta_parameters(recipe).items()}
        theirs = {ours: name for ours, name in names.name_map(model).items() if ours in shapes}
        unused = tuple(f"{head}." for head in names.SENTENCE_HEAD.values() if model.sentence_head == "none")
        tensors = {
            name: (name, WithoutPadding(slices.shape, slices.dtype, slices.layout, model.vocab_size))
            if name in names.WITH_PADDING
            else (name, slices)
            for name, slices in found.items()
            if not name.startswith(unused or ("\0",))
        }
        fix = "give a whole checkpoint of Megatron's GPT or BERT"
        words = Words(f"a Megatron {model.family} of these arguments", "its arguments", fix)
        heads = {f"{head}.{leaf}" for head in names.SENTENCE_HEAD.values() for leaf in ("weight", "bias")}
        missing = {name for name in theirs.values() if name not in found}
        why = "they have no head for sentences; add --set model.sentence_head=none to train without one"
        expected = {name: shapes[ours] for ours, name in theirs.items()}
        if model.heads % self.checkpoint.slices:
            came = f"has {self.checkpoint.slices} tensor slices, and model.heads={model.heads}"
            yield Problem(KEY, came, "each slice holds whole heads", "set model.heads to theirs")
        yield from _differences(tensors, expected, words, why if missing and missing <= heads else "")
        yield from _untied(self.checkpoint, recipe)

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from _trained_dense(recipe)
        found, model = self.checkpoint, recipe.model
        slices = f"{found.slices} tensor slice{'s' if found.slices > 1 else ''}"
        yield f"a Megatron checkpoint of version {found.version:g} in {slices}, {found.where}"
        rows = found.size(names.WORD, 0) or 0
        if rows > model.vocab_size:
            yield f"of their {rows:,} rows of the vocabulary the first {model.vocab_size:,}: the rest pads"
        if "num_attention_heads" not in found.arguments:
            yield f"they do not say how many heads they have: model.heads={model.heads} is taken"
        eps = found.arguments.get("layernorm_epsilon", 1e-5)
        if found.is_bert and (found.tanh_gelu or eps != BERT_NORM_EPS):
            gelu = "the tanh form of GELU" if found.tanh_gelu else "the exact GELU"
            yield (
                f"they were trained with {gelu} and LayerNorm's epsilon {eps}, our BERT has the exact form "
                f"and {BERT_NORM_EPS:g}: its outputs differ a little at first"
            )

    def weights(self, recipe: Recipe) -> LazyWeights:
        return self.checkpoint.weights(recipe.model)

    def damage(self, weights: LazyWeights) -> list[Problem]:
        return _not_finite(self.directory, weights)


class RunWeights:
    """A checkpoint of this project: that in the directory, or the newest whole one of a run."""

    forms = RUN_FORMS

    def __init__(self, directory: Path):
        self.directory = directory

    @cached_property
    def _found(self) -> tuple[checkpoints.Checkpoint, tuple[Damaged, ...]]:
        return checkpoints.newest_whole(self.directory)

    @property
    def checkpoint(self) -> checkpoints.Checkpoint:
        return self._found[0]

    @cached_property
    def recipe(self) -> Recipe:
        """That of the run."""
        where = self.checkpoint.directory / manifest.NAME
        held: Recipe = checked(TypeAdapter(Recipe), self.checkpoint.manifest.recipe, where)
        return held

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        form = form_of(self.recipe.model, RUN_FORMS)
        assert form is not None, "every model of a recipe has one"
        own = dict(flatten(self.recipe.model_dump()))
        return {"model_type": form.model_type, **own, "model.positions": self.recipe.positions}

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        if recipe is None:  # as for Megatron's
            return []
        stored = StoredTensors(self.checkpoint.directory, self.checkpoint.manifest)
        return list(self._problems(stored, with_few_layers(recipe, len(stored))))

    def _problems(self, stored: StoredTensors, recipe: Recipe) -> Iterator[Problem]:
        shapes = {name: parameter.shape for name, parameter in meta_parameters(recipe).items()}
        if recipe.model.task_head != "none":
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(NEW_HEADS)}
            found = {name: (name, Plain(torch.Size(stored.shape(name)))) for name in stored if name in shapes}
            yield from _differences(
                found, shapes, Words("its encoder", "its recipe", "give a whole checkpoint"), ""
            )
            return
        heads = tuple(f"{head}." for head in names.SENTENCE_HEAD)
        unused = heads if recipe.model.sentence_head == "none" else ()
        found = {
            name: (name, Plain(torch.Size(stored.shape(name))))
            for name in stored
            if not name.startswith(unused or ("\0",))
        }
        missing = [name for name in shapes if name not in stored]
        without = missing and all(name.startswith(heads) for name in missing)
        why = "they have no head for sentences; add --set model.sentence_head=none to train without one"
        words = Words(f"the {recipe.model.family} of its recipe", "its recipe", "give a whole checkpoint")
        yield from _differences(found, shapes, words, why if without else "")

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield f"of that run step {self.checkpoint.step}, {self.checkpoint.directory}"
        for damaged in self._found[1]:
            yield f"WARNING: {damaged}; an older checkpoint is taken"
        length, positions = self.recipe.sequence_length, self.recipe.positions
        if length < positions:
            yield f"that run trained the first {length:,} of its {positions:,} positions (sequence_length)"
        was, now = self.recipe.model, recipe.model
        if was.windows != now.windows:
            there = f"model.attention={list(was.attention)}, model.attention_window={was.attention_window}"
            here = f"{list(now.attention)} and {now.attention_window}"
            yield f"they were trained with {there}, and here these are {here}: the loss starts higher"

    def weights(self, recipe: Recipe) -> LazyWeights:
        stored = StoredTensors(self.checkpoint.directory, self.checkpoint.manifest)
        wanted = {name: list(parameter.shape) for name, parameter in meta_parameters(recipe).items()}
        return LazyWeights(
            {
                name: partial(stored.__getitem__, name)
                for name in stored
                if name in wanted
                # A head of other classes is another task's.
                and (not name.startswith(NEW_HEADS) or list(stored.shape(name)) == wanted[name])
            }
        )

    def damage(self, weights: LazyWeights) -> list[Problem]:
        return inspection.not_whole(self.checkpoint.directory, (WEIGHT,), RESTORE)


class Plain(NamedTuple):
    """What is known of a tensor of ours: a file with another type is found damaged when it is read."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided


class WithoutPadding(NamedTuple):
    """Rows of a vocabulary, of which the padding is left out."""

    stored: torch.Size
    dtype: torch.dtype
    layout: torch.layout
    vocabulary: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((min(self.vocabulary, self.stored[0]), *self.stored[1:]))


class Words(NamedTuple):
    """How messages call the model, what states its shapes, and what to do."""

    model: str
    source: str
    fix: str


class Header(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def layout(self) -> torch.layout: ...


class Tied(Protocol):
    def untied(self) -> list[tuple[str, str]]:
        """(copy, tensor) where the stored numbers differ, which have to be read for it."""


def _differences(
    found: Mapping[str, tuple[str, Header]], shapes: Mapping[str, torch.Size], words: Words, why_missing: str
) -> Iterator[Problem]:
    """Missing and unexpected tensors, odd types and shapes; `found`: name -> (its name as stored, tensor)."""
    if missing := [name for name in shapes if name not in found]:
        rule = why_missing or f"{words.model} has {'it' if len(missing) == 1 else 'them'}"
        yield Problem(KEY, f"lacks {some(missing, SHOWN)}", rule, "" if "--set" in rule else words.fix)
    if unexpected := [stored for name, (stored, _) in found.items() if name not in shapes]:
        yield Problem(KEY, f"holds {some(unexpected, SHOWN)}", f"{words.model} has no such tensor", words.fix)
    both = {name: (found[name][1], shape) for name, shape in shapes.items() if name in found}
    if odd := [f"{name} ({_type(tensor)})" for name, (tensor, _) in both.items() if not _readable(tensor)]:
        rule = "weights are float32, bfloat16, float16 or float64"
        yield Problem(
            KEY, f"holds {some(odd, SHOWN)}", rule, "give them as they were before they were packed"
        )
    elif differing := [
        f"{name} of {list(tensor.shape)} instead of {list(shape)}"
        for name, (tensor, shape) in both.items()
        if tensor.shape != shape
    ]:
        yield Problem(
            KEY, f"holds {some(differing, SHOWN)}", f"that is its shape by {words.source}", words.fix
        )


def _not_finite(directory: Path, weights: LazyWeights) -> list[Problem]:
    odd, rule = weights.not_finite(), "a model with NaN or infinity never leaves it"
    came = f"holds numbers that are not finite, in {some(odd)}"
    return [Problem(str(directory), came, rule, "give other weights", str(directory))] if odd else []


def _trained_dense(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if banded := [str(i) for i, window in enumerate(model.windows) if window is not None]:
        seen = f"{model.attention_window} of {recipe.sequence_length} positions (model.attention_window)"
        yield (
            f"they were trained in dense layers, and layers {', '.join(banded)} are banded here: they see "
            f"{seen}, so the loss starts above that of the dense model"
        )


def _untied(stored: Tied, recipe: Recipe) -> Iterator[Problem]:
    for copy, original in stored.untied() if processes.local_rank() == 0 else ():
        rule = f"our {recipe.model.family} has one tensor for both, and would lose the other"
        yield Problem(KEY, f"{copy} differs from {original}", rule, "give weights with tied embeddings")


def _readable(tensor: Header) -> bool:
    return tensor.dtype in READABLE and tensor.layout is torch.strided


def _type(tensor: Header) -> str:
    return str(tensor.dtype).removeprefix("torch.")
