"""Plans of recipes for other machines: as published, or on any GPUs."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from ds_configs.plan import ANY_GPU, Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.machine.memory import offloads
from recipes.schema import Recipe


def processes(recipe: Recipe) -> int:
    """Return tp x pp x dp as stated by the recipe."""
    return math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)


def published_plan(recipe: Recipe, world: int | None = None) -> Plan:
    """Resolve a recipe with its own ds_config, on `world` or its own number of ideal GPUs.

    Raises ConfigError.
    """
    return resolve_on_machine(recipe, recipe.ds_config, world or processes(recipe))


def resolve_on_machine(
    recipe: Recipe,
    ds_config: str | Path,
    world: int | None = None,
    machine: Machine = ANY_GPU,
) -> Plan:
    """Resolve a plan for another machine; the NVMe path stays $MEGARECIPES_NVME.

    Raises ConfigError.
    """
    stand_in = tempfile.gettempdir()  # the resolver wants a directory that is there
    plan = resolve(recipe, ds_config, world, machine, {NVME_VARIABLE: stand_in})
    for section in offloads(plan):
        if section.get("nvme_path") == stand_in:
            section["nvme_path"] = f"${NVME_VARIABLE}"
    return plan
