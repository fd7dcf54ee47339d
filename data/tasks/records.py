"""Reader of a task's data set, from the hub or from local files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from data.text.file_types import looks_like
from recipes import files
from recipes.problems import ProblemsError, counted
from recipes.tasks import TaskFacts

MOST_LINE = 64 * files.MIB  # bytes
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


@dataclass(frozen=True)
class LocatedRecord:
    """A record and its place; `why`: the reason where it is unusable."""

    place: str
    value: dict[str, Any]
    why: str = ""


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


def read_split(facts: TaskFacts, split: str, path: str | None) -> list[LocatedRecord]:
    """Read all records of a split, from a file or else from the hub.

    Raises ProblemsError: it cannot be had, or has no record with the task's fields.
    """
    key = f"--{split}"
    file = files.path_of(path, key) if path else None
    records = _local(file) if file else _hub(facts, split)
    found = list(records)
    where = path or f"{facts.hub[0]} {facts.splits[split]}"
    if not found:
        _refuse(key, where, "holds no records", f"give {KINDS}")
    if all(each.why for each in found):
        kind, source = (file and file.is_file() and looks_like(file)) or ("", None)
        said = f"it is {kind}, and " if kind and source != "jsonl" else ""
        rule = (
            f"{said}no record can be read, the first: {found[0].place}: {found[0].why}"
        )
        _refuse(key, where, rule, f"give {KINDS}, in UTF-8 and not compressed")
    needed = (*facts.fields, *(() if is_test(split) else (facts.label,)))
    held = set[str]().union(*(each.value for each in found))
    lacking = [name for name in needed if name not in held]
    if lacking:
        has = (
            ", ".join(next((each.value for each in found if each.value), {})) or "none"
        )
        rule = f"its records have the fields {has}, and lack {', '.join(lacking)} of {', '.join(needed)}"
        _refuse(key, where, rule, f"give files in the schema of {facts.hub[0]}")
    return found


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


def _local(path: Path) -> Iterator[LocatedRecord]:
    kind = path.suffix.lower()
    if not files.is_file(path) and path.is_dir():
        yield from _directory(path)
    elif kind == ".tsv" or (kind == ".txt" and _is_table(path)):
        yield from _tsv(path)
    elif kind == ".txt":
        yield from _race_file(path)
    elif kind in (".jsonl", ".ndjson"):
        yield from _json_lines(path)
    elif kind == ".json":
        yield from _json(path)
    elif kind == ".parquet":
        yield from _rows(path, _parquet(path))
    else:
        files.refuse(path, "is of no kind that is read here", fix=f"give {KINDS}")


def _directory(path: Path) -> Iterator[LocatedRecord]:
    articles = sorted(path.rglob("*.txt"))
    for file in articles:
        yield from _race_file(file)
    if not articles:
        yield from _rows(path, _saved(path))


def _json_lines(path: Path) -> Iterator[LocatedRecord]:
    for number, line in files.lines_of(path, MOST_LINE):
        if line.strip():
            yield _located(f"{path}:{number}", line)


def _rows(where: object, rows: Iterable[Any]) -> Iterator[LocatedRecord]:
    yield from (
        LocatedRecord(f"{where}: row {number}", dict(row))
        for number, row in enumerate(rows, 1)
    )


def _located(place: str, line: bytes) -> LocatedRecord:
    try:
        value = json.loads(files.decode(line, place))
        files.check_value(value, place)
    except files.FileError as error:
        return LocatedRecord(place, {}, str(error.problems[0].came))
    except (ValueError, RecursionError) as error:
        return LocatedRecord(place, {}, f"not JSON: {error}")
    return _object(place, value)


def _object(place: str, value: Any) -> LocatedRecord:
    if isinstance(value, dict):
        return LocatedRecord(place, value)
    return LocatedRecord(place, {}, "not an object")


def _json(path: Path) -> Iterator[LocatedRecord]:
    value = files.read_json(path, MOST_FILE)
    if isinstance(value, dict) and "questions" in value:
        yield from _race_article(str(path), value)
        return
    listed = value.get("data") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        rule = 'it is a list of records, {"data": [records]}, or SQuAD\'s own {"data": [articles]}'
        files.refuse(path, f"holds {files.named_kind(value)}", rule)
    for number, entry in enumerate(listed, 1):
        if isinstance(entry, dict) and "paragraphs" in entry:
            yield from _article(f"{path}: article {number}", entry)
        else:
            yield _object(f"{path}: record {number}", entry)


def _article(place: str, article: dict[str, Any]) -> Iterator[LocatedRecord]:
    """Yield the questions of an article in SQuAD's own form: paragraphs with a context and questions."""
    try:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                texts = [answer["text"] for answer in answers]
                starts = [answer["answer_start"] for answer in answers]
                value = {
                    "id": question["id"],
                    "question": question["question"],
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "answers": {"text": texts, "answer_start": starts},
                }
                yield LocatedRecord(f"{place}, question {value['id']}", value)
    except (KeyError, TypeError) as error:
        yield LocatedRecord(
            place, {}, f"not an article of SQuAD ({type(error).__name__}: {error})"
        )


