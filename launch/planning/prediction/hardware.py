"""The hardware catalogue: GPUs, nodes and their connections, with the source of every figure.

`hardware.yaml` next to this file is the catalogue; a file of the user's in the same form adds to it and may
use its GPUs. Figures there are mappings {is: number, source: key of `sources`}, or plain numbers.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from ds_configs.plan import GPU, Machine
from launch.machine.memory import Memory
from launch.planning.prediction import typed_hardware
from recipes import files, yaml_lines
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Recipe, Strict

SHOWN = "launch/planning/prediction/hardware.yaml"
GIB = 2**30
YAML = (".yaml", ".yml")
# node whose CUDA context stands for that of a GPU that nothing is said of
USUAL = "a100-80x8"
MOST = 8  # GPUs of a machine that is made up
Form = TypeVar("Form", bound=BaseModel)


class Price(Strict):
    """The price of renting a GPU, with its share of the node."""

    usd_per_gpu_hour: PositiveFloat
    where: str
    """who asked for it, and when"""


class Gpu(Strict):
    """An accelerator."""

    name: str
    """in the catalogue"""
    title: str
    memory_gib: PositiveFloat
    """as the driver reports it to torch"""
    context_gib: float = Field(default=1.5, ge=0)
    """of CUDA's context and kernels, before the first tensor"""
    memory_gb_s: PositiveFloat
    """bandwidth of its memory, 10^9 bytes per second"""
    tflops: dict[str, PositiveFloat]
    """peak rate of dense matrix products by precision; a precision that the GPU lacks is absent"""
    matrix_share: float = Field(default=0.8, gt=0, le=1)
    """largest share of that peak that somebody measured on large matrices, in half precision"""
    matrix_share_fp32: float = Field(default=0.89, gt=0, le=1)
    """the same in fp32, which tensor cores do not multiply; unless known, the V100's 14 of 15.7 (mli)"""
    multiprocessors: PositiveInt
    pcie: Literal[3, 4, 5] = 4
    """generation of its PCIe, for a machine that is made up"""
    watts: PositiveFloat
    price: Price | None = None
    """null: nobody's list is known"""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


class Link(Strict):
    """The connection between the GPUs of a node."""

    kind: str
    gb_s: PositiveFloat | None = None
    """10^9 bytes per second, each way, per GPU; null: one GPU, linked to none"""
    pair_gb_s: PositiveFloat | None = None
    """of it between two GPUs; null: all, through a switch"""


class Network(Strict):
    """The connection between nodes."""

    gb_s: PositiveFloat
    """10^9 bytes per second, each way, per node"""
    reached_gb_s: PositiveFloat | None = None
    """what collectives were measured to reach there, per node; null: the planner's usual share"""


class Host(Strict):
    """The host of a node's GPUs."""

    memory_gb: PositiveFloat
    memory_gb_s: PositiveFloat
    cores: PositiveInt


class Node(Strict):
    """A node with its GPUs."""

    name: str
    title: str
    gpu: Gpu
    gpus: PositiveInt
    link: Link
    network: Network | None = None
    pcie_gb_s: PositiveFloat
    """between host and GPU, each way, 10^9 bytes per second"""
    host: Host
    nvme_gb_s: PositiveFloat | None = None
    other_watts: PositiveFloat | None = None
    """of the node besides its GPUs"""

    @property
    def memory(self) -> Memory:
        """The node's memory, on its GPUs and its host."""
        return Memory(self.gpus, self.gpu.memory_bytes, self.host.memory_gb * 1e9)

    @property
    def machine(self) -> Machine:
        """The node's abilities, for the resolver."""
        rates = self.gpu.tflops
        return Machine(
            GPU, fp16="fp16" in rates, bf16="bf16" in rates, compiler=True, libaio=True
        )

    def holds_groups(self, ranks: int, spread: int, world: int) -> bool:
        """Check that groups of ranks, `spread` apart, of `world` in all, never cross a node's border."""
        reach = ranks * spread
        return reach <= self.gpus and (self.gpus % reach == 0 or world <= self.gpus)


def node_for(recipe: Recipe, name: str | None = None) -> Node:
    """Return the node named by the user, or the recipe's. Raises ProblemsError: neither is there."""
    name = name or (recipe.hardware.node if recipe.hardware else None)
    if name is None:
        raise ProblemsError.of(
            "--hardware",
            "no --hardware, and the recipe names none",
            "a plan is for a kind of node",
            f"--hardware {', '.join(names()[:6])}, …, 4xv100-32, 2x3090, or FILE.yaml:NODE of your own",
        )
    return find(name)


