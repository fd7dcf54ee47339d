"""Words and word n-grams as 64-bit numbers, computed with numpy over the bytes of many texts, and MinHash.

A word is a run of letters and digits of the lower-cased text; punctuation and white space end it. Every
character outside ASCII counts as a letter but for the blocks Latin-1 punctuation, General Punctuation and CJK
punctuation. The numbers are functions of the text alone, on every machine (unlike Python's `hash`).

The share of equal entries of two MinHash signatures (Broder 1997) estimates the Jaccard similarity of their
sets, the word n-grams ("shingles") of the repaired text. The estimate from p permutations has the standard
error sqrt(J (1 - J) / p): 0.04 at J = 0.7 and p = 128.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import rensa

from data.keyed_random import mix

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_SMALLEST_TABLE = 1 << 19
_STEP = np.uint64(0xD1342543DE82EF95)  # multiplier between neighbouring words of an n-gram
# (256,) bool: ASCII letters (lower case) and digits, and all bytes of characters outside ASCII.
_IS_WORD = np.zeros(256, dtype=bool)
_IS_WORD[ord("a") : ord("z") + 1] = _IS_WORD[ord("0") : ord("9") + 1] = _IS_WORD[128:] = True


@dataclass(frozen=True)
class Words:
    """Words of n texts: word w is buffer[starts[w]:ends[w]]; text t has words offsets[t]:offsets[t + 1]."""

    buffer: np.ndarray  # (bytes,) uint8: a line feed, then the lower-cased texts with a line feed after each
    starts: np.ndarray  # (W,) int64
    ends: np.ndarray  # (W,) int64
    hashes: np.ndarray  # (W,) uint64
    offsets: np.ndarray  # (n + 1,) int64

    def between(self, first: int, last: int) -> str:
        """Return the lower-cased text from word `first` to word `last`, both included."""
        return self.buffer[self.starts[first] : self.ends[last]].tobytes().decode("utf-8", "replace")


def words_of(texts: Sequence[str]) -> Words:
    """Find the words of every text.

    It is fastest where the arrays, 25 bytes per byte of text, stay in the processor's cache.
    """
    parts = [text.lower().encode("utf-8", "replace") for text in texts]
    buffer = np.frombuffer(b"\n".join([b"", *parts, b""]), dtype=np.uint8)
    inside = _IS_WORD[buffer]
    _exclude_punctuation(buffer, inside)
    # The first and last byte are line feeds: every word begins and ends.
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    starts, ends = edges[::2], edges[1::2]
    text_ends = np.cumsum([len(part) + 1 for part in parts], dtype=np.int64) + 1
    offsets = np.concatenate([[0], np.searchsorted(starts, text_ends)])
    return Words(buffer, starts, ends, _hash_slices(buffer, starts, ends), offsets)


def ngrams(words: Words, n: int, whole_if_short: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash the n-grams of consecutive words within each text.

    Args:
        whole_if_short: a text of fewer than n words has one n-gram of all its words; otherwise none.

    Returns:
        hashes (G,) uint64; first (G,) int64, the first word of each; offsets (texts + 1,) int64 into both.
    """
    counts = np.diff(words.offsets)
    shown = np.maximum(counts - n + 1, int(whole_if_short))
    offsets = np.concatenate([[0], np.cumsum(shown)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], shown)
    first = np.repeat(words.offsets[:-1], shown) + within
    # Words beyond the end of a short text count as nothing.
    padded = np.concatenate([words.hashes, np.zeros(n, dtype=np.uint64)])
    hashes = np.zeros(offsets[-1], dtype=np.uint64)
    lengths = np.repeat(counts, shown)
    short = np.flatnonzero(lengths < n)  # none without whole_if_short
    for k in range(n):
        following = padded[first + k]
        following[short[lengths[short] <= k]] = 0
        hashes = hashes * _STEP + following
    return mix(hashes), first, offsets


def _exclude_punctuation(buffer: np.ndarray, inside: np.ndarray) -> None:
    """Clear spaces and punctuation: U+0080-U+00BF, U+2000-U+203F and U+3000-U+303F."""
    outside_ascii = np.flatnonzero(buffer >= 0xC2)  # lead bytes; a text is whole UTF-8: more bytes follow
    lead, second = buffer[outside_ascii], buffer[outside_ascii + 1]
    latin = outside_ascii[lead == 0xC2]
    general = outside_ascii[((lead == 0xE2) | (lead == 0xE3)) & (second == 0x80)]
    for places in (latin, latin + 1, general, general + 1, general + 2):
        inside[places] = False


def _hash_slices(buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Hash each buffer[start:end] by a polynomial modulo 2**64, with one running sum: (W,) uint64."""
    size = max(_SMALLEST_TABLE, 1 << buffer.size.bit_length())
    powers = _powers(_BASE, size)[: buffer.size]
    sums = np.zeros(buffer.size + 1, dtype=np.uint64)
    np.cumsum(buffer * powers, out=sums[1:])
    # Dividing by _BASE**start makes the hash independent of the place.
    unplaced = (sums[ends] - sums[starts]) * _powers(_INVERSE, size)[starts]
    return mix(unplaced)


@functools.lru_cache(maxsize=4)  # as costly as the rest of the hashing
def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Return base**0, base**1, ... modulo 2**64, (count,) uint64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    powers = np.cumprod(factors, dtype=np.uint64)
    powers.setflags(write=False)
    return powers


RECALL = 0.99  # least probability that two documents at the threshold meet in a band


def signatures(words: Words, shingle: int, permutations: int, seed: int) -> np.ndarray:
    """Compute MinHash signatures (texts, permutations) uint32; a shorter text is one shingle."""
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
        """Return the probability to compare two such documents: 1 - (1 - s^r)^b (Leskovec et al., 3.4.2)."""
        return 1 - (1 - similarity**self.rows) ** self.count


def choose_bands(permutations: int, threshold: float) -> Bands:
    """Choose the bands of most rows, so of fewest false candidates, to find RECALL of the pairs."""
    for rows in range(permutations, 0, -1):
        if (bands := Bands(permutations // rows, rows)).probability(threshold) > RECALL:
            return bands
    missed = f"--permutations {permutations} find no {RECALL:.0%} of the pairs at --dedup {threshold}"
    raise ValueError(f"{missed}: set --permutations 128 or more")
