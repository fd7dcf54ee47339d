"""Export a checkpoint's weights to a directory that `transformers` loads, and compare what it computes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.vocabularies.vocabulary import vocabulary_size
from launch.checkpoints.checkpoint import Checkpoint, complete_checkpoints
from launch.checkpoints.stored import StoredTensors
from launch.training.build_model import whole_model
from modeling.families import family_of
from modeling.huggingface.conversion import Logits, Tensors, check_convertible
from recipes import catalog
from recipes.files import is_file, refuse
from recipes.micro_batch import FIELDS
from recipes.problems import some
from recipes.schema import Recipe

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit where that is above 1
RESTORE = "restore it from a copy of the run, or name another with --step"
SAMPLES, POSITIONS = 2, 128  # random tokens to compare on; the second sample is padded where samples may be


@dataclass(frozen=True)
class Export:
    """What was written. Differences are the largest absolute ones between logits on random tokens."""

    directory: Path
    checkpoint: Path
    step: int
    dtype: str
    difference: float  # transformers on the export against our model with the same, rounded, weights
    rounding: float  # our model with the rounded weights against the one with the run's float32 weights


class ExportMismatch(RuntimeError):
    """The exported model computes something else than ours."""


def recipe_of(run: Path) -> Recipe:
    """The recipe of a run. Raises ValueError where `run` is none, or `transformers` has no such model."""
    if not is_file(run / "recipe.yaml"):
        what = "is no run of this project (it holds no recipe.yaml)" if run.exists() else "does not exist"
        raise ValueError(f"{run} {what}: give a run directory, as pretrain.py printed it")
    recipe = catalog.load_resolved(run / "recipe.yaml")
    check_convertible(recipe.model)
    return recipe


def choose_checkpoint(run: Path, recipe: Recipe, step: int | None) -> Checkpoint:
    """The complete checkpoint after `step` steps, or the newest. Raises ValueError naming those there are."""
    found = {c.step: c for c in complete_checkpoints(run / "checkpoints")}
    if not found:
        raise ValueError(f"{run} holds no complete checkpoint: {_why_no_checkpoint(recipe)}")
    if step is not None and step not in found:
        came = f"--step {step}: {run} holds no complete checkpoint of that step"
        raise ValueError(f"{came}, only of {', '.join(map(str, found))}: give one of these")
    return found[max(found) if step is None else step]


def _why_no_checkpoint(recipe: Recipe) -> str:
    if recipe.run.save_last:
        return "the run saves at its end and every run.save_every steps; let it continue"
    every = f"every run.save_every={recipe.run.save_every} steps and" if recipe.run.save_every else "only"
    saves = f"with run.save_last=false the run saves {every} when it is stopped"
    return f"{saves}; train it again with --set run.save_last=true"


def export(
    checkpoint: Checkpoint, recipe: Recipe, tokenizer: Tokenizer, out: Path, dtype: str, *, run: Path
) -> Export:
    """Export to `out`, a directory that is new or empty, which appears whole and checked or not at all.

    Raises:
        FileError: checkpoint or tokenizer are damaged or of another model, or `out` cannot be made.
        ExportMismatch: `transformers` computes other logits than our model from the same weights.
    """
    if (tokens := vocabulary_size(tokenizer)) > recipe.model.vocab_size:
        came = f"its tokenizer has {tokens} tokens, and model.vocab_size={recipe.model.vocab_size}"
        fix = "restore tokenizer/ and recipe.yaml from a copy of the run"
        refuse(run, came, "the model knows no more", fix)
    master = read_weights(checkpoint, recipe)
    rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in master.items()}

    batch = RandomBatch.of(recipe)
    try:
        ours = our_logits(recipe, rounded, batch)
    except ValueError as error:  # a tensor of another shape
        refuse(checkpoint.directory, str(error), "they are not of the run's recipe", RESTORE)
    rounding = 0.0 if dtype == "float32" else _largest(ours, our_logits(recipe, master, batch))
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
    except (OSError, ValueError) as error:
        refuse(f"--out {out}", f"cannot be made ({error})", fix="name another directory")
    try:
        write_model(recipe, rounded, tokenizer, temporary)
        tokenizer.save_pretrained(temporary)
        facts = dict(run=str(run), step=checkpoint.step, dtype=dtype)
        facts |= dict(recipe_digest=catalog.digest(recipe), title=recipe.title)
        (temporary / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
        difference = compare(ours, their_logits(recipe, temporary, batch), checkpoint.directory)
        os.replace(temporary, out)  # onto nothing, or onto an empty directory
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(out, checkpoint.directory, checkpoint.step, dtype, difference, rounding)


def read_weights(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Tensor]:
    """The canonical weights of a checkpoint. Raises FileError: damaged, or of another recipe."""
    where = checkpoint.directory
    for name in checkpoint.manifest.files:
        if problem := checkpoint.check_file(name):
            refuse(where, problem, "its files are those that the run wrote", RESTORE)
    weights = dict(StoredTensors(where, checkpoint.manifest))
    wanted = {entry.ours for entry in family_of(recipe.model).conversion.name_map(recipe.model)}
    if other := sorted(wanted ^ weights.keys()):
        refuse(where, f"holds or lacks {some(other)}", "its tensors are those of the run's recipe", RESTORE)
    if odd := sorted(n for n, t in weights.items() if t.dtype != torch.float32 or not t.isfinite().all()):
        rule = "a run keeps such numbers, until it diverges"
        refuse(where, f"{some(odd)}: not all finite float32", rule, RESTORE)
    return weights


class RandomBatch(NamedTuple):
    """Random inputs: tokens (B, S), token types (B, S) and lengths (B,) where the family has them."""

    tokens: Tensor
    token_types: Tensor | None
    lengths: Tensor | None

    @staticmethod
    def of(recipe: Recipe) -> RandomBatch:
        """By the recipe's seed."""
        generator, inputs = torch.Generator().manual_seed(recipe.seed), FIELDS[recipe.model.family].inputs
        shape = (SAMPLES, min(POSITIONS, recipe.sequence_length))
        return RandomBatch(
            torch.randint(recipe.model.vocab_size, shape, generator=generator),
            torch.randint(2, shape, generator=generator) if "token_types" in inputs else None,
            torch.tensor([shape[1], shape[1] // 2 + 1]) if "lengths" in inputs else None,
        )

    @property
    def mask(self) -> Tensor:
        """(B, S), True for tokens that are not padding."""
        if self.lengths is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


def our_logits(recipe: Recipe, weights: Tensors, batch: RandomBatch) -> Logits:
    """From our own model in one process."""
    with torch.no_grad():
        outcome = whole_model(recipe, weights)(*(x for x in batch if x is not None))
    logits, *sentence = outcome if isinstance(outcome, tuple) else (outcome,)
    tokens = logits[..., : recipe.model.vocab_size][batch.mask]
    return (tokens, *(x for x in sentence if x is not None))


def write_model(recipe: Recipe, weights: Tensors, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config.json, model.safetensors and, of a GPT-2, generation_config.json."""
    conversion = family_of(recipe.model).conversion
    special = dict(end=tokenizer.eos_token_id, pad=tokenizer.pad_token_id or 0)
    config = conversion.config(recipe.model, recipe.sequence_length, recipe.dropout, **special)
    with torch.device("meta"):
        model = conversion.model_class(recipe.model)(config)
    state = conversion.to_transformers(weights, recipe.model)
    left = model.load_state_dict(state, strict=False, assign=True)
    assert set(left.missing_keys) <= conversion.copies and not left.unexpected_keys, left
    model.tie_weights()
    model.save_pretrained(directory)


def their_logits(recipe: Recipe, directory: Path, batch: RandomBatch) -> Logits:
    """From the exported directory as a user loads it, computed in float32."""
    conversion = family_of(recipe.model).conversion
    kind = conversion.model_class(recipe.model)
    model = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return conversion.logits(model, batch.tokens, batch.token_types, batch.mask)


def compare(ours: Logits, theirs: Logits, source: Path) -> float:
    """The largest difference. Raises ExportMismatch where it is more than rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        difference = _largest((mine,), (other,))
        allowed = TOLERANCE * max(1.0, float(mine.abs().max()))
        if not difference <= allowed:  # NaN differs
            came = f"the logits of transformers differ from ours by {difference:.3g}, more than {allowed:.3g}"
            fix = "with the pinned version of transformers (requirements.txt) this is a bug of the conversion"
            raise ExportMismatch(f"{came}: nothing was exported from {source}; {fix}")
    return _largest(ours, theirs)


def _largest(a: Logits, b: Logits) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
