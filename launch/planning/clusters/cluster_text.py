"""A cluster's job as text: a map of its ranks, the command line of each launcher, and notes.

Ranks go from host to host in the order of the hostfile (deepspeed), of `--node_rank` (torchrun), of Slurm's
node list (srun, block distribution) and of pods, as many on each as GPUs are taken of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launch.console import launch_lines
from launch.planning.clusters import files
from launch.planning.clusters.job import Job
from launch.planning.page import Page
from recipes.layout import Layout
from recipes.problems import counted
from recipes.rank_order import Coordinates, coordinates, data_groups, pipeline_groups, tensor_groups

PORT = 29500  # torchrun's own
MOST = 16  # lines of a map, of which the last two are its last
PLACE = ("rank", "host", "GPU", "tensor", "data", "stage")
STRETCH = ("stage", "ranks", "data", "tensor", "where")


GROUPS = {"tensor": tensor_groups, "pipeline": pipeline_groups, "data": data_groups}


class Place(NamedTuple):
    """The place of a rank. `host`: counted from 0; `gpu`: counted on its host."""

    rank: int
    host: int
    gpu: int
    at: Coordinates


class Spread(NamedTuple):
    """Groups of one kind of parallelism: ranks of each, how many cross hosts, the most hosts of one."""

    kind: str
    degree: int
    groups: int
    crossing: int
    hosts: int


def page(job: Job, out: Path | None, *, whole: bool, width: int | None = None) -> Page:
    """Describe the job: its map of ranks (`whole`: every rank), notes, and command lines."""
    layout, node = job.layout, job.node
    sm = f", sm_{node.capability}" if node.capability else ""
    shown = Page(width)
    shown.facts(
        ("recipe", f"{job.name}: {job.plan.recipe.title}"),
        ("cluster", f"{job.nodes} x {job.gpus} GPUs ({node.title}{sm})"),
        ("layout", f"{layout.degrees()} = {layout.world} processes ({job.plan.ds_name}.json)"),
        ("batch", layout.identity()),
    )
    add_map(shown, job, whole=whole)
    shown.table(map(_spread, spreads(layout, job.gpus)))
    shown.notes(remarks(job))
    _add_launch(shown, job, out)
    return shown


def add_map(shown: Page, job: Job, *, whole: bool) -> None:
    """Add a table of stages and their hosts; `whole`: a table of all ranks."""
    layout, gpus = job.layout, job.gpus
    order = f"rank = (stage x {layout.dp} + data) x {layout.tp} + tensor; {gpus} ranks on each host"
    if whole:
        rows = [
            [each.rank, job.hosts[each.host], each.gpu, each.at.tp, each.at.dp, each.at.pp]
            for each in (place(rank, layout, gpus) for rank in range(layout.world))
        ]
        shown.table(rows, PLACE, "rlrrrr", above=[order])
        return
    parts = list(stretches(layout, gpus, by_host=True))
    if len(parts) > MOST:  # whole stages, over several hosts
        parts = list(stretches(layout, gpus, by_host=False))
    lines = [_line(*part, job) for part in parts]
    if left_out := lines[MOST - 3 : -2] if len(lines) > MOST else []:
        lines[MOST - 3 : -2] = [["..."] * 4 + [f"{len(left_out)} more stages"]]
    shown.table(lines, STRETCH, "rllll", above=[order], below=["(--all lists every rank)"])


def _line(first: Place, last: Place, job: Job) -> list[str]:
    """Return the stage, and each coordinate of the first rank and of the last one."""
    places = ((first.rank, last.rank), (first.at.dp, last.at.dp), (first.at.tp, last.at.tp))
    return [str(first.at.pp), *(_ranks(*each) for each in places), _where(first, last, job)]


def _where(first: Place, last: Place, job: Job) -> str:
    hosts = job.hosts
    whole = first.gpu == 0 and last.gpu == job.gpus - 1
    if first.host == last.host:
        gpus = "" if whole else f" GPU {_ranks(first.gpu, last.gpu)}"
        return hosts[first.host] + gpus
    if whole:
        return f"{hosts[first.host]} to {hosts[last.host]}"
    return f"{hosts[first.host]} GPU {first.gpu} to {hosts[last.host]} GPU {last.gpu}"


def _ranks(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _spread(each: Spread) -> tuple[str, str, str]:
    """Describe the number and the reach of the groups of one kind of parallelism."""
    where = f"{each.crossing} of them over {counted(each.hosts, 'node')}, the others inside one"
    if not each.crossing:
        where = "each inside a node"
    elif each.crossing == each.groups:
        where = f"each over {counted(each.hosts, 'node')}"
    return each.kind, f"{counted(each.groups, 'group')} of {each.degree}", where


def remarks(job: Job) -> list[str]:
    """Return warnings about the job before it costs anything."""
    capability = job.node.capability
    said = [
        _tensor_crosses(job, each)
        for each in spreads(job.layout, job.gpus)
        if each.kind == "tensor" and each.crossing
    ]
    if idle := job.node.gpus - job.gpus:
        said.append(f"{idle} of the {job.node.gpus} GPUs of each node are not taken, and may be others'")
    if not job.has_host_names and job.nodes > 1:
        said.append("the names of hosts stand in for yours: give --hosts, or edit the hostfile")
    if job.nodes > 1:
        said.append(
            "deepspeed takes no variables to other hosts but NCCL_*, PYTHON*, UCX_*, MV2* and MLFLOW*: write "
            "others, such as MEGARECIPES_CACHE and HF_HOME, into ~/.deepspeed_env"
        )
    if job.cores is None:
        said.append(
            "nobody knows the cores of a node here: give --cpus-per-task, or each process gets one core"
        )
    if index := files.wheel_for(capability).index:
        said.append(f"PyPI's torch has no kernels for sm_{capability}: install it from {index}")
    return [*said, *map(str, job.plan.notices)]


def _tensor_crosses(job: Job, spread: Spread) -> str:
    heads = job.plan.recipe.model.heads
    inside = max(each for each in range(1, spread.degree + 1) if job.gpus % each == heads % each == 0)
    return (
        f"tensor parallelism crosses nodes: {spread.crossing} of {counted(spread.groups, 'group')} of "
        f"{spread.degree}, so that the all-reduces of every layer go over the network; with "
        f"--set parallel.tp={inside} and more pipeline stages or data ranks each would be inside one"
    )


def _add_launch(shown: Page, job: Job, out: Path | None) -> None:
    """Add the command line of each launcher, and the names of the written files."""
    at, nodes, gpus = "." if out is None else str(out), job.nodes, job.gpus
    started = f"{job.command} --out {launch_lines.quoted([job.run_directory])}"
    each = f", on each host with its NODE_RANK, 0 to {nodes - 1}" if nodes > 1 else ""
    reach = f", on {job.hosts[0]}, which reaches the others by ssh" if nodes > 1 else ""
    lines = [
        f"# deepspeed{reach}",
        f"{launch_lines.deepspeed(nodes, gpus, f'{at}/hosts' if out else 'hosts')} {started}",
        f"# torchrun{each}",
        f"{launch_lines.torchrun(nodes, gpus, job.hosts[0], PORT)} {started}",
    ]
    names = ", ".join(files.NAMES)
    if out is None:
        shown.commands(*lines, f"# --out DIR writes {names}")
        return
    built = ["docker", "build", "-f", f"{at}/Dockerfile", "-t", job.image, "."]
    lines += [
        "# Slurm",
        launch_lines.quoted(["sbatch", f"{at}/job.sbatch"]),
        "# Kubernetes, once the image is where its nodes find it",
        launch_lines.quoted(built),
        launch_lines.quoted(["kubectl", "apply", "-f", f"{at}/pytorchjob.yaml"]),
    ]
    shown.commands(*lines, below=[f"wrote {names} in {at}"])


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
    found = []
    for kind, groups_of in GROUPS.items():
        groups = groups_of(layout.tp, layout.pp, layout.dp)
        hosts = [len({rank // gpus for rank in group}) for group in groups]
        if len(groups[0]) > 1:
            crossing = sum(number > 1 for number in hosts)
            found.append(Spread(kind, len(groups[0]), len(groups), crossing, max(hosts)))
    return found
