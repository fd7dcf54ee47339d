"""Scores and files of the predictions of a fine-tuned model.

RUN/predictions/dev/SST-2.tsv     in the form of the task's submissions
RUN/predictions/dev/logits.npy    (n, classes) or (windows, S, 2), float32, for ensembles
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.durable_files import write_atomically
from data.tasks.choices import SplitScores
from data.tasks.corpus import PredictedSplit
from launch.records.facts import TaskScore

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
