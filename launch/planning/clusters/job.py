"""A recipe on the nodes of a cluster: which nodes, how many, and the values for every file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_configs.plan import Plan
from launch.console import launch_lines
from launch.planning.prediction import hardware
from launch.planning.resolved_plans import resolve_on_machine
from recipes.layout import Layout, divisors
from recipes.problems import Problem, ProblemsError, counted
from recipes.schema import Recipe

MOST_CHARACTERS = 48  # characters of a name, which pods end with "-worker-1023" within 63
CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")


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
        capability, host = found.gpu.compute_capability, found.host
        number = int(capability.replace(".", "")) if capability else None
        node = ClusterNode(found.title, found.gpus, number, host.cores, found.slurm_constraint)
        printed = own.gpus_per_node if own and not name else None
        return replace(node, gpus=gpus or printed or node.gpus)
    count = gpus or (own.gpus_per_node if own else None)
    if count is None:
        came = "the recipe does not say how many GPUs a node has"
        fix = "give --hardware, e.g. a100-80x8, or --gpus-per-node 8"
        raise ProblemsError([Problem("--gpus-per-node", came, "ranks are counted node by node", fix)])
    return ClusterNode(own.name if own else "any GPU", count)


@dataclass(frozen=True)
class Job:
    """A recipe on the nodes of a cluster.

    Attributes:
        words: arguments of pretrain.py, without --out and --resume.
        gpus: number of GPUs and processes on each node.
        run_directory: on a file system shared by all nodes; relative to the checkout.
        seconds: time limit, after which the scheduler requeues the job.
        cores: physical cores of each process; None: not known.
    """

    name: str
    words: tuple[str, ...]
    plan: Plan
    node: ClusterNode
    nodes: int
    gpus: int
    run_directory: str
    hosts: tuple[str, ...]
    has_host_names: bool
    seconds: int
    partition: str | None
    account: str | None
    constraint: str | None
    cores: int | None
    image: str

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def identity(self) -> str:
        """Name and run directory in one line; the files of a job are replaced by the same job alone."""
        return " ".join(f"{self.name} in {self.run_directory}".split())

    @property
    def slug(self) -> str:
        """The name in the form of schedulers: lower case, digits and hyphens, a letter first (RFC 1035)."""
        slug = "run-" + re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if len(slug) <= MOST_CHARACTERS:
            return slug
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:6]
        return f"{slug[: MOST_CHARACTERS - 7].rstrip('-')}-{digest}"

    @property
    def command(self) -> str:
        """The arguments of Python to start the run, without --out and --resume."""
        return f"{launch_lines.SCRIPT} {launch_lines.quoted(self.words)}"


def parse_clock(text: str) -> int:
    """Return the seconds of [DAYS-]HOURS:MINUTES:SECONDS. Raises ProblemsError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, rest = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not total:
        rule = "[DAYS-]HOURS:MINUTES:SECONDS"
        raise ProblemsError([Problem("--time", f"--time {text[:40]}", rule, "e.g. --time 20:00:00")])
    return total


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
        raise ProblemsError([_misfit(plan.layout, node, taken)])
    return Placement(plan, taken, gpus)


def _misfit(layout: Layout, node: ClusterNode, nodes: int) -> Problem:
    world = layout.world
    nodes_there = f"{counted(nodes, 'node')} of {counted(node.gpus, 'GPU')}"
    came = f"{layout.degrees()} = {counted(world, 'process')} on {nodes_there}"
    rule = f"{nodes * node.gpus} are there, and every GPU that is taken holds one process"
    fix = f"--nodes {max(1, world // node.gpus)}"
    if world % node.gpus and world > node.gpus:
        fits = max(divisor for divisor in divisors(world) if divisor <= node.gpus)
        fix = f"--gpus-per-node {fits} --nodes {world // fits}"
    return Problem("--nodes", came, rule, f"give {fix}")
