"""Weights of transformers, Megatron and runs: the stated model, a check of the tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch.checkpoints import inspection, run_checkpoints
from launch.checkpoints.manifest import WEIGHT
from launch.checkpoints.run_checkpoints import Damaged
from launch.checkpoints.stored import StoredTensors
from launch.ranks import processes
from modeling.families import meta_parameters, with_few_layers
from modeling.formats.families import conversion_of
from modeling.formats.huggingface.config_forms import FORMS, MEGATRON_FORMS, Forms, form_of, run_forms
from modeling.formats.huggingface.conversion import Selection
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.formats.megatron import files, names
from modeling.formats.megatron.checkpoint import Checkpoint, open_checkpoint
from modeling.initialization import NEW_HEADS
from modeling.lazy_weights import LazyWeights
from modeling.transformer import BERT_NORM_EPS
from recipes.families import PUBLISHED_VOCABULARIES
from recipes.files import FileError, read_json_object, refuse
from recipes.key_paths import flatten
from recipes.problems import Problem, some
from recipes.schema import Model, Recipe

KEY = "--init_from"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHOWN = 3  # tensors of each problem
RESTORE = "restore it, or give another step-NNNNNN"


class Saved:
    """Weights of any kind in a directory."""

    forms: Forms

    def __init__(self, directory: Path):
        self.directory = directory

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        """Read the description of the model, in one of `forms`. Raises FileError."""
        raise NotImplementedError

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        """Compare the tensors with the recipe's model and return all problems; None: no known model.

        Reads the headers of the tensors; one process of a machine also reads tied tensors.
        """
        return [] if recipe is None else list(self._differences(recipe))

    def _differences(self, recipe: Recipe) -> Iterator[Problem]:
        raise NotImplementedError

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        """Yield remarks for the user on fitting weights."""
        model = recipe.model
        if sparse := [str(i) for i, window in enumerate(model.windows) if window is not None]:
            layers = f"they were trained in dense layers, and layers {', '.join(sparse)} are sparse here"
            yield f"{layers} ({model.sparse_keys}), so the loss starts above that of the dense model"

    def weights(self, recipe: Recipe) -> LazyWeights:
        """Return canonical weights. Raises ValueError if they do not fit the recipe's model."""
        raise NotImplementedError

    def damage(self, weights: LazyWeights) -> list[Problem]:
        """Read all numbers and return their problems."""
        odd, rule = weights.not_finite(), "a model with NaN or infinity never leaves it"
        came, where = f"holds numbers that are not finite, in {some(odd)}", str(self.directory)
        return [Problem(where, came, rule, "give other weights", where)] if odd else []


def saved_in(directory: str | Path) -> Saved:
    """Recognize the kind of weights in a directory."""
    path = Path(directory)
    if run_checkpoints.holds_ours(path):
        return RunWeights(path)
    return MegatronWeights(path) if files.is_checkpoint(path) else TransformersWeights(path)


def read(directory: str | Path, recipe: Recipe) -> LazyWeights:
    """Return canonical weights, read on demand.

    Raises ValueError if they do not fit the recipe's model, or have numbers that are not finite; one process
    of a machine reads them all for it.
    """
    saved = saved_in(directory)
    weights = saved.weights(recipe)
    if problems := saved.damage(weights) if processes.local_rank() == 0 else []:
        raise FileError(problems)
    return weights


class TransformersWeights(Saved):
    """Weights written by `save_pretrained`."""

    forms = FORMS

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        return read_json_object(self.directory / "config.json")

    @cached_property
    def _stored(self) -> dict[str, torch.Tensor]:
        return read_state_dict(self.directory)

    def problems(self, recipe: Recipe | None) -> list[Problem]:
        try:
            few = with_few_layers(recipe, len(self._stored)) if recipe else None
        except FileError as error:
            return list(error.problems)
        return super().problems(few)

    def _differences(self, recipe: Recipe) -> Iterator[Problem]:
        conversion = conversion_of(recipe.model)
        selected, kind = conversion.select(self._stored, recipe.model), conversion.class_name(recipe.model)
        meta = meta_parameters(recipe)
        shapes = {n: t.shape for n, t in conversion.to_transformers(meta, recipe.model).items()}
        if recipe.model.task_head != "none":  # its head is drawn where the weights have none
            entries = [each for each in conversion.name_map(recipe.model) if each.ours.startswith(NEW_HEADS)]
            new = {name for entry in entries for name in entry.theirs if name not in selected.tensors}
            shapes = {name: shape for name, shape in shapes.items() if name not in new}
        missing = [name for name in shapes if name not in selected.tensors]
        fix = f"give a directory in which save_pretrained wrote a whole {kind}"
        words = Words(f"a {kind} of this config.json", "config.json", fix)
        found = {
            n: Header(selected.stored[n], t.shape, t.dtype, t.layout) for n, t in selected.tensors.items()
        }
        yield from _differences(found, shapes, words, conversion.why_missing(missing, recipe.model))
        if selected.twice:
            came = f"holds {some(selected.twice, SHOWN)} under two names"
            yield Problem(KEY, came, "one of them would be lost", fix)
        yield from _untied(selected, recipe)

    def weights(self, recipe: Recipe) -> LazyWeights:
        return conversion_of(recipe.model).read(self.directory, recipe.model)


