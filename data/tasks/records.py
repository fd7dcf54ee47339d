"""Reader of a task's data set by Hugging Face's `datasets`, from the hub or from local files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from data import durable_files
from recipes import files
from recipes.problems import ProblemsError, counted
from recipes.tasks import TaskFacts

if TYPE_CHECKING:
    from datasets import Dataset

MOST_FILE = 2048 * files.MIB  # bytes; a .json is read whole
KINDS = (
    "JSON, JSON lines, GLUE's own tables (.tsv, .txt), RACE's own directories, parquet, or a directory that "
    "datasets' save_to_disk wrote"
)
# Columns of GLUE's own files -> fields on the hub.
COLUMNS = {
    "#1 String": "sentence1", "#2 String": "sentence2", "sentence1": "premise", "sentence2": "hypothesis",
    "Quality": "label", "gold_label": "label", "is_duplicate": "label", "index": "idx", "id": "idx",
}  # fmt: skip
SHOWN = 3  # broken examples to name per split
E_co = TypeVar("E_co", covariant=True)


class WrongRecord(ValueError):
    """A fault of one record."""


@dataclass(frozen=True)
class Examples(Generic[E_co]):
    """The sound examples of a split, and place and reason of each broken one.

    Of a test, what is readable of the broken ones is among the sound: a submission has a row for each.
    """

    split: str
    sound: tuple[E_co, ...]
    broken: tuple[str, ...]

    def __str__(self) -> str:
        """Describe the broken examples to a user; "" where there are none."""
        if not self.broken:
            return ""
        named = "; ".join(self.broken[:SHOWN])
        more = len(self.broken) - SHOWN
        others = f"; and {more} more" if more > 0 else ""
        fate = "predicted from what is readable" if is_test(self.split) else "left out"
        return f"{self.split}: {counted(len(self.broken), 'broken example')} {fate}: {named}{others}"


def read_split(facts: TaskFacts, split: str, path: str | None) -> Dataset:
    """Read all records of a split, from a file or else from the hub.

    Raises ProblemsError: it cannot be had, or lacks the task's fields.
    """
    import datasets

    datasets.disable_progress_bars()
    key = f"--{split}"
    where = path or f"{facts.hub[0]} {facts.splits[split]}"
    fix = f"give {KINDS}, in UTF-8 and not compressed"
    try:
        found = _local(files.path_of(path, key)) if path else _hub(facts, split)
    except ProblemsError:
        raise
    except Exception as error:  # of networks, files and formats: each has its own
        said = f"datasets cannot read it: {_last_cause(error)}"
        if path is None:
            fix = f"give local files with --{split} FILE ({KINDS}), or run once where there is network"
        _refuse(key, where, said, fix)
    if not len(found):
        _refuse(key, where, "holds no records", f"give {KINDS}")
    needed = (*facts.fields, *(() if is_test(split) else (facts.label,)))
    lacking = [name for name in needed if name not in found.column_names]
    if lacking:
        has = ", ".join(found.column_names)
        rule = f"its records have the fields {has}, and lack {', '.join(lacking)} of {', '.join(needed)}"
        _refuse(key, where, rule, f"give files in the schema of {facts.hub[0]}")
    return found


def _last_cause(error: BaseException) -> str:
    """Return the first line of the error that a chain of them began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def is_test(split: str) -> bool:
    """Check that the labels of a split may be hidden, and its predictions are submitted."""
    return split.startswith("test")


def check_split(split: str, path: str) -> None:
    """Check that a file or directory exists. Raises ProblemsError."""
    file = files.path_of(path, f"--{split}")
    if not (files.is_file(file) or file.is_dir()):
        _refuse(f"--{split}", path, "no such file or directory", f"give {KINDS}")


def _refuse(key: str, where: str, rule: str, fix: str) -> NoReturn:
    raise ProblemsError.of(key, where, rule, fix, where=key)


def _local(path: Path) -> Dataset:
    from datasets import Dataset, Features, Value

    kind = path.suffix.lower()
    cache = str(durable_files.cache_directory() / "datasets")
    if not files.is_file(path) and path.is_dir():
        return _directory(path)
    if kind == ".tsv" or (kind == ".txt" and _is_table(path)):
        _, header = next(files.lines_of(path, MOST_FILE), (0, b""))
        names = files.decode(header, path).rstrip("\r\n").split("\t")
        how: dict[str, Any] = dict(sep="\t", quoting=csv.QUOTE_NONE)
        how |= dict(keep_default_na=False, cache_dir=cache)
        how["features"] = Features({name: Value("string") for name in names})
        return _named_as_on_the_hub(Dataset.from_csv(str(path), **how))
    if kind in (".json", ".txt"):
        return Dataset.from_list(list(_flattened(files.read_json(path, MOST_FILE))))
    if kind in (".jsonl", ".ndjson"):
        return Dataset.from_json(str(path), cache_dir=cache)
    if kind == ".parquet":
        return Dataset.from_parquet(str(path), cache_dir=cache)
    files.refuse(path, "is of no kind that is read here", fix=f"give {KINDS}")


