"""Search for duplicates of earlier documents: exact copies, and near-duplicates by banded MinHash.

Documents are taken in their order. One is dropped if and only if its Jaccard similarity to an earlier kept
document reaches the threshold, which is counted wherever the two share a band and their signatures do not
agree by much less. Of documents with one band, many of one template, only the newest kept ones are met. So
the result depends on nothing but the documents, their order and the arguments, and the work on a document is
bounded.

Memory, measured on a million random signatures with 5 % near-duplicates: 173 MB per million documents, in 5 s
(the hashes of one band, their order and their numbers, then the buckets). A document with a match in all of
32 bands takes up to 450 bytes more. The signatures, 512 MB per million documents at 128 permutations, stay in
a mapped file, whose pages the system may drop; so do the sets of shingles, 4 bytes a word.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.keyed_random import mix
from data.prepare.words import Bands

_ROWS_AT_ONCE = 1 << 16
# newest kept documents of a bucket to compare with
MOST_MET = 8
# standard errors below the threshold to which an estimate leaves the similarity open
_LIKELY = 3.0


@dataclass(frozen=True)
class Duplicates:
    """The earlier original of each of n documents."""

    # (n,) int64: number of the earlier document; -1: the document is kept
    of: np.ndarray
    # (n,) float32: Jaccard similarity to it; 1 for exact copies; 0: kept
    jaccard: np.ndarray
    exact: np.ndarray  # (n,) bool: an exact copy, byte for byte
    candidates: int  # pairs whose signatures were compared


@dataclass(frozen=True)
class ShingleSets:
    """The sets of shingles of n documents, one after the other."""

    hashes: np.ndarray  # uint32, of each document ascending; mapped or in memory
    ends: np.ndarray  # (n,) int64

    def __getitem__(self, document: int) -> np.ndarray:
        first = self.ends[document - 1] if document else 0
        return self.hashes[first : self.ends[document]]

    def jaccard(self, one: int, other: int) -> float:
        """Count the Jaccard similarity of two documents."""
        sets = self[one], self[other]
        common = np.intersect1d(*sets, assume_unique=True).size
        return common / (len(sets[0]) + len(sets[1]) - common)


def find_duplicates(
    digests: np.ndarray,
    marks: np.ndarray,
    sets: ShingleSets,
    bands: Bands,
    threshold: float,
    step: Callable[[float], None] = lambda done: None,
) -> Duplicates:
    """Find the duplicates among n documents.

    Args:
        digests: (n,) uint64 hash of each document's text.
        marks: (n, permutations) uint32 signatures, mapped or in memory.
        step: called with the percentage that is done, for a progress bar.
    """
    _, firsts, texts = np.unique(digests, return_index=True, return_inverse=True)
    of = firsts[texts]
    exact = of < np.arange(len(digests))
    of[~exact] = -1
    jaccard = exact.astype(np.float32)
    candidates = _drop_in_order(
        _meetings(marks, bands, ~exact, step), marks, sets, threshold, of, jaccard, step
    )
    # A copy of a dropped document repeats the original of that one, which is no copy.
    copies = np.flatnonzero(exact & (of[of] >= 0))
    of[copies] = of[of[copies]]
    return Duplicates(of, jaccard, exact, candidates)


def band_hashes(marks: np.ndarray, band: int, rows: int) -> np.ndarray:
    """Hash each signature's entries band * rows to band * rows + rows - 1, as (n,) uint64."""
    hashes = np.empty(len(marks), np.uint64)
    for start in range(0, len(marks), _ROWS_AT_ONCE):
        block = marks[start : start + _ROWS_AT_ONCE, band * rows : (band + 1) * rows]
        value = np.full(len(block), band + 1, np.uint64)
        for row in range(rows):
            value = mix(value + block[:, row])
        hashes[start : start + _ROWS_AT_ONCE] = value
    return hashes


@dataclass(frozen=True)
class _Meetings:
    """Buckets with several documents."""

    documents: np.ndarray  # (m,) int64, ascending: documents in such a bucket
    # (m, bands) int32: the bucket in each band, numbered over all; -1: none
    buckets: np.ndarray
    count: int  # of buckets


def _meetings(
    marks: np.ndarray,
    bands: Bands,
    considered: np.ndarray,
    step: Callable[[float], None],
) -> _Meetings:
    columns = []  # per band: documents that share a bucket, and its number
    meets = np.zeros(len(marks), bool)
    count = 0
    for band in range(bands.count):
        members, numbers = _shared_buckets(
            band_hashes(marks, band, bands.rows), considered
        )
        columns.append((members, numbers + np.int32(count)))
        count += int(numbers.max(initial=-1)) + 1
        meets[members] = True
        step(50 * (band + 1) / bands.count)
    documents = np.flatnonzero(meets)
    buckets = np.full((len(documents), bands.count), -1, np.int32)
    for band, (members, numbers) in enumerate(columns):
        buckets[np.searchsorted(documents, members), band] = numbers
    return _Meetings(documents, buckets, count)


def _shared_buckets(
    hashes: np.ndarray, considered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents with a common hash, and int32 bucket numbers 0, 1, ..., one per hash."""
    _, buckets, sizes = np.unique(
        hashes[considered], return_inverse=True, return_counts=True
    )
    numbers = np.cumsum(sizes > 1, dtype=np.int32) - np.int32(1)
    shared = sizes[buckets] > 1
    return np.flatnonzero(considered)[shared], numbers[buckets[shared]]


def _drop_in_order(
    meetings: _Meetings,
    marks: np.ndarray,
    sets: ShingleSets,
    threshold: float,
    of: np.ndarray,
    jaccard: np.ndarray,
    step: Callable[[float], None],
) -> int:
    """Fill `of` and `jaccard`, document after document; return the number of compared pairs."""
    # The kept documents of each bucket, as linked lists in three flat arrays: a dict of lists would take 20
    # times the memory.
    newest = array("i", [-1]) * meetings.count
    kept = array("q")
    older = array("i")
    compared = 0
    error = np.sqrt(threshold * (1 - threshold) / max(marks.shape[1], 1))
    likely = threshold - _LIKELY * error
    count = len(meetings.documents)
    for number, document in enumerate(meetings.documents.tolist()):
        row = meetings.buckets[number]
        buckets = row[row >= 0].tolist()
        met: set[int] = set()
        for bucket in buckets:
            entry = newest[bucket]
            for _ in range(MOST_MET):
                if entry < 0:
                    break
                met.add(kept[entry])
                entry = older[entry]
        compared += len(met)
        others = sorted(met)
        shares = (marks[others] == marks[document]).mean(axis=1)
        for k in np.argsort(-shares, kind="stable")[: np.sum(shares >= likely)]:
            earlier = others[k]
            similarity = sets.jaccard(document, earlier)
            if similarity >= threshold:
                of[document] = earlier
                jaccard[document] = similarity
                break
        else:
            for bucket in buckets:
                older.append(newest[bucket])
                newest[bucket] = len(kept)
                kept.append(document)
        step(50 + 50 * (number + 1) / count)
    return compared
