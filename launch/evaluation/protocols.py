"""Texts and results of our task files, of which two follow the protocols of published scores.

WikiText-103 as Megatron-LM scores it (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3, appendix E.1). The
test set comes tokenized by words. It is turned back into text; the sum of the losses is divided by the number
of the *original* word-level tokens, so that perplexities of models with other vocabularies can be compared.

LAMBADA (Paperno et al. 2016): passages whose last word has to be guessed. Two forms of the test set are in
use, and their figures do not compare. "original" is the authors' file: words in lower case, cut from their
punctuation by blanks. "openai" is the text that Radford et al. (2019) made of it again, with its capitals and
quotation marks, which Megatron-LM scores, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from data import corpus
from data.durable_files import quiet
from data.text.encoder import UNSPACED
from data.text.given_text import text_settings
from data.text.hub import HubSource
from data.text.records import MAX_RECORD_BYTES, BrokenRecord, decode_payload
from data.text.sources import files_of, format_of
from data.text.text_files import numbered_lines
from recipes.problems import Key, Problem, ProblemsError, Setting, Words
from recipes.schema import Origin, Recipe

PERPLEXITY = "perplexity"
PUBLISHED = ("wikitext103", "lambada")
TASKS = (PERPLEXITY, *PUBLISHED)  # their files: tasks/*.yaml
Variant = Literal["original", "openai"]  # of LAMBADA
WIKITEXT103 = HubSource("Salesforce/wikitext", "wikitext-103-raw-v1", "test")
LAMBADA: dict[Variant, HubSource] = {
    "original": HubSource("cimec/lambada", None, "test"),
    "openai": HubSource("EleutherAI/lambada_openai", "default", "test"),
}
FACTS = "facts"  # next to the splits of a data set
BLANK = " \n"  # a blank line of the original file, which the hub has as an empty row
_ALONE = "".join(UNSPACED.values())
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True)
class TaskText:
    """Facts on the texts of a task.

    Attributes:
        variant: which form of the task; "" where there is one.
        source: file or data set.
        words, bytes: of the original text; None: the task counts none.
        broken: rows that were left out, each with its reason.
    """

    variant: str
    source: str
    words: int | None = None
    bytes: int | None = None
    broken: tuple[str, ...] = ()


class Rows:
    """Rows of files or of a data set.

    Attributes:
        source: where they are.
        broken: descriptions of those that could not be read, so far.
    """

    def __init__(self, flag: str, place: str | HubSource, column: str | None):
        """Open the files of a flag, or a data set of the hub. Raises ProblemsError."""
        self.broken: list[str] = []
        self._flag = flag
        self._place: Origin | HubSource
        if isinstance(place, HubSource):
            self.source = place.name
            self._place = replace(place, text_column=column or "text")
        else:
            self.source = place
            self._place = _files(flag, place, column)

    def read(self, *, by_line: bool = True) -> Iterator[str]:
        """Yield the rows, empty ones too; of plain text its lines, or else whole files.

        Raises ProblemsError where no row has text.
        """
        is_empty = True
        for row in self._records(by_line):
            if isinstance(row, BrokenRecord):
                reason = row.render(_in_flags)
                self.broken.append(f"{row.file}:{row.number}: {reason}")
            else:
                is_empty = is_empty and not row.strip()
                yield row
        if is_empty:
            raise self.nothing_left()

    def _records(self, by_line: bool) -> Iterator[str | BrokenRecord]:
        place = self._place
        if isinstance(place, HubSource):
            fix = f"check the network, or give a copy with {self._flag} FILE (JSON lines, parquet or text)"
            with _told(self._flag, self.source, fix):
                for raw in place.records():
                    yield raw if isinstance(raw, BrokenRecord) else str(raw.payload)
            return
        form = format_of(place)
        lines = by_line and place.source == "text"
        parse = decode_payload if lines else form.parse
        for file in files_of(place):
            records = form.frame(file.path)
            if lines:
                records = numbered_lines(file.path, MAX_RECORD_BYTES)
            for raw in records:
                yield raw if isinstance(raw, BrokenRecord) else parse(raw) or ""

    def nothing_left(self) -> ProblemsError:
        """Make the refusal of rows without any text to score."""
        came = f"{self.source}: nothing is left to score"
        rule = "it holds no text"
        if self.broken:
            rule = f"{len(self.broken)} broken examples, the first: {self.broken[0]}"
        return ProblemsError.of(self._flag, came, rule, "give another text")


def _files(flag: str, place: str, column: str | None) -> Origin:
    """Return the files of a flag and how to read them. Raises ProblemsError."""
    with _told(flag, f"{flag} {place}"):
        stated = text_settings(place, column)
    stated.pop("data.blend")
    named = {key.removeprefix("data."): value for key, value in stated.items()}
    origin = Origin(**named)
    if column and origin.source == "text":
        came = f"--column {column}"
        raise ProblemsError.of(
            "--column", came, f"{place} is plain text", "leave it out"
        )
    return origin


@contextmanager
def _told(flag: str, where: str, fix: str | None = None) -> Iterator[None]:
    """Tell the problems of a recipe's data in the words of this command's flags."""
    try:
        yield
    except ProblemsError as error:
        problems = []
        for each in error.problems:
            found = replace(each, where=where)
            if fix is not None:
                found = replace(found, came="", fix=fix)
            problems.append(Problem(flag, found.render(_in_flags)))
        raise ProblemsError(problems) from error


def _in_flags(words: Words) -> str:
    if isinstance(words, Setting):
        return f"--column {words.value}"
    return "--column" if isinstance(words, Key) else str(words)


def _as_dataset(documents: list[dict[str, Any]], facts: TaskText) -> dict[str, Any]:
    """Return what lm-eval takes for a data set, with the facts that a score keeps."""
    import datasets

    return {"test": datasets.Dataset.from_list(documents), FACTS: facts}


def perplexity(
    text: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    recipe: Recipe | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Read whole documents of a text, or the tokens of the samples that a recipe holds out.

    Whitespace separates words; a character of a script without blanks is one. `limit`: documents or samples.
    Raises ValueError.
    """
    if text is None:
        assert recipe is not None
        built = corpus.build(recipe, say=quiet)
        numbers = range(len(built.validation))[:limit]
        samples = built.validation.take(numbers)["window"]
        documents = [{"text": sample.tolist()} for sample in samples]
        return _as_dataset(
            documents, TaskText("held out", str(built.summary["source"]))
        )
    rows = Rows("--text", text, column)
    texts = [*islice(filter(str.strip, rows.read(by_line=False)), limit)]
    words = sum(len(_WORD.findall(each)) for each in texts)
    size = sum(len(each.encode()) for each in texts)
    facts = TaskText("documents", text, words, size, tuple(rows.broken))
    return _as_dataset([{"text": each} for each in texts], facts)


