"""Weights of transformers, Megatron and runs: the stated model, a check of the tensors, and the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch.checkpoints import inspection, run_checkpoints
from launch.checkpoints.names import WEIGHT
from launch.checkpoints.run_checkpoints import Checkpoint, DamagedCheckpoint
from launch.checkpoints.stored import StoredTensors
from launch.ranks import processes
from modeling.families import (
    conversion_of,
    meta_parameters,
    with_few_layers,
    with_vocabulary,
)
from modeling.formats import nanogpt
from modeling.formats.huggingface import bert
from modeling.formats.huggingface.config_forms import (
    FORMS,
    MEGATRON_FORMS,
    ConfigForm,
    form_of,
    run_forms,
)
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.formats.megatron import files, names
from modeling.formats.megatron.checkpoint import (
    SMALLEST_PADDING,
    MegatronCheckpoint,
    Slices,
    open_checkpoint,
)
from modeling.initialization import NEW_HEADS
from modeling.lazy_weights import LazyWeights
from modeling.transformer import BERT_NORM_EPS
from recipes.families import GPT2_VOCABULARY, PUBLISHED_VOCABULARIES
from recipes.files import FileError, is_file, read_json_object, refuse
from recipes.key_paths import flatten
from recipes.problems import Problem, counted, some
from recipes.schema import Model, Recipe

KEY = "--init_from"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHOWN = 3  # tensors of each problem
RESTORE = "restore it, or give another step-NNNNNN"
# Beginnings of the canonical names of a BERT's heads.
MASKED_HEAD = ("head.transform.", "head.norm.")
SENTENCE_HEAD = ("head.pooler.", "head.sentence.")


class MessageWords(NamedTuple):
    """Words of messages: the model, the source of its shapes, and the fix."""

    model: str
    source: str
    fix: str


class Saved:
    """Weights of any kind in a directory.

    Attributes:
        forms: descriptions of models of this kind.
        sentence_head: beginnings of stored names, which a model without this head leaves.
    """

    forms: Sequence[ConfigForm]
    sentence_head: tuple[str, ...]

    def __init__(self, directory: Path):
        self.directory = directory

    def config(self, vocabulary: int | None) -> Mapping[str, Any]:
        """Read the description of the model, in one of `forms`. Raises FileError.

        `vocabulary`: number of its tokens, for weights that know it only with padding.
        """
        raise NotImplementedError

    def stored(self, model: Model) -> Mapping[str, Any]:
        """Map each stored name to a tensor, or to what has its shape and dtype. Raises FileError."""
        raise NotImplementedError

    def expected(self, recipe: Recipe) -> Mapping[str, tuple[str, torch.Size]]:
        """Map each stored name of the recipe's model to its canonical name, and the shape stored there."""
        raise NotImplementedError

    def words(self, model: Model) -> MessageWords:
        raise NotImplementedError

    def untied(self, model: Model) -> Iterable[tuple[str, str]]:
        """Return (copy, tensor) for each copy that differs from its tied tensor. Reads their numbers."""
        return ()

    def weights(self, recipe: Recipe) -> LazyWeights:
        """Return canonical weights of a model that they fit."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows of their vocabulary, padding included; 0: as many as tokens."""
        return 0

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        """Compare the tensors with the recipe's model and yield all problems. Raises FileError.

        Reads the headers of the tensors; one process of a machine also reads tied tensors.
        """
        model = recipe.model
        stored = self.stored(model)
        words = self.words(model)
        expected = self.expected(with_few_layers(recipe, len(stored)))
        missing = {}
        held = {}
        for name, (ours, shape) in expected.items():
            if model.task_head != "none" and ours.startswith(NEW_HEADS):
                continue  # it is drawn
            if name in stored:
                held[name] = stored[name], shape
            else:
                missing[name] = ours
        if missing:
            rule, fix = _why_missing([*missing.values()])
            rule = rule or f"{words.model} has {'it' if len(missing) == 1 else 'them'}"
            yield Problem(
                KEY, f"lacks {some([*missing], SHOWN)}", rule, fix or words.fix
            )
        left = self.sentence_head if model.sentence_head == "none" else ()
        unexpected = []
        for name in stored:
            if name not in expected and not name.startswith(left):
                unexpected.append(name)
        if unexpected and model.task_head == "none":
            yield Problem(
                KEY,
                f"holds {some(unexpected, SHOWN)}",
                f"{words.model} has no such tensor",
                words.fix,
            )
        yield from _form_problems(held, words)
        if processes.local_rank() == 0:
            yield from self._untied_problems(model)

    def _untied_problems(self, model: Model) -> Iterator[Problem]:
        rule = f"our {model.family} has one tensor for both, and would lose the other"
        for copy, original in self.untied(model):
            yield Problem(
                KEY,
                f"{copy} differs from {original}",
                rule,
                "give weights with tied embeddings",
            )

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        """Yield remarks for the user on fitting weights."""
        model = recipe.model
        sparse = [
            str(i) for i, window in enumerate(model.windows) if window is not None
        ]
        if sparse:
            layers = f"they were trained in dense layers, and layers {', '.join(sparse)} are sparse here"
            yield f"{layers} ({model.sparse_keys}), so the loss starts above that of the dense model"
        if self.rows > model.vocab_size:
            taken = f"the first {model.vocab_size:,}: the rest pads"
            more = math.log(self.rows / model.vocab_size)
            softmax = f"their softmax counted it, which makes a loss higher, at first by {more:.1g}"
            yield f"of their {self.rows:,} rows of the vocabulary {taken}; {softmax}"

    def damage(self, weights: LazyWeights) -> list[Problem]:
        """Read all numbers and return their problems."""
        odd = weights.not_finite()
        rule = "a model with NaN or infinity never leaves it"
        came = f"holds numbers that are not finite, in {some(odd)}"
        where = str(self.directory)
        if odd:
            return [Problem(where, came, rule, "give other weights", where)]
        return []