def _directory(path: Path) -> Dataset:
    """Read RACE's own directory, an article in each .txt, or what `save_to_disk` wrote."""
    import datasets

    articles = sorted(path.rglob("*.txt"))
    if articles:
        rows = list[dict[str, Any]]()
        for file in articles:
            rows += _flattened(files.read_json(file, MOST_FILE))
        return datasets.Dataset.from_list(rows)
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        came = f"holds the splits {', '.join(found)}"
        files.refuse(path, came, fix="give the directory of one of them")
    return found


def _hub(facts: TaskFacts, split: str) -> Dataset:
    import datasets

    name, config = facts.hub
    return datasets.load_dataset(name, config, split=facts.splits[split])


def _is_table(path: Path) -> bool:
    """Tell a table (MRPC's own .txt) from an article of RACE: in JSON, no line begins with a word and a tab."""
    return b"\t" in files.read_part(path, 0, 4096).partition(b"\n")[0].strip()


def _named_as_on_the_hub(table: Dataset) -> Dataset:
    """Add the fields of the hub to a table of GLUE with other columns."""
    for theirs, ours in COLUMNS.items():
        if theirs in table.column_names and ours not in table.column_names:
            table = table.add_column(ours, table[theirs])
    return table


def _flattened(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON: listed, or the questions of SQuAD's or RACE's own articles.

    SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}; RACE: {"article",
    "questions", "options", "answers", "id"}.
    """
    if isinstance(value, dict) and "questions" in value:
        shared = {"article": value["article"], "example_id": value["id"]}
        names = ("question", "options", "answer")
        hidden = [None] * len(value["questions"])
        columns = (value["questions"], value["options"], value.get("answers", hidden))
        for row in zip(*columns, strict=True):
            yield shared | dict(zip(names, row, strict=True))
        return
    listed = value.get("data") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise ValueError(
            'it is a list of records, {"data": [records]}, or an article of SQuAD or RACE'
        )
    for entry in listed:
        if "paragraphs" not in entry:
            yield entry
            continue
        for paragraph in entry["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                texts = [answer["text"] for answer in answers]
                starts = [answer["answer_start"] for answer in answers]
                yield {
                    "id": question["id"],
                    "question": question["question"],
                    "context": paragraph["context"],
                    "answers": {"text": texts, "answer_start": starts},
                }


def parse_examples(
    facts: TaskFacts,
    split: str,
    records: Dataset,
    parse: Callable[[TaskFacts, dict[str, Any], int, bool], E_co],
) -> Examples[E_co]:
    """Parse the examples of a split; all but a test split need labels and texts.

    Raises ProblemsError: all of them are broken.
    """
    sound = list[E_co]()
    broken = list[str]()
    labelled = not is_test(split)
    for number, record in enumerate(records):
        try:
            sound.append(parse(facts, record, number, labelled))
        except WrongRecord as error:
            broken.append(f"record {number + 1}: {error}")
            if not labelled:
                readable = _readable(facts, record)
                sound.append(parse(facts, readable, number, labelled))
    if len(broken) == len(records):
        rule = f"all of its {counted(len(broken), 'example')} are broken: {'; '.join(broken[:SHOWN])}"
        _refuse(f"--{split}", split, rule, "give a sound file")
    return Examples(split, tuple(sound), tuple(broken))


def _readable(facts: TaskFacts, value: dict[str, Any]) -> dict[str, Any]:
    """Return the texts and identities of a broken record, without its label; a text is empty instead."""
    readable = dict[str, Any]()
    for name in facts.texts:
        text = value.get(name)
        readable[name] = text if isinstance(text, str) else ""
    for name in ("idx", "id", "example_id"):
        if name in value:
            readable[name] = value[name]
    if facts.head == "choice":
        readable["options"] = [""] * len(facts.labels)
    return readable


def text_of(record: dict[str, Any], name: str, needed: bool) -> str:
    """Return a text field; `needed`: it is not empty. Raises WrongRecord."""
    value = record.get(name)
    if not isinstance(value, str):
        found = type(value).__name__ if value is not None else "missing"
        raise WrongRecord(f"{name} is {found}, and a text is needed")
    if needed and not value.strip():
        raise WrongRecord(f"{name} is empty")
    return value


def label_of(
    record: dict[str, Any], name: str, labels: Sequence[str], labelled: bool
) -> int | None:
    """Return the number of a label, given as number or name; None: it is hidden. Raises WrongRecord."""
    value = record.get(name)
    if value in labels:
        return labels.index(value)
    if isinstance(value, str) and value.isdecimal():  # of a table with names, too
        value = int(value)
    if type(value) is int and 0 <= value < len(labels):
        return value
    if not labelled and value in (None, -1, ""):
        return None
    least = f"it is one of 0..{len(labels) - 1} ({', '.join(labels)})"
    raise WrongRecord(f"{name} {value!r} is out of range: {least}")
