"""Layouts for the comparison with one process, and their plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ds_configs.findings import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from launch.experiments.proving.layout import ACCUMULATION, Layout, layout_of
from recipes.problems import Problem
from recipes.schema import Recipe

NO_DROPOUT = ("dropout.hidden=0", "dropout.attention=0")
# Settings of the recipe in every layout. The watch over numbers is off: it would end a wrong one uncompared.
FORCED = (
    "precision=fp32",
    *NO_DROPOUT,
    "optimizer.eps=1e-6",
    "run.save_last=true",
    "run.check_every=0",
)
# Keys or sections of the recipe that each layout decides.
DECIDED = (
    "parallel",
    "ds_config",
    "activation_checkpointing",
    "run.save_last",
    "run.check_every",
)


@dataclass(frozen=True)
class LayoutCase:
    """One layout of the recipe; it must not change the numbers."""

    name: str
    tp: int  # degrees of tensor, pipeline and data parallelism
    pp: int
    dp: int
    ds_config: str  # bare name of a file in ds_configs/
    # micro-batches per optimizer step, at the recipe's global batch; None: the recipe's own number
    accumulation: int | None = 1
    checkpointing: str = "none"  # activation_checkpointing of the recipe
    sequence: bool = False  # sequence parallelism over the tensor ranks
    compiled_from: str | None = None  # name of the eager case, if layers are compiled
    # precision of weights and states, and of the one process that it is compared with
    states: Literal["fp32", "bf16"] = "fp32"

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def folder(self) -> str:
        """Return the name of its directory."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def words(self) -> str:
        """Return its degrees as `proving.layout` reads them."""
        accumulation = self.accumulation or 1
        degrees = f"tp{self.tp}-pp{self.pp}-dp{self.dp}"
        return f"{degrees}-accumulation{accumulation}"

    @property
    def layout(self) -> Layout:
        """Return its degrees under its name."""
        return Layout(self.name, layout_of(self.words).words)

    def with_compiled_layers(self) -> LayoutCase:
        return replace(self, name=f"{self.name} compiled", compiled_from=self.name)


RUN = "run"  # the run directory below the layout's own
# by the precision of weights and states
REFERENCES = {
    "fp32": LayoutCase("one process", 1, 1, 1, "zero0"),
    "bf16": LayoutCase("one process, pure bf16", 1, 1, 1, "pure_bf16", states="bf16"),
}
REFERENCE = REFERENCES["fp32"]
# by name: words of `proving.layout`, and the file in ds_configs/; `own`: accumulation of the recipe, `full2`:
# every second layer is recomputed
_CASES = {
    "accumulation 4": ("accumulation4", "zero0"),
    "own accumulation": ("own", "zero1"),
    "recomputed": ("full", "zero1"),
    "recomputed by 2": ("full2", "zero3"),
    "tp2": ("tp2", "zero0"),
    "tp2 accumulation 4, recomputed": ("tp2-accumulation4-full", "zero1"),
    "tp2 zero3": ("tp2", "zero3"),
    "pp2": ("pp2", "pipeline"),
    "pp2 accumulation 4": ("pp2-accumulation4", "pipeline"),
    "pp2 accumulation 4, recomputed": ("pp2-accumulation4-full", "pipeline"),
    "pp2 own accumulation": ("pp2-own", "pipeline"),
    "dp2 zero0": ("dp2", "zero0"),
    "dp2 zero1": ("dp2", "zero1"),
    "dp2 zero2": ("dp2", "zero2"),
    "dp2 zero3": ("dp2", "zero3"),
    "dp2 zero2 offload": ("dp2", "zero2_offload"),
    "dp2 zero3 offload": ("dp2-accumulation4", "zero3_offload"),
    "dp2 zero2 own accumulation": ("dp2-own", "zero2"),
    "tp3": ("tp3", "zero0"),
    "pp3": ("pp3-own", "pipeline"),
    "tp2 dp2 zero1": ("tp2-dp2", "zero1"),
    "tp2 dp2 zero2": ("tp2-dp2-accumulation4", "zero2"),
    "tp2 dp2 zero3": ("tp2-dp2", "zero3"),
    "tp2 dp2 zero3 offload, recomputed": ("tp2-dp2-full", "zero3_offload"),
    "pp2 dp2": ("pp2-dp2-accumulation4", "pipeline"),
    "tp2 pp2": ("tp2-pp2-accumulation4", "3d"),
    "tp2 pp2 recomputed": ("tp2-pp2-full", "3d"),
    "tp4": ("tp4", "zero1"),
    "tp2 pp2 dp2": ("tp2-pp2-dp2-accumulation4", "3d"),
    "sequence tp2": ("tp2-sequence", "zero0"),
    "sequence tp2 zero1, recomputed": ("tp2-full-sequence", "zero1"),
    "sequence tp2 zero3": ("tp2-sequence", "zero3"),
    "sequence tp4": ("tp4-sequence", "zero1"),
    "sequence tp2 dp2 zero2": ("tp2-dp2-accumulation4-sequence", "zero2"),
    "sequence tp2 dp2 zero3 offload, recomputed": (
        "tp2-dp2-full-sequence",
        "zero3_offload",
    ),
    "sequence tp2 pp2": ("tp2-pp2-accumulation4-sequence", "3d"),
    "sequence tp2 pp2 dp2, selective": ("tp2-pp2-dp2-selective-sequence", "3d"),
    "selective": ("selective", "zero1"),
    "selective tp2": ("tp2-selective", "zero0"),
    "selective dp2 zero3": ("dp2-selective", "zero3"),
    "selective pp2 accumulation 4": ("pp2-accumulation4-selective", "pipeline"),
    "pure bf16 dp2": ("dp2-accumulation4", "pure_bf16"),
    "pure bf16 tp2": ("tp2", "pure_bf16"),
}


