"""Whether a layout fills N nodes of G GPUs, or what would."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import ANY_GPU, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.planning.clusters.nodes import ClusterNode
from recipes.layout import divisors
from recipes.plural import counted
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe


@dataclass(frozen=True)
class Placement:
    """A plan on `nodes` nodes, of each of which it takes `gpus` GPUs."""

    plan: Plan
    nodes: int
    gpus: int


def placed(recipe: Recipe, ds_config: str, node: ClusterNode, nodes: int | None, *, whole: bool) -> Placement:
    """The plan on these nodes; without `nodes` on as many as it needs.

    A layout may take fewer GPUs than a node has, unless `whole`, where the user says how many it takes.

    Raises ProblemsError: the layout does not fill them; ConfigError: it cannot be had at all.
    """
    if recipe.parallel.dp is None:
        printed = recipe.hardware.gpus if recipe.hardware else None
        nodes = nodes or max(1, (printed or 0) // node.gpus)
        return Placement(_plan(recipe, ds_config, nodes * node.gpus), nodes, node.gpus)
    plan = _plan(recipe, ds_config, None)
    world = plan.layout.world
    taken = nodes or -(-world // node.gpus)
    gpus, over = divmod(world, taken)
    part = whole and gpus < node.gpus and (nodes is not None or taken > 1)
    if over or gpus > node.gpus or part:
        raise ProblemsError([_misfit(recipe, ds_config, node, taken, plan)])
    return Placement(plan, taken, gpus)


def _plan(recipe: Recipe, ds_config: str, world: int | None) -> Plan:
    """The plan on GPUs that can do everything; whatever is offloaded to NVMe has a directory there."""
    return resolve(recipe, ds_config, world, ANY_GPU, {NVME_VARIABLE: tempfile.gettempdir()})


def _misfit(recipe: Recipe, ds_config: str, node: ClusterNode, nodes: int, plan: Plan) -> Problem:
    layout = plan.layout
    world, there = layout.world, nodes * node.gpus
    degrees = f"{layout.tp} tensor x {layout.pp} pipeline x {layout.dp} data parallel"
    came = (
        f"{degrees} = {counted(world, 'process')} on {counted(nodes, 'node')} of {counted(node.gpus, 'GPU')}"
    )
    rule = f"{there} are there, and every GPU that is taken holds one process"
    fixes = []
    if world % node.gpus == 0 or world < node.gpus:
        fixes.append(f"--nodes {max(1, world // node.gpus)}")
    else:
        fits = max(divisor for divisor in divisors(world) if divisor <= node.gpus)
        fixes.append(f"--gpus-per-node {fits} --nodes {world // fits}")
    fixes += _other_dp(recipe, ds_config, layout.tp * layout.pp, there)
    return Problem("--nodes", came, rule, f"give {', or '.join(fixes)}")


def _other_dp(recipe: Recipe, ds_config: str, shared: int, there: int) -> list[str]:
    """The --set that fills the nodes by data parallelism, where the batch allows it."""
    dp, over = divmod(there, shared)
    if over or not dp:
        return []
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    for update in ({}, {"accumulation": None}, {"micro": None}, {"micro": None, "accumulation": None}):
        batch = recipe.batch.model_copy(update=update)
        try:
            _plan(recipe.model_copy(update={"parallel": parallel, "batch": batch}), ds_config, None)
        except ConfigError:
            continue
        return [" ".join([f"--set parallel.dp={dp}", *(f"--set batch.{key}=null" for key in update)])]
    return []
