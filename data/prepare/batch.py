"""The documents of a chunk between two steps, and what a step drops of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from data.prepare.settings import in_flags
from data.prepare.tally import Step
from data.sources.records import Broken

EXCERPT_CHARACTERS = 200  # of a dropped document


@dataclass(frozen=True)
class Documents:
    """Lists of equal length; those that no step has filled yet are empty."""

    files: list[int]  # number of the input file
    names: list[str]  # the file, as records name it
    numbers: list[int]  # record in it
    texts: list[str]
    sizes: list[int]  # bytes of the text in UTF-8
    sentences: list[list[str]] = field(default_factory=list)
    tokens: list[list[np.ndarray]] = field(default_factory=list)  # per document its sequences, uint32

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def with_texts(self, texts: list[str]) -> Documents:
        return replace(self, texts=texts, sizes=[utf8_size(text) for text in texts])

    def select(self, keep: Sequence[bool]) -> Documents:
        if all(keep):
            return self
        chosen = {
            column.name: [value for value, kept in zip(values, keep, strict=True) if kept]
            for column in fields(self)
            if (values := getattr(self, column.name))
        }
        return replace(self, **chosen)


def utf8_size(text: str) -> int:
    """Bytes of the text in UTF-8; `isascii` is a flag that the string carries."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


@dataclass(frozen=True)
class Verdict:
    """Why a document is dropped."""

    reason: str  # one of few, for the report
    detail: str = ""  # of this document


def sift(
    documents: Documents, verdicts: Sequence[Verdict | None], step: Step, reject: Callable[[str], None]
) -> Documents:
    """Those with the verdict None; the others are counted and handed to `reject` as lines of JSON."""
    for k, verdict in enumerate(verdicts):
        if verdict is not None:
            step.drop(verdict.reason, documents.sizes[k])
            reject(
                dropped_line(
                    documents.names[k], documents.numbers[k], verdict, documents.sizes[k], documents.texts[k]
                )
            )
    return documents.select([verdict is None for verdict in verdicts])


def dropped_line(file: str, number: int, verdict: Verdict, size: int, text: str) -> str:
    excerpt = text[:EXCERPT_CHARACTERS]
    return _line(
        file=file, number=number, reason=verdict.reason, detail=verdict.detail, size=size, excerpt=excerpt
    )


def broken_line(broken: Broken) -> str:
    """A record kept aside: its first 64 KiB, as text where they are text, else exactly, in base64."""
    facts = dict(file=broken.file, number=broken.number, reason=broken.render(in_flags), size=broken.size)
    try:
        return _line(**facts, excerpt=broken.excerpt.decode("utf-8"))
    except UnicodeDecodeError:
        return _line(**facts, excerpt_base64=base64.b64encode(broken.excerpt).decode())


def _line(**fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False) + "\n"