def _case(name: str, words: str, ds_config: str) -> LayoutCase:
    layout = layout_of(words)
    recomputed = "selective" if layout["selective"] else "none"
    if layout["full"]:
        recomputed = "full" if layout["full"] == 1 else str(layout["full"])
    return LayoutCase(
        name,
        layout["tp"],
        layout["pp"],
        layout["dp"],
        ds_config,
        None if layout["own"] else layout[ACCUMULATION],
        recomputed,
        bool(layout["sequence"]),
        states="bf16" if ds_config == "pure_bf16" else "fp32",
    )


CASES = tuple(_case(name, *of) for name, of in _CASES.items())


def case_plan(recipe: Recipe, case: LayoutCase, machine: Machine) -> Plan:
    """Resolve the recipe under the case's layout, with the same global batch. Raises ConfigError."""
    batch = recipe.batch
    recomputed = case.checkpointing
    shares = {"micro": None, "accumulation": case.accumulation}
    if case.accumulation is None:
        shares = {
            "micro": batch.micro,
            "accumulation": None if batch.micro else batch.accumulation,
        }
    # the largest micro-batch that accumulates as often, or more often
    elif batch.rampup:
        most = max(1, batch.global_ // (case.accumulation * case.dp))
        shares = {
            "micro": math.gcd(most, max(1, batch.unit // case.dp)),
            "accumulation": None,
        }
    degrees = {"tp": case.tp, "pp": case.pp, "dp": case.dp, "sequence": case.sequence}
    settings = {
        "parallel": recipe.parallel.model_copy(update=degrees),
        "batch": batch.model_copy(update=shares),
        "activation_checkpointing": int(recomputed)
        if recomputed.isdigit()
        else recomputed,
    }
    return resolve(
        recipe.model_copy(update=settings), case.ds_config, case.processes, machine
    )


def why_impossible(
    recipe: Recipe, case: LayoutCase, machine: Machine, most: int
) -> tuple[Problem, ...]:
    """Return the problems of the recipe under the case's layout, with at most `most` processes.

    The problems have no fixes: a fix would change the layout.
    """
    if case.processes > most:
        return (
            Problem(
                "--processes",
                f"it has {case.processes} processes",
                f"there are {most} at most",
            ),
        )
    try:
        case_plan(recipe, case, machine)
    except ConfigError as error:
        return tuple(replace(problem, fix="") for problem in error.problems)
    return ()
