"""Export a checkpoint to a directory that `transformers` loads, a tensor at a time, and compare the two."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerFast as Tokenizer

from data import durable_files
from data.text.vocabulary import save_tokenizer, vocabulary_size
from data.text.vocabulary_files import AS_IT_IS
from launch.checkpoints import inspection, tensor_file
from launch.checkpoints.names import WEIGHT
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.stored import StoredTensors
from launch.checkpoints.tensor_file import Reader, TensorEntry
from launch.machine import memory
from modeling import cost
from modeling.families import conversion_of, meta_parameters, whole_model
from modeling.formats.huggingface.conversion import Logits, Tensors
from modeling.generation import in_transformers, positions_of
from modeling.lazy_weights import LazyWeights
from recipes import catalog
from recipes.files import FileError, refuse
from recipes.problems import some
from recipes.schema import Recipe

# largest difference of a logit, relative to the largest logit where that is above 1
TOLERANCE = 1e-4
RESTORE = "restore it from a copy of the run, or name another with --step"
SAMPLES = 2  # of random tokens to compare on; the second is padded where samples may be
POSITIONS = 128
SHARD = 5 * 10**9  # bytes of a file, as transformers had it up to version 4
# Bytes per parameter for comparing logits: one model at a time in float32, and transformers' loading.
COMPARING = 8


@dataclass(frozen=True)
class Export:
    """Facts of an export.

    Attributes:
        difference: largest absolute difference of logits on random tokens, between transformers on the
            export and our model with the same, rounded, weights; None: not compared.
        rounding: largest absolute difference of our model's logits with rounded and with float32 weights.
        needed, free: bytes of memory for comparing logits: needed, and available.
        left_out: tokens that the run's vocabulary adds to a text, and training and the export do not.
        pushed: the repository of the hub that has it too, and who sees it; "" without one.
    """

    directory: Path
    checkpoint: Path
    step: int
    dtype: str
    files: int
    difference: float | None
    rounding: float
    needed: int
    free: int
    left_out: tuple[str, ...] = ()
    pushed: str = ""


class ExportMismatch(RuntimeError):
    """An exported model with other logits or other numbers than ours."""


def export(  # noqa: PLR0913
    checkpoint: Checkpoint,
    recipe: Recipe,
    tokenizer: Tokenizer,
    out: Path,
    dtype: str,
    *,
    run: Path,
    compare_logits: bool = False,
    seen: inspection.Seen = lambda number: None,
) -> Export:
    """Export to `out`, a new or empty directory, which appears whole and checked or not at all.

    Memory holds one tensor at a time; two models, one after the other, with `compare_logits` or if they fit.
    `seen` gets the number of checked bytes of the checkpoint.

    Raises:
        FileError: checkpoint or tokenizer are damaged or of another model, or `out` cannot be made.
        ExportMismatch: `transformers` computes other logits than our model from the same weights, or the
            files hold other numbers.
    """
    check_whole(checkpoint, recipe, tokenizer, run, (WEIGHT,), seen)
    master = StoredTensors(checkpoint.directory, checkpoint.manifest)
    kind = getattr(torch, dtype)
    with appearing("--out", out) as temporary:
        files = write_model(recipe, master, tokenizer, temporary, kind)
        left_out = write_tokenizer(recipe, tokenizer, temporary)
        write_facts(checkpoint, recipe, temporary, run=str(run), dtype=dtype)
        difference = None
        rounding = 0.0
        needed = COMPARING * cost.parameters(recipe.model, recipe.positions)
        free = int(memory.available())
        # a task's head computes in transformers only
        computed = recipe.model.task_head == "none"
        if computed and (compare_logits or needed <= free):
            batch = RandomBatch.of(recipe)
            rounded = LazyWeights(master, lambda name: master[name].to(kind))
            ours = our_logits(recipe, rounded, batch, tokenizer)
            if dtype != "float32":
                exact = our_logits(recipe, master, batch, tokenizer)
                rounding = _largest(ours, exact)
            difference = compare(
                ours, their_logits(recipe, temporary, batch), checkpoint.directory
            )
        else:
            compare_tensors(
                recipe, master, kind, files, temporary, checkpoint.directory
            )
    return Export(
        out,
        checkpoint.directory,
        checkpoint.step,
        dtype,
        len(set(files.values())),
        difference,
        rounding,
        needed,
        free,
        left_out,
    )


def check_whole(
    checkpoint: Checkpoint,
    recipe: Recipe,
    tokenizer: Tokenizer,
    run: Path,
    kinds: tuple[str, ...],
    seen: inspection.Seen,
) -> None:
    """Check tokenizer and files before an export of these kinds. Reads all files. Raises FileError."""
    tokens = vocabulary_size(tokenizer)
    if tokens > recipe.model.vocab_size:
        refuse(
            run,
            f"its tokenizer has {tokens} tokens, and model.vocab_size={recipe.model.vocab_size}",
            "the model knows no more",
            "restore tokenizer/ and recipe.yaml from a copy of the run",
        )
    problems = inspection.faults_of_kinds(checkpoint.directory, kinds, RESTORE, seen)
    if problems:
        raise FileError(problems)


@contextmanager
def appearing(flag: str, out: Path) -> Iterator[Path]:
    """Yield a temporary directory; rename it to `out` if the block succeeds, remove it if it fails.

    `out`: new or empty, given by `flag`. Raises FileError if it cannot be made.
    """
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
    except (OSError, ValueError) as error:
        refuse(
            f"{flag} {out}", f"cannot be made ({error})", fix="name another directory"
        )
    try:
        yield temporary
        durable_files.sync_names(temporary)
        os.replace(temporary, out)  # onto nothing, or onto an empty directory
        durable_files.sync_names(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class RandomBatch(NamedTuple):
    """Random inputs: tokens (B, S), and the family's token types (B, S) and lengths (B,), or None."""

    tokens: Tensor
    token_types: Tensor | None
    lengths: Tensor | None

    @staticmethod
    def of(recipe: Recipe) -> RandomBatch:
        """Draw a batch by the recipe's seed."""
        generator = torch.Generator().manual_seed(recipe.seed)
        inputs = recipe.model.facts.fields.inputs
        shape = (SAMPLES, min(POSITIONS, positions_of(recipe)))
        return RandomBatch(
            torch.randint(recipe.model.vocab_size, shape, generator=generator),
            torch.randint(2, shape, generator=generator)
            if "token_types" in inputs
            else None,
            torch.tensor([shape[1], *[shape[1] // 2 + 1] * (SAMPLES - 1)])
            if "lengths" in inputs
            else None,
        )

    @property
    def mask(self) -> Tensor:
        """(B, S), True for tokens that are not padding."""
        if self.lengths is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


def our_logits(
    recipe: Recipe,
    weights: Tensors,
    batch: RandomBatch,
    tokenizer: Tokenizer | None = None,
) -> Logits:
    """Compute the logits of our own model, or of one by its config and `tokenizer`, in one process."""
    model = recipe.model
    if model.config:
        made = in_transformers(recipe, weights, tokenizer=tokenizer)
        with torch.no_grad():
            return conversion_of(model).logits(made, batch.tokens, None, batch.mask)
    with torch.no_grad():
        outcome = whole_model(recipe, weights)(*(x for x in batch if x is not None))
    logits, *sentence = outcome if isinstance(outcome, tuple) else (outcome,)
    tokens = logits[..., : recipe.model.vocab_size][batch.mask]
    return (tokens, *(x for x in sentence if x is not None))


def write_model(
    recipe: Recipe,
    weights: Tensors,
    tokenizer: Tokenizer,
    directory: Path,
    dtype: torch.dtype,
) -> Mapping[str, str]:
    """Write config.json, weights and a GPT-2's generation_config.json; return the file of each tensor.

    `weights` are canonical, and read one after the other. Files are those of `save_pretrained`:
    model.safetensors, or shards with their index.
    """
    conversion = conversion_of(recipe.model)
    kind = conversion.model_class(recipe.model)
    config = model_config(recipe, tokenizer, dtype)
    with torch.device("meta"):
        model = kind(config)
    state = {
        name: torch.empty(tensor.shape, dtype=dtype, device="meta")
        for name, tensor in conversion.to_transformers(
            meta_parameters(recipe), recipe.model
        ).items()
    }
    left = model.load_state_dict(state, strict=False, assign=True)
    assert (
        set(left.missing_keys) <= conversion.tied.keys() and not left.unexpected_keys
    ), left
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    split = split_torch_state_dict_into_shards(state, max_shard_size=SHARD)
    read = ConvertedTensors(weights, recipe, dtype).read
    for file, names in split.filename_to_tensors.items():
        entries = [
            TensorEntry(name, dtype, tuple(state[name].shape), partial(read, name))
            for name in names
        ]
        tensor_file.write(directory / file, entries, {"format": "pt"})
    if split.is_sharded:
        metadata = {
            "total_parameters": sum(tensor.numel() for tensor in state.values()),
            **split.metadata,
        }
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(f"{text}\n")
    return split.tensor_to_filename


def model_config(
    recipe: Recipe, tokenizer: Tokenizer, dtype: torch.dtype
) -> PretrainedConfig:
    """Return the config.json of the recipe's model in `transformers`."""
    conversion = conversion_of(recipe.model)
    config = conversion.config(
        recipe.model, recipe.positions, recipe.dropout, tokenizer
    )
    config.architectures = [conversion.class_name(recipe.model)]
    config.dtype = dtype
    return config


def write_tokenizer(
    recipe: Recipe, tokenizer: Tokenizer, directory: Path
) -> tuple[str, ...]:
    """Write the tokenizer as `transformers` uses it with the recipe's model.

    Return the tokens that it no longer adds to a text, since a GPT is trained without them.
    """
    # Without this, GPT-2 of transformers takes a token's type for another token and adds its embedding.
    model = recipe.model
    reads_types = model.facts.masked and not model.config
    types = ["token_type_ids"] if reads_types else []
    tokenizer.model_input_names = ["input_ids", *types, "attention_mask"]
    backend = tokenizer.backend_tokenizer
    left_out: tuple[str, ...] = ()
    if not model.facts.masked:
        bare = backend.encode("a", add_special_tokens=False).tokens
        left_out = tuple(
            each for each in backend.encode("a").tokens if each not in bare
        )
    if left_out:
        backend.post_processor = AS_IT_IS
    save_tokenizer(tokenizer, directory)
    return left_out


def write_facts(
    checkpoint: Checkpoint, recipe: Recipe, directory: Path, **facts: Any
) -> None:
    """Write export.json, which says what was exported."""
    of_recipe = {"recipe_digest": catalog.digest(recipe), "title": recipe.title}
    text = json.dumps({"step": checkpoint.step, **of_recipe, **facts}, indent=2)
    (directory / "export.json").write_text(text + "\n")


class ConvertedTensors:
    """Canonical tensors as those of `transformers`, converted one at a time.

    Attributes:
        names: their names, those of one canonical tensor after each other.
    """

    def __init__(self, tensors: Tensors, recipe: Recipe, dtype: torch.dtype):
        self._tensors = tensors
        self._dtype = dtype
        self._heads = recipe.model.heads
        entries = conversion_of(recipe.model).name_map(recipe.model)
        self._places = {
            name: (entry, i) for entry in entries for i, name in enumerate(entry.theirs)
        }
        self.names = tuple(self._places)
        # of the newest canonical tensor, which may be several
        self._made: dict[str, list[Tensor]] = {}

    def read(self, name: str) -> Tensor:
        entry, index = self._places[name]
        if entry.ours not in self._made:
            self._made.clear()  # before the next one is read
            parts = entry.form.to_theirs(self._tensors[entry.ours], self._heads)
            self._made[entry.ours] = [part.to(self._dtype) for part in parts]
        return self._made[entry.ours][index]


def their_logits(recipe: Recipe, directory: Path, batch: RandomBatch) -> Logits:
    """Load the exported directory as a user does, and compute its logits in float32."""
    conversion = conversion_of(recipe.model)
    kind = conversion.model_class(recipe.model)
    model = kind.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        return conversion.logits(model, batch.tokens, batch.token_types, batch.mask)


def compare_tensors(
    recipe: Recipe,
    weights: Tensors,
    dtype: torch.dtype,
    files: Mapping[str, str],
    directory: Path,
    source: Path,
) -> None:
    """Read the exported tensors again, one at a time. Raises ExportMismatch for other numbers."""
    opened = {file: Reader(directory / file) for file in set(files.values())}
    odd = []
    for ours, theirs, form in conversion_of(recipe.model).name_map(recipe.model):
        parts = [opened[files[name]].whole(name).float() for name in theirs]
        if not torch.equal(
            form.to_ours(parts, recipe.model.heads), weights[ours].to(dtype).float()
        ):
            odd.append(ours)
    if odd:
        came = (
            f"the written files hold other numbers of {some(odd)} than the checkpoint"
        )
        raise ExportMismatch(
            f"{came}: nothing was exported from {source}; is the disk sound?"
        )


def compare(ours: Logits, theirs: Logits, source: Path) -> float:
    """Return the largest difference of logits. Raises ExportMismatch if it is more than rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        difference = _largest((mine,), (other,))
        if not (mine.isfinite().all() and other.isfinite().all()):
            fix = "export in float32, or another checkpoint with --step N"
            raise ExportMismatch(
                f"logits are not finite, the weights overflow: nothing was exported; {fix}"
            )
        allowed = TOLERANCE * max(1.0, float(mine.abs().max()))
        if not difference <= allowed:
            came = f"the logits of transformers differ from ours by {difference:.3g}, more than {allowed:.3g}"
            fix = "with the pinned version of transformers (requirements.txt) this is a bug of the conversion"
            raise ExportMismatch(f"{came}: nothing was exported from {source}; {fix}")
    return _largest(ours, theirs)


def _largest(a: Logits, b: Logits) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
