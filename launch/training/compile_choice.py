"""The choice of torch.compile: the user's word, else yes where compiling is paid back within the run.

The choice depends on the run and the machine alone, not on a clock: a resumed run and all ranks choose alike.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Literal

from packaging.version import Version

from ds_configs.plan import Machine, Plan
from launch.ranks import processes
from modeling import cost
from recipes.problems import Problem, ProblemsError

Wish = Literal["auto", "on", "off"]
WISHES: tuple[Wish, ...] = ("auto", "on", "off")

# Rough rates of eager training, operations per second: of one core, and of one GPU.
CORE = {"fp32": 5e10, "bf16": 1e11, "fp16": 1e11}
GPU = {"fp32": 1e13, "bf16": 1e14, "fp16": 1e14}
# Compiling pays in runs of this many eager seconds or more, also where little lies between the products: it
# takes 20 to 40 s, and saves 3 % of a step (fp32 on two cores) to a quarter.
PAYS_FROM = 1000.0


def compiles(wish: Wish, plan: Plan, machine: Machine) -> bool:
    """Decide whether the run of `plan` is compiled on this machine. Raises ProblemsError."""
    if wish == "on" and computes_wrong_gradients(plan):
        came = f"--compile on with tp={plan.layout.tp} and torch {version('torch')}"
        rule = (
            "compiled by torch below 2.13, a tensor-parallel layer has wrong gradients"
        )
        raise ProblemsError(
            [
                Problem(
                    "--compile",
                    came,
                    rule,
                    "leave --compile out, or install torch 2.13",
                )
            ]
        )
    if wish != "auto":
        return wish == "on"
    return worth_compiling(plan, machine) and has_compiler(machine)


def computes_wrong_gradients(plan: Plan) -> bool:
    """Check for a torch that loses sums over tensor ranks in compiled backward passes (2.11 does)."""
    return plan.layout.tp > 1 and Version(version("torch")) < Version("2.13")


def worth_compiling(plan: Plan, machine: Machine) -> bool:
    """Judge whether compiling is paid back within the run, if there is a compiler.

    No under ZeRO-3 on a GPU, until it is measured there: DeepSpeed gathers parameters in hooks inside the
    compiled layer, and each hook breaks its graph. No on GPUs without bf16 (NVIDIA's before Ampere), which
    Triton no longer tests.
    """
    against = (
        plan.recipe.model.implementation == "transformers",
        machine.emulated_fp16,
        computes_wrong_gradients(plan),
        machine.device.own_memory and not machine.bf16,
        plan.zero_stage == 3 and machine.device.asynchronous,
    )
    return not any(against) and eager_seconds(plan, machine) >= PAYS_FROM


def has_compiler(machine: Machine) -> bool:
    """Check for the compiler of torch.compile: a C++ compiler on a CPU, Triton on a GPU."""
    if not machine.device.own_memory:
        return machine.compiler
    from modeling.fusing import has_gpu_compiler

    return has_gpu_compiler()


def explain_missing(wish: Wish, plan: Plan, machine: Machine) -> str | None:
    """Return a warning that a needed compiler is missing, or None."""
    if wish == "off" or not worth_compiling(plan, machine) or has_compiler(machine):
        return None
    needed = (
        "Triton, a C compiler and Python.h"
        if machine.device.own_memory
        else "g++ and Python's headers"
    )
    return f"not compiled: torch.compile needs {needed}; some of it is missing, and the run is slower"


def eager_seconds(plan: Plan, machine: Machine) -> float:
    """Estimate the seconds that the run computes without torch.compile."""
    recipe = plan.recipe
    layout = plan.layout
    samples = recipe.sizes.samples(recipe.steps)
    operations = cost.operations_of(recipe, samples, plan.padded_vocab)
    if machine.device.own_memory:
        return operations / (GPU[plan.precision] * layout.world)
    cores = max(1, len(os.sched_getaffinity(0)) // processes.local_world_size())
    return operations / (CORE[plan.precision] * cores * layout.world)
