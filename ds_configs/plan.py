"""Input and outcome of the resolver: `Device` and `Machine`, which `launch` detects, and `Plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from ds_configs.findings import Notice
from recipes.layout import Layout
from recipes.schema import Recipe

Precision = Literal["fp32", "bf16", "fp16"]
# nvme: whatever goes there
Offload = Literal["none", "optimizer", "parameters", "optimizer+parameters", "nvme"]
ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Device:
    """Facts about the device that trains: code asks these, and shows the name.

    Attributes:
        name: torch's for its kind, such as "cpu", "cuda" (NVIDIA and AMD) or "xpu".
        asynchronous: calls return early; copies and collectives run beside computation.
        own_memory: each rank has a device with memory, kernels and clocks of its own; else it is the host.
    """

    name: str
    asynchronous: bool
    own_memory: bool


HOST = Device("cpu", asynchronous=False, own_memory=False)
GPU = Device("cuda", asynchronous=True, own_memory=True)


@dataclass(frozen=True)
class Machine:
    """A machine's abilities.

    Attributes:
        device: what trains.
        fp16, bf16: the device trains in it.
        slow_bf16: there are no instructions for it: a product takes many times as long as in fp32.
        compiler: DeepSpeed can compile its ops (g++ and ninja).
        cuda_compiler: it can compile CUDA ops as well (nvcc); true without CUDA.
        libaio: library and headers for DeepSpeed's NVMe op.
        lacks: optional packages that are missing.
        emulated_fp16: fp16 on a device that refuses it, as the user asks, to test the loss scaler.
    """

    device: Device
    fp16: bool
    bf16: bool
    compiler: bool
    libaio: bool
    emulated_fp16: bool = False
    cuda_compiler: bool = True
    lacks: frozenset[str] = frozenset()
    slow_bf16: bool = False


# For resolving a plan that is meant for another machine: it refuses nothing.
ANY_GPU = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=True)


@dataclass(frozen=True)
class Plan:
    """A recipe resolved against a DeepSpeed JSON, a number of processes and a machine.

    Attributes:
        recipe: as it was given.
        layout: degrees of parallelism, and the batch identity.
        ds: resolved JSON for DeepSpeed: no "auto" left to fill, no `parallel` section.
        zero_stage: 0 to 3.
        offload: parts of the model states outside the GPU.
        precision: of the run, never "auto"; differs from the recipe's only with a notice.
        padded_vocab: rows of the embedding, a multiple of model.vocab_divisible_by x tp (not transformers').
        notices: to be shown loudly and kept with the results.
        ds_name: name of the JSON without its folder and suffix.
    """

    recipe: Recipe
    layout: Layout
    ds: dict[str, Any]
    zero_stage: ZeroStage
    offload: Offload
    precision: Precision
    padded_vocab: int
    notices: tuple[Notice, ...]
    ds_name: str


# of plan.json: makes an equal plan of what `plan_to_json` gave
FORM = TypeAdapter(Plan)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data."""
    values: dict[str, Any] = FORM.dump_python(plan, mode="json", by_alias=True)
    return values


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, without the recipe and the DeepSpeed configuration."""
    values: dict[str, Any] = FORM.dump_python(
        plan, mode="json", by_alias=True, exclude={"recipe", "ds"}
    )
    return values