class MegatronWeights(Saved):
    """A checkpoint of Megatron-LM or Megatron-DeepSpeed."""

    forms = MEGATRON_FORMS

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.directory)

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        assert recipe is not None, "its arguments do not say all"
        return self.checkpoint.config(recipe.model, tuple(PUBLISHED_VOCABULARIES.values()))

    def _differences(self, recipe: Recipe) -> Iterator[Problem]:
        recipe = with_few_layers(recipe, self.checkpoint.layers)
        model = recipe.model
        shapes = {name: parameter.shape for name, parameter in meta_parameters(recipe).items()}
        theirs = {ours: name for ours, name in names.name_map(model).items() if ours in shapes}
        found = {
            name: Header(name, self._without_padding(name, each.shape, model), each.dtype, each.layout)
            for name, each in self.checkpoint.tensors.items()
        }
        words = Words(
            f"a Megatron {model.family} of these arguments", "its arguments",
            "give a whole checkpoint of Megatron's GPT or BERT",
        )  # fmt: skip
        if model.heads % self.checkpoint.slices:
            came = f"has {self.checkpoint.slices} tensor slices, and model.heads={model.heads}"
            yield Problem(KEY, came, "each slice holds whole heads", "set model.heads to theirs")
        expected = {name: shapes[ours] for ours, name in theirs.items()}
        yield from _but_for_heads(found, expected, words, model, tuple(names.SENTENCE_HEAD.values()))
        yield from _untied(self.checkpoint, recipe)

    @staticmethod
    def _without_padding(name: str, shape: torch.Size, model: Model) -> torch.Size:
        if name not in names.WITH_PADDING:
            return shape
        return torch.Size((min(model.vocab_size, shape[0]), *shape[1:]))

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from super().remarks(recipe)
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


class RunWeights(Saved):
    """A checkpoint of this project: the directory's own, or the newest whole one of a run."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.forms = run_forms()

    @cached_property
    def _found(self) -> tuple[run_checkpoints.Checkpoint, tuple[Damaged, ...]]:
        return run_checkpoints.newest_whole(self.directory)

    @property
    def checkpoint(self) -> run_checkpoints.Checkpoint:
        return self._found[0]

    @property
    def _stored(self) -> StoredTensors:
        return StoredTensors(self.checkpoint.directory, self.checkpoint.manifest)

    @cached_property
    def recipe(self) -> Recipe:
        """The run's recipe. Raises FileError if the run around the checkpoint has another."""
        directory, held = self.checkpoint.directory, self.checkpoint.manifest
        if fault := inspection.recipe_fault(directory, held):
            refuse(directory, str(fault), "a run keeps its recipe, and one of the two was changed", RESTORE)
        return Recipe.model_validate(held.recipe)

    def config(self, recipe: Recipe | None) -> Mapping[str, Any]:
        form = form_of(self.recipe.model, self.forms)
        assert form is not None, "every model of a recipe has one"
        own = dict(flatten(self.recipe.model_dump()))
        return {"model_type": form.model_type, **own, "model.positions": self.recipe.positions}

    def _differences(self, recipe: Recipe) -> Iterator[Problem]:
        stored, model = self._stored, recipe.model
        meta = meta_parameters(with_few_layers(recipe, len(stored)))
        shapes = {name: parameter.shape for name, parameter in meta.items()}
        found = {name: Header(name, torch.Size(stored.shape(name))) for name in stored}
        fix = "give a whole checkpoint"
        if model.task_head != "none":
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(NEW_HEADS)}
            found = {name: header for name, header in found.items() if name in shapes}
            yield from _differences(found, shapes, Words("its encoder", "its recipe", fix))
            return
        words = Words(f"the {model.family} of its recipe", "its recipe", fix)
        yield from _but_for_heads(found, shapes, words, model, tuple(names.SENTENCE_HEAD))

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield f"of that run step {self.checkpoint.step}, {self.checkpoint.directory}"
        if inspection.recipe_around(self.checkpoint.directory) is None:
            yield "no run lies around that checkpoint: whether its recipe was changed cannot be known"
        for damaged in self._found[1]:
            yield f"WARNING: {damaged}; an older checkpoint is taken"
        length, positions = self.recipe.sequence_length, self.recipe.positions
        if length < positions:
            yield f"that run trained the first {length:,} of its {positions:,} positions (sequence_length)"
        was, now = self.recipe.model, recipe.model
        if was.windows != now.windows:
            there, here = was.sparse_keys, now.sparse_keys
            yield f"they were trained with {there}, and here it is {here}: the loss starts higher"

    def weights(self, recipe: Recipe) -> LazyWeights:
        stored = self._stored
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
        return inspection.faults_of_kinds(self.checkpoint.directory, (WEIGHT,), RESTORE)