def original_tokens(text: str) -> int:
    """Count the word-level tokens of the original text, with line breaks, as Megatron-LM does."""
    return len(text.strip().split(" "))


def wikitext103(
    file: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Read the test set as one document, turned back into text.

    `file`: the original file, or rows with its lines; `limit`: lines. Raises ProblemsError.
    """
    # Megatron-LM's rules, of tasks/zeroshot_gpt/detokenizer.py.
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    rows = Rows("--data", file or WIKITEXT103, column)
    lines = [row or BLANK for row in islice(rows.read(), limit)]
    text = "".join(lines).strip()
    if not text:
        raise rows.nothing_left()
    words = original_tokens(text)
    document = {"text": wikitext_detokenizer({"page": text}), "words": words}
    facts = TaskText("", rows.source, words, broken=tuple(rows.broken))
    return _as_dataset([document], facts)


def per_word(document: Mapping[str, Any], results: Sequence[float]) -> dict[str, Any]:
    return {"perplexity_per_word": (results[0], document["words"])}


def lambada(
    file: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    variant: Variant | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Read passages, each cut at its last blank. `limit`: passages.

    Raises ProblemsError: the file cannot be read, or is of the other variant.
    """
    variant = variant or "original"
    rows = Rows("--data", file or LAMBADA[variant], column)
    passages = list[dict[str, Any]]()
    for number, row in enumerate(islice(rows.read(), limit), 1):
        before, _blank, word = row.strip().rpartition(" ")
        if before.strip() and word:
            passages.append({"before": before, "last_word": f" {word}"})
        elif row.strip():
            came = f"{rows.source}: passage {number} has one word"
            rows.broken.append(f"{came}: there is nothing to guess it from")
    if not passages:
        raise rows.nothing_left()
    _check_variant(variant, passages, rows.source)
    facts = TaskText(variant, rows.source, broken=tuple(rows.broken))
    return _as_dataset(passages, facts)


def _check_variant(
    variant: Variant, passages: Sequence[Mapping[str, str]], source: str
) -> None:
    whole = "".join(each["before"] + each["last_word"] for each in passages)
    lower = whole == whole.lower()
    if lower != (variant == "original"):
        other, found = ("original", "no capital") if lower else ("openai", "capitals")
        came = f"--variant {variant} with {source}, which has {found}"
        rule = "the original text is in lower case, and OpenAI's is not"
        raise ProblemsError.of(
            "--data", came, rule, f"give --variant {other}, or the other file"
        )


def likelihood(_document: Any, results: Sequence[float]) -> dict[str, float]:
    return {"log_likelihood": results[0]}


def of_last_word(
    _passage: Any, results: Sequence[tuple[float, bool]]
) -> dict[str, float]:
    ((log_likelihood, right),) = results
    return {"accuracy": float(right), "perplexity_of_last_word": log_likelihood}