def _form_problems(
    held: Mapping[str, tuple[Any, torch.Size]], words: MessageWords
) -> Iterator[Problem]:
    """Yield problems of tensors next to their expected shapes."""
    packed = []
    differing = []
    for name, (tensor, shape) in held.items():
        layout = getattr(tensor, "layout", torch.strided)
        if tensor.dtype not in READABLE or layout != torch.strided:
            dtype = str(tensor.dtype).removeprefix("torch.")
            packed.append(f"{name} ({dtype})")
        if tensor.shape != shape:
            sizes = f"{list(tensor.shape)} instead of {list(shape)}"
            differing.append(f"{name} of {sizes}")
    if packed:
        yield Problem(
            KEY,
            f"holds {some(packed, SHOWN)}",
            "weights are float32, bfloat16, float16 or float64",
            "give them as they were before they were packed",
        )
    elif differing:
        yield Problem(
            KEY,
            f"holds {some(differing, SHOWN)}",
            f"that is its shape by {words.source}",
            words.fix,
        )


def _why_missing(names: Sequence[str]) -> tuple[str, str]:
    """Explain the lack of tensors of these canonical names, and say the fix; "" where there is no other."""
    if all(name.startswith(SENTENCE_HEAD) for name in names):
        return (
            "they have no head for sentences",
            "add --set model.sentence_head=none to train without one",
        )
    if all(any(name.startswith(head) for name in names) for head in MASKED_HEAD):
        return "an encoder alone has no head to predict tokens with", ""
    return "", ""


def saved_in(directory: str | Path) -> Saved:
    """Recognize the kind of weights in a directory."""
    path = Path(directory)
    if run_checkpoints.holds_ours(path):
        return RunWeights(path)
    stated = is_file(path / "config.json")
    if is_file(path / nanogpt.FILE) and not stated:
        return NanoGptWeights(path)
    if files.is_checkpoint(path):
        return MegatronWeights(path)
    kind = read_json_object(path / "config.json").get("model_type") if stated else None
    ours = {None, *(form.model_type for form in FORMS)}
    return TransformersWeights(path) if kind in ours else ConfigWeights(path)