class Header(NamedTuple):
    """Facts of a stored tensor from its header."""

    name: str  # as it is stored
    shape: torch.Size
    # Of a run's tensor: a file with another type is found damaged when it is read.
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided


class Words(NamedTuple):
    """Words of messages: the model, the source of its shapes, and the fix."""

    model: str
    source: str
    fix: str


def _but_for_heads(
    found: Mapping[str, Header],
    shapes: Mapping[str, torch.Size],
    words: Words,
    model: Model,
    heads: tuple[str, ...],
) -> Iterator[Problem]:
    """Yield `_differences`, but ignore `heads` for sentences if the model has none."""
    heads = tuple(f"{head}." for head in heads)
    if model.sentence_head == "none":
        found = {name: header for name, header in found.items() if not name.startswith(heads)}
    missing = [name for name in shapes if name not in found]
    without = missing and all(name.startswith(heads) for name in missing)
    why = "they have no head for sentences; add --set model.sentence_head=none to train without one"
    yield from _differences(found, shapes, words, why if without else "")


def _differences(
    found: Mapping[str, Header], shapes: Mapping[str, torch.Size], words: Words, why_missing: str = ""
) -> Iterator[Problem]:
    """Yield problems of missing and unexpected tensors, unreadable types and other shapes."""
    if missing := [name for name in shapes if name not in found]:
        rule = why_missing or f"{words.model} has {'it' if len(missing) == 1 else 'them'}"
        yield Problem(KEY, f"lacks {some(missing, SHOWN)}", rule, "" if "--set" in rule else words.fix)
    if unexpected := [header.name for name, header in found.items() if name not in shapes]:
        yield Problem(KEY, f"holds {some(unexpected, SHOWN)}", f"{words.model} has no such tensor", words.fix)
    both = {name: (found[name], shape) for name, shape in shapes.items() if name in found}
    odd = [
        f"{name} ({str(header.dtype).removeprefix('torch.')})"
        for name, (header, _) in both.items()
        if header.dtype not in READABLE or header.layout is not torch.strided
    ]
    differing = [
        f"{name} of {list(header.shape)} instead of {list(shape)}"
        for name, (header, shape) in both.items()
        if header.shape != shape
    ]
    if odd:
        rule, fix = (
            "weights are float32, bfloat16, float16 or float64",
            "give them as they were before they were packed",
        )
        yield Problem(KEY, f"holds {some(odd, SHOWN)}", rule, fix)
    elif differing:
        came, rule = f"holds {some(differing, SHOWN)}", f"that is its shape by {words.source}"
        yield Problem(KEY, came, rule, words.fix)


def _untied(stored: Checkpoint | Selection, recipe: Recipe) -> Iterator[Problem]:
    for copy, original in stored.untied() if processes.local_rank() == 0 else ():
        rule = f"our {recipe.model.family} has one tensor for both, and would lose the other"
        yield Problem(KEY, f"{copy} differs from {original}", rule, "give weights with tied embeddings")
