"""Checkpoints made by hand, for tests without an engine."""

import zlib

import torch
from transformers import PreTrainedTokenizerFast

from data.text.trained_vocabulary import train_bpe
from launch.checkpoints import manifest, run_checkpoints, tensor_file
from launch.checkpoints.geometry import share
from launch.checkpoints.manifest import (
    MOMENTS,
    WEIGHT,
    ListedTensor,
    Manifest,
    Progress,
    Series,
    StoredFile,
    file_name,
    joined,
)
from launch.checkpoints.stored import StoredTensors
from launch.checkpoints.tensor_file import TensorEntry
from modeling.families import conversion_of, meta_parameters
from modeling.formats.huggingface.conversion import SAME
from recipes import catalog


def model_tensors(recipe, seed=1):
    """Random weights of a recipe's model."""
    random = torch.Generator().manual_seed(seed)
    shapes = meta_parameters(recipe)
    return {name: 0.02 * torch.randn(p.shape, generator=random) for name, p in shapes.items()}


def write_checkpoint(  # noqa: PLR0913 - tests name what they change
    root, step, tensors, recipe=None, corpus="0" * 8, kinds=(WEIGHT,), ranks=1, data=None, form="canonical"
):
    """Write a whole checkpoint below `root`, each tensor cut over `ranks` files; its directory.

    `form` "transformers": as a run of `transformers`' modules stores them.
    """
    forms = dict.fromkeys(tensors, "canonical")
    if form == "transformers":
        entries = {e.ours: e.form for e in conversion_of(recipe.model).name_map(recipe.model)}
        forms = {name: "canonical" if entries[name] is SAME else form for name in tensors}
        tensors = {n: entries[n].to_theirs(t, recipe.model.heads)[0] for n, t in tensors.items()}
    directory = run_checkpoints.directory_of(root, step).with_suffix(run_checkpoints.WRITING)
    run_checkpoints.begin(directory)
    files, pieces = {}, {name: [] for name in tensors}
    for rank in range(ranks):
        file, entries = file_name(rank), []
        for name, tensor in tensors.items():
            first, count = share(tensor.numel(), rank, ranks)
            if count:
                pieces[name].append(Series(rank, None, first, count, count))
            part = tensor.reshape(-1)[first : first + count]
            every = {WEIGHT: part, MOMENTS[0]: part / 2, MOMENTS[1]: part.abs()}
            of_kind = {kind: every[kind] for kind in kinds}
            entries += [
                TensorEntry(f"{k}/{name}", p.dtype, (count,), lambda p=p: p) for k, p in of_kind.items()
            ]
        files[file] = tensor_file.write(directory / file, entries)
    held = {
        name: ListedTensor(tuple(t.shape), joined(pieces[name]), forms[name]) for name, t in tensors.items()
    }
    recipe = recipe or catalog.load("default/sotu", tiny=True)
    recipe = recipe.model_copy(update={"steps": max(step, recipe.steps)})
    updates = step if len(kinds) > 1 else 0  # without moments all steps were skipped
    progress = Progress(step, updates, updates, step - updates)
    values, position = recipe.model_dump(mode="json", by_alias=True), step * recipe.batch.global_
    if form == "transformers":
        values["model"]["implementation"] = form
    made = Manifest(progress, data or {"position": position}, corpus, values, {}, {}, files, held, kinds)
    return run_checkpoints.complete(directory, made)


def write_run(path, recipe, **how):
    """A run directory with a tokenizer and a checkpoint of step 4; `how` as in `write_checkpoint`."""
    path.mkdir()
    (path / "recipe.yaml").write_text(catalog.dump(recipe))
    tokens = train_bpe(["the thin thing this there"] * 3, 262)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(path / "tokenizer")
    write_checkpoint(path / "checkpoints", 4, model_tensors(recipe), recipe, ranks=2, **how)
    return path


def complete_checkpoints(root):
    """All whole checkpoints, the oldest first."""
    return [e for e in run_checkpoints.found(root) if isinstance(e, run_checkpoints.Checkpoint)][::-1]


def rewrite_manifest(directory, change):
    """Change a manifest as one who writes it would: its own checksum fits again."""
    manifest.write(change(manifest.read(directory)), directory)


def layers_of_files(root):
    """Of the newest checkpoint below `root`: file -> numbers of the transformer layers that it holds of."""
    held = run_checkpoints.newest(root).manifest
    names = {file: (name.split(".") for name in held.held_by(file)) for file in sorted(held.files)}
    return {file: sorted({int(n[1]) for n in of if n[0] == "layers"}) for file, of in names.items()}


def load_weights(directory, kind=WEIGHT):
    """All tensors of one kind in memory, full and canonical."""
    return dict(StoredTensors(directory, kind=kind))


def checksum(path):
    """Size and checksum of a file, as a manifest holds them."""
    content = path.read_bytes()
    return StoredFile(len(content), f"{zlib.crc32(content):08x}")
