"""The steps that look at one document at a time, each a function over the documents of a chunk.

Each can be called, and timed, alone; `work` runs them one after the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from data.prepare.batch import Documents, Verdict, broken_line, utf8_size
from data.prepare.contamination import Evaluation
from data.prepare.minhash import signatures
from data.prepare.repair import repair
from data.prepare.tally import BROKEN, Step
from data.prepare.words import Words, words_of
from data.sources.documents import Document
from data.sources.records import Broken, Raw, RecordFormat
from data.sources.sentences import split
from data.vocabularies.encoder import Encoder, grouped

NOT_A_DOCUMENT = "not a document (empty, a redirect)"
_WORDS_AT_ONCE = (
    1 << 17
)  # characters whose words are hashed together: numpy's arrays then stay in the processor's cache


def parse(
    items: Sequence[tuple[int, Raw | Broken]], form: RecordFormat, step: Step, reject: Callable[[str], None]
) -> Documents:
    """Records to documents; broken ones are counted and kept aside."""
    documents = Documents([], [], [], [], [])
    for file, item in items:
        text = item if isinstance(item, Broken) else form.parse(item)
        size = item.size if isinstance(item, Broken) else len(item.payload)
        step.documents_in += 1
        step.bytes_in += size
        if isinstance(text, Broken):
            step.drop(BROKEN + text.kind, size)
            reject(broken_line(text))
        elif not text:
            step.drop(NOT_A_DOCUMENT, size)
        else:
            documents.files.append(file)
            documents.names.append(item.file)
            documents.numbers.append(item.number)
            documents.texts.append(text)
            documents.sizes.append(utf8_size(text))
    return documents


def repair_texts(documents: Documents, step: Step) -> Documents:
    texts = [repair(text) for text in documents.texts]
    step.changed += sum(
        new is not old and new != old for new, old in zip(texts, documents.texts, strict=True)
    )
    return documents.with_texts(texts)


def judge_language(
    documents: Documents, detect: Callable[[str], tuple[str, float]], wanted: str, least: float
) -> list[Verdict | None]:
    verdicts: list[Verdict | None] = []
    for text in documents.texts:
        language, score = detect(text)
        if language != wanted:
            verdicts.append(Verdict(f"language is not {wanted}", f"{language} {score:.2f}"))
        elif score < least:
            verdicts.append(Verdict(f"language is {wanted} with a score below {least}", f"{score:.2f}"))
        else:
            verdicts.append(None)
    return verdicts


def split_sentences(documents: Documents, how: str) -> list[list[str]]:
    return [split(text, how) for text in documents.texts]  # type: ignore[arg-type]


def tokenize_documents(documents: Documents, encoder: Encoder) -> list[list[np.ndarray]]:
    """Per document one sequence, ended by the end-of-document token: the samples of a GPT."""
    return [[ids] for _, ids in encoder(Document(k, text) for k, text in enumerate(documents.texts))]


def tokenize_sentences(documents: Documents, encoder: Encoder) -> list[list[np.ndarray]]:
    """Per document one sequence per sentence, without special tokens: the samples of a BERT."""
    return encoder.encode_sentences(documents.sentences)


def judge_length(documents: Documents, least: int, ends: int) -> list[Verdict | None]:
    """`ends`: tokens of each document that end it and do not count."""
    verdicts: list[Verdict | None] = []
    for sequences in documents.tokens:
        length = sum(len(sequence) for sequence in sequences) - ends
        if length <= 0:
            verdicts.append(Verdict("no tokens"))
        elif length < least:
            verdicts.append(Verdict(f"fewer than {least} tokens", f"{length} tokens"))
        else:
            verdicts.append(None)
    return verdicts


def hash_words(texts: Sequence[str]) -> list[Words]:
    """The words of all texts, in blocks of about `_WORDS_AT_ONCE` characters."""
    return [words_of(some) for some in grouped(texts, len, _WORDS_AT_ONCE)]


def judge_contamination(blocks: Sequence[Words], evaluation: Evaluation) -> list[Verdict | None]:
    matches = [match for words in blocks for match in evaluation.matches(words)]
    return [
        None if m is None else Verdict(f"shares {evaluation.n} words in a row with {m[0]}", m[1])
        for m in matches
    ]


def sign(blocks: Sequence[Words], shingle: int, permutations: int, seed: int) -> np.ndarray:
    """(documents, permutations) uint32."""
    parts = [signatures(words, shingle, permutations, seed) for words in blocks]
    return np.concatenate(parts) if parts else np.zeros((0, permutations), dtype=np.uint32)


def digests(texts: Sequence[str]) -> np.ndarray:
    """(documents,) uint64: equal for equal texts. Some two of 10^8 texts agree once in 4,000 corpora."""
    parts = [hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(parts), dtype="<u8")


def article_line(file: str, number: int, text: str) -> bytes:
    """One article as a line of JSON; sentences, where it has them, end with line feeds."""
    return (json.dumps({"text": text, "file": file, "number": number}, ensure_ascii=False) + "\n").encode(
        "utf-8", "replace"
    )


def article_lines(documents: Documents) -> bytes:
    return b"".join(map(article_line, documents.names, documents.numbers, documents.texts))


def sentence_lines(documents: Documents) -> bytes:
    texts = ["".join(f"{sentence}\n" for sentence in sentences) for sentences in documents.sentences]
    return b"".join(map(article_line, documents.names, documents.numbers, texts))