def find(name: str, flag: str = "--hardware") -> Node:
    """Return the node `name` of the catalogue, GPUs as people name them, or NODE of a FILE.yaml:NODE.

    `flag`: where the name was given.

    Raises ProblemsError: no such node, with near matches; a file that is no catalogue.
    """
    known = catalogue()
    came = f"{flag} {name[:100]}"
    written, colon, node = name.rpartition(":")
    file = written if colon else name
    if file.endswith(YAML):
        own = _read(files.path_of(file, flag), file)
        if colon:
            return _node(node, own.nodes, {**known.gpus, **own.gpus}, f"of {file}")
        raise ProblemsError.of(
            flag,
            came,
            "no node is named",
            f"{flag} {file}:{next(iter(own.nodes), 'NODE')}",
        )
    if name in known.nodes:
        return _node(name, known.nodes, known.gpus, f"of the catalogue ({SHOWN})")
    count, gpu = typed_hardware.read(name, known.gpus, known.nodes, flag)
    nodes = [find(node) for node, form in known.nodes.items() if form["gpu"] == gpu]
    for each in nodes:
        if each.gpus == count:
            return each
    if not 1 <= count <= MOST:
        raise ProblemsError.of(
            flag,
            came,
            f"a node that the catalogue lacks has 1 to {MOST} GPUs",
            f"{flag} {MOST}x{gpu} --nodes {max(1, math.ceil(count / MOST))}",
        )
    of_these = f"{count}x{gpu}"
    larger = next((each for each in nodes if each.gpus > count), None)
    if larger:
        return _part_of(larger, count, of_these)
    return _made_up(count, gpu, of_these)


def of_memory(memory: Memory) -> Node:
    """Return a node of which only the memory is known; `memory.gpus` may be 0."""
    usual = find(USUAL)
    gpu = usual.gpu.model_copy(update={"memory_gib": memory.gpu_bytes / GIB})
    host = usual.host.model_copy(update={"memory_gb": memory.host_bytes / 1e9})
    return usual.model_copy(update={"gpus": memory.gpus, "gpu": gpu, "host": host})


def names() -> list[str]:
    """Return the names of all nodes of the catalogue."""
    return list(catalogue().nodes)


def ways_to_name() -> str:
    """List what a --hardware may be."""
    return f"{', '.join(names())}; GPUs as 4xv100-32, 2x3090 or h100; or FILE.yaml:NODE of your own"


class MadeUp(Strict):
    """What is assumed of a machine that no catalogue has; figures of the host are for each GPU."""

    pcie_gb_s: dict[int, PositiveFloat]
    """by generation"""
    memory_gb: PositiveFloat
    memory_gb_s: PositiveFloat
    cores: PositiveInt
    other_watts: PositiveFloat


class Catalogue(Strict):
    """A catalogue's file, as plain numbers."""

    sources: dict[str, str] = {}
    gpus: dict[str, dict[str, Any]] = {}
    nodes: dict[str, dict[str, Any]] = {}
    made_up: MadeUp | None = None


@functools.cache
def catalogue() -> Catalogue:
    return _read(Path(__file__).with_name("hardware.yaml"), SHOWN)


def _part_of(node: Node, count: int, name: str) -> Node:
    """Return a share of a node's GPUs with their link and as much of the host; its network is unknown."""
    share = count / node.gpus
    changed = {
        "name": name,
        "title": f"{count} of the {node.gpus} GPUs of {node.title}",
        "gpus": count,
        "network": None,
        "host": _host(node.host, share),
        "nvme_gb_s": node.nvme_gb_s and node.nvme_gb_s * share,
        "other_watts": node.other_watts and node.other_watts * share,
    }
    return node.model_copy(update=changed)


def _made_up(count: int, key: str, name: str) -> Node:
    """Return a machine with `count` such GPUs on PCIe, as the catalogue assumes it."""
    known = catalogue()
    gpu = _checked(Gpu, {**known.gpus[key], "name": key}, key)
    assumed = known.made_up
    assert assumed
    rate = assumed.pcie_gb_s[gpu.pcie]
    return Node(
        name=name,
        title=f"a made-up machine with {count} {gpu.title} on PCIe",
        gpu=gpu,
        gpus=count,
        link=Link(kind=f"PCIe {gpu.pcie}.0", gb_s=rate),
        pcie_gb_s=rate,
        host=_host(assumed, count),
        other_watts=assumed.other_watts * count,
    )


def _host(whole: Host | MadeUp, share: float) -> Host:
    """Return a host with so many times the memory, its rate, and the cores."""
    return Host(
        memory_gb=whole.memory_gb * share,
        memory_gb_s=whole.memory_gb_s * share,
        cores=max(1, int(whole.cores * share)),
    )


def _read(path: Path, shown: str) -> Catalogue:
    return _checked(Catalogue, _plain(yaml_lines.read(path, shown).value), shown)


def _plain(value: Any) -> Any:
    """Strip the sources from figures."""
    if not isinstance(value, dict):
        return value
    if "is" in value:
        return value["is"]
    return {key: _plain(below) for key, below in value.items()}


def _node(name: str, nodes: dict[str, Any], gpus: dict[str, Any], where: str) -> Node:
    if name not in nodes:
        raise ProblemsError.of(
            "--hardware",
            f"--hardware {name[:100]}",
            f"no such node {where}",
            did_you_mean(name, nodes),
        )
    gpu = str(nodes[name].get("gpu"))
    if gpu not in gpus:
        raise ProblemsError.of(
            "--hardware",
            f"{name}.gpu={gpu}",
            f"no such GPU {where}",
            did_you_mean(gpu, gpus),
        )
    return _checked(
        Node, {**nodes[name], "name": name, "gpu": {**gpus[gpu], "name": gpu}}, name
    )


def _checked(form: type[Form], values: Any, what: str) -> Form:
    try:
        return form.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
    problems = []
    for fault in faults:
        problems.append(
            Problem(
                "--hardware",
                f"{what}: {'.'.join(map(str, fault['loc']))}",
                fault["msg"],
                f"write it as in {SHOWN}",
            )
        )
    raise ProblemsError(problems)
