"""Reader of a task's data set by Hugging Face's `datasets`, from the hub or from local files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import datasets
from datasets import Dataset, Features, List, Value

from data import durable_files
from recipes import files
from recipes.problems import ProblemsError, counted
from recipes.schema import Recipe, Task
from recipes.tasks import TaskFacts

MOST_FILE = 2048 * files.MIB  # bytes; a .json is read whole
KINDS = (
    "JSON lines (.jsonl), a list of records or SQuAD's articles (.json), GLUE's own tables (.tsv, .txt), or "
    "RACE's own directories"
)
# Names of columns in the files of GLUE and on the hub -> ours; not where a task's text has the first name.
COLUMNS = {
    "#1 String": "sentence1", "#2 String": "sentence2", "sentence1": "premise", "sentence2": "hypothesis",
    "Quality": "label", "gold_label": "label", "is_duplicate": "label", "answer": "label", "answers": "label",
    "index": "id", "idx": "id", "example_id": "id",
}  # fmt: skip
TEXT = Value("string")
ANSWERS: dict[str, Any] = {"text": List(TEXT), "answer_start": List(Value("int64"))}
HIDDEN = -1  # the label of an example that has none
SHOWN = 3  # wrong records to name


@dataclass(frozen=True)
class Split:
    """The examples of a split.

    Attributes:
        records: texts as on the hub, "id", and "label": a number or HIDDEN; of SQuAD ANSWERS or None.
        incomplete: number of records that were left out, since a text or a label is missing.
    """

    name: str
    records: Dataset
    incomplete: int


def read_split(facts: TaskFacts, split: str, path: str | None) -> Split:
    """Read the examples of a split, from a file or else from the hub.

    Of a test no record is left out: its labels may be hidden, and a submission has a row for each.

    Raises ProblemsError: it cannot be had, lacks the task's fields, or holds wrong records.
    """
    datasets.disable_progress_bars()
    there = facts.splits.get(split)
    where = path or f"{facts.hub[0]} {there}"
    key = f"--{split}"
    refused = partial(ProblemsError.of, key, where, where=key)
    test = split.startswith("test")
    needed = (*facts.texts, *([] if test else ["label"]))
    try:
        examples = (
            _local(path) if path else datasets.load_dataset(*facts.hub, split=there)
        )
        examples = _in_our_fields(facts, examples, needed)
    except ProblemsError:
        raise
    except Exception as error:  # of networks, files and formats: each has its own
        said = " ".join(str(error.__cause__ or error).split())
        fix = f"give {KINDS}, in UTF-8 and not compressed, with the fields of {facts.hub[0]}"
        if path is None:
            fix = f"give local files with --{split} FILE, or run once where there is network"
        raise refused(f"cannot be read: {said}", fix) from None
    rows = list[dict[str, Any]]()
    wrong = list[str]()
    for number, record in enumerate(examples):
        if test or all(str(record[name] or "").strip() for name in needed):
            row = {"id": str(number), "label": None, **record}
            hidden = test and row["label"] in (None, "", str(HIDDEN))
            fault = _fault(facts, row)
            wrong += [f"record {number + 1}: {fault}"] if fault and not hidden else []
            rows.append(row)
    if wrong:
        rule = f"{counted(len(wrong), 'wrong record')}: {'; '.join(wrong[:SHOWN])}"
        raise refused(rule, "correct them, or take them out of the file")
    if not rows:
        raise refused("holds no complete record", f"give {KINDS}")
    return Split(split, Dataset.from_list(rows), len(examples) - len(rows))


def task_of(recipe: Recipe) -> Task:
    assert recipe.task, "a recipe for fine-tuning"
    return recipe.task


def _local(place: str) -> Dataset:
    path = files.path_of(place, place)
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return Dataset.from_json(
            str(path), cache_dir=str(durable_files.cache_directory() / "datasets")
        )
    rows = list[Any]()
    if path.is_dir():
        for article in sorted(path.rglob("*.txt")):
            rows += _flattened(files.read_json(article, MOST_FILE))
    elif kind == ".json":
        rows += _flattened(files.read_json(path, MOST_FILE))
    elif kind in (".tsv", ".txt"):
        with open(path, encoding="utf-8-sig", newline="") as file:
            # a quotation mark is text
            rows += csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        files.refuse(path, "is of no kind that is read here", fix=f"give {KINDS}")
    if any(None in row for row in rows):
        raise ValueError("a line has more fields than the first one")
    return Dataset.from_list(rows)


def _flattened(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON: listed, or the questions of SQuAD's or RACE's own articles.

    SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}; RACE: {"article",
    "questions", "options", "answers", "id"}.
    """
    if isinstance(value, dict) and "questions" in value:
        hidden = [None] * len(value["questions"])
        columns = (value["questions"], value["options"], value.get("answers", hidden))
        for question, options, label in zip(*columns, strict=True):
            own = {"question": question, "options": options, "label": label}
            yield {"article": value["article"], "id": value["id"], **own}
        return
    listed = value.get("data") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise ValueError(
            'it is a list of records, {"data": [records]}, or an article of SQuAD or RACE'
        )
    for entry in listed:
        for paragraph in entry.get("paragraphs", ()):
            for question in paragraph["qas"]:
                given = question.get("answers")
                answers = None if given is None else _columns(given)
                yield {**question, "context": paragraph["context"], "answers": answers}
        if "paragraphs" not in entry:
            yield entry


