"""Kind and number of the nodes of a layout, which has to fill them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Plan
from launch.planning.prediction import hardware
from launch.planning.resolved_plans import resolve_on_machine
from recipes.layout import divisors
from recipes.problems import Problem, ProblemsError, counted
from recipes.schema import Recipe


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster, as its scheduler and its image need to know it.

    Attributes:
        capability: compute capability of its GPUs, 70 for sm_70; None: not known.
        cores: cores of its host; None: not known.
        constraint: Slurm's name for this kind of node; None: not needed.
    """

    title: str
    gpus: int
    capability: int | None = None
    cores: int | None = None
    constraint: str | None = None


def node_of(recipe: Recipe, name: str | None = None, gpus: int | None = None) -> ClusterNode:
    """Return the node `name` of the catalogue, else the recipe's; `gpus` replaces its number of GPUs.

    Raises ProblemsError: no such node, or nobody says how many GPUs one has.
    """
    own = recipe.hardware
    known: str | None = name or (own.node if own else None)
    if known:
        found = hardware.find(known)
        capability, host = found.gpu.compute_capability, found.form.host
        number = int(capability.replace(".", "")) if capability else None
        node = ClusterNode(found.form.title, found.gpus, number, host.cores, found.form.slurm_constraint)
        printed = own.gpus_per_node if own and not name else None
        return replace(node, gpus=gpus or printed or node.gpus)
    count = gpus or (own.gpus_per_node if own else None)
    if count is None:
        came = "the recipe does not say how many GPUs a node has"
        fix = "give --hardware, e.g. a100-80x8, or --gpus-per-node 8"
        raise ProblemsError([Problem("--gpus-per-node", came, "ranks are counted node by node", fix)])
    return ClusterNode(own.name if own else "any GPU", count)


class Placement(NamedTuple):
    """A plan on `nodes` nodes with `gpus` GPUs of each."""

    plan: Plan
    nodes: int
    gpus: int


def place_on_nodes(
    recipe: Recipe, ds_config: str, node: ClusterNode, nodes: int | None, *, whole: bool
) -> Placement:
    """Resolve the plan on `nodes` nodes; None: on as many as the layout needs.

    A layout may take fewer GPUs than a node has, unless `whole`, where the user says how many it takes.

    Raises ProblemsError: the layout does not fill them; ConfigError: it cannot be had at all.
    """
    if recipe.parallel.dp is None:
        printed = recipe.hardware.gpus if recipe.hardware else None
        nodes = nodes or max(1, (printed or 0) // node.gpus)
        return Placement(resolve_on_machine(recipe, ds_config, nodes * node.gpus), nodes, node.gpus)
    plan = resolve_on_machine(recipe, ds_config)
    world = plan.layout.world
    taken = nodes or -(-world // node.gpus)
    gpus, over = divmod(world, taken)
    part = whole and gpus < node.gpus and (nodes is not None or taken > 1)
    if over or gpus > node.gpus or part:
        raise ProblemsError([_misfit(recipe, ds_config, node, taken, plan)])
    return Placement(plan, taken, gpus)


def _misfit(recipe: Recipe, ds_config: str, node: ClusterNode, nodes: int, plan: Plan) -> Problem:
    layout = plan.layout
    world, there = layout.world, nodes * node.gpus
    nodes_there = f"{counted(nodes, 'node')} of {counted(node.gpus, 'GPU')}"
    came = f"{layout.degrees()} = {counted(world, 'process')} on {nodes_there}"
    rule = f"{there} are there, and every GPU that is taken holds one process"
    fix = f"--nodes {max(1, world // node.gpus)}"
    if world % node.gpus and world > node.gpus:
        fits = max(divisor for divisor in divisors(world) if divisor <= node.gpus)
        fix = f"--gpus-per-node {fits} --nodes {world // fits}"
    fixes = [fix, *_other_dp(recipe, ds_config, layout.tp * layout.pp, there)]
    return Problem("--nodes", came, rule, f"give {', or '.join(fixes)}")


def _other_dp(recipe: Recipe, ds_config: str, shared: int, there: int) -> list[str]:
    """Return the --set options to fill the nodes by data parallelism, if the batch allows it."""
    dp, over = divmod(there, shared)
    if over or not dp:
        return []
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    for update in ({}, {"accumulation": None}, {"micro": None}, {"micro": None, "accumulation": None}):
        batch = recipe.batch.model_copy(update=update)
        try:
            resolve_on_machine(recipe.model_copy(update={"parallel": parallel, "batch": batch}), ds_config)
        except ConfigError:
            continue
        return [" ".join([f"--set parallel.dp={dp}", *(f"--set batch.{key}=null" for key in update)])]
    return []
