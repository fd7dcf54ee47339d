"""Predictions of a fine-tuned model under the layout that trained it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.samples.fields import HeldOut
from data.tasks.corpus import TaskCorpus
from data.tasks.features import Features
from launch.evaluation.kept_predictions import FOLDER, keep
from launch.ranks.processes import gathered
from launch.ranks.watchdog import Phase
from launch.records.facts import TaskScore
from launch.training.run import TrainingRun, held_out_batches

CHUNK = 2048  # examples that are in memory with their padding


def predict(run: TrainingRun, corpus: TaskCorpus) -> tuple[TaskScore, ...]:
    """Predicts every split of the corpus; rank 0 writes and returns what came of it. Collective."""
    found: dict[str, np.ndarray] = {}
    for split in corpus.predicted:
        logits = logits_of(run, split.features)
        if logits is not None:
            found[split.name] = logits
    if not found:
        return ()
    return keep(run.job.directory / FOLDER, corpus.predicted, found)


def logits_of(run: TrainingRun, features: Features) -> np.ndarray | None:
    """On rank 0 the logits of all examples in their order, float32; None on the others. Collective."""
    parts = []
    for start in range(0, len(features), CHUNK):
        chunk = range(start, min(start + CHUNK, len(features)))
        batches = held_out_batches(
            HeldOut(features.take(chunk), features.sequence_length), run.job.plan, run.grid
        )
        run.watchdog.enter(Phase.VALIDATING)
        with captured(run.engine) as kept:
            run.validate(batches)
        steps, at = len(batches), run.grid.at
        speaks = at.tp == 0 and at.pp == run.grid.pp - 1
        own = _joined(kept, steps, features.sequence_length) if speaks else None
        ranks = gathered((at.dp, own), run.grid.control_group)
        if run.grid.rank == 0:
            by_rank = [
                logits
                for _, logits in sorted(((dp, x) for dp, x in ranks if x is not None), key=lambda r: r[0])
            ]
            # A step's samples are shared out over the data-parallel ranks, consecutive ones to each.
            parts.append(np.concatenate(by_rank, axis=1).reshape(-1, *by_rank[0].shape[2:])[: len(chunk)])
    return np.concatenate(parts) if parts else None


def _joined(kept: Sequence[torch.Tensor], steps: int, length: int) -> np.ndarray:
    """(steps, examples of this rank, ...) of the micro-batches' logits, of spans up to S."""
    if kept[0].dim() == 3:
        kept = [torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[1]), value=float("-inf")) for x in kept]
    joined = torch.cat(list(kept))
    return joined.view(steps, -1, *joined.shape[1:]).numpy()


@contextlib.contextmanager
def captured(engine: DeepSpeedEngine) -> Iterator[list[torch.Tensor]]:
    """The logits that the losses in the block are computed from, a tensor of each micro-batch."""
    kept: list[torch.Tensor] = []
    pipeline = isinstance(engine, PipelineEngine)
    holder, name = (engine.module.loss_fn, "function") if pipeline else (engine.module, "loss")
    computed = getattr(holder, name)

    def keeping(logits: torch.Tensor, *targets: object) -> object:
        kept.append(logits.detach().float().cpu())
        return computed(logits, *targets)

    setattr(holder, name, keeping)
    try:
        yield kept
    finally:
        setattr(holder, name, computed)
