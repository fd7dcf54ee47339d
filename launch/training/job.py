"""One run before it runs, its plan, checked before anything is started, and the choice of torch.compile.

The choice is the user's word, else yes where compiling is paid back within the run. It depends on the run and
the machine alone, not on a clock: a resumed run and all ranks choose alike.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from packaging.version import Version
from pydantic import ValidationError

from data.durable_files import quiet
from data.text.sources import open_source
from ds_configs.findings import FOLDER, ConfigError, Notice, find, lookup, shown
from ds_configs.plan import ANY_GPU, Device, Machine, Plan
from ds_configs.resolver import resolve
from launch.checkpoints.run_checkpoints import Checkpoint, DamagedCheckpoint, found
from launch.console import terminal
from launch.deepspeed_fixes import versions
from launch.machine.memory import largest_master
from launch.ranks import processes
from launch.records.facts import Ending, RunFacts
from modeling import cost
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from data.corpus import Corpus
    from launch.ranks.meeting import Meeting
    from launch.training.early_ends import EarlyStop

Wish = Literal["auto", "on", "off"]
WISHES: tuple[Wish, ...] = ("auto", "on", "off")
# Rough rates of eager training, operations per second: of one core, and of one GPU.
CORE = {"fp32": 5e10, "bf16": 1e11, "fp16": 1e11}
GPU = {"fp32": 1e13, "bf16": 1e14, "fp16": 1e14}
# Compiling pays in runs of this many eager seconds or more, also where little lies between the products: it
# takes 20 to 40 s, and saves 3 % of a step (fp32 on two cores) to a quarter.
PAYS_FROM = 1000.0
# DeepSpeed's models -> the sections that they read.
_MODELS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
_FIX = "write what it takes, or remove the key"


class InitialWeights(Protocol):
    """Weights in a directory for the start of a run, instead of random ones (`launch.weights`)."""

    @property
    def directory(self) -> str: ...

    def check(self, recipe: Recipe) -> tuple[Notice, ...]:
        """Check that the weights fit the recipe; return remarks. Raises ProblemsError with every problem."""

    def resolved(self) -> InitialWeights:
        """Fix the choice, so that a run that still trains there cannot change it by a later save."""

    def record(self) -> Mapping[str, Any]:
        """Return what makes the same choice again, as plain data."""

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of one of our runs that they are; None: they are other weights."""

    def read(self, recipe: Recipe) -> Mapping[str, Tensor]:
        """Return full tensors by canonical name; each is read on access."""


@dataclass(frozen=True)
class Job:
    """One run before it runs: its facts, directory and options, and the work that its command adds."""

    facts: RunFacts
    directory: Path  # the run directory
    # start from the newest complete checkpoint of `directory`, if there is one
    resume: bool = False
    compiled: bool = False  # torch.compile the model
    # make more callbacks of a TrainingRun (`launch.training.callbacks`)
    callbacks: tuple[Callable[[Any], Any], ...] = ()
    initial_weights: InitialWeights | None = None  # None: random ones
    # writes the first checkpoint of an adopted run; takes the checksum of the training tokens
    adopt: Callable[[Plan, Path, str], None] | None = None
    # makes the training data on all ranks together, and raises ValueError or OSError; None: the recipe's
    corpus: Callable[[Meeting], Corpus] | None = None
    # trains instead of our loop, from a `Start`
    loop: Callable[[Any], EarlyStop | None] | None = None
    # finds the checkpoints that the loop keeps
    saved: Callable[[Path], Iterable[Checkpoint | DamagedCheckpoint]] = found
    # on rank 0 after a good end; makes the sample or the scores
    outcome: Callable[[Job, Corpus], Ending] = lambda job, corpus: Ending()

    @property
    def plan(self) -> Plan:
        return self.facts.plan

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.directory / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """The STOP file, which ends the run after its current step."""
        return self.directory / "STOP"


