"""What the ranks tell each other at the end of a step, all of it in one small collective.

A fact that every rank has to know of all others at a step's end is a field of `StepReport`, and how the
ranks' values become one is a property of `StepNews`.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist

from launch.ranks.stop_request import REASONS
from launch.records.facts import RankSeconds

# torch 2.13 renamed it; what GPU machines hold is often older.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class StepReport:
    """What one rank tells at the end of a step. Numbers, since they travel as one row of a tensor.

    `stop`: index in `REASONS` of what asked this rank to stop; `own_seconds`: as in `RankSeconds`.
    """

    stop: int = 0
    own_seconds: float = 0.0


@dataclass(frozen=True)
class StepNews:
    """The reports of all ranks, in rank order; the same on every rank."""

    reports: tuple[StepReport, ...]

    @property
    def stopped(self) -> str | None:
        """What asked any rank to stop: all leave at the same step."""
        return REASONS[max(report.stop for report in self.reports)] or None

    @property
    def rank_seconds(self) -> RankSeconds | None:
        """None in a run of one rank."""
        seconds = [report.own_seconds for report in self.reports]
        if len(seconds) == 1:
            return None
        most = max(seconds)
        return RankSeconds(min(seconds), statistics.median(seconds), most, seconds.index(most))


class StepExchange:
    """An exchange on its way: the CPUs talk while a GPU still computes the step."""

    def __init__(self, own: StepReport, group: dist.ProcessGroup) -> None:
        """Tell `own`. Collective."""
        row = torch.tensor(dataclasses.astuple(own), dtype=torch.float64)
        self._table = torch.empty(dist.get_world_size(group), len(row), dtype=torch.float64)
        self._work = _all_gather(self._table.view(-1), row, group=group, async_op=True)

    def wait(self) -> StepNews:
        """What all ranks have told."""
        self._work.wait()
        return StepNews(tuple(_report(values) for values in self._table.tolist()))


def _report(values: list[float]) -> StepReport:
    stop, own_seconds = values
    return StepReport(int(stop), own_seconds)
