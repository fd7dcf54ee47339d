"""BERT's chunks: runs of consecutive sentences of one document, each the text of one sample.

As in BERT's data preparation (Devlin et al. 2018, appendix A.2): sentences are taken until they have as many
tokens as a sample holds, or, for a share of the chunks, until a random smaller number. A sentence longer than
a sample is cut into pieces first, so that all of its text is used. Chunks depend on the seed and not on the
epoch.

Documents are cut in lock step: one search finds the k-th chunk of every document that has sentences left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.keyed_random import random_bits
from data.tokens.store import Store

SHORTEST_TARGET = 2  # tokens
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Lengths:
    """Target lengths of chunks."""

    target: int  # tokens
    # share of chunks with a random length in [SHORTEST_TARGET, target]
    short_probability: float
    seed: int

    def of(self, documents: np.ndarray, chunk: int) -> np.ndarray:
        """Return the target tokens (N,) int64 of the chunk with this number, in each of the documents."""
        bits = random_bits(self.seed, documents, chunk)
        short = (bits >> np.uint64(32)) < np.uint64(
            round(self.short_probability * 2**32)
        )
        choices = np.uint64(self.target - SHORTEST_TARGET + 1)
        shorter = SHORTEST_TARGET + (bits & np.uint64(0xFFFFFFFF)) % choices
        return np.where(short, shorter.astype(np.int64), self.target)


@dataclass(frozen=True)
class Chunks:
    """The chunks of some documents, in the order of the documents; 12 bytes per chunk and 16 per document."""

    documents: np.ndarray  # (D,) int64, ascending: documents that have a chunk
    starts: np.ndarray  # (C,) int64: where each chunk begins, in tokens of the store
    lengths: np.ndarray  # (C,) int32 tokens
    # (D + 1,) int64: the chunks of document d are first[d] up to, not with, first[d + 1]
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def of_same_document(self, chunk: int) -> tuple[int, int]:
        """Return the range of the chunks of this chunk's document, as (first, last + 1)."""
        document = int(self.first.searchsorted(chunk, side="right"))
        return int(self.first[document - 1]), int(self.first[document])


def build_chunks(store: Store, documents: np.ndarray, lengths: Lengths) -> Chunks:
    """Cut `documents` (D,) int64, ascending, into chunks; a document without tokens has none."""
    cuts = []
    # Blocks of the store's documents, chosen or not: they bound the memory for sentences.
    end = documents[-1] + 1 if len(documents) else 0
    spans = np.arange(0, end, _BLOCK)
    for block in filter(len, np.split(documents, documents.searchsorted(spans))):
        first = store.document_index[block]
        last = store.document_index[block + 1]
        edges = store.sequence_starts(np.arange(first[0], last[-1] + 1))
        cuts.append(_cut(edges, first - first[0], last - first[0], block, lengths))
    cuts = cuts or [(np.empty(0, np.int64),) * 3]
    counts, starts, sizes = (np.concatenate(parts) for parts in zip(*cuts, strict=True))
    filled = counts > 0
    return Chunks(
        documents[filled],
        starts,
        sizes,
        np.concatenate([[0], np.cumsum(counts[filled])]),
    )


def chunks_of_document(
    edges: np.ndarray, document: int, lengths: Lengths
) -> tuple[np.ndarray, np.ndarray]:
    """Cut one document outside any store into chunks.

    Args:
        edges: (S + 1,) int64 beginnings of its sentences, in tokens, and the end of the last one.
        document: its number, for the random lengths.

    Returns:
        (C,) int64 beginnings of the chunks, in tokens of the document, and (C,) int32 tokens.
    """
    return _cut(
        edges, np.array([0]), np.array([len(edges) - 1]), np.array([document]), lengths
    )[1:]


def _cut(
    edges: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    documents: np.ndarray,
    lengths: Lengths,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the documents (D,) of one run of sentences into chunks.

    Args:
        edges: (S + 1,) int64 beginnings of the sentences, in tokens, and the end of the last one.
        first, last: (D,) document d is the sentences from first[d] up to, not with, last[d].

    Returns:
        (D,) chunks of each document; (C,) int64 beginnings of chunks, in tokens; (C,) int32 tokens; in order.
    """
    places = edges[first]  # where the next chunk of each document begins
    ends = edges[last]
    longest = lengths.target
    sizes = np.diff(edges)
    if len(sizes) and sizes.max() > longest:  # edges inside long sentences too
        pieces = np.maximum(-(-sizes // longest), 1)
        # within its sentence
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        edges = np.append(np.repeat(edges[:-1], pieces) + piece * longest, edges[-1])
    counts = np.zeros(len(documents), np.int64)
    steps: list[tuple[np.ndarray, ...]] = []
    going = np.flatnonzero(places < ends)  # documents with text left
    while going.size:
        start = places[going]
        reached = edges.searchsorted(start + lengths.of(documents[going], len(steps)))
        places[going] = np.minimum(
            edges[np.minimum(reached, len(edges) - 1)], ends[going]
        )
        steps.append((going, start, (places[going] - start).astype(np.int32)))
        counts[going] += 1
        going = going[places[going] < ends[going]]
    before = np.cumsum(counts) - counts
    starts = np.empty(counts.sum(), np.int64)
    sizes = np.empty(counts.sum(), np.int32)
    for step, (going, start, size) in enumerate(steps):
        starts[before[going] + step] = start
        sizes[before[going] + step] = size
    return counts, starts, sizes
