"""The settings of a preparation: its sources, its tokenizer, and options beyond a recipe's `data` section.

launch/prepare_data.py makes its flags of `recipes.schema.Origin`, `recipes.schema.Tokenizer` and `Settings`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from recipes.families import SMALLEST_BPE, TRAINED
from recipes.problems import Key, Problem, ProblemsError, Setting, Words
from recipes.schema import Origin, Tokenizer

FORMAT_VERSION = 4  # of chunk files and of the manifest


class PreparationFailed(RuntimeError):
    """Failure of a preparation; the work done is kept.

    `exit_code`: of the command; 2: the input or a flag has to change, 1: the same command may succeed.
    """

    def __init__(self, said: str, exit_code: int = 2) -> None:
        super().__init__(said)
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Option:
    """The flag of a field of `Settings`: its group, help and range of numbers."""

    group: str  # of flags: read, made, left out, run
    help: str
    metavar: str = "N"
    least: float = -math.inf
    most: float = math.inf


def option(group: str, default: Any, *declared: Any, **more: Any) -> Any:
    """Declare a field of `Settings` with its `Option`."""
    return dataclasses.field(
        default=default, metadata={"option": Option(group, *declared, **more)}
    )


_made, _left_out, _read, _run = (
    partial(option, group) for group in ("made", "left out", "read", "run")
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one preparation. Sizes are of text, in UTF-8, decompressed."""

    origins: tuple[Origin, ...]  # of one kind: the same source, column, split
    samples: Literal["gpt", "bert"] = _made(
        "gpt",
        "gpt: one sequence per document, ended by the end-of-document token; bert: one per sentence",
    )
    tokenizer: Tokenizer = Tokenizer()
    vocab_size: int | None = _made(
        None, "tokens of a trained vocabulary", least=1, most=10_000_000
    )
    vocabulary_mb: int = _made(
        256,
        "text that a vocabulary is trained on: the input's beginning, repaired and in the wanted language",
        "MB",
        1,
        100_000,
    )
    repair: bool = _left_out(
        True,
        "mend mojibake, entities (&amp;) and control characters by ftfy, compose characters (NFC), part "
        "ligatures, make curly quotes straight; Chinese and Japanese keep their quotes and full width",
    )
    language: str | None = _left_out(
        "en", "ISO 639 code of documents to keep; none: all", "CODE"
    )
    language_score: float = _left_out(0.5, "least certainty of it", "SCORE", 0, 1)
    min_tokens: int = _left_out(
        128, "drop documents of fewer tokens", least=0, most=2**31 - 1
    )
    decontaminate: tuple[str, ...] = _left_out(
        (),
        "evaluation files, JSON lines or text, repaired as the documents are: drop documents that share "
        "--ngram words in a row with them",
        "FILE",
    )
    ngram: int = _left_out(
        13,
        "words of such a run; 2 characters of Chinese or Japanese count as one, 4 of Thai and its kin",
        least=1,
        most=1000,
    )
    dedup: float | None = _left_out(
        0.7,
        "drop documents that are this similar to an earlier one; none: keep all",
        "JACCARD",
        0.05,
        1,
    )
    permutations: int = _left_out(
        128, "entries of a MinHash signature", least=1, most=4096
    )
    shingle: int = _left_out(
        5,
        "words of a shingle; characters of scripts without blanks",
        least=1,
        most=1000,
    )
    seed: int = _left_out(1234, "of the permutations", least=0, most=2**64 - 1)
    write_articles: bool = _made(
        False, "also write articles.jsonl: one JSON object per document kept"
    )
    write_sentences: bool = _made(
        False,
        "also write sentences.jsonl: the same with a line feed after each sentence",
    )
    limit: int | None = _read(None, "read N documents", least=1, most=10**15)
    max_record_mb: int = _read(64, "longer records are broken", "MB", 1, 1024)
    chunk_mb: float = _run(
        2.0,
        "text that a worker takes at a time, and at most loses when it is killed",
        "MB",
        0.001,
        1024,
    )
    # What follows changes no byte of the result.
    max_broken: float = _run(
        0.01, "broken records above which nothing is published", "SHARE", 0, 1
    )
    workers: int = _run(
        1,
        "worker processes (default: cores; 0: none, for a debugger)",
        least=0,
        most=1024,
    )

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ProblemsError(problems)

    @property
    def origin(self) -> Origin:
        """The first origin, for the common settings of all."""
        return self.origins[0]

    def deciding(self) -> dict[str, Any]:
        """Return the settings with an effect on the result, as JSON values."""
        elsewhere = ("origins", "tokenizer", "max_broken", "workers")
        return {
            **self.origin.model_dump(exclude={"name", "streaming"}),
            "name": [origin.name for origin in self.origins],
            **{
                name: value
                for name, value in vars(self).items()
                if name not in elsewhere
            },
            "tokenizer": self.tokenizer.model_dump(),
            "decontaminate": list(self.decontaminate),
        }

    def _problems(self) -> Iterator[Problem]:
        kind = self.tokenizer.kind
        size = self.vocab_size
        tokenizer = f"--tokenizer {kind}"
        vocabulary = f"--vocab_size {size}"
        if kind in TRAINED and size is None:
            rule = f"{tokenizer} needs --vocab_size"
            yield Problem(
                "--vocab_size",
                rule,
                fix="give the number of tokens to train, e.g. 8192",
            )
        if kind == "trained_bpe" and size is not None and size < SMALLEST_BPE:
            rule = f"{tokenizer} begins with 256 bytes and the end-of-document token"
            yield Problem(
                "--vocab_size", vocabulary, rule, f"give {SMALLEST_BPE} or more"
            )
        if kind not in TRAINED and size is not None:
            rule = f"{tokenizer} has a size already"
            yield Problem("--vocab_size", vocabulary, rule, "leave --vocab_size out")
        if kind == "store":
            fix = "to use another store's, give --tokenizer file:STORE/tokenizer"
            yield Problem("--tokenizer", tokenizer, "a store is being made", fix)
        if self.samples == "bert" and kind in ("gpt2", "trained_bpe"):
            came = f"--samples bert with {tokenizer}"
            rule = "it lacks [CLS], [SEP], [MASK]"
            yield Problem(
                "--tokenizer", came, rule, "give bert_uncased or trained_wordpiece"
            )
        for field in options():
            value = getattr(self, field.name)
            shown = field.metadata["option"]
            if (
                isinstance(value, int | float)
                and not shown.least <= value <= shown.most
            ):
                flag = f"--{field.name}"
                fix = f"give a number from {shown.least} to {shown.most}"
                yield Problem(flag, f"{flag} {value}", fix=fix)


def options() -> list[dataclasses.Field[Any]]:
    """List the fields of `Settings` with a flag of their own."""
    return [
        field for field in dataclasses.fields(Settings) if "option" in field.metadata
    ]


def in_flags(words: Words) -> str:
    """Word a key of a recipe as a flag of prepare_data, for `Problem.render`."""
    if not isinstance(words, Key | Setting):
        return words
    key, value = (
        (words.key, shlex.quote(str(words.value)))
        if isinstance(words, Setting)
        else (words, None)
    )
    if key == "data.tokenizer.path":
        return f"--tokenizer KIND:{value or 'PATH'}"
    name = {"data.tokenizer.kind": "tokenizer"}.get(key, key.rpartition(".")[2])
    return f"--{name}" if value is None else f"--{name} {value}"
