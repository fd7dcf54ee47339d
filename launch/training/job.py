"""The job of a run with its plan, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data.text.sources import open_source
from ds_configs.findings import Notice
from ds_configs.jsonfile import FOLDER, ConfigError, find
from ds_configs.plan import ANY_GPU, Machine, Plan
from ds_configs.resolver import resolve
from launch.ranks import processes
from launch.training import deepspeed_judgement
from recipes.schema import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from launch.checkpoints.run_checkpoints import Checkpoint


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
    """The plan of one run, its directory and its options."""

    plan: Plan
    name: str  # the recipe's, as the user names it, for results
    directory: Path  # the run directory
    # start from the newest complete checkpoint of `directory`, if there is one
    resume: bool = False
    compiled: bool = False  # torch.compile the model
    # of (TrainingRun, StepRecord)
    after_step: Callable[[Any, Any], None] = lambda run, outcome: None
    initial_weights: InitialWeights | None = None  # None: random ones
    # writes the first checkpoint of an adopted run; takes the checksum of the training tokens
    adopt: Callable[[Plan, Path, str], None] | None = None
    ds_config: Path | None = None  # the DeepSpeed JSON as it was given
    # the run whose recipe was taken; None: a row's, or the resumed run's
    recipe_of: Path | None = None
    # of vocabularies and tokens; None: `data.cache.default_directory()`
    cache: Path | None = None

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
    ds_config: str | None,
    machine: Machine,
    *,
    compiled: bool,
    initial_weights: InitialWeights | None,
    elsewhere: bool = False,
    planned: int | None = None,
) -> Plan:
    """Plan the run of `recipe` on this launch's processes.

    `ds_config` None: the recipe's own; `elsewhere`: a plan on paper, of `planned` processes or of as many as
    the layout needs; refusals of this machine alone become notices. Raises ValueError with every problem of
    recipe and configuration, or with a problem of the given weights or the data.
    """
    config = ds_config or recipe.ds_config
    if elsewhere:
        plan = plan_anywhere(recipe, config, machine, planned)
    else:
        plan = resolve(recipe, config, processes.world_size(), machine)
    # ours are judged by a test: a plan waits for no torch
    if not elsewhere or find(config).parent != FOLDER:
        deepspeed_judgement.check(plan, config)
    if compiled and recipe.model.implementation == "transformers":
        raise ValueError(
            "--compile with model.implementation=transformers: these rows run transformers' modules as their "
            "source did, uncompiled; leave --compile out, or --set model.implementation=megarecipes"
        )
    if initial_weights is not None:
        plan = replace(plan, notices=(*plan.notices, *initial_weights.check(recipe)))
    data = recipe.data
    if recipe.task is not None:
        return plan
    own = any(origin.source not in ("packaged", "hub") for origin in data.origins)
    if own or data.tokenizer.kind in ("file", "store"):
        from data.corpus import check_sources  # with transformers

        check_sources(recipe)
    else:
        for origin in data.origins:
            open_source(origin)
    return plan


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
