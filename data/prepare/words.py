"""Words and word n-grams as 64-bit numbers, computed by numpy over the characters of many texts, and MinHash.

A word is a run of letters and digits; punctuation and white space end it. Of a script that sets no blanks
between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese, ...) every character is a word. Every character
outside ASCII counts as a letter but for the blocks Latin-1 punctuation, General Punctuation and CJK
punctuation. Texts are compared lower-cased, without entities and in NFKC: composed or not, full width or not.
The numbers depend only on the text, on every machine (unlike Python's `hash`).

The share of equal entries of two MinHash signatures (Broder 1997) estimates the Jaccard similarity of their
sets, the word n-grams ("shingles") of the repaired text. The estimate from p permutations has the standard
error sqrt(J (1 - J) / p): 0.04 at J = 0.7 and p = 128.
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import rensa

from data.keyed_random import mix
from data.text.encoder import UNSPACED

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_SMALLEST_TABLE = 1 << 19
# Quarters of a word that a character stands for; a run of letters is one word. 0: it ends a word.
_WORD = 4
_QUARTERS = np.full(0x110000, _WORD, np.uint8)
for _begin, _end in (
    (0, 0x30),
    (0x3A, 0x41),
    (0x5B, 0x61),
    (0x7B, 0xC0),
    (0x2000, 0x2040),
    (0x3000, 0x3040),
):
    _QUARTERS[_begin:_end] = 0
for _characters, _ranges in UNSPACED.items():
    for _first, _last in re.findall("(.)-(.)", _ranges):
        _QUARTERS[ord(_first) : ord(_last) + 1] = _WORD // _characters


@dataclass(frozen=True)
class Words:
    """Words of n texts: word w is codes[starts[w]:ends[w]]; text t has words offsets[t]:offsets[t + 1]."""

    codes: np.ndarray  # (characters,) uint32: a line feed, then the compared texts with a line feed after each
    starts: np.ndarray  # (W,) int64
    ends: np.ndarray  # (W,) int64
    hashes: np.ndarray  # (W,) uint64
    offsets: np.ndarray  # (n + 1,) int64

    def between(self, first: int, last: int) -> str:
        """Return the compared text from word `first` up to, not with, word `last`."""
        return (
            self.codes[self.starts[first] : self.ends[last - 1]]
            .tobytes()
            .decode("utf-32-le")
        )


def words_of(texts: Sequence[str]) -> Words:
    """Find the words of every text.

    It is fastest where the arrays, 40 bytes per character, stay in the processor's cache.
    """
    parts = [
        unicodedata.normalize("NFKC", html.unescape(text)).lower() for text in texts
    ]
    codes = np.frombuffer(
        "\n".join(["", *parts, ""]).encode("utf-32-le", "replace"), "<u4"
    )
    quarters = _QUARTERS[codes]
    letter = quarters == _WORD
    alone = (quarters > 0) & ~letter
    # The first and last character are line feeds: every word begins and ends.
    starts = np.flatnonzero(alone[1:] | (letter[1:] & ~letter[:-1])) + 1
    ends = np.flatnonzero(alone[:-1] | (letter[:-1] & ~letter[1:])) + 1
    text_ends = np.cumsum([len(part) + 1 for part in parts], dtype=np.int64) + 1
    offsets = np.concatenate([[0], np.searchsorted(starts, text_ends)])
    return Words(codes, starts, ends, _hash_slices(codes, starts, ends), offsets)


def shingles(words: Words, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash the n-grams of consecutive words within each text; a shorter text is one of all its words.

    Returns:
        hashes (G,) uint64; offsets (texts + 1,) int64 into them.
    """
    shown = np.maximum(np.diff(words.offsets) - n + 1, 1)
    offsets = np.concatenate([[0], np.cumsum(shown)])
    first = np.arange(offsets[-1]) + np.repeat(words.offsets[:-1] - offsets[:-1], shown)
    last = np.minimum(first + n, np.repeat(words.offsets[1:], shown))
    return _hash_slices(words.hashes, first, last), offsets


def passages(words: Words, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash the runs of n words within each text: 2 n characters of Chinese or Japanese, 4 n of Thai.

    Returns:
        hashes (G,) uint64; first (G,) int64, the first word of each; last (G,) int64, the word after it.
    """
    lengths = np.concatenate(
        [[0], np.cumsum(_QUARTERS[words.codes[words.starts]], dtype=np.int64)]
    )
    last = np.searchsorted(lengths, lengths[:-1] + _WORD * n)
    first = np.flatnonzero(last <= np.repeat(words.offsets[1:], np.diff(words.offsets)))
    return _hash_slices(words.hashes, first, last[first]), first, last[first]


def _hash_slices(
    values: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Hash each values[start:end] by a polynomial modulo 2**64, with one running sum: (W,) uint64."""
    size = max(_SMALLEST_TABLE, 1 << values.size.bit_length())
    powers = _powers(_BASE, size)[: values.size]
    sums = np.zeros(values.size + 1, np.uint64)
    np.cumsum(values * powers, out=sums[1:])
    # Dividing by _BASE**start makes the hash independent of the place.
    unplaced = (sums[ends] - sums[starts]) * _powers(_INVERSE, size)[starts]
    return mix(unplaced)


@functools.lru_cache(maxsize=4)  # as costly as the rest of the hashing
def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Return base**0, base**1, ... modulo 2**64, (count,) uint64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    powers = np.cumprod(factors, dtype=np.uint64)
    powers.setflags(write=False)
    return powers


RECALL = 0.99  # least probability that two documents at the threshold meet in a band


def signatures(
    words: Words, shingle: int, permutations: int, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Compute MinHash signatures; a text shorter than a shingle is one shingle.

    Returns:
        signatures (texts, permutations) uint32; each text's set of shingles, uint32 ascending.
    """
    hashes, offsets = shingles(words, shingle)
    digests = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets.astype(np.uint64), permutations, seed
    )
    # Half of each hash: of two sets of 10^5 shingles, about two are then taken for equal.
    halves = hashes.astype(np.uint32)
    sets = [np.unique(halves[a:b]) for a, b in pairwise(offsets)]
    return np.array(digests.to_rows(), np.uint32).reshape(-1, permutations), sets


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
    raise ValueError(
        f"--permutations {permutations} find no {RECALL:.0%} of the pairs at --dedup {threshold}"
        ": set --permutations 128 or more"
    )