def plan_job(
    recipe: Recipe,
    config: str,
    machine: Machine,
    *,
    compiled: bool,
    initial_weights: InitialWeights | None,
    elsewhere: bool = False,
    planned: int | None = None,
) -> Plan:
    """Plan the run of `recipe` on this launch's processes.

    `config`: the DeepSpeed JSON; `elsewhere`: a plan on paper, of `planned` processes or of as many as
    the layout needs; refusals of this machine alone become notices. Raises ValueError with every problem of
    recipe and configuration, or with a problem of the given weights or the data.
    """
    if elsewhere:
        plan = plan_anywhere(recipe, config, machine, planned)
    else:
        plan = resolve(recipe, config, processes.world_size(), machine)
    check_flat_tensors(plan, machine.device)
    notices = [*plan.notices]
    # ours are judged by a test: a plan waits for no torch
    if not elsewhere or find(config).parent != FOLDER:
        check_by_deepspeed(plan, config)
    if not elsewhere and versions.is_newer_than_seen():
        newer = f"DeepSpeed {versions.installed()}: newer than {versions.SEEN[-1]}, the newest seen to agree"
        notices.append(Notice("deepspeed", newer))
    if compiled and recipe.model.implementation == "transformers":
        raise ValueError(
            "--compile with model.implementation=transformers: transformers' modules run uncompiled, as those "
            "of the rows' sources did; leave --compile out"
        )
    if initial_weights is not None:
        notices += initial_weights.check(recipe)
    if recipe.task is None:
        data = recipe.data
        own = any(origin.source not in ("packaged", "hub") for origin in data.origins)
        if own or data.tokenizer.kind in ("file", "store"):
            from data.corpus import check_sources  # with transformers

            say = terminal.say if processes.rank() == 0 else quiet
            for text in check_sources(recipe, say):
                notices.append(Notice("data", f"data: {text}"))
        else:
            for origin in data.origins:
                open_source(origin)
    return replace(plan, notices=tuple(notices))


def check_flat_tensors(plan: Plan, device: Device) -> None:
    """Check that torch steps the largest flat tensor (docs/design.md). Raises ProblemsError."""
    elements = largest_master(plan)
    torch = version("torch")
    if elements < 2**31 or not device.own_memory or Version(torch) >= Version("2.10"):
        return
    came = f"torch {torch} with {elements:,.0f} master weights in one tensor of a rank"
    rule = "before 2.10 torch's fused AdamW and norms count its elements in 32 bits"
    fix = "install torch>=2.10, or take more tensor, pipeline or data-parallel ranks"
    raise ProblemsError([Problem("parallel", came, rule, fix)])


def plan_anywhere(
    recipe: Recipe, ds_config: str, machine: Machine, world: int | None = None
) -> Plan:
    """Plan for `world` processes, or for as many as the layout needs, on any machine.

    If only `machine` refuses, the plan is for a GPU with every ability, and a notice says so. Raises
    ConfigError if the recipe cannot run on any machine.
    """
    try:
        return resolve(recipe, ds_config, world, machine)
    except ConfigError as refused:
        try:
            plan = resolve(recipe, ds_config, world, ANY_GPU)
        except ConfigError:
            raise refused from None
        here = [
            Notice("machine", f"refused on this machine: {problem}")
            for problem in refused.problems
        ]
        return replace(plan, notices=(*plan.notices, *here))


def assumed_machine(plan: Plan, here: str) -> str:
    """Name the machine of a `plan_anywhere`; `here`: the name of this one."""
    if any(notice.key == "machine" for notice in plan.notices):
        return f"planned for GPUs that have fp16, bf16 and every op of DeepSpeed's; here: {here}"
    return f"planned for machines like this one: {here}"


