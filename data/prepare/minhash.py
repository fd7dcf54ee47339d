"""MinHash signatures of documents (Broder 1997).

The share of equal entries of two estimates the Jaccard similarity of their sets: the word n-grams
("shingles") of the repaired text. The estimate from p permutations has the
standard error sqrt(J (1 - J) / p): 0.04 at J = 0.7 and p = 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import rensa

from data.prepare.words import Words, ngrams

RECALL = 0.99  # least probability that two documents at the threshold meet in a band


def signatures(words: Words, shingle: int, permutations: int, seed: int) -> np.ndarray:
    """(texts, permutations) uint32. A text of fewer than `shingle` words is one shingle."""
    hashes, _, offsets = ngrams(words, shingle, whole_if_short=True)
    digests = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets.astype(np.uint64), permutations, seed
    )
    return np.array(digests.to_rows(), dtype=np.uint32).reshape(-1, permutations)


@dataclass(frozen=True)
class Bands:
    """Locality-sensitive hashing: candidates are equal in one of `count` bands of `rows` entries."""

    count: int
    rows: int

    def probability(self, similarity: float) -> float:
        """That documents this similar are compared: 1 - (1 - s^r)^b (Leskovec et al., 3.4.2)."""
        return 1 - (1 - similarity**self.rows) ** self.count


def choose_bands(permutations: int, threshold: float) -> Bands:
    """The bands with fewest false candidates (most rows) that find RECALL of the pairs at the threshold."""
    for rows in range(permutations, 0, -1):
        if (bands := Bands(permutations // rows, rows)).probability(threshold) > RECALL:
            return bands
    missed = f"--permutations {permutations} find no {RECALL:.0%} of the pairs at --dedup {threshold}"
    raise ValueError(f"{missed}: set --permutations 128 or more")
