"""The rank map as a person reads it, a few lines for thousands of ranks, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.console.text_table import table
from launch.planning.clusters.job import Job
from launch.planning.clusters.rank_map import Place, Spread, Stretch, places, spreads, stretches
from recipes.plural import counted

MOST = 16  # lines of a map, of which the last two are its last
PLACE = ("rank", "host", "GPU", "tensor", "data", "stage")
ELIDED = ("...",) * 4
STRETCH = ("stage", "ranks", "data", "tensor", "where")


def describe_map(job: Job, *, whole: bool, width: int | None) -> str:
    """A table: of every rank where `whole`, else of stages, and of each host's part of them while few."""
    layout, gpus = job.layout, job.gpus
    if whole:
        rows = [_row(each, job.hosts) for each in places(layout, gpus)]
        return table(rows, PLACE, align="rlrrrr", width=width)
    lines = _lines(job)
    if len(lines) > MOST:
        left_out = f"{len(lines) - MOST + 1} more stages"
        lines[MOST - 3 : -2] = [[*ELIDED, left_out]]
    elided = any(line[0] == ELIDED[0] for line in lines)
    more = "\n(--all lists every rank)" if elided else ""
    return table(lines, STRETCH, align="rllll", width=width) + more


def _lines(job: Job) -> list[list[str]]:
    """Of each host's part of each stage; of the first two and the last in each; or of whole stages."""
    layout, gpus = job.layout, job.gpus
    parts = list(stretches(layout, gpus, by_host=True))
    if len(parts) <= MOST:
        return [_line(part, job) for part in parts]
    if layout.pp * 4 > MOST:
        return [_line(part, job) for part in stretches(layout, gpus, by_host=False)]
    lines: list[list[str]] = []
    for stage in range(layout.pp):
        first, second, *others, last = [_line(part, job) for part in parts if part.first.at.pp == stage]
        lines += [first, second]
        if others:
            lines.append([*ELIDED, f"{len(others)} more hosts"])
        lines.append(last)
    return lines


def describe_spreads(job: Job, width: int | None) -> str:
    """How far the groups of each kind of parallelism reach."""
    rows = []
    for each in spreads(job.layout, job.gpus):
        where = f"{each.crossing} of them over {counted(each.hosts, 'node')}, the others inside one"
        rows.append([each.kind, f"{counted(each.groups, 'group')} of {each.degree}", where])
        if not each.crossing:
            rows[-1][-1] = "each inside a node"
        elif each.crossing == each.groups:
            rows[-1][-1] = f"each over {counted(each.hosts, 'node')}"
    return table(rows, width=width)


def remarks(job: Job) -> list[str]:
    """What of the placement costs speed that another layout would not."""
    layout, gpus, said = job.layout, job.gpus, []
    for each in spreads(layout, gpus):
        if each.kind == "tensor" and each.crossing:
            said.append(_tensor_crosses(job, each))
    if gpus < job.node.gpus:
        idle = job.node.gpus - gpus
        said.append(f"{idle} of the {job.node.gpus} GPUs of each node are not taken, and may be others'")
    return said


def _tensor_crosses(job: Job, spread: Spread) -> str:
    hosts = sorted({rank // job.gpus for rank in spread.example})
    where = ", ".join(job.hosts[host] for host in hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    ranks = _ranks(spread.example[0], spread.example[-1])
    heads = job.placement.plan.recipe.model.heads
    inside = max(each for each in range(1, spread.degree + 1) if job.gpus % each == heads % each == 0)
    cure = f"with --set parallel.tp={inside} and more pipeline stages or data ranks each would be inside one"
    return (
        f"tensor parallelism crosses nodes: {spread.crossing} of {counted(spread.groups, 'group')} of "
        f"{spread.degree} (ranks {ranks} lie on {where}), so that the all-reduces of every layer go "
        f"over the network; {cure}"
    )


def as_json(job: Job) -> dict[str, Any]:
    """The whole map as plain data."""
    layout = job.layout
    return {
        "recipe": job.name,
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        "nodes": job.nodes,
        "gpus_per_node": job.gpus,
        "ranks": [
            {"rank": each.rank, "host": job.hosts[each.host], "gpu": each.gpu, **each.at._asdict()}
            for each in places(layout, job.gpus)
        ],
        "groups": [
            {"kind": each.kind, "degree": each.degree, "groups": each.groups, "crossing_nodes": each.crossing,
             "most_nodes": each.hosts}
            for each in spreads(layout, job.gpus)
        ],
        "remarks": remarks(job),
    }  # fmt: skip


def _row(each: Place, hosts: Sequence[str]) -> list[object]:
    return [each.rank, hosts[each.host], each.gpu, each.at.tp, each.at.dp, each.at.pp]


def _line(part: Stretch, job: Job) -> list[str]:
    first, last = part.first, part.last
    data, tensor = _ranks(first.at.dp, last.at.dp), f"0-{job.layout.tp - 1}" if job.layout.tp > 1 else "0"
    if data == str(first.at.dp):
        tensor = _ranks(first.at.tp, last.at.tp)
    elif (first.at.tp, last.at.tp) != (0, job.layout.tp - 1):
        tensor = f"{first.at.tp} (data {first.at.dp}) to {last.at.tp} (data {last.at.dp})"
    return [str(first.at.pp), _ranks(first.rank, last.rank), data, tensor, _where(part, job)]


def _where(part: Stretch, job: Job) -> str:
    first, last, hosts = part.first, part.last, job.hosts
    whole = first.gpu == 0 and last.gpu == job.gpus - 1
    if first.host == last.host:
        gpus = "" if whole else f" GPU {_ranks(first.gpu, last.gpu)}"
        return hosts[first.host] + gpus
    if whole:
        return f"{hosts[first.host]} to {hosts[last.host]}"
    return f"{hosts[first.host]} GPU {first.gpu} to {hosts[last.host]} GPU {last.gpu}"


def _ranks(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
