"""Plans of recipes as they were published, on GPUs that can do everything."""

from __future__ import annotations

import math
import tempfile

from ds_configs.plan import ANY_GPU, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.machine.model_states import offloads
from recipes.schema import Recipe


def processes(recipe: Recipe) -> int:
    """tp x pp x dp as the recipe states them."""
    return math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)


def published_plan(recipe: Recipe, world: int | None = None) -> Plan:
    """The recipe with its own ds_config and number of processes (or `world`), on GPUs that can do everything.

    A path that the other machine's environment gives is left as $MEGARECIPES_NVME.

    Raises:
        ConfigError: it cannot run like that.
    """
    stand_in = tempfile.gettempdir()  # the resolver wants a directory that is there
    plan = resolve(recipe, recipe.ds_config, world or processes(recipe), ANY_GPU, {NVME_VARIABLE: stand_in})
    for section in offloads(plan):
        if section.get("nvme_path") == stand_in:
            section["nvme_path"] = f"${NVME_VARIABLE}"
    return plan
