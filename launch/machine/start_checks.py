"""The quick checks of a machine, made at every start of a run."""

from __future__ import annotations

import difflib
import os
import re
from functools import partial
from pathlib import Path

from launch.machine import gpu_checkup, places
from launch.machine.checks import Check, Function, failed, ok, unchecked, warning
from launch.machine.description import REPOSITORY, installed
from launch.machine.model_states import SAVED_BYTES
from launch.ranks import processes
from modeling import cost
from recipes.problems import some
from recipes.schema import Recipe

# Packages of requirements.txt that no run needs: tests, lint and types.
TOOLS = re.compile(r"pytest|hypothesis|ruff|mypy|types-")
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
        chosen["packages"] = packages
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


def packages() -> Check:
    """Check the installed packages against requirements.txt; local versions (+cu126) are right, too."""
    from packaging.requirements import Requirement

    file = REPOSITORY / "requirements.txt"
    if not file.exists():
        return unchecked(f"there is no {file}")
    pinned = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    wanted = [Requirement(line) for line in pinned if line and not line.startswith("-")]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    missing, other = [], []
    for each in wanted:
        found = installed(each.name)
        if found is None:
            missing.append(each.name)
        elif found not in each.specifier and not TOOLS.match(each.name):
            other.append(f"{each.name} {found}, pinned {str(each.specifier).removeprefix('==')}")
    fix = "pip install -r requirements.txt"
    if needed := [name for name in missing if not TOOLS.match(name)]:
        return failed(f"not installed: {some(needed)}", fix)
    if other:
        return warning(f"{some(other)}: what was tested are the pinned ones", fix)
    left_out = f"; not installed, for tests alone: {some(missing)}" if missing else ""
    return ok(f"{len(wanted) - len(missing)} as pinned in requirements.txt{left_out}")


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
