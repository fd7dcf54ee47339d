"""What the files of a cluster need to know of one of its nodes: the one place where it is looked up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.planning.prediction import hardware
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe


@dataclass(frozen=True)
class ClusterNode:
    """One node of a cluster, as far as its scheduler and its image ask.

    Attributes:
        title: for people.
        gpus: that it has.
        capability: compute capability of its GPUs, 70 for sm_70; None: not known.
        cores: of its host; None: not known.
        constraint: by which Slurm there tells its kinds of nodes apart; None: there is no need.
    """

    title: str
    gpus: int
    capability: int | None = None
    cores: int | None = None
    constraint: str | None = None


def node_of(recipe: Recipe, name: str | None = None, gpus: int | None = None) -> ClusterNode:
    """The node of the catalogue called `name`, else the recipe's; with `gpus` GPUs, where they are given.

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
