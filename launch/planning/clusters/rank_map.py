"""Host, GPU and coordinates of every global rank, and the hosts of every group.

Ranks go from host to host in the order of the hostfile (deepspeed), of `--node_rank` (torchrun), of Slurm's
node list (srun, block distribution) and of pods, as many on each as GPUs are taken of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recipes.layout import Layout
from recipes.rank_order import Coordinates, coordinates, data_groups, pipeline_groups, tensor_groups

Kind = Literal["tensor", "pipeline", "data"]
GROUPS = {"tensor": tensor_groups, "pipeline": pipeline_groups, "data": data_groups}


class Place(NamedTuple):
    """The place of a rank. `host`: counted from 0; `gpu`: counted on its host."""

    rank: int
    host: int
    gpu: int
    at: Coordinates


@dataclass(frozen=True)
class Spread:
    """The reach of the groups of one kind of parallelism over the hosts.

    Attributes:
        crossing: number of groups on more than one host.
        hosts: number of hosts of the most widely spread group.
    """

    kind: Kind
    degree: int
    groups: int
    crossing: int
    hosts: int


def place(rank: int, layout: Layout, gpus: int) -> Place:
    """Return the place of global `rank`, with `gpus` ranks on each host."""
    return Place(rank, rank // gpus, rank % gpus, coordinates(rank, layout.tp, layout.dp))


def stretches(layout: Layout, gpus: int, *, by_host: bool) -> Iterator[tuple[Place, Place]]:
    """Yield the first and last rank of each pipeline stage, or `by_host` of each host's part of it."""
    stage = layout.tp * layout.dp
    ends = {*range(stage, layout.world + 1, stage)}
    if by_host:
        ends |= {*range(gpus, layout.world + 1, gpus)}
    first = 0
    for end in sorted(ends):
        yield place(first, layout, gpus), place(end - 1, layout, gpus)
        first = end


def spreads(layout: Layout, gpus: int) -> list[Spread]:
    """Return the reach of tensor, pipeline and data groups; groups of one rank are left out."""
    degrees: dict[Kind, int] = {"tensor": layout.tp, "pipeline": layout.pp, "data": layout.dp}
    found = []
    for kind, degree in degrees.items():
        groups = GROUPS[kind](layout.tp, layout.pp, layout.dp)
        hosts = [len({rank // gpus for rank in group}) for group in groups]
        if degree > 1:
            crossing = sum(number > 1 for number in hosts)
            found.append(Spread(kind, degree, len(groups), crossing, max(hosts)))
    return found