def _race_file(path: Path) -> Iterator[LocatedRecord]:
    """Yield the questions in a file of RACE's own form: one article as JSON."""
    found = _located(str(path), files.read_bytes(path, MOST_LINE))
    yield from [found] if found.why else _race_article(str(path), found.value)


def _race_article(place: str, article: dict[str, Any]) -> Iterator[LocatedRecord]:
    try:
        questions = article["questions"]
        answers = article.get("answers", [None] * len(questions))
        rows = list(zip(questions, article["options"], answers, strict=True))
        shared = {"article": article["article"], "example_id": article.get("id", place)}
    except (KeyError, TypeError, ValueError) as error:
        yield LocatedRecord(
            place, {}, f"not an article of RACE ({type(error).__name__}: {error})"
        )
        return
    for number, (question, options, answer) in enumerate(rows, 1):
        own = {"question": question, "options": options, "answer": answer}
        yield LocatedRecord(f"{place}, question {number}", shared | own)


def _is_table(path: Path) -> bool:
    """Tell a table (MRPC's own .txt) from an article of RACE: in JSON, no line begins with a word and a tab."""
    return b"\t" in files.read_part(path, 0, 4096).partition(b"\n")[0].strip()


def _tsv(path: Path) -> Iterator[LocatedRecord]:
    """Yield the rows of a file with a header, in which a quotation mark is text."""
    header: list[str] = []
    for number, line in files.lines_of(path, MOST_LINE):
        place = f"{path}:{number}"
        try:
            cells = files.decode(line, place).rstrip("\r\n").split("\t")
        except files.FileError as error:
            yield LocatedRecord(place, {}, str(error.problems[0].came))
            continue
        if not header:
            header = cells
        elif len(cells) != len(header):
            yield LocatedRecord(
                place, {}, f"has {len(cells)} columns, and the header {len(header)}"
            )
        else:
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            row |= {
                ours: row[theirs] for theirs, ours in COLUMNS.items() if theirs in row
            }
            numbers = [key for key in ("label", "idx") if row.get(key, "").isdecimal()]
            yield LocatedRecord(place, row | {key: int(row[key]) for key in numbers})


def _parquet(path: Path) -> Iterable[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        files.refuse(path, "cannot be read as parquet", str(error).splitlines()[0])


def _saved(path: Path) -> Iterable[Any]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of arrow, JSON and the file system: each has its own
        first = [*str(error).splitlines(), ""][0]
        files.refuse(
            path,
            "is no directory that datasets' save_to_disk wrote",
            first,
            f"give {KINDS}",
        )
    if isinstance(found, datasets.DatasetDict):
        files.refuse(
            path,
            f"holds the splits {', '.join(found)}",
            fix="give the directory of one of them",
        )
    return found


def _hub(facts: TaskFacts, split: str) -> Iterator[LocatedRecord]:
    import datasets

    name, config = facts.hub
    try:
        found = datasets.load_dataset(name, config, split=facts.splits[split])
    except Exception as error:  # of networks, files and formats: each has its own
        first = [*str(error).splitlines(), type(error).__name__][0]
        fix = f"give local files with --{split} FILE ({KINDS}), or run once where there is network"
        _refuse(f"--{split}", f"{name} cannot be had from the hub", first, fix)
    yield from _rows(f"{name} {facts.splits[split]}", found)


def parse_examples(
    facts: TaskFacts,
    split: str,
    records: Sequence[LocatedRecord],
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
            if record.why:
                raise WrongRecord(record.why)
            sound.append(parse(facts, record.value, number, labelled))
        except WrongRecord as error:
            broken.append(f"{record.place}: {error}")
            if not labelled:
                sound.append(
                    parse(facts, _readable(facts, record.value), number, labelled)
                )
    if len(broken) == len(records):
        rule = f"all of its {counted(len(broken), 'example')} are broken: {'; '.join(broken[:SHOWN])}"
        _refuse(f"--{split}", split, rule, "give a sound file")
    return Examples(split, tuple(sound), tuple(broken))


def _readable(facts: TaskFacts, value: dict[str, Any]) -> dict[str, Any]:
    """Return the texts and identities of a broken record, without its label; a text is empty instead."""
    readable = {
        name: text
        for name, text in value.items()
        if name in facts.texts and isinstance(text, str)
    }
    identity = {
        name: value[name] for name in ("idx", "id", "example_id") if name in value
    }
    choices = {"options": [""] * len(facts.labels)} if facts.head == "choice" else {}
    return dict.fromkeys(facts.texts, "") | readable | identity | choices


def text_of(record: dict[str, Any], name: str, needed: bool) -> str:
    """Return a text field; `needed`: it is not empty. Raises WrongRecord."""
    value = record.get(name)
    if not isinstance(value, str):
        found = type(value).__name__ if name in record else "missing"
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
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value < len(labels)
    ):
        return value
    if not labelled and value in (None, -1, ""):
        return None
    least = f"it is one of 0..{len(labels) - 1} ({', '.join(labels)})"
    raise WrongRecord(f"{name} {value!r} is out of range: {least}")
