"""The steps of a preparation on single documents, and the documents of a chunk.

A step takes documents and its log, which gets a line on each dropped document. It returns the remaining
documents. Each can be called and timed by itself; `work` runs them one after the other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import compress

import numpy as np

from data.prepare.chunk_file import BROKEN, ChunkStep, json_line
from data.prepare.cleaning import Detect, repair
from data.prepare.contamination import Evaluation
from data.prepare.settings import Settings, in_flags
from data.prepare.words import Words, signatures, words_of
from data.text.documents import Document
from data.text.encoder import Encoder, Ends, group_items, sentences_of
from data.text.records import AnyRecord, BrokenRecord, RecordFormat

NOT_A_DOCUMENT = "not a document (empty, a redirect)"
EXCERPT_CHARACTERS = 200  # of a dropped document
# Characters to hash together: numpy's arrays then stay in the processor's cache.
_WORDS_AT_ONCE = 1 << 17

# Why a document is dropped: one of few reasons, and a detail; None: it is kept.
Verdict = tuple[str, str] | None


@dataclass(frozen=True)
class StepLog:
    """The counts of a step, and a line of JSON on each document or record that it drops."""

    counts: ChunkStep
    rejected: list[bytes]


@dataclass(frozen=True)
class Documents:
    """Columns of documents, of equal length; empty before a step fills them."""

    files: Sequence[int] = ()  # number of the input file
    names: Sequence[str] = ()  # the file, as records name it
    numbers: Sequence[int] = ()  # record in it
    texts: Sequence[str] = ()
    sizes: Sequence[int] = ()  # bytes of the text in UTF-8
    sentences: Sequence[list[str]] = ()
    tokens: Sequence[list[np.ndarray]] = ()  # per document its sequences, uint32
    marks: Sequence[np.ndarray] = ()  # (permutations,) uint32 each
    sets: Sequence[np.ndarray] = ()  # each document's set of shingles, uint32

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def sift(self, verdicts: Iterable[Verdict], log: StepLog) -> Documents:
        """Keep the documents without a verdict; count the others, and describe them in the log."""
        keep = []
        columns = (self.names, self.numbers, self.sizes, self.texts)
        for verdict, file, number, size, text in zip(verdicts, *columns, strict=True):
            keep.append(not verdict)
            if verdict:
                reason, detail = verdict
                log.counts.drop(reason, size)
                log.rejected.append(
                    json_line(
                        file=file,
                        number=number,
                        reason=reason,
                        detail=detail,
                        size=size,
                        excerpt=text[:EXCERPT_CHARACTERS],
                    )
                )
        if all(keep):
            return self
        kept = {
            c.name: list(compress(getattr(self, c.name), keep)) for c in fields(self)
        }
        return replace(self, **kept)

    @cached_property
    def words(self) -> list[Words]:
        """The words of all texts, in blocks of about `_WORDS_AT_ONCE` characters."""
        return [words_of(some) for some in group_items(self.texts, len, _WORDS_AT_ONCE)]


def parse(
    documents: Documents,
    log: StepLog,
    items: list[tuple[int, AnyRecord]],
    form: RecordFormat,
) -> Documents:
    """Take the documents of records; count broken records and keep them aside."""
    rows = []
    for file, item in items:
        text = form.text_of(item)
        size = item.size if isinstance(item, BrokenRecord) else len(item.payload)
        log.counts.enter(1, size)
        if isinstance(text, BrokenRecord):
            log.counts.drop(BROKEN + text.kind, size)
            log.rejected.append(_broken_line(text))
        elif not text:
            log.counts.drop(NOT_A_DOCUMENT, size)
        else:
            rows.append((file, item.file, item.number, text, utf8_size(text)))
    return Documents(*zip(*rows, strict=True))


def repair_texts(documents: Documents, log: StepLog) -> Documents:
    texts = []
    for text in documents.texts:
        repaired = repair(text)
        log.counts.changed += repaired is not text and repaired != text
        texts.append(repaired)
    return replace(documents, texts=texts, sizes=[utf8_size(text) for text in texts])


def keep_language(
    documents: Documents, log: StepLog, detect: Detect, settings: Settings
) -> Documents:
    wanted = settings.language
    least = settings.language_score

    def judge(language: str, score: float) -> Verdict:
        if language != wanted:
            return f"language is not {wanted}", f"{language} {score:.2f}"
        if score < least:
            return f"language is {wanted} with a score below {least}", f"{score:.2f}"
        return None

    return documents.sift((judge(*detect(text)) for text in documents.texts), log)


def split_sentences(documents: Documents, log: StepLog, how: Ends) -> Documents:
    return replace(
        documents, sentences=[sentences_of(text, how) for text in documents.texts]
    )


def tokenize(
    documents: Documents, log: StepLog, encoder: Encoder, settings: Settings
) -> Documents:
    """Tokenize each document as one sequence with an end-of-document token; for a BERT as its sentences.

    It drops documents of fewer than `min_tokens`, special ones not counted.
    """
    least = settings.min_tokens
    if settings.samples == "bert":
        tokens = encoder.encode_sentences(documents.sentences)
        ends = 0
    else:
        texts = (Document(k, text) for k, text in enumerate(documents.texts))
        tokens = [[ids] for _, ids in encoder(texts)]
        ends = 1

    def judge(length: int) -> Verdict:
        if length <= 0:
            return "no tokens", ""
        if length < least:
            return f"fewer than {least} tokens", f"{length} tokens"
        return None

    verdicts = [judge(sum(map(len, sequences)) - ends) for sequences in tokens]
    return replace(documents, tokens=tokens).sift(verdicts, log)


def decontaminate(
    documents: Documents, log: StepLog, evaluation: Evaluation
) -> Documents:
    reason = f"shares {evaluation.n} words in a row with"
    matches = (
        match for words in documents.words for match in evaluation.matches(words)
    )
    return documents.sift(
        (match and (f"{reason} {match[0]}", match[1]) for match in matches), log
    )


def sign(documents: Documents, log: StepLog, settings: Settings) -> Documents:
    marks: list[np.ndarray] = []
    sets: list[np.ndarray] = []
    for words in documents.words:
        rows, shingles = signatures(
            words, settings.shingle, settings.permutations, settings.seed
        )
        marks += [*rows]
        sets += shingles
    return replace(documents, marks=marks, sets=sets)


def digests(texts: Sequence[str]) -> np.ndarray:
    """Hash texts as (documents,) uint64; of 10^8 texts any two collide once in 4,000 corpora."""
    parts = [
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        for text in texts
    ]
    return np.frombuffer(b"".join(parts), "<u8")


def article_lines(documents: Documents, texts: Iterable[str]) -> bytes:
    """Write each article as a line of JSON."""
    lines = []
    for file, number, text in zip(
        documents.names, documents.numbers, texts, strict=True
    ):
        lines.append(json_line(text=text, file=file, number=number))
    return b"".join(lines)


def utf8_size(text: str) -> int:
    """Count the text's bytes in UTF-8; `isascii` is a stored flag of the string."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _broken_line(broken: BrokenRecord) -> bytes:
    """Write a broken record as a line of JSON: its first 64 KiB as text, or else in base64."""
    facts = dict(
        file=broken.file,
        number=broken.number,
        reason=broken.render(in_flags),
        size=broken.size,
    )
    try:
        return json_line(**facts, excerpt=broken.excerpt.decode("utf-8"))
    except UnicodeDecodeError:
        return json_line(
            **facts, excerpt_base64=base64.b64encode(broken.excerpt).decode()
        )
