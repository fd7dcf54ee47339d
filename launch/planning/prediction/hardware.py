"""The hardware catalogue: GPUs, nodes and their connections, with the source of every figure.

`hardware.yaml` next to this file is the catalogue; a file of the user's in the same form adds to it and may
use its GPUs. Figures there are mappings {is: number, source: key of `sources`}, or plain numbers.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from ds_configs.plan import GPU, HOST, Machine
from launch.console import quiet, terminal
from launch.machine import rates
from launch.machine.rates import Rates
from recipes import files, yaml_lines
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Recipe, Strict

SHOWN = "launch/planning/prediction/hardware.yaml"
GIB = 2**30
RATES = ("tflops", "reached_tflops", "attention_tflops")  # of a Gpu, by precision
USUAL_WATTS = 300.0  # of a machine whose power limit nothing says
Form = TypeVar("Form", bound=BaseModel)
THIS = "this"  # the machine that the planner runs on, as --hardware names it


class Price(Strict):
    """The price of renting a GPU, with its share of the node."""

    usd_per_gpu_hour: PositiveFloat
    where: str
    """who asked for it, and when"""


class Gpu(Strict):
    """An accelerator, or all cores of a machine without one."""

    name: str
    """in the catalogue"""
    title: str
    torch_names: list[str] = Field(default_factory=list)
    """what torch.cuda.get_device_name says of it"""
    memory_gib: PositiveFloat
    """as the driver reports it to torch"""
    in_host: bool = False
    """cores in the place of a GPU: their memory is the host's, which counts once it is written to"""
    context_gib: float = Field(default=1.5, ge=0)
    """of CUDA's context and kernels, before the first tensor"""
    memory_gb_s: PositiveFloat
    """bandwidth of its memory, 10^9 bytes per second"""
    tflops: dict[str, PositiveFloat]
    """peak rate of dense matrix products by precision; a precision that the GPU lacks is absent"""
    reached_tflops: dict[str, PositiveFloat] = Field(default_factory=dict)
    """what a layer's products were measured to reach; empty: shares of the peak, fitted elsewhere"""
    attention_tflops: dict[str, PositiveFloat] = Field(default_factory=dict)
    """what attention was measured to reach; empty: as other products"""
    matrix_share: float = Field(default=0.8, gt=0, le=1)
    """largest share of that peak that somebody measured on large matrices"""
    multiprocessors: PositiveInt
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
    """A node with its GPUs, or a machine without one."""

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
    kernel_seconds: float | None = None
    """time to start a kernel or operation; None: as on GPUs"""
    measured: tuple[tuple[str, float], ...] = ()
    """the planner's constants as measured on this machine, by name"""

    @property
    def is_cpu(self) -> bool:
        """True if ranks share the host's cores and memory instead of having GPUs."""
        return self.gpu.in_host

    @property
    def machine(self) -> Machine:
        """The node's abilities, for the resolver."""
        device, rates = HOST if self.is_cpu else GPU, self.gpu.tflops
        return Machine(device, fp16="fp16" in rates, bf16="bf16" in rates, compiler=True, libaio=True)

    def share_among(self, ranks: int) -> Node:
        """Divide a machine without GPUs among its ranks: cores, memory and bandwidth."""
        if not self.is_cpu:
            return self
        values = {key: getattr(self.gpu, key) / ranks for key in ("memory_gib", "memory_gb_s", "watts")}
        for key in RATES:
            values[key] = {name: rate / ranks for name, rate in getattr(self.gpu, key).items()}
        return self.model_copy(update={"gpu": self.gpu.model_copy(update=values), "gpus": ranks})

    def holds_groups(self, ranks: int, spread: int, world: int) -> bool:
        """Check that groups of ranks, `spread` apart, of `world` in all, never cross a node's border."""
        reach = ranks * spread
        return reach <= self.gpus and (self.gpus % reach == 0 or world <= self.gpus)


def node_for(recipe: Recipe, name: str | None = None, *, remeasure: bool = False) -> Node:
    """Return the node named by the user, or the recipe's; `remeasure`: measure this machine again.

    Raises ProblemsError: neither is there.
    """
    name = name or (recipe.hardware.node if recipe.hardware else None)
    if name == THIS:
        return this_node(remeasure=remeasure)
    if name is None:
        came, rule = "no --hardware, and the recipe names none", "a plan is for a kind of node"
        fix = f"--hardware {', '.join(names()[:6])}, … or this"
        raise ProblemsError([Problem("--hardware", came, rule, fix)])
    return find(name)


def find(name: str) -> Node:
    """Return the node `name` of the catalogue, or NODE of a user's file given as FILE.yaml:NODE.

    Raises ProblemsError: no such node, with near matches; a file that is no catalogue.
    """
    known = catalogue()
    written, colon, node = name.rpartition(":")
    if colon and written.endswith((".yaml", ".yml")):
        own = _read(files.path_of(written, "--hardware"), written)
        return _node(node, own.nodes, {**known.gpus, **own.gpus}, f"of {written}")
    return _node(name, known.nodes, known.gpus, f"of the catalogue ({SHOWN})")


