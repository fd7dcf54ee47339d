"""Data and results of our task files, by the protocols of the published scores.

WikiText-103 as Megatron-LM scores it (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3, appendix E.1). The
test set comes tokenized by words. It is turned back into text; the sum of the losses is divided by the number
of the *original* word-level tokens, so that perplexities of models with other vocabularies can be compared.

LAMBADA (Paperno et al. 2016): passages whose last word has to be guessed. Two forms of the test set are in
use, and their figures do not compare. "original" is the authors' file: words in lower case, cut from their
punctuation by blanks. "openai" is the text that Radford et al. (2019) made of it again, with its capitals and
quotation marks, which Megatron-LM scores, too.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.tasks.rows import FLAG, is_plain_text, read_rows, read_whole
from data.text.hub import HubSource
from recipes.problems import ProblemsError

TASKS = ("wikitext103", "lambada")  # their files: tasks/*.yaml
Variant = Literal["original", "openai"]  # of LAMBADA
WIKITEXT103 = HubSource("Salesforce/wikitext", "wikitext-103-raw-v1", "test")
LAMBADA: dict[Variant, HubSource] = {
    "original": HubSource("cimec/lambada", None, "test"),
    "openai": HubSource("EleutherAI/lambada_openai", "default", "test"),
}
FACTS = "facts"  # next to the splits of a data set
LARGEST_EXPONENT = 700.0  # of e, in float64
BLANK = " \n"  # a blank line of the original file, which the hub has as an empty row


@dataclass(frozen=True)
class TaskText:
    """Facts on the data of a task.

    Attributes:
        variant: which form of the task; "" where there is one.
        source: file or data set.
        words: of the original text; None: the task counts none.
        broken: rows that were left out, each with its reason.
    """

    variant: str
    source: str
    words: int | None
    broken: tuple[str, ...]


def has_harness() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def original_tokens(text: str) -> int:
    """Count the word-level tokens of the original text, with line breaks, as Megatron-LM does."""
    return len(text.strip().split(" "))


def _as_dataset(documents: list[dict[str, Any]], facts: TaskText) -> dict[str, Any]:
    """Return what lm-eval takes for a data set, with the facts that a score keeps."""
    import datasets

    return {"test": datasets.Dataset.from_list(documents), FACTS: facts}


def wikitext103(
    file: str | None = None, column: str = "text", limit: int | None = None, **_: Any
) -> dict[str, Any]:
    """Read the test set as one document, turned back into text.

    `file`: the original file, or rows with its lines; `limit`: lines. Raises ProblemsError.
    """
    # Megatron-LM's rules, of tasks/zeroshot_gpt/detokenizer.py.
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    place = Path(file) if file else None
    if place is not None and is_plain_text(place):
        lines = read_whole(place).splitlines(keepends=True)
        source = str(place)
        broken = tuple[str, ...]()
    else:
        rows = read_rows(place or WIKITEXT103, column)
        lines = [row or BLANK for row in rows.texts]
        source = rows.source
        broken = rows.broken
    text = "".join(lines[:limit])
    words = original_tokens(text)
    document = {"text": wikitext_detokenizer({"page": text.strip()}), "words": words}
    return _as_dataset([document], TaskText("", source, words, broken))


def per_word(document: Mapping[str, Any], results: Sequence[float]) -> dict[str, Any]:
    return {"perplexity_per_word": (results[0], document["words"])}


def perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Return exp(sum of losses / number of units), of (log-likelihood, units)."""
    likelihood = math.fsum(item[0] for item in items)
    return exponential(-likelihood / sum(item[1] for item in items))


def exponential(nats: float) -> float:
    return math.exp(min(nats, LARGEST_EXPONENT))


def lambada(
    file: str | None = None,
    column: str = "text",
    limit: int | None = None,
    variant: Variant = "original",
    **_: Any,
) -> dict[str, Any]:
    """Read passages, each cut at its last blank. `limit`: passages.

    Raises ProblemsError: the file cannot be read, or is of the other variant.
    """
    rows = read_rows(Path(file) if file else LAMBADA[variant], column, limit)
    broken = list(rows.broken)
    passages = list[dict[str, Any]]()
    for number, text in enumerate(rows.texts, 1):
        before, _blank, word = text.strip().rpartition(" ")
        if before.strip() and word:
            passages.append({"before": before, "last_word": f" {word}"})
        elif text.strip():
            broken.append(
                f"{rows.source}: passage {number} has one word: there is nothing to guess it from"
            )
    if not passages:
        rule = f"{len(broken)} broken examples, the first: {broken[0]}"
        raise ProblemsError.of(
            FLAG, f"{rows.source}: nothing is left to score", rule, "give another file"
        )
    _check_variant(variant, passages, rows.source)
    return _as_dataset(passages, TaskText(variant, rows.source, None, tuple(broken)))


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
            FLAG, came, rule, f"give --variant {other}, or the other file"
        )


def of_last_word(
    passage: Mapping[str, Any], results: Sequence[tuple[float, bool]]
) -> dict[str, Any]:
    ((likelihood, right),) = results
    return {"accuracy": float(right), "perplexity_of_last_word": (likelihood, 1)}
