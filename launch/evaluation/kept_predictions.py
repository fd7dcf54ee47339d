"""Predictions in the directory of a fine-tuning: their logits, their scores, and their files.

RUN/predictions/dev/SST-2.tsv     in the form of the task's submissions
RUN/predictions/dev/logits.npy    (n, classes) or (windows, S, 2), float32: what ensembles average
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.durable_files import write_atomically
from data.tasks.choices import Scored
from launch.records.facts import TaskScore

if TYPE_CHECKING:
    from data.tasks.corpus import PredictedSplit

FOLDER, LOGITS = "predictions", "logits.npy"


def keep(
    folder: Path, splits: Sequence[PredictedSplit], logits: Mapping[str, np.ndarray]
) -> tuple[TaskScore, ...]:
    """Scores the logits of splits, and writes these and the submissions below `folder`."""
    scores, dev = list[TaskScore](), None
    for split in splits:
        scored: Scored = split.score(logits[split.name], dev)
        dev = dev or scored
        place = folder / split.name
        place.mkdir(parents=True, exist_ok=True)
        with open(place / LOGITS, "wb") as file:
            np.save(file, logits[split.name])
        for name, text in scored.files.items():
            write_atomically(place / name, text)
        metrics = dict(scored.metrics)
        scores.append(TaskScore(split.name, metrics, split.examples, split.broken, tuple(scored.files)))
    return tuple(scores)
