"""Predict the splits of a task with a fine-tuned model, under its training layout.

RUN/predictions/dev/SST-2.tsv     in the form of the task's submissions
RUN/predictions/dev/logits.npy    (n, classes) or (windows, S, 2), float32, for ensembles
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.durable_files import write_atomically
from data.samples.fields import Array, HeldOut
from data.tasks.choices import SplitScores
from data.tasks.corpus import TaskCorpus
from data.tasks.features import Features
from launch.ranks.processes import gathered
from launch.ranks.watchdog import Phase
from launch.records.facts import TaskScore
from launch.training.run import TrainingRun, held_out_batches

if TYPE_CHECKING:
    from data.tasks.corpus import PredictedSplit

CHUNK = 2048  # padded examples in memory at a time


def predict(run: TrainingRun, corpus: TaskCorpus) -> tuple[TaskScore, ...]:
    """Predict every split of the corpus; rank 0 writes and returns the scores. Collective."""
    found: dict[str, np.ndarray] = {}
    for split in corpus.predicted:
        logits = logits_of(run, split.features)
        if logits is not None:
            found[split.name] = logits
    if not found:
        return ()
    return keep(run.job.directory / FOLDER, corpus.predicted, found)


def logits_of(run: TrainingRun, features: Features) -> np.ndarray | None:
    """Return the float32 logits of all examples in order on rank 0, None on other ranks. Collective."""
    parts = []
    for start in range(0, len(features), CHUNK):
        chunk = range(start, min(start + CHUNK, len(features)))
        batches = held_out_batches(
            HeldOut(features.take(chunk)), run.job.plan, run.grid
        )
        run.watchdog.enter(Phase.VALIDATING)
        with capture_logits(run.engine) as kept:
            run.validate(batches)
        steps = len(batches)
        at = run.grid.at
        speaks = at.tp == 0 and at.pp == run.grid.pp - 1
        own = _join(kept, steps, features.sequence_length) if speaks else None
        ranks = gathered((at.dp, own), run.grid.control_group, tuple[int, Array | None])
        if run.grid.rank == 0:
            # Each data-parallel rank has consecutive samples of a step.
            by_rank = [
                x for _, x in sorted(ranks, key=lambda rank: rank[0]) if x is not None
            ]
            parts.append(
                np.concatenate(by_rank, axis=1).reshape(-1, *by_rank[0].shape[2:])[
                    : len(chunk)
                ]
            )
    return np.concatenate(parts) if parts else None


def _join(kept: Sequence[torch.Tensor], steps: int, length: int) -> np.ndarray:
    """Join the logits of micro-batches to (steps, examples of this rank, ...); pad spans to S."""
    if kept[0].dim() == 3:
        kept = [
            torch.nn.functional.pad(
                x, (0, 0, 0, length - x.shape[1]), value=float("-inf")
            )
            for x in kept
        ]
    joined = torch.cat(list(kept))
    return joined.view(steps, -1, *joined.shape[1:]).numpy()


@contextlib.contextmanager
def capture_logits(engine: DeepSpeedEngine) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects the logits of each micro-batch in the block."""
    kept: list[torch.Tensor] = []
    pipeline = isinstance(engine, PipelineEngine)
    holder, name = (
        (engine.module.loss_fn, "function") if pipeline else (engine.module, "loss")
    )
    computed = getattr(holder, name)

    def keeping(logits: torch.Tensor, *targets: object) -> object:
        kept.append(logits.detach().float().cpu())
        return computed(logits, *targets)

    setattr(holder, name, keeping)
    try:
        yield kept
    finally:
        setattr(holder, name, computed)


FOLDER = "predictions"
LOGITS = "logits.npy"


def keep(
    folder: Path, splits: Sequence[PredictedSplit], logits: Mapping[str, np.ndarray]
) -> tuple[TaskScore, ...]:
    """Score the logits of splits; write logits and submissions below `folder`."""
    scores = list[TaskScore]()
    dev = None
    for split in splits:
        scored: SplitScores = split.score(logits[split.name], dev)
        dev = dev or scored
        place = folder / split.name
        place.mkdir(parents=True, exist_ok=True)
        with open(place / LOGITS, "wb") as file:
            np.save(file, logits[split.name])
        for name, text in scored.files.items():
            write_atomically(place / name, text)
        metrics = dict(scored.metrics)
        scores.append(
            TaskScore(
                split.name, metrics, split.examples, split.broken, tuple(scored.files)
            )
        )
    return tuple(scores)
