"""Plans of recipes for other machines: as published, on any GPUs, on nodes of the catalogue."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from ds_configs.plan import ANY_GPU, Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.machine.memory import offloads
from launch.planning.prediction.hardware import Node
from recipes.schema import Recipe


def processes(recipe: Recipe) -> int:
    """Return tp x pp x dp as stated by the recipe."""
    return math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)


def published_plan(recipe: Recipe, world: int | None = None) -> Plan:
    """Resolve a recipe with its own ds_config, on `world` or its own number of ideal GPUs.

    Raises ConfigError.
    """
    return resolve_on_machine(recipe, recipe.ds_config, world or processes(recipe))


def plan_on_nodes(
    recipe: Recipe, ds_config: str | Path, node: Node, nodes: int | None = None
) -> Plan:
    """Resolve a recipe on `nodes` such nodes; None: on as many as needed. Raises ConfigError."""
    world = None
    if recipe.parallel.dp is None:
        world = (nodes or 1) * node.gpus
    elif nodes:
        stated = processes(recipe)
        # A node that the layout leaves partly empty is its user's to choose.
        world = (
            stated
            if (nodes - 1) * node.gpus < stated <= nodes * node.gpus
            else nodes * node.gpus
        )
    return resolve_on_machine(recipe, ds_config, world, node.machine)


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
