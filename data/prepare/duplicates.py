"""Search for duplicates of earlier documents: exact copies, and near-duplicates by banded MinHash.

Documents are taken in their order. One is dropped if and only if an earlier kept document shares a band with
it and its signature agrees with that one's by the threshold or more. So the result depends on nothing but the
documents, their order and the arguments.

Memory, measured on a million random signatures with 5 % near-duplicates: 47 MB per million documents, in 3 s
(the hashes of one band and their order, then 2 MB of buckets). A document with a match in all of 32 bands
takes up to 450 bytes more. The signatures, 512 MB per million documents at 128 permutations, stay in a mapped
file, whose pages the system may drop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.keyed_random import mix
from data.prepare.words import Bands

_ROWS_AT_ONCE = 1 << 16
_COMPARED_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Duplicates:
    """The earlier original of each of n documents."""

    # (n,) int64: number of the earlier document; -1: the document is kept
    of: np.ndarray
    # (n,) float32: share of equal signature entries; 1 for exact copies; 0: kept
    agreement: np.ndarray
    exact: np.ndarray  # (n,) bool: an exact copy, byte for byte
    candidates: int  # compared pairs: those with a common band


def find_duplicates(
    digests: np.ndarray,
    marks: np.ndarray,
    bands: Bands,
    threshold: float,
    step: Callable[[], None] = lambda: None,
) -> Duplicates:
    """Find the duplicates among n documents.

    Args:
        digests: (n,) uint64 hash of each document's text.
        marks: (n, permutations) uint32 signatures, mapped or in memory.
        step: called after each band, for a progress bar.
    """
    n = len(digests)
    of = np.full(n, -1, dtype=np.int64)
    agreement = np.zeros(n, dtype=np.float32)
    exact = _repeat_earlier(digests, of)
    agreement[exact] = 1
    candidates = _drop_in_order(
        _meetings(marks, bands, ~exact, step), marks, threshold, of, agreement
    )
    # A copy of a dropped document repeats the original of that one, which is no copy.
    copies = np.flatnonzero(exact & (of[of] >= 0))
    of[copies] = of[of[copies]]
    return Duplicates(of, agreement, exact, candidates)


def _repeat_earlier(values: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Mark values with an earlier occurrence, (n,) bool; write their first place into `of`."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    places = np.flatnonzero(same) + 1  # of repeated values, in `order`
    firsts = np.flatnonzero(np.concatenate([[True], ~same]))
    repeats = np.zeros(len(values), dtype=bool)
    repeats[order[places]] = True
    of[order[places]] = order[firsts[np.searchsorted(firsts, places) - 1]]
    return repeats


def band_hashes(marks: np.ndarray, band: int, rows: int) -> np.ndarray:
    """Hash each signature's entries band * rows to band * rows + rows - 1, as (n,) uint64."""
    hashes = np.empty(len(marks), dtype=np.uint64)
    for start in range(0, len(marks), _ROWS_AT_ONCE):
        block = marks[start : start + _ROWS_AT_ONCE, band * rows : (band + 1) * rows]
        value = np.full(len(block), band + 1, dtype=np.uint64)
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
    marks: np.ndarray, bands: Bands, considered: np.ndarray, step: Callable[[], None]
) -> _Meetings:
    columns = []  # per band: documents that share a bucket, and its number
    meets = np.zeros(len(marks), dtype=bool)
    count = 0
    for band in range(bands.count):
        members, numbers = _shared_buckets(
            band_hashes(marks, band, bands.rows), considered
        )
        columns.append((members, numbers + np.int32(count)))
        count += int(numbers[-1]) + 1 if len(numbers) else 0
        meets[members] = True
        step()
    documents = np.flatnonzero(meets)
    buckets = np.full((len(documents), bands.count), -1, dtype=np.int32)
    for band, (members, numbers) in enumerate(columns):
        buckets[np.searchsorted(documents, members), band] = numbers
    return _Meetings(documents, buckets, count)


def _shared_buckets(
    hashes: np.ndarray, considered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents with a common hash, and int32 bucket numbers 0, 1, ..., one per hash."""
    order = np.argsort(hashes)
    order = order[considered[order]]
    ordered = hashes[order]
    same = ordered[1:] == ordered[:-1]
    begins = np.concatenate([[True], ~same])[: len(order)]
    shared = ~begins
    shared[:-1] |= same
    return order[shared], np.cumsum(begins[shared], dtype=np.int32) - np.int32(1)


def _drop_in_order(
    meetings: _Meetings,
    marks: np.ndarray,
    threshold: float,
    of: np.ndarray,
    agreement: np.ndarray,
) -> int:
    """Fill `of` and `agreement`, document after document; return the number of compared pairs."""
    # The kept documents of each bucket, as linked lists in three flat arrays: a dict of lists would take 20
    # times the memory.
    newest = array("i", [-1]) * meetings.count
    kept = array("q")
    older = array("i")
    compared = 0
    for document, row in zip(
        meetings.documents.tolist(), meetings.buckets, strict=True
    ):
        buckets = row[row >= 0].tolist()
        met: set[int] = set()
        for bucket in buckets:
            entry = newest[bucket]
            while entry >= 0:
                met.add(kept[entry])
                entry = older[entry]
        compared += len(met)
        share, earlier = _best(marks, document, sorted(met))
        if share >= threshold:
            of[document] = earlier
            agreement[document] = share
            continue
        for bucket in buckets:
            older.append(newest[bucket])
            newest[bucket] = len(kept)
            kept.append(document)
    return compared


def _best(marks: np.ndarray, document: int, others: list[int]) -> tuple[float, int]:
    """Return the largest agreement with one of `others`, and the first one with it; (-1, -1) without any."""
    best = -1.0
    where = -1
    for start in range(0, len(others), _COMPARED_AT_ONCE):
        some = others[start : start + _COMPARED_AT_ONCE]
        shares = (marks[some] == marks[document]).mean(axis=1)
        k = int(shares.argmax())
        if shares[k] > best:
            best = float(shares[k])
            where = some[k]
    return best, where
