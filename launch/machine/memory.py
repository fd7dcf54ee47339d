"""Memory: limits of this machine, use and peaks of a process, and the counted bytes of its model states."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_configs.findings import lookup
from ds_configs.plan import Plan
from launch.machine.description import gpus, physical_memory
from launch.ranks import processes
from modeling import cost
from recipes.problems import amount, counted

# of DeepSpeed's devices
PLACES: dict[str, cost.Place] = {"none": "gpu", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class PeakMemory:
    """The largest memory use of this process so far. `kind`: GPU or host memory, which do not compare."""

    bytes: int
    kind: str


def peak_memory() -> PeakMemory:
    """Return this process's peak: torch's allocations on the GPU, or the resident set without a GPU."""
    if processes.device().own_memory:
        return PeakMemory(
            processes.device_module().max_memory_allocated(), "GPU memory allocated"
        )
    # of this program; getrusage begins with its parent
    with contextlib.suppress(OSError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        own = dict(line.split(":", 1) for line in lines)["VmHWM"]
        return PeakMemory(1024 * int(own.split()[0]), "resident set")
    return PeakMemory(
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "resident set"
    )


def peak_cached_bytes() -> int | None:
    """Return the peak that torch reserved on the GPU (the tables' "cached"); None without a GPU."""
    return (
        processes.device_module().max_memory_reserved()
        if processes.device().own_memory
        else None
    )


def pin_no_more_than_asked() -> None:
    """Keep torch from rounding large blocks of pinned host memory up to powers of two.

    Rounding costs offloaded state a quarter more memory (torch 2.13, ATen/core/CachingHostAllocator.h). The
    user's settings stay.
    """
    import torch

    key = "pinned_max_round_threshold_mb"
    # torch 2.11 has no such setting
    with contextlib.suppress(AttributeError, ValueError):
        given = torch._C._accelerator_getAllocatorSettings()
        if key not in given:
            settings = ",".join(filter(None, [given, f"{key}:1"]))
            torch._C._accelerator_setAllocatorSettings(settings)


def return_unused_pinned() -> None:
    """Give a GPU's unused pinned memory back to the system."""
    import torch

    # only CUDA's
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


@dataclass(frozen=True)
class Memory:
    """The memory of a machine: of each GPU, if there are any, and of the host."""

    gpus: int
    gpu_bytes: float
    host_bytes: float

    def __str__(self) -> str:
        gpus = "no GPU"
        if self.gpus:
            gpus = f"{counted(self.gpus, 'GPU')} of {amount(self.gpu_bytes)}"
        return f"{gpus}, {amount(self.host_bytes)} of host memory"


def this_machine() -> Memory:
    """Return the memory of this machine: of its smallest visible GPU, and the host's within limits."""
    sizes = [gpu.total for gpu in gpus()]
    return Memory(len(sizes), min(sizes, default=0.0), host_memory())


def host_memory(root: Path = Path("/")) -> float:
    """Return the bytes of the machine's memory, or the lowest limit of this process's control groups."""
    return min(
        [float(physical_memory()), *(limit for limit, _ in _control_groups(root))]
    )


def available() -> float:
    """Return the bytes that processes can still take without swapping, within the control groups."""
    import psutil

    left = (limit - used for limit, used in _control_groups(Path("/")))
    return max(0.0, min([float(psutil.virtual_memory().available), *left]))


def _control_groups(root: Path) -> Iterator[tuple[float, float]]:
    """Yield (limit, use) in bytes of this process's control group and its parents, cgroup v2 and v1.

    The cache of files does not count as use: the system takes it back.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        version_1 = (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        )
        version_2 = "sys/fs/cgroup", "memory.max", "memory.current"
        top, most, now = version_1 if controllers else version_2
        group = root / top / path.strip("/")
        for folder in (group, *group.parents):
            # Invisible from inside a container; "max": no limit.
            with contextlib.suppress(OSError, ValueError):
                limit = float((folder / most).read_text())
                used = 0.0
                with contextlib.suppress(OSError, ValueError):
                    facts = dict(
                        line.split()
                        for line in (folder / "memory.stat").read_text().splitlines()
                    )
                    cached = sum(
                        float(facts.get(key, 0))
                        for key in ("active_file", "inactive_file")
                    )
                    used = max(0.0, float((folder / now).read_text()) - cached)
                yield limit, used
            if folder == root / top:
                break


def model_states(plan: Plan) -> cost.StateBytes:
    """Count the bytes on the fullest pipeline stage, by their place in an optimizer step."""
    recipe = plan.recipe
    layout = plan.layout
    zero = plan.ds.get("zero_optimization") or {}
    widths = state_widths(plan)
    fullest, layers = fullest_stage(plan)
    if recipe.optimizer.name == "muon":
        matrices = cost.hidden_matrices(recipe.model, layers, layout.tp)
        widths = widths.of_muon(fullest, matrices)
    return cost.placed_state_bytes(
        fullest,
        plan.zero_stage,
        layout.dp,
        widths=widths,
        places=places_of(plan),
        accumulates=layout.accumulation > 1,
        sub_group=zero.get("sub_group_size", 1e9),
    ).total


def describe_states(plan: Plan) -> str:
    """Name the sizes of the model states on the fullest pipeline stage, by place."""
    at = model_states(plan)
    places = (
        (at.gpu, "per process"),
        (at.host, "in host memory"),
        (at.nvme, "on NVMe"),
    )
    sizes = "; ".join(f"{amount(size)} {place}" for size, place in places if size)
    rest = "launch/plan.py predicts the rest"
    if plan.recipe.model.config:
        rest = "activations of a model by its config are not counted"
    return f"model states of {sizes}, counted; {rest}"


def fullest_stage(plan: Plan) -> tuple[int, int]:
    """Return the parameters on a rank of the fullest pipeline stage, and the layers of the stage."""
    recipe = plan.recipe
    vocab = plan.padded_vocab
    pp = plan.layout.pp
    stages = []
    for stage, layers in enumerate(cost.stages_of(recipe, vocab, pp)):
        parameters = cost.parameters_per_rank(
            recipe.model,
            recipe.positions,
            vocab,
            plan.layout.tp,
            layers=layers,
            first=stage == 0,
            last=stage == pp - 1,
        )
        stages.append((parameters, layers))
    return max(stages)


def largest_master(plan: Plan) -> float:
    """Return the elements of a rank's largest flat tensor that its device steps; 0: no such tensor."""
    if plan.zero_stage == 0 or places_of(plan).optimizer != "gpu":
        return 0.0
    share = fullest_stage(plan)[0] / plan.layout.dp
    if plan.zero_stage < 3:
        return share
    return min(share, lookup(plan.ds, "zero_optimization.sub_group_size") or 1e9)


def places_of(plan: Plan) -> cost.Places:
    """Return where the resolved JSON has the optimizer states and the weights."""
    return cost.Places(
        *(PLACES[section.get("device") or "none"] for section in offloads(plan))
    )


def offloads(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections offload_optimizer and offload_param of the resolved JSON; {} if missing."""
    zero = plan.ds.get("zero_optimization") or {}
    return zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}


def state_widths(plan: Plan) -> cost.Widths:
    """Return the bytes of one number of each kind under the resolved JSON.

    DeepSpeed 0.19.8: `<half>_master_weights_and_grads` keeps the optimizer's weights and gradients in half
    precision. So does `bf16_optimizer_states` with Adam's moments on the GPU, and `fp32_optimizer_states:
    false` on the CPU (ops/adam/cpu_adam.py). `grad_accum_dtype` is the type of the gradients.
    """
    if plan.precision == "fp32":
        return cost.FP32
    ds = plan.ds
    half = plan.precision
    accumulated = (ds.get("data_types") or {}).get("grad_accum_dtype") or half
    gradient = 4 if accumulated == "fp32" else 2
    if not ds.get(half, {}).get(f"{half}_master_weights_and_grads"):
        return cost.Widths(gradient=gradient)
    params = (ds.get("optimizer") or {}).get("params") or {}
    halved = (
        ds.get(half, {}).get("bf16_optimizer_states")
        or params.get("fp32_optimizer_states") is False
    )
    moment = 2 if halved else 4
    return cost.Widths(gradient=gradient, master=2, moment=moment)
