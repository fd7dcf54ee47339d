"""The exchange of facts between the ranks of a run: before it, after each step and at its end."""

from __future__ import annotations

import copy
import hashlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from data.corpus import Corpus
from ds_configs.plan import Plan
from launch.machine import description, memory
from launch.ranks import processes
from launch.records.facts import Peaks
from launch.training.early_ends import REASONS
from modeling import fusing
from recipes import catalog

# torch 2.13 renamed it; what GPU machines hold is often older.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def kernel_failure(group: dist.ProcessGroup) -> str | None:
    """Return why some rank's GPU cannot run a compiled kernel, or None. Collective."""
    device = processes.device()
    if not device.own_memory:
        return None
    own = fusing.failure_of_kernels(torch.device(device.name))
    return next(iter(processes.texts_of_all([own], group)), None)


def facts(
    plan: Plan, corpus: Corpus, initial_weights: str | None, compiled: bool
) -> dict[str, Any]:
    """Return what all ranks have to train on alike, and this rank's host."""
    ds = json.dumps(without_paths(plan.ds), sort_keys=True).encode()
    return {
        "host": socket.gethostname(),
        "vocabulary": corpus.summary.get("vocabulary_digest", "absent"),
        "recipe": catalog.digest(plan.recipe)[:12],
        "training tokens (crc32)": corpus.summary.get("train_tokens_crc32", "absent"),
        "initial weights": initial_weights or "random",
        "compiled layers": compiled,
        "resolved DeepSpeed configuration": hashlib.sha256(ds).hexdigest()[:12],
        **{
            f"version of {name}": version
            for name, version in description.versions().items()
        },
    }


def check(ranks: Sequence[dict[str, Any]]) -> None:
    """Refuse ranks that differ in data, weights, code or settings, by the facts of all.

    Every machine prepares its own copy of the corpus: another version of a package or file there would change
    the training silently. Raises ValueError with the differences.
    """
    lines = []
    for key in ranks[0]:
        values = {str(each[key]) for each in ranks}
        if key != "host" and len(values) > 1:
            found = {f"{each[key]} on {each['host']}" for each in ranks}
            lines.append(f"  {key}: {', '.join(sorted(found))}")
    if lines:
        raise ValueError(
            "\n".join(
                [
                    "the ranks of this run do not train on the same thing; make the machines equal in:",
                    *lines,
                ]
            )
        )


def without_paths(ds: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved JSON without the NVMe paths, which machines choose for themselves."""
    own = copy.deepcopy(ds)
    zero = own.setdefault("zero_optimization", {})
    for kind in ("offload_optimizer", "offload_param"):
        zero.get(kind, {}).pop("nvme_path", None)
    return own


class StepReport(NamedTuple):
    """The report of one rank at the end of a step, in numbers that travel as one row of a tensor."""

    stop: int = 0  # index in `REASONS` of the request to stop
    # busy seconds of this rank (`StepRecord.rank_seconds_min`)
    own_seconds: float = 0.0
    unreadable: bool = False  # this rank cannot read the batches of the next step
    # this rank has written its file of the checkpoint in progress
    written: bool = False
    overdue: bool = False  # run.save_every_minutes have passed since the last save


@dataclass(frozen=True)
class RankReports:
    """The reports of all ranks; the same on every rank.

    Attributes:
        table: (ranks, fields of `StepReport`) in float64 on the CPU; no rank makes an object of each row.
    """

    table: torch.Tensor

    def _column(self, field: str) -> torch.Tensor:
        return self.table[:, StepReport._fields.index(field)]

    @property
    def stopped(self) -> str | None:
        """The request to stop that some rank got; all ranks leave at the same step."""
        return REASONS[int(self._column("stop").max())] or None

    @property
    def rank_seconds(self) -> dict[str, Any]:
        """The busy times of all ranks, by their fields in `StepRecord`; none in a run of one rank."""
        seconds = self._column("own_seconds")
        if len(seconds) == 1:
            return {}
        return {
            "rank_seconds_min": float(seconds.min()),
            "rank_seconds_median": float(seconds.quantile(0.5)),
            "rank_seconds_max": float(seconds.max()),
            "slowest_rank": int(seconds.argmax()),
        }

    @property
    def unreadable(self) -> bool:
        """Whether some rank cannot read the batches of the next step."""
        return bool(self._column("unreadable").any())

    @property
    def written(self) -> bool:
        """Whether all ranks have written their files of the checkpoint in progress."""
        return bool(self._column("written").all())

    @property
    def overdue(self) -> bool:
        """Whether a save is due by rank 0's clock."""
        return bool(self._column("overdue")[0])


def send_report(own: StepReport, group: dist.ProcessGroup) -> Callable[[], RankReports]:
    """Send a report to all ranks; return what waits for theirs. Collective.

    The CPUs talk while a GPU still computes the step.
    """
    row = torch.tensor(own, dtype=torch.float64)
    table = torch.empty(dist.get_world_size(group), len(row), dtype=torch.float64)
    work = all_gather(table.view(-1), row, group=group, async_op=True)

    def hear() -> RankReports:
        work.wait()
        return RankReports(table)

    return hear


def peak_memory(group: dist.ProcessGroup) -> Peaks:
    """Return the largest peak and the largest cached memory of any rank. Collective."""
    peaks = torch.tensor([memory.peak_memory().bytes, memory.peak_cached_bytes() or 0])
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
    peak, cached = peaks.tolist()
    return Peaks(peak, cached or None)
