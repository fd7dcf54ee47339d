"""Whether the tensors of given weights are those of the model that their config.json describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from launch.machine import processes
from modeling.families import family_of, model_shape
from modeling.huggingface.weight_files import read_state_dict
from modeling.initialization import Init, canonical_name
from recipes.files import FileError
from recipes.problems import Problem, some
from recipes.schema import Recipe

KEY = "--init_from"
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHOWN = 3  # tensors of each problem


def problems(directory: Path, recipe: Recipe | None) -> list[Problem]:
    """Everything wrong with the weights in `directory`, as of the model of `recipe`; None: it is not known.

    Of the weights only headers are read, and the tensors that have to be equal, by one process of a machine.
    """
    try:
        stored = read_state_dict(directory)
    except FileError as error:
        return list(error.problems)
    return list(_problems(stored, recipe))


def _problems(stored: dict[str, torch.Tensor], recipe: Recipe | None) -> Iterator[Problem]:
    if recipe is None:
        return
    # So that a config.json with a billion layers makes no billion layers.
    few = min(recipe.model.layers, len(stored) + 1)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": few})})
    conversion = family_of(recipe.model).conversion
    selected, shapes = conversion.select(stored, recipe.model), expected_shapes(recipe)
    found, kind = selected.tensors, conversion.class_name(recipe.model)
    fix = f"give a directory in which save_pretrained wrote a whole {kind}"
    if missing := [name for name in shapes if name not in found]:
        why = conversion.why_missing(missing, recipe.model)
        rule = why or f"a {kind} of this config.json has {'it' if len(missing) == 1 else 'them'}"
        yield Problem(KEY, f"lacks {some(missing, SHOWN)}", rule, "" if "--set" in why else fix)
    if unexpected := [selected.stored[name] for name in found if name not in shapes]:
        rule = f"a {kind} of this config.json has no such tensor"
        yield Problem(KEY, f"holds {some(unexpected, SHOWN)}", rule, fix)
    if selected.twice:
        yield Problem(
            KEY, f"holds {some(selected.twice, SHOWN)} under two names", "one of them would be lost", fix
        )
    both = {name: (found[name], shape) for name, shape in shapes.items() if name in found}
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
        yield Problem(KEY, f"holds {some(differing, SHOWN)}", "that is its shape by config.json", fix)
    for copy, original in selected.untied() if processes.local_rank() == 0 else ():
        rule = f"our {recipe.model.family} has one tensor for both, and would lose the other"
        yield Problem(KEY, f"{copy} differs from {original}", rule, "give weights with tied embeddings")


def expected_shapes(recipe: Recipe) -> dict[str, torch.Size]:
    """Shape of every tensor of the class in `transformers`, by its name there."""
    family = family_of(recipe.model)
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, meta=True)
    model = family.plain(model_shape(recipe, recipe.model.vocab_size), group=None, init=init)
    ours = {canonical_name(parameter): parameter for parameter in model.parameters()}
    return {name: t.shape for name, t in family.conversion.to_transformers(ours, recipe.model).items()}


def _readable(tensor: torch.Tensor) -> bool:
    return tensor.dtype in READABLE and tensor.layout is torch.strided


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