def _columns(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the texts and the places of a question's answers, as on the hub."""
    columns = {}
    for key in ANSWERS:
        columns[key] = [each[key] for each in answers]
    return columns


def _in_our_fields(facts: TaskFacts, rows: Dataset, needed: Sequence[str]) -> Dataset:
    """Take the columns of the task under our names, in its types. Raises ValueError: it lacks `needed` ones."""
    features: dict[str, Any] = dict.fromkeys(("id", *facts.texts, "label"), TEXT)
    features |= {"options": List(TEXT, length=4)} if facts.head == "choice" else {}
    features |= {"label": ANSWERS} if facts.head == "span" else {}
    for theirs, ours in COLUMNS.items():
        names = rows.column_names
        if theirs in names and theirs not in features and ours not in names:
            rows = rows.rename_column(theirs, ours)
    lacking = [name for name in needed if name not in rows.column_names]
    if lacking:
        raise ValueError(f"of {', '.join(needed)} it lacks {', '.join(lacking)}")
    features = {name: features[name] for name in rows.column_names if name in features}
    return rows.select_columns(list(features)).cast(Features(features))


def _fault(facts: TaskFacts, row: dict[str, Any]) -> str:
    """Put the number of the label in its place; say what is wrong with it, "" if nothing is."""
    if facts.head == "span":
        return _answer_fault(facts, row)
    stated = row["label"]
    numbers = [str(number) for number in range(len(facts.labels))]
    for names in (facts.labels, numbers):
        if stated in names:
            row["label"] = names.index(stated)
            return ""
    row["label"] = HIDDEN
    known = f"it is one of 0..{numbers[-1]} ({', '.join(facts.labels)})"
    return f"label {stated!r} is out of range: {known}"


def _answer_fault(facts: TaskFacts, row: dict[str, Any]) -> str:
    answers = row["label"] or dict.fromkeys(ANSWERS, ())
    pairs = list(zip_longest(*(answers[key] or () for key in ANSWERS)))
    for text, start in pairs[:1]:
        if None in (text, start):
            return "its answers are no texts with an answer_start each"
        if start < 0 or not row["context"].startswith(text, start):
            return (
                f"its answer {text[:40]!r} is not at character {start} of the context"
            )
    if not pairs and facts.hub[0].endswith("/squad"):
        return "it has no answer, which only SQuAD 2.0 knows"
    return ""