def this_node(*, remeasure: bool = False, measure: bool = True) -> Node:
    """Return this machine; measure it the first time, or with `remeasure`.

    Raises ProblemsError: not measured, and not to `measure`.
    """
    found = None if remeasure else rates.cached()
    if found is None and not measure:
        fix = "python launch/plan.py --recipe default/sotu --hardware this measures it once"
        raise ProblemsError([Problem("--hardware", "this machine", "it is not measured", fix)])
    if found is None:
        line = "measuring this machine, once: matrix products, memory, copies, a collective, an empty process"
        terminal.say(line, sys.stderr)
        quiet.quiet_libraries()
        from launch.machine import measuring  # with torch

        found = measuring.measured()
    return node_of_rates(found)


def node_of_rates(found: Rates) -> Node:
    """Make the node of a measured machine."""
    cpu = found.accelerators == 0
    key = gpu_named(found.accelerator)
    known = Gpu.model_validate({**catalogue().gpus[key], "name": key}) if key else None
    peaks = known.tflops if known else found.tflops
    # Largest measured rate of large products, where a peak is published.
    reached = [found.tflops[name] / peaks[name] for name in peaks.keys() & found.tflops.keys() if known]
    gpu = Gpu(
        name=key or THIS,
        title=found.accelerator,
        in_host=cpu,
        memory_gib=found.memory_bytes / GIB,
        context_gib=found.context_bytes / GIB,
        memory_gb_s=found.memory_gb_s,
        tflops=peaks,
        matrix_share=min(1.0, max(reached, default=1.0)),
        multiprocessors=found.multiprocessors,
        reached_tflops=found.layer_tflops if cpu else {},
        attention_tflops=found.attention_tflops if cpu else {},
        watts=found.watts or (known.watts if known else USUAL_WATTS),
    )
    # In place of those fitted on GPUs: by this `traffic` a layer's work between products takes what it was
    # measured to take, the link was measured by a collective, and no allocator keeps what nothing uses.
    own = {"traffic": found.memory_gb_s / found.layer_gb_s, "link": 1.0, "fragmentation": 0.0}
    return Node(
        name=THIS,
        title="this machine",
        gpu=gpu,
        gpus=found.accelerators or 1,
        link=Link(kind="shared memory" if cpu else "measured copy", gb_s=found.link_gb_s),
        pcie_gb_s=found.copy_gb_s,
        host=Host(memory_gb=found.host_bytes / 1e9, memory_gb_s=found.host_gb_s, cores=found.cores),
        kernel_seconds=found.start_us * 1e-6,
        measured=tuple(own.items()) if cpu else (),
    )


def gpu_named(name: str) -> str | None:
    """Return the catalogue's key of a GPU by torch's name for it; None: not in the catalogue."""
    return next((key for key, gpu in catalogue().gpus.items() if name in gpu.get("torch_names", ())), None)


def catalogue_node(accelerator: str, count: int) -> Node | None:
    """Return the smallest node with at least `count` such GPUs (torch's name); None: there is none."""
    gpu = gpu_named(accelerator)
    nodes = [find(name) for name, form in catalogue().nodes.items() if form["gpu"] == gpu]
    return min((node for node in nodes if node.gpus >= count), key=lambda node: node.gpus, default=None)


def names() -> list[str]:
    """Return the names of all nodes of the catalogue."""
    return list(catalogue().nodes)


class Catalogue(Strict):
    """A catalogue's file, as plain numbers."""

    sources: dict[str, str] = {}
    gpus: dict[str, dict[str, Any]] = {}
    nodes: dict[str, dict[str, Any]] = {}


@functools.cache
def catalogue() -> Catalogue:
    return _read(Path(__file__).with_name("hardware.yaml"), SHOWN)


def _read(path: Path, shown: str) -> Catalogue:
    return _checked(Catalogue, _plain(yaml_lines.read(path, shown).value), shown)


def _plain(value: Any) -> Any:
    """Strip the sources from figures."""
    if isinstance(value, dict):
        return value["is"] if "is" in value else {key: _plain(below) for key, below in value.items()}
    return value


def _node(name: str, nodes: dict[str, Any], gpus: dict[str, Any], where: str) -> Node:
    if name not in nodes:
        fix = did_you_mean(name, nodes)
        raise ProblemsError([Problem("--hardware", f"--hardware {name[:100]}", f"no such node {where}", fix)])
    gpu = str(nodes[name].get("gpu"))
    if gpu not in gpus:
        came, rule = f"{name}.gpu={gpu}", f"no such GPU {where}"
        raise ProblemsError([Problem("--hardware", came, rule, did_you_mean(gpu, gpus))])
    return _checked(Node, {**nodes[name], "name": name, "gpu": {**gpus[gpu], "name": gpu}}, name)


def _checked(form: type[Form], values: Any, what: str) -> Form:
    try:
        return form.model_validate(values)
    except ValidationError as error:
        faults = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
    fix = f"write it as in {SHOWN}"
    raise ProblemsError(Problem("--hardware", f"{what}: {key}", rule, fix) for key, rule in faults)
