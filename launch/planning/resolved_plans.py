"""Plans of recipes without their machine: as published, or on GPUs that can do everything."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace

from ds_configs.findings import Notice
from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.planning.prediction.workload import offloads
from recipes.schema import Recipe

# For resolving a row that is meant for another machine: it refuses nothing.
ANY_GPU = Machine("cuda", fp16=True, bf16=True, compiler=True, libaio=True)


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


def anywhere(recipe: Recipe, ds_config: str, machine: Machine, world: int | None = None) -> Plan:
    """The plan of `world` processes, or of as many as the layout asks for.

    Where `machine` alone is in the way, it is a plan for a GPU that can do everything, and a notice says so.
    Raises ConfigError: it cannot run on any machine.
    """
    try:
        return resolve(recipe, ds_config, world, machine)
    except ConfigError as refused:
        try:
            plan = resolve(recipe, ds_config, world, ANY_GPU)
        except ConfigError:
            raise refused from None
        here = [Notice("machine", f"refused on this machine: {problem}") for problem in refused.problems]
        return replace(plan, notices=(*plan.notices, *here))


def assumes_gpus(plan: Plan) -> bool:
    """Whether a plan of `anywhere` is for GPUs that can do everything, since this machine refuses it."""
    return any(notice.key == "machine" for notice in plan.notices)


def assumed_machine(plan: Plan, here: str) -> str:
    """On what a plan of `anywhere` would run, where this machine, called `here`, does not start it."""
    if assumes_gpus(plan):
        return f"planned for GPUs that have fp16, bf16 and every op of DeepSpeed's; here: {here}"
    return f"planned for machines like this one: {here}"
