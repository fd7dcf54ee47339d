"""Layouts for the comparison with one process, and their plans."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ds_configs.findings import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
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
    # precision of weights and states, which decides the tolerances
    states: str = "fp32"

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def folder(self) -> str:
        """Return the name of the run directory."""
        return self.name.replace(",", "").replace(" ", "-")

    def with_compiled_layers(self) -> LayoutCase:
        return replace(self, name=f"{self.name} compiled", compiled_from=self.name)


def _case(name: str, ds_config: str, **other: Any) -> LayoutCase:
    """Make the case of a layout by its name, which has the degrees above 1: tp2, pp2, dp2."""
    for kind in ("tp", "pp", "dp"):
        degree = re.search(rf"\b{kind}(\d)", name)
        other[kind] = int(degree[1]) if degree else 1
    return LayoutCase(name, ds_config=ds_config, **other)


REFERENCE = _case("one process", "zero0")
CASES = (
    _case("accumulation 4", "zero0", accumulation=4),
    _case("own accumulation", "zero1", accumulation=None),
    _case("recomputed", "zero1", checkpointing="full"),
    _case("recomputed by 2", "zero3", checkpointing="2"),
    _case("tp2", "zero0"),
    _case(
        "tp2 accumulation 4, recomputed", "zero1", accumulation=4, checkpointing="full"
    ),
    _case("tp2 zero3", "zero3"),
    _case("pp2", "pipeline"),
    _case("pp2 accumulation 4", "pipeline", accumulation=4),
    _case(
        "pp2 accumulation 4, recomputed",
        "pipeline",
        accumulation=4,
        checkpointing="full",
    ),
    _case("pp2 own accumulation", "pipeline", accumulation=None),
    _case("dp2 zero0", "zero0"),
    _case("dp2 zero1", "zero1"),
    _case("dp2 zero2", "zero2"),
    _case("dp2 zero3", "zero3"),
    _case("dp2 zero2 offload", "zero2_offload"),
    _case("dp2 zero3 offload", "zero3_offload", accumulation=4),
    _case("dp2 zero2 own accumulation", "zero2", accumulation=None),
    _case("tp3", "zero0"),
    _case("pp3", "pipeline", accumulation=None),
    _case("tp2 dp2 zero1", "zero1"),
    _case("tp2 dp2 zero2", "zero2", accumulation=4),
    _case("tp2 dp2 zero3", "zero3"),
    _case("tp2 dp2 zero3 offload, recomputed", "zero3_offload", checkpointing="full"),
    _case("pp2 dp2", "pipeline", accumulation=4),
    _case("tp2 pp2", "3d", accumulation=4),
    _case("tp2 pp2 recomputed", "3d", checkpointing="full"),
    _case("tp4", "zero1"),
    _case("tp2 pp2 dp2", "3d", accumulation=4),
    _case("sequence tp2", "zero0", sequence=True),
    _case(
        "sequence tp2 zero1, recomputed", "zero1", checkpointing="full", sequence=True
    ),
    _case("sequence tp2 zero3", "zero3", sequence=True),
    _case("sequence tp4", "zero1", sequence=True),
    _case("sequence tp2 dp2 zero2", "zero2", accumulation=4, sequence=True),
    _case(
        "sequence tp2 dp2 zero3 offload, recomputed",
        "zero3_offload",
        checkpointing="full",
        sequence=True,
    ),
    _case("sequence tp2 pp2", "3d", accumulation=4, sequence=True),
    _case(
        "sequence tp2 pp2 dp2, selective",
        "3d",
        checkpointing="selective",
        sequence=True,
    ),
    _case("selective", "zero1", checkpointing="selective"),
    _case("selective tp2", "zero0", checkpointing="selective"),
    _case("selective dp2 zero3", "zero3", checkpointing="selective"),
    _case(
        "selective pp2 accumulation 4",
        "pipeline",
        accumulation=4,
        checkpointing="selective",
    ),
    _case("pure bf16 dp2", "pure_bf16", accumulation=4, states="bf16"),
    _case("pure bf16 tp2", "pure_bf16", states="bf16"),
)


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
