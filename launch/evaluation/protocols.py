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
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from data import corpus
from data.durable_files import quiet
from data.text.encoder import UNSPACED
from data.text.given_text import text_settings
from data.text.hub import HubSource
from data.text.local_files import files_of, format_of
from data.text.records import MAX_RECORD_BYTES, BrokenRecord, Parsed, decode_payload
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
    """

    variant: str
    source: str
    words: int | None = None
    bytes: int | None = None


def rows_of(
    flag: str, place: str | HubSource, column: str | None, *, whole: bool = False
) -> Iterator[str]:
    """Yield the rows of files or of a data set, empty ones too; of plain text its lines, or `whole` files.

    Raises ProblemsError: the files of the flag, the data set or a row cannot be read.
    """
    try:
        if isinstance(place, HubSource):
            place = replace(place, text_column=column or "text")
            rows: Iterator[Parsed] = (
                raw if isinstance(raw, BrokenRecord) else str(raw.payload)
                for raw in place.records()
            )
        else:
            rows = _rows_of_files(place, column, whole)
        for row in rows:
            if isinstance(row, BrokenRecord):
                raise ProblemsError.of(
                    flag, f"{row.file}:{row.number}: {row.kind}", row.detail
                )
            yield row or ""
    except ProblemsError as error:
        problems = []
        for each in error.problems:
            told = replace(each, where=f"{flag} {place}")
            if isinstance(place, HubSource):
                fix = f"check the network, or give a copy with {flag} FILE (JSON lines, parquet or text)"
                told = replace(each, where=place.name, came="", fix=fix)
            problems.append(Problem(flag, told.render(_in_flags)))
        raise ProblemsError(problems) from error


def _rows_of_files(place: str, column: str | None, whole: bool) -> Iterator[Parsed]:
    stated = text_settings(place, column)
    stated.pop("data.blend")
    named = {key.removeprefix("data."): value for key, value in stated.items()}
    origin = Origin(**named)
    is_plain = origin.source == "text"
    if column and is_plain:
        raise ProblemsError.of(
            "--column", f"--column {column}", "it is plain text", "leave it out"
        )
    form = format_of(origin)
    for file in files_of(origin):
        if is_plain and not whole:
            for line in numbered_lines(file.path, MAX_RECORD_BYTES):
                yield decode_payload(line)
        else:
            for record in form.frame(file.path):
                yield form.text_of(record)


def _in_flags(words: Words) -> str:
    if isinstance(words, Setting):
        return f"--column {words.value}"
    return "--column" if isinstance(words, Key) else str(words)


def _as_dataset(
    flag: str, documents: Sequence[Mapping[str, Any]], facts: TaskText
) -> dict[str, Any]:
    """Return what lm-eval takes for a data set, with the facts that a score keeps.

    Raises ProblemsError: there is no document.
    """
    import datasets

    if not documents:
        raise ProblemsError.of(
            flag,
            f"{facts.source}: nothing is left to score",
            "it holds no text",
            "give another text",
        )
    return {"test": datasets.Dataset.from_list([*documents]), FACTS: facts}


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
        facts = TaskText("held out", str(built.summary["source"]))
        return _as_dataset("--text", documents, facts)
    rows = rows_of("--text", text, column, whole=True)
    texts = [*islice(filter(str.strip, rows), limit)]
    words = sum(len(_WORD.findall(each)) for each in texts)
    size = sum(len(each.encode()) for each in texts)
    facts = TaskText("documents", text, words, size)
    return _as_dataset("--text", [{"text": each} for each in texts], facts)


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

    rows = rows_of("--data", file or WIKITEXT103, column)
    lines = [row or BLANK for row in islice(rows, limit)]
    text = "".join(lines).strip()
    documents = [{"text": wikitext_detokenizer({"page": text})}] if text else []
    facts = TaskText("", file or WIKITEXT103.name, original_tokens(text))
    return _as_dataset("--data", documents, facts)


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
    source = file or LAMBADA[variant].name
    rows = rows_of("--data", file or LAMBADA[variant], column)
    passages = []
    for number, row in enumerate(islice(rows, limit), 1):
        before, _blank, word = row.strip().rpartition(" ")
        if before.strip():
            passages.append({"before": before, "last_word": f" {word}"})
        elif word:
            raise ProblemsError.of(
                "--data",
                f"{source}: passage {number} has one word",
                "there is nothing to guess it from",
                "remove it",
            )
    dataset = _as_dataset("--data", passages, TaskText(variant, source))
    _check_variant(variant, passages, source)
    return dataset


def _check_variant(
    variant: Variant, passages: Sequence[Mapping[str, str]], source: str
) -> None:
    whole = "".join(each["before"] + each["last_word"] for each in passages)
    lower = whole == whole.lower()
    if lower != (variant == "original"):
        other = "original" if lower else "openai"
        letters = "no capital" if lower else "capitals"
        raise ProblemsError.of(
            "--data",
            f"--variant {variant} with {source}, which has {letters}",
            "the original text is in lower case, and OpenAI's is not",
            f"give --variant {other}, or the other file",
        )


def likelihood(_document: Any, results: Sequence[float]) -> dict[str, float]:
    return {"log_likelihood": results[0]}