def read(directory: str | Path, recipe: Recipe) -> LazyWeights:
    """Return canonical weights that fit the recipe (`Saved.problems`), read on demand.

    Raises FileError for files that cannot be read, and for numbers that are not finite; one process of a
    machine reads them all for it.
    """
    saved = saved_in(directory)
    weights = saved.weights(recipe)
    problems = saved.damage(weights) if processes.local_rank() == 0 else []
    if problems:
        raise FileError(problems)
    return weights


class TransformersWeights(Saved):
    """Weights written by `save_pretrained`."""

    forms = FORMS
    sentence_head = tuple(f"{name}." for name in bert.SENTENCE_HEAD.values())

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json_object(self.directory / "config.json")

    def config(self, vocabulary: int | None) -> Mapping[str, Any]:
        """Read config.json; rows that pad a vocabulary of so many tokens are left out."""
        more = 0 if vocabulary is None else self.rows - vocabulary
        published = self.rows in PUBLISHED_VOCABULARIES.values()
        if 0 < more < SMALLEST_PADDING and not published:
            return {**self._config, "vocab_size": vocabulary}
        return self._config

    @property
    def rows(self) -> int:
        rows = self._config.get("vocab_size")
        return rows if type(rows) is int else 0

    @cached_property
    def _state_dict(self) -> dict[str, torch.Tensor]:
        return read_state_dict(self.directory)

    def stored(self, model: Model) -> Mapping[str, torch.Tensor]:
        return conversion_of(model).select(self._state_dict).tensors

    def expected(self, recipe: Recipe) -> Mapping[str, tuple[str, torch.Size]]:
        whole = with_vocabulary(recipe, max(self.rows, recipe.model.vocab_size))
        meta = meta_parameters(whole)
        parts = conversion_of(recipe.model).converted(meta, recipe.model)
        return {name: (ours, part.shape) for ours, name, part in parts}

    def words(self, model: Model) -> MessageWords:
        kind = conversion_of(model).class_name(model)
        fix = f"give a directory in which save_pretrained wrote a whole {kind}"
        return MessageWords(f"a {kind} of this config.json", "config.json", fix)

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        yield from super().problems(recipe)
        twice = conversion_of(recipe.model).select(self._state_dict).twice
        if twice:
            fix = self.words(recipe.model).fix
            yield Problem(
                KEY,
                f"holds {some(twice, SHOWN)} under two names",
                "one of them would be lost",
                fix,
            )

    def untied(self, model: Model) -> Iterable[tuple[str, str]]:
        return conversion_of(model).select(self._state_dict).untied()

    def weights(self, recipe: Recipe) -> LazyWeights:
        return conversion_of(recipe.model).to_canonical(self._state_dict, recipe.model)


class ConfigWeights(TransformersWeights):
    """Weights of any other model of transformers, which it reads itself."""

    @property
    def model(self) -> dict[str, Any]:
        """The model of a recipe."""
        return {"implementation": "transformers", "config": self._config}

    def _read(self, recipe: Recipe) -> tuple[dict[str, torch.nn.Parameter], set[str]]:
        """Return the parameters, and the names that were amiss. Raises FileError."""
        from modeling.formats.huggingface import auto_model

        try:
            model, amiss = auto_model.loaded(recipe.model, self.directory)
        # what transformers raises is of any type
        except Exception as error:
            refuse(self.directory, f"transformers cannot read it ({error})")
        return dict(model.named_parameters()), amiss

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        """Compare the types, and on one process of a machine all tensors: reading takes a whole model."""
        own = recipe.model.config or {"model_type": recipe.model.family}
        kinds = [str(config["model_type"]) for config in (self._config, own)]
        if len({*kinds}) > 1:
            came = f"is a model of type {kinds[0]}"
            rule = f"the recipe's is of type {kinds[1]}"
            yield Problem(KEY, came, rule, "leave --recipe out: theirs is taken then")
            return
        amiss = self._read(recipe)[1] if processes.local_rank() == 0 else ()
        if amiss:
            came = f"lacks, or holds besides or otherwise, {some(sorted(amiss), SHOWN)}"
            fix = "leave --recipe out, or give a whole one that save_pretrained wrote"
            yield Problem(
                KEY, came, "weights are all of the model in model.config", fix
            )

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from super().remarks(recipe)
        for key, value in (recipe.model.config or {}).items():
            theirs = self._config.get(key, value)
            if theirs != value:
                yield f"{key}={theirs} in theirs, and {value} in model.config"

    def weights(self, recipe: Recipe) -> LazyWeights:
        held, _ = self._read(recipe)
        return LazyWeights(held, held.__getitem__)


