"""Search for documents with n words in a row of an evaluation text (Brown et al. 2020, appendix C, n = 13).

Words are compared lower-cased and without punctuation; two characters of Chinese or Japanese count as a word,
and four of Thai, Lao, Khmer or Burmese. Evaluation texts are repaired as the documents are. Those of fewer
than n words are not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.prepare.cleaning import repair
from data.prepare.words import Words, passages, words_of
from data.text.encoder import group_items
from data.text.file_types import JSON_LINES, JSON_LIST, looks_like, way_from
from data.text.text_files import TextFormat
from recipes import files

# size of a table to dismiss most n-grams by: 16 MiB, one byte an entry
_FILTER_BITS = 24
_TEXTS_AT_ONCE = 4096
_LARGEST_FILE = 1 << 28  # bytes of one evaluation file, held in memory


@dataclass(frozen=True)
class Evaluation:
    """The n-grams of the evaluation files."""

    n: int
    hashes: np.ndarray  # (G,) uint64, sorted, distinct
    file: np.ndarray  # (G,) int32: the first file with it
    files: tuple[str, ...]
    texts: int
    too_short: int  # texts of fewer than n words
    filter: np.ndarray  # (2**_FILTER_BITS,) bool, by the upper bits of the hashes

    def matches(self, words: Words) -> list[tuple[str, str] | None]:
        """Return for each text (evaluation file, first common run of words), or None."""
        hashes, first, last = passages(words, self.n)
        common: list[tuple[str, str] | None] = [None] * (len(words.offsets) - 1)
        likely = np.flatnonzero(self.filter[hashes >> np.uint64(64 - _FILTER_BITS)])
        if not likely.size:
            return common
        places = np.searchsorted(self.hashes, hashes[likely])
        places[places == len(self.hashes)] = 0
        hit = self.hashes[places] == hashes[likely]
        likely = likely[hit]
        places = places[hit]
        texts = np.searchsorted(words.offsets, first[likely], side="right") - 1
        for k in np.unique(texts, return_index=True)[1].tolist():
            passage = words.between(int(first[likely[k]]), int(last[likely[k]]))
            common[texts[k]] = (self.files[self.file[places[k]]], passage)
        return common


def read_evaluation(paths: Sequence[str], n: int, repaired: bool = True) -> Evaluation:
    """Read the n-grams of all strings in JSON and JSON-lines files, and of all lines of other text files.

    `repaired`: as the documents are.

    Raises ValueError: a file is missing, empty or broken, or no text in it has n words. An evaluation set
    silently not excluded would be worse than an error.
    """
    hashes: list[np.ndarray] = []
    file: list[np.ndarray] = []
    texts = too_short = 0
    for number, path in enumerate(paths):
        found = 0
        for some in group_items(_strings(Path(path)), lambda text: 1, _TEXTS_AT_ONCE):
            read = [repair(text) for text in some] if repaired else some
            words = words_of(read)
            ngrams, first, _ = passages(words, n)
            texts += len(some)
            too_short += len(some) - len(
                np.unique(np.searchsorted(words.offsets, first, side="right"))
            )
            hashes.append(ngrams)
            found += ngrams.size
            file.append(np.full(len(ngrams), number, np.int32))
        if not found:
            raise ValueError(
                f"--decontaminate {path}: no text in it has {n} words: "
                "leave it out, or give a smaller --ngram"
            )
    distinct, where = np.unique(np.concatenate(hashes), return_index=True)
    table = np.zeros(1 << _FILTER_BITS, bool)
    table[distinct >> np.uint64(64 - _FILTER_BITS)] = True
    files = np.concatenate(file)[where]
    return Evaluation(
        n, distinct, files, tuple(map(str, paths)), texts, too_short, table
    )


def _strings(path: Path) -> Iterator[str]:
    if not files.is_file(path):
        raise ValueError(f"--decontaminate {path}: no such file, or no ordinary one")
    lines = TextFormat(max_record_bytes=_LARGEST_FILE)
    named = any(suffix in (".json", ".jsonl", ".ndjson") for suffix in path.suffixes)
    kind = looks_like(path)
    is_json = named or kind in (JSON_LINES, JSON_LIST)
    for raw in lines.framed(path, 0):
        text = lines.text_of(raw)
        if not isinstance(text, str):
            why = text.reason if text else "the file is empty"
            if kind and not is_json:
                why = f"it is {kind}: {way_from(kind)}"
            raise ValueError(f"--decontaminate {path}: {why}")
        yield from (_json_strings(path, text) if is_json else text.splitlines())


def _json_strings(path: Path, text: str) -> Iterator[str]:
    try:
        yield from _leaves(json.loads(text))  # one object or list
    except (ValueError, RecursionError):
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    yield from _leaves(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"--decontaminate {path}:{number}: not JSON ({error})"
                ) from error


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