def compiles(wish: Wish, plan: Plan, machine: Machine) -> tuple[bool, str | None]:
    """Decide whether the run of `plan` is compiled on this machine, and why not where it pays.

    Raises ProblemsError.
    """
    if wish == "on" and computes_wrong_gradients(plan):
        came = f"--compile on with tp={plan.layout.tp} and torch {version('torch')}"
        rule = (
            "compiled by torch below 2.13, a tensor-parallel layer has wrong gradients"
        )
        raise ProblemsError.of(
            "--compile", came, rule, "leave --compile out, or install torch 2.13"
        )
    if wish == "off" or (wish == "auto" and not worth_compiling(plan, machine)):
        return False, None
    if has_compiler(machine):
        return True, None
    needed = (
        "Triton, a C compiler and Python.h"
        if machine.device.own_memory
        else "g++ and Python's headers"
    )
    rule = f"torch.compile needs {needed}; some of it is missing"
    if wish == "on":
        raise ProblemsError.of("--compile", "--compile on", rule, "leave --compile out")
    return False, f"not compiled: {rule}, and the run is slower"


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
    return not any(against) and (eager_seconds(plan, machine) or 0) >= PAYS_FROM


def has_compiler(machine: Machine) -> bool:
    """Check for the compiler of torch.compile: a C++ compiler on a CPU, Triton on a GPU."""
    if not machine.device.own_memory:
        return machine.compiler
    from modeling.fusing import has_gpu_compiler

    return has_gpu_compiler()


def eager_seconds(plan: Plan, machine: Machine) -> float | None:
    """Estimate the seconds that the run computes without torch.compile; None: no count of its operations."""
    recipe = plan.recipe
    layout = plan.layout
    samples = recipe.sizes.samples(recipe.steps)
    samples -= recipe.sizes.samples(recipe.begins_after)
    operations = cost.operations_of(recipe, samples, plan.padded_vocab)
    if not operations:
        return None
    if machine.device.own_memory:
        return operations / (GPU[plan.precision] * layout.world)
    cores = max(1, len(os.sched_getaffinity(0)) // processes.local_world_size())
    return operations / (CORE[plan.precision] * cores * layout.world)


def check_by_deepspeed(plan: Plan, where: str) -> None:
    """Check that DeepSpeed accepts the configuration; `where`: the JSON. Raises ConfigError.

    `ds_configs` judges the keys that it knows first. DeepSpeed judges the rest, such as sections that are
    handed on unread, and rules of another version.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    _check_release(plan, where)
    ds = copy.deepcopy(plan.ds)
    ds["train_batch_size"] = plan.layout.micro * plan.layout.accumulation
    try:
        DeepSpeedConfig(ds, SimpleNamespace(get_data_parallel_world_size=lambda: 1))
    except ValidationError as error:
        raise ConfigError(list(_refused_values(error, where))) from None
    except Exception as error:  # its other checks raise exceptions of any type
        came = f"DeepSpeed refuses it ({' '.join(str(error).split()) or type(error).__name__})"
        raise ConfigError.of("--ds_config", came, fix=_FIX, where=where) from None


def _check_release(plan: Plan, where: str) -> None:
    """Refuse what the installed release does wrong. Raises ConfigError.

    Before 0.19.8 `split_half_float_double` of runtime/zero/stage_1_and_2.py finds no type on a CPU, and
    gradients that do not lie in one buffer are averaged over none of the ranks.
    """
    key = "zero_optimization.contiguous_gradients"
    if lookup(plan.ds, key) is not False or versions.at_least("0.19.8"):
        return
    if plan.zero_stage in (1, 2) and not processes.device().own_memory:
        rule = f"DeepSpeed {versions.installed()} then averages no gradient on a CPU"
        fix = "set it to true, or pip install deepspeed==0.19.8"
        raise ConfigError.of(key, f"{key}=false", rule, fix, where=where)


def _refused_values(error: ValidationError, where: str) -> Iterator[Problem]:
    section = _MODELS.get(error.title, "")
    for each in error.errors():
        key = ".".join(filter(None, (section, *map(str, each["loc"]))))
        value: Any = each["input"]
        came = (
            f"{key}={shown(value)}"
            if each["loc"] and not isinstance(value, Mapping)
            else key
        )
        said = (
            each["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        )
        yield Problem(
            key,
            came,
            f"DeepSpeed refuses it ({said[:1].lower()}{said[1:]})",
            _FIX,
            where=where,
        )