class NanoGptWeights(TransformersWeights):
    """A ckpt.pt of nanoGPT, under transformers' names."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._config, self._state_dict = nanogpt.read(directory)

    def config(self, vocabulary: int | None) -> Mapping[str, Any]:
        return super().config(vocabulary or GPT2_VOCABULARY)

    def words(self, model: Model) -> MessageWords:
        fix = "give a whole ckpt.pt"
        return MessageWords("a GPT of nanoGPT", "its model_args", fix)

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from super().remarks(recipe)
        came = "a checkpoint of nanoGPT, which has the exact GELU since May 2023 (594068e7)"
        yield f"{came}, and ours the tanh form: its outputs may differ a little at first"
        if not self._config["bias"]:
            yield "it has no biases: they are zero at first, and trained here"


class MegatronWeights(Saved):
    """A checkpoint of Megatron-LM or Megatron-DeepSpeed."""

    forms = MEGATRON_FORMS
    sentence_head = tuple(f"{name}." for name in names.SENTENCE_HEAD.values())

    @cached_property
    def checkpoint(self) -> MegatronCheckpoint:
        return open_checkpoint(self.directory)

    def config(self, vocabulary: int | None) -> Mapping[str, Any]:
        own = () if vocabulary is None else (vocabulary,)
        return self.checkpoint.config((*own, *PUBLISHED_VOCABULARIES.values()))

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        yield from super().problems(recipe)
        slices = self.checkpoint.slices
        heads = recipe.model.heads
        if heads % slices:
            yield Problem(
                KEY,
                f"is in {counted(slices, 'tensor slice')}, and has {heads} heads",
                "each slice holds whole heads",
                "give their true number",
            )

    def stored(self, model: Model) -> Mapping[str, Slices]:
        return self.checkpoint.tensors

    def expected(self, recipe: Recipe) -> Mapping[str, tuple[str, torch.Size]]:
        meta = meta_parameters(recipe)
        tensors = self.checkpoint.tensors
        shapes = {}
        for ours, name in names.name_map(recipe.model).items():
            rows, *rest = meta[ours].shape
            if name in names.WITH_PADDING and name in tensors:
                rows = max(rows, tensors[name].shape[0])
            shapes[name] = ours, torch.Size((rows, *rest))
        return shapes

    @property
    def rows(self) -> int:
        return self.checkpoint.size(names.WORD, 0) or 0

    def words(self, model: Model) -> MessageWords:
        fix = "give a whole checkpoint of Megatron's GPT or BERT"
        return MessageWords(
            f"a Megatron {model.family} of these arguments", "its arguments", fix
        )

    def untied(self, model: Model) -> Iterable[tuple[str, str]]:
        return self.checkpoint.untied()

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield from super().remarks(recipe)
        checkpoint = self.checkpoint
        slices = counted(checkpoint.slices, "tensor slice")
        yield f"a Megatron checkpoint of version {checkpoint.version:g} in {slices}, {checkpoint.where}"
        if not checkpoint.arguments:
            yield "they keep no arguments: GELU's form and LayerNorm's epsilon are Megatron's defaults"
        eps = checkpoint.arguments.get("layernorm_epsilon", 1e-5)
        if checkpoint.is_bert and (checkpoint.tanh_gelu or eps != BERT_NORM_EPS):
            gelu = "the tanh form of GELU" if checkpoint.tanh_gelu else "the exact GELU"
            yield (
                f"they were trained with {gelu} and LayerNorm's epsilon {eps}, our BERT has the exact form "
                f"and {BERT_NORM_EPS:g}: its outputs differ a little at first"
            )

    def weights(self, recipe: Recipe) -> LazyWeights:
        return self.checkpoint.weights(recipe.model)


class RunWeights(Saved):
    """A checkpoint of this project: the directory's own, or the newest whole one of a run."""

    sentence_head = SENTENCE_HEAD

    @property
    def forms(self) -> Sequence[ConfigForm]:  # type: ignore[override] # families may be registered later
        return run_forms()

    @cached_property
    def _found(self) -> tuple[Checkpoint, tuple[DamagedCheckpoint, ...]]:
        return run_checkpoints.newest_whole(self.directory)

    @property
    def checkpoint(self) -> Checkpoint:
        return self._found[0]

    @property
    def _tensors(self) -> StoredTensors:
        return StoredTensors(self.checkpoint.directory, self.checkpoint.manifest)

    @cached_property
    def recipe(self) -> Recipe:
        """The run's recipe. Raises FileError if the run around the checkpoint has another."""
        directory = self.checkpoint.directory
        held = self.checkpoint.manifest
        fault = inspection.recipe_fault(directory, held)
        if fault:
            refuse(
                directory,
                str(fault),
                "a run keeps its recipe, and one of the two was changed",
                RESTORE,
            )
        return Recipe.model_validate(held.recipe)

    def config(self, vocabulary: int | None) -> Mapping[str, Any]:
        form = form_of(self.recipe.model, self.forms)
        assert form is not None, "every model of a recipe has one"
        own = dict(flatten(self.recipe.model_dump()))
        own["model.positions"] = self.recipe.positions
        return {"model_type": form.model_type, **own}

    def stored(self, model: Model) -> Mapping[str, torch.Tensor]:
        """Return the tensors' shapes; a file with another type is found damaged when it is read."""
        tensors = self._tensors
        return {
            name: torch.empty(tensors.shape(name), device="meta") for name in tensors
        }

    def expected(self, recipe: Recipe) -> Mapping[str, tuple[str, torch.Size]]:
        return {
            name: (name, each.shape) for name, each in meta_parameters(recipe).items()
        }

    def words(self, model: Model) -> MessageWords:
        return MessageWords(
            f"the {model.family} of its recipe", "its recipe", "give a whole checkpoint"
        )

    def remarks(self, recipe: Recipe) -> Iterator[str]:
        yield f"of that run step {self.checkpoint.step}, {self.checkpoint.directory}"
        if inspection.run_around(self.checkpoint.directory) is None:
            yield "no run lies around that checkpoint: whether its recipe was changed cannot be known"
        for damaged in self._found[1]:
            yield f"WARNING: {damaged}; an older checkpoint is taken"
        length = self.recipe.sequence_length
        positions = self.recipe.positions
        if length < positions:
            yield f"that run trained the first {length:,} of its {positions:,} positions (sequence_length)"
        was = self.recipe.model
        now = recipe.model
        if was.windows != now.windows:
            there = was.sparse_keys
            here = now.sparse_keys
            yield f"they were trained with {there}, and here it is {here}: the loss starts higher"

    def weights(self, recipe: Recipe) -> LazyWeights:
        stored = self._tensors
        meta = meta_parameters(recipe)

        def usable(name: str) -> bool:  # a head of other classes is another task's
            if name not in meta or not name.startswith(NEW_HEADS):
                return name in meta
            return stored.shape(name) == meta[name].shape

        return LazyWeights(filter(usable, stored), stored.__getitem__)

    def damage(self, weights: LazyWeights) -> list[Problem]:
        return inspection.faults_of_kinds(self.checkpoint.directory, (WEIGHT,), RESTORE)
