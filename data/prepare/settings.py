"""The arguments of one preparation, and what of them decides its result."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from recipes.schema import Origin, Tokenizer
from recipes.vocabularies import SMALLEST_BPE, TRAINED

FORMAT_VERSION = 1  # of chunk files and of the manifest


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes are of text, in UTF-8, decompressed."""

    origins: tuple[Origin, ...]  # of one kind: the same source, column, split
    samples: Literal["gpt", "bert"]
    tokenizer: Tokenizer
    vocab_size: int | None = None  # tokens of a trained vocabulary
    vocabulary_mb: int = 256  # MB of text that a trained vocabulary is trained on
    repair: bool = True
    language: str | None = "en"  # ISO 639 code that documents must be in; None: any
    language_score: float = 0.5  # least certainty that they are
    min_tokens: int = 128  # least tokens of a document, without the end-of-document token
    decontaminate: tuple[str, ...] = ()  # evaluation files
    ngram: int = 13  # words that a document must have in common with them, in a row, to be dropped
    dedup: float | None = 0.7  # Jaccard similarity; None: duplicates stay
    permutations: int = 128
    shingle: int = 5  # words
    seed: int = 1234
    write_articles: bool = False
    write_sentences: bool = False
    limit: int | None = None  # documents that are read
    max_record_mb: int = 64
    chunk_mb: float = 2.0  # of records that a worker takes at a time
    # What follows changes no byte of the result.
    max_broken: float = 0.01
    workers: int = 1  # processes; 0: in this one

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ValueError("\n".join(problems))

    @property
    def origin(self) -> Origin:
        """Of the kind that all origins are."""
        return self.origins[0]

    @property
    def sentences(self) -> bool:
        """Whether documents are cut into sentences."""
        return self.samples == "bert" or self.write_sentences

    def deciding(self) -> dict[str, Any]:
        """What decides the result, as JSON values."""
        fields = dataclasses.asdict(dataclasses.replace(self, origins=()))
        del fields["max_broken"], fields["workers"], fields["origins"], fields["tokenizer"]
        origin = self.origin.model_dump(exclude={"name", "streaming"})
        return {
            **origin,
            "name": [o.name for o in self.origins],
            **fields,
            "tokenizer": self.tokenizer.model_dump(),
            "decontaminate": list(self.decontaminate),
        }

    def _problems(self) -> list[str]:
        found = []
        bert, kind = self.samples == "bert", self.tokenizer.kind
        if kind in TRAINED and self.vocab_size is None:
            found.append(f"--tokenizer {kind} needs --vocab_size: the number of tokens to train, e.g. 8192")
        if kind == "trained_bpe" and self.vocab_size is not None and self.vocab_size < SMALLEST_BPE:
            found.append(f"--vocab_size {self.vocab_size} with --tokenizer trained_bpe, which begins with 256 bytes and the end-of-"
                         f"document token: give {SMALLEST_BPE} or more")  # fmt: skip
        if kind not in TRAINED and self.vocab_size is not None:
            found.append(
                f"--vocab_size {self.vocab_size} with --tokenizer {kind}, which has a size already: leave --vocab_size out"
            )
        if kind == "store":
            found.append(
                "--tokenizer store: a store is being made; to use another store's, give --tokenizer file:STORE/tokenizer"
            )
        if bert and kind in ("gpt2", "trained_bpe"):
            found.append(
                f"--samples bert with --tokenizer {kind}: it lacks [CLS], [SEP], [MASK]: give bert_uncased or trained_wordpiece"
            )
        for flag, value, least, most in (
            ("--language_score", self.language_score, 0, 1),
            ("--max_broken", self.max_broken, 0, 1),
            ("--dedup", 1 if self.dedup is None else self.dedup, 0.05, 1),
        ):
            if not least <= value <= most:
                found.append(f"{flag} {value} is a share: give a number from {least} to {most}")
        for flag, count in (
            ("--ngram", self.ngram), ("--shingle", self.shingle), ("--permutations", self.permutations),
            ("--max_record_mb", self.max_record_mb), ("--vocabulary_mb", self.vocabulary_mb),
            ("--limit", 1 if self.limit is None else self.limit),
        ):  # fmt: skip
            if count < 1:
                found.append(f"{flag} {count}: give 1 or more")
        for flag, count in (("--min_tokens", self.min_tokens), ("--workers", self.workers)):
            if count < 0:
                found.append(f"{flag} {count}: give 0 or more")
        if not 0 <= self.seed < 2**64:
            found.append(f"--seed {self.seed}: give a number from 0 to {2**64 - 1}")
        if not 0 < self.chunk_mb < math.inf:
            found.append(f"--chunk_mb {self.chunk_mb}: give a number above 0")
        return found
