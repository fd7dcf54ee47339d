"""Published rows as cases for the planner: workload, node and printed numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_configs.findings import ConfigError
from launch.planning.prediction import hardware
from launch.planning.prediction.published_step import (
    printed_seconds,
    published_workload,
    seconds_of,
)
from launch.planning.prediction.workload import Workload
from launch.planning.resolved_plans import published_plan
from recipes import catalog
from tools.tables.lines import CheckedRow, checked_tables

# Errata of a row that make its time, or its running out of memory, worthless as a measurement.
QUANTITIES = ("time", "memory", "allocated")
CONTRADICTIONS = {"time": ("GPUs", "time"), "memory": ("GPUs", "out of memory")}


@dataclass(frozen=True)
class Case:
    """A row to predict.

    Attributes:
        document: short name of its source; constants are fitted leaving one document out.
        node, work: None for an unpredictable row; `excluded` has the reason.
        seconds: time of an iteration as printed, or from printed TFLOPS and sizes.
        cached: bytes cached (reserved) by torch, or in use on the device.
        allocated: bytes of tensors, of those.
        by_device: `cached` is the device's own figure, as of nvidia-smi, with CUDA's context.
        oom: it ran out of memory; None: not known.
        excluded: reasons against comparing a quantity.
    """

    document: str
    table: str
    name: str
    node: hardware.Node | None
    work: Workload | None
    seconds: float | None = None
    cached: float | None = None
    allocated: float | None = None
    by_device: bool = False
    oom: bool | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> tuple[Workload, hardware.Node]:
        """Workload and node of a predictable row."""
        assert self.work and self.node
        return self.work, self.node

    def compares(self, quantity: str) -> bool:
        """Check whether the row can be predicted, and one of `QUANTITIES` compared."""
        return self.work is not None and quantity not in self.excluded

    def printed(self, quantity: str) -> float | None:
        """Return the compared seconds of "time", cached bytes of "memory", or allocated ones; None: none."""
        value = {
            "time": self.seconds,
            "memory": self.cached,
            "allocated": self.allocated,
        }[quantity]
        return value if self.compares(quantity) else None


def of_published_tables() -> list[Case]:
    """Return the rows of recipes/ with a printed time, rate, cached memory, or out of memory."""
    tables = checked_tables(catalog.tables())
    cases = (of_row(row) for table in tables for row in table.rows)
    return [case for case in cases if case.seconds or case.cached or case.oom]


def of_row(row: CheckedRow) -> Case:
    """Make the case of a row of recipes/, on the system of its source."""
    published = row.published
    recipe = row.recipe
    excluded = {}
    for quantity, errors in CONTRADICTIONS.items():
        for erratum in row.source.evidence.errata_of(row.name):
            if erratum.quantity in errors:
                excluded[quantity] = erratum.difference
    work = None
    why = None
    if published.software is None:
        why = f"{published.framework or 'its software'} is none that the planner knows"
    elif guessed := row.unknown_reason("model"):
        why = f"the model is a guess: {guessed}"
    else:
        try:
            work = published_workload(published_plan(recipe))
        except ConfigError as error:
            why = str(error)
    if why:
        excluded |= dict.fromkeys(CONTRADICTIONS, why)
    seconds = printed_seconds(recipe, published)
    tflops = published.tflops
    if seconds is None and tflops and work and row.gpus:
        seconds = seconds_of(work, tflops, row.gpus, published.tflops_by)
    ran = published.cached_gb or published.time_per_iteration_s
    oom = published.oom if published.oom or ran else None
    document, *_ = re.split(r",| \(", row.table.source or row.table.title)
    return Case(
        document=document.strip('"'),
        table=row.table.name,
        name=row.name,
        node=hardware.find(row.value("hardware.node") or "dgx2"),
        work=work,
        seconds=seconds,
        cached=published.cached_gb and published.cached_gb * hardware.GIB,
        oom=oom,
        excluded=excluded,
    )


def by_document(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Group the cases by document."""
    documents: dict[str, list[Case]] = {}
    for case in cases:
        documents.setdefault(case.document, []).append(case)
    return documents
