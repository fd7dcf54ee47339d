"""The layouts that are compared with one process, and the plan of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from recipes.schema import Recipe

NO_DROPOUT = ("dropout.hidden=0", "dropout.attention=0")
# What a recipe is trained with in every layout.
FORCED = ("precision=fp32", *NO_DROPOUT, "optimizer.eps=1e-6", "run.save_last=true")


@dataclass(frozen=True)
class LayoutCase:
    """One way to run the recipe, which must not change its numbers."""

    name: str
    tp: int  # degrees of tensor, pipeline and data parallelism
    pp: int
    dp: int
    ds_config: str  # bare name of a file in ds_configs/
    accumulation: int = 1  # micro-batches per optimizer step; the global batch is the recipe's
    checkpointing: str = "none"  # activation_checkpointing of the recipe
    compiled_from: str | None = None  # with compiled layers; the name of the same case without

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        return self.name.replace(",", "").replace(" ", "-")

    def with_compiled_layers(self) -> LayoutCase:
        return replace(self, name=f"{self.name} compiled", compiled_from=self.name)


REFERENCE = LayoutCase("one process", 1, 1, 1, "zero0")
CASES = (
    LayoutCase("accumulation 4", 1, 1, 1, "zero0", accumulation=4),
    LayoutCase("recomputed", 1, 1, 1, "zero1", checkpointing="full"),
    LayoutCase("recomputed by 2", 1, 1, 1, "zero3", checkpointing="2"),
    LayoutCase("tp2", 2, 1, 1, "zero0"),
    LayoutCase("tp2 accumulation 4, recomputed", 2, 1, 1, "zero1", accumulation=4, checkpointing="full"),
    LayoutCase("tp2 zero3", 2, 1, 1, "zero3"),
    LayoutCase("pp2", 1, 2, 1, "pipeline"),
    LayoutCase("pp2 accumulation 4", 1, 2, 1, "pipeline", accumulation=4),
    LayoutCase("pp2 accumulation 4, recomputed", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
    LayoutCase("dp2 zero0", 1, 1, 2, "zero0"),
    LayoutCase("dp2 zero1", 1, 1, 2, "zero1"),
    LayoutCase("dp2 zero2", 1, 1, 2, "zero2"),
    LayoutCase("dp2 zero3", 1, 1, 2, "zero3"),
    LayoutCase("dp2 zero2 offload", 1, 1, 2, "zero2_offload"),
    LayoutCase("dp2 zero3 offload", 1, 1, 2, "zero3_offload", accumulation=4),
    LayoutCase("tp2 dp2 zero1", 2, 1, 2, "zero1"),
    LayoutCase("tp2 dp2 zero2", 2, 1, 2, "zero2", accumulation=4),
    LayoutCase("tp2 dp2 zero3", 2, 1, 2, "zero3"),
    LayoutCase("tp2 dp2 zero3 offload, recomputed", 2, 1, 2, "zero3_offload", checkpointing="full"),
    LayoutCase("pp2 dp2", 1, 2, 2, "pipeline", accumulation=4),
    LayoutCase("tp2 pp2", 2, 2, 1, "3d", accumulation=4),
    LayoutCase("tp2 pp2 recomputed", 2, 2, 1, "3d", checkpointing="full"),
    LayoutCase("tp4", 4, 1, 1, "zero1"),
    LayoutCase("tp2 pp2 dp2", 2, 2, 2, "3d", accumulation=4),
)


def case_plan(recipe: Recipe, case: LayoutCase, machine: Machine) -> Plan:
    """The plan of the recipe under the case's layout, its global batch kept. Raises ConfigError."""
    micro = recipe.batch.global_ // (case.dp * case.accumulation)
    recomputed = case.checkpointing
    settings = {
        "parallel": recipe.parallel.model_copy(update={"tp": case.tp, "pp": case.pp, "dp": case.dp}),
        "batch": recipe.batch.model_copy(update={"micro": micro, "accumulation": case.accumulation}),
        "activation_checkpointing": int(recomputed) if recomputed.isdigit() else recomputed,
    }
    return resolve(recipe.model_copy(update=settings), case.ds_config, case.processes, machine)
