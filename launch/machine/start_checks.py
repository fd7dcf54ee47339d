"""The quick checks of a machine, made at every start of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from launch.machine import checkup, gpu_checkup, places
from launch.machine.checks import Function
from launch.machine.model_states import SAVED_BYTES
from launch.ranks import processes
from modeling import cost
from recipes.schema import Recipe


def quick(recipe: Recipe, directory: Path) -> dict[str, Function]:
    """Return the checks of every start by their keys. `directory`: of the run."""
    chosen: dict[str, Function] = {
        "GPU kernels": gpu_checkup.kernels,
        "variables": checkup.variables,
        "shared memory": partial(gpu_checkup.shared_memory, processes.local_world_size()),
    }
    if processes.rank() == 0:
        chosen["packages"] = checkup.packages
        chosen["disk"] = partial(places.space, directory, *checkpoint_bytes(recipe))
    return chosen


def checkpoint_bytes(recipe: Recipe) -> tuple[float, int | None]:
    """Return (bytes of a checkpoint, largest number on the disk at one time; None: unknown).

    An old checkpoint is removed after the newer one is on the disk.
    """
    run = recipe.run
    size = SAVED_BYTES * cost.parameters(recipe.model, recipe.positions)
    saves = recipe.steps // run.save_every if run.save_every else 0
    saves += bool(run.save_last and not (run.save_every and recipe.steps % run.save_every == 0))
    most = run.keep_checkpoints + 1 if run.keep_checkpoints else None
    if run.save_every_minutes is not None:
        return size, most
    return size, saves if most is None else min(saves, most)
