"""The first checkpoint of an adopted run: weights, moments and counters of a DeepSpeed run in our form.

What is written is checked while it is read. Master weights that are rounded are the module's own weights,
where the save holds both. Each element's moments satisfy |m| <= c sqrt(v): m and v are weighted sums of the
same gradients and of their squares, and the inequality of Cauchy and Schwarz bounds the one by the other.
Moments of another tensor, or transposed ones, do not.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ds_configs.plan import Plan, plan_facts
from launch.checkpoints import run_checkpoints, tensor_file
from launch.checkpoints.manifest import (
    ListedTensor,
    Manifest,
    Progress,
    ScalerState,
    Series,
    file_name,
    kinds_after,
)
from launch.checkpoints.names import MOMENTS, Kind
from launch.checkpoints.shares import Sums, add_up, with_sums
from launch.machine import description
from launch.weights.deepspeed_weights import NAMES, OfDeepSpeed
from modeling.families import meta_parameters
from modeling.formats.deepspeed import states
from recipes.files import refuse

SLACK = 1.01  # of the bound, for rounding
SMALLEST = 1e-16  # of a moment whose square is a float32
FIX = (
    "give another save of the run: this one is damaged, or was put together of several"
)


def write(
    saved: OfDeepSpeed, betas: Sequence[float], plan: Plan, root: Path, corpus: str
) -> None:
    """Write the checkpoint below `root`.

    Args:
        betas: of their Adam.
        corpus: checksum of the training tokens.

    Raises FileError: tensors are not what DeepSpeed wrote; OSError.
    """
    recipe = plan.recipe
    state = saved.state
    made = state.steps - state.skipped
    directory = run_checkpoints.directory_of(root, state.steps)
    directory = directory.with_suffix(run_checkpoints.WRITING)
    run_checkpoints.begin(directory)
    try:
        check_rounding(state)
        progress = Progress(
            state.steps, state.updates, made, state.skipped, _scaler(plan, state)
        )
        kinds = kinds_after(state.updates)
        sums = Sums()
        bound = moment_bound(betas, state.updates)
        entries, tensors = _contents(saved, plan, kinds, sums, bound)
        name = file_name(0)
        stored = tensor_file.write(directory / name, entries)
        held = Manifest(
            progress,
            {"position": recipe.sizes_in_data.samples(state.steps)},
            corpus,
            recipe.as_data(),
            plan_facts(plan),
            description.versions(),
            {name: stored},
            with_sums(tensors, sums),
            kinds,
            saved=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        run_checkpoints.complete(directory, held)
    finally:  # it has another name if it is whole
        shutil.rmtree(directory, ignore_errors=True)


def _contents(
    saved: OfDeepSpeed, plan: Plan, kinds: tuple[Kind, ...], sums: Sums, bound: float
) -> tuple[list[tensor_file.TensorEntry], dict[str, ListedTensor]]:
    """Return the entries of the one file, and the tensors in it; `sums` gets those of each entry."""
    where = saved.state.where
    by_kind = {kind: saved.canonical(plan.recipe, NAMES[kind]) for kind in kinds}

    def read(kind: Kind, name: str) -> Tensor:
        numbers = by_kind[kind][name]
        if not numbers.isfinite().all():
            refuse(
                where,
                f"{kind} of {name} holds NaN or infinity",
                "training ended there",
                FIX,
            )
        if kind == MOMENTS[1]:
            check_moments(where, name, by_kind[MOMENTS[0]][name], numbers, bound)
        return numbers.reshape(-1)

    entries = []
    tensors = {}
    for name, parameter in meta_parameters(plan.recipe).items():
        elements = parameter.numel()
        series = Series(0, None, 0, elements, elements)
        tensors[name] = ListedTensor(tuple(parameter.shape), (series,))
        for kind in kinds:
            key = f"{kind}/{name}"
            reading = partial(read, kind, name)
            seen = partial(add_up, sums, key, parameter, 0)
            entries.append(
                tensor_file.TensorEntry(key, torch.float32, (elements,), reading, seen)
            )
    return entries, tensors


def moment_bound(betas: Sequence[float], updates: int) -> float:
    """Return the largest |m| / sqrt(v) of Adam's moments after so many updates (Kingma and Ba 2014, section 2).

    By Cauchy and Schwarz, with m = (1 - b1) sum b1^i g_i and v = (1 - b2) sum b2^i g_i^2.
    """
    first, second = betas
    ratio = first * first / second if second else math.inf
    if ratio >= 1:
        return math.inf
    total = (1 - ratio**updates) / (1 - ratio)
    return (1 - first) * math.sqrt(total / (1 - second))


def check_moments(
    where: Path, name: str, first: Tensor, second: Tensor, bound: float
) -> None:
    """Check that both moments are of the same gradients. Raises FileError."""
    if not second.any():
        # so are positions that DeepSpeed's tool takes from gpt-neox's last pipeline stage
        refuse(where, f"{name} never had a gradient", "all weights are trained", FIX)
    most = SLACK * bound * second.sqrt() + SMALLEST
    odd = int((~(first.abs() <= most)).sum())  # of negative numbers the root is NaN
    if odd:
        refuse(
            where,
            f"{odd:,} elements of {name} have moments that no gradients give",
            f"|{MOMENTS[0]}| is at most {bound:.4g} sqrt({MOMENTS[1]})",
            FIX,
        )


def check_rounding(state: states.DeepSpeedState) -> None:
    """Check the rounded master weights against the module's. Raises FileError."""
    for name in sorted(state.module.keys() & state.parameters.keys()):
        rounded = state.module[name]
        own = state.parameters[name].read(states.WEIGHT).to(rounded.dtype)
        if not torch.equal(own, rounded):
            refuse(
                state.where,
                f"{name} differs between the optimizer's and the model's file",
                "a step writes the rounded master weights into the model",
                FIX,
            )


def _scaler(plan: Plan, state: states.DeepSpeedState) -> ScalerState | None:
    """Return the state of the loss scaler, where both runs are in fp16."""
    scaler: Mapping[str, float] = state.scaler
    if plan.precision != "fp16" or not scaler:
        return None
    return ScalerState(
        float(scaler["cur_scale"]),
        int(scaler["cur_iter"]),
        int(scaler["last_overflow_iter"]),
        max(1, int(scaler.get("cur_hysteresis", 1))),
    )
