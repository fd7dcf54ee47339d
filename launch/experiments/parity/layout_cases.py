"""Layouts for the comparison with one process, and their plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    # precision of weights and states, and of the one process that it is compared with
    states: str = "fp32"

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

    def with_compiled_layers(self) -> LayoutCase:
        return replace(self, name=f"{self.name} compiled", compiled_from=self.name)


RUN = "run"  # the run directory below the layout's own
# by the precision of weights and states
REFERENCES = {
    "fp32": LayoutCase("one process", 1, 1, 1, "zero0"),
    "bf16": LayoutCase("one process, pure bf16", 1, 1, 1, "pure_bf16", states="bf16"),
}
REFERENCE = REFERENCES["fp32"]
CASES = (
    LayoutCase("accumulation 4", 1, 1, 1, "zero0", accumulation=4),
    LayoutCase("own accumulation", 1, 1, 1, "zero1", accumulation=None),
    LayoutCase("recomputed", 1, 1, 1, "zero1", checkpointing="full"),
    LayoutCase("recomputed by 2", 1, 1, 1, "zero3", checkpointing="2"),
    LayoutCase("tp2", 2, 1, 1, "zero0"),
    LayoutCase(
        "tp2 accumulation 4, recomputed",
        2,
        1,
        1,
        "zero1",
        accumulation=4,
        checkpointing="full",
    ),
    LayoutCase("tp2 zero3", 2, 1, 1, "zero3"),
    LayoutCase("pp2", 1, 2, 1, "pipeline"),
    LayoutCase("pp2 accumulation 4", 1, 2, 1, "pipeline", accumulation=4),
    LayoutCase(
        "pp2 accumulation 4, recomputed",
        1,
        2,
        1,
        "pipeline",
        accumulation=4,
        checkpointing="full",
    ),
    LayoutCase("pp2 own accumulation", 1, 2, 1, "pipeline", accumulation=None),
    LayoutCase("dp2 zero0", 1, 1, 2, "zero0"),
    LayoutCase("dp2 zero1", 1, 1, 2, "zero1"),
    LayoutCase("dp2 zero2", 1, 1, 2, "zero2"),
    LayoutCase("dp2 zero3", 1, 1, 2, "zero3"),
    LayoutCase("dp2 zero2 offload", 1, 1, 2, "zero2_offload"),
    LayoutCase("dp2 zero3 offload", 1, 1, 2, "zero3_offload", accumulation=4),
    LayoutCase("dp2 zero2 own accumulation", 1, 1, 2, "zero2", accumulation=None),
    LayoutCase("tp3", 3, 1, 1, "zero0"),
    LayoutCase("pp3", 1, 3, 1, "pipeline", accumulation=None),
    LayoutCase("tp2 dp2 zero1", 2, 1, 2, "zero1"),
    LayoutCase("tp2 dp2 zero2", 2, 1, 2, "zero2", accumulation=4),
    LayoutCase("tp2 dp2 zero3", 2, 1, 2, "zero3"),
    LayoutCase(
        "tp2 dp2 zero3 offload, recomputed",
        2,
        1,
        2,
        "zero3_offload",
        checkpointing="full",
    ),
    LayoutCase("pp2 dp2", 1, 2, 2, "pipeline", accumulation=4),
    LayoutCase("tp2 pp2", 2, 2, 1, "3d", accumulation=4),
    LayoutCase("tp2 pp2 recomputed", 2, 2, 1, "3d", checkpointing="full"),
    LayoutCase("tp4", 4, 1, 1, "zero1"),
    LayoutCase("tp2 pp2 dp2", 2, 2, 2, "3d", accumulation=4),
    LayoutCase("sequence tp2", 2, 1, 1, "zero0", sequence=True),
    LayoutCase(
        "sequence tp2 zero1, recomputed",
        2,
        1,
        1,
        "zero1",
        checkpointing="full",
        sequence=True,
    ),
    LayoutCase("sequence tp2 zero3", 2, 1, 1, "zero3", sequence=True),
    LayoutCase("sequence tp4", 4, 1, 1, "zero1", sequence=True),
    LayoutCase(
        "sequence tp2 dp2 zero2", 2, 1, 2, "zero2", accumulation=4, sequence=True
    ),
    LayoutCase(
        "sequence tp2 dp2 zero3 offload, recomputed",
        2,
        1,
        2,
        "zero3_offload",
        checkpointing="full",
        sequence=True,
    ),
    LayoutCase("sequence tp2 pp2", 2, 2, 1, "3d", accumulation=4, sequence=True),
    LayoutCase(
        "sequence tp2 pp2 dp2, selective",
        2,
        2,
        2,
        "3d",
        checkpointing="selective",
        sequence=True,
    ),
    LayoutCase("selective", 1, 1, 1, "zero1", checkpointing="selective"),
    LayoutCase("selective tp2", 2, 1, 1, "zero0", checkpointing="selective"),
    LayoutCase("selective dp2 zero3", 1, 1, 2, "zero3", checkpointing="selective"),
    LayoutCase(
        "selective pp2 accumulation 4",
        1,
        2,
        1,
        "pipeline",
        accumulation=4,
        checkpointing="selective",
    ),
    LayoutCase("pure bf16 dp2", 1, 1, 2, "pure_bf16", accumulation=4, states="bf16"),
    LayoutCase("pure bf16 tp2", 2, 1, 1, "pure_bf16", states="bf16"),
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
