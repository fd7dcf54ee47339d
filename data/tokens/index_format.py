"""Megatron-LM's format of indexed datasets, which Megatron-DeepSpeed, gpt-neox and others read and write too.

A store is two files. `PREFIX.bin` holds the tokens of all sequences, one after the other. `PREFIX.idx` holds,
little endian:

     9 bytes  magic "MMIDIDX", 0, 0
     8        uint64 version, 1
     1        uint8 type of the tokens, a key of `DTYPES`
     8        uint64 n, number of sequences
     8        uint64 m, documents + 1
    4n        int32 tokens of each sequence
    8n        int64 where each sequence begins in PREFIX.bin, in bytes
    8m        int64 document index: document d is the sequences from entry d up to, not with, entry d + 1
     n        int8 modes, in multimodal stores only; not used here

A GPT store has one sequence per document, a BERT store one per sentence. Neither file has a checksum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.durable_files import Damaged

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = (6, 7)  # float64 and float32; older writers have them the other way round
BLOCK = 1 << 20  # entries that are handled at a time
assert HEADER.size == 34


class Index(NamedTuple):
    """A checked index; the arrays lie in the mapped file, without alignment."""

    dtype: np.dtype  # of the tokens
    sizes: np.ndarray  # (n,) int32 tokens per sequence
    pointers: np.ndarray  # (n,) int64 bytes
    documents: np.ndarray  # (m,) int64 sequences
    tokens: int  # of all sequences


class Header(NamedTuple):
    """What an index says of itself."""

    dtype: np.dtype  # of the tokens
    sequences: int
    entries: int  # of the document index
    ends: np.ndarray  # (4,) bytes at which sizes, pointers, document index and modes end


def read_header(path: Path) -> Header:
    """Reads and checks the first bytes of an .idx file and its length.

    Raises:
        Damaged: truncated, contradicts itself, or is something else.
        ValueError: it is sound, but its tokens are no integers.
    """
    with open(path, "rb") as file:
        raw, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    if (head := raw[: len(MAGIC)]) != MAGIC:
        raise Damaged(f"{path} begins with {head!r} and not with {MAGIC!r}: it is no index of a token store")
    if size < HEADER.size:
        raise Damaged(f"{path} has {size} bytes, less than its header of {HEADER.size}")
    _, version, code, sequences, entries = HEADER.unpack(raw)
    if version != VERSION:
        raise Damaged(f"{path} is of version {version}, and only version {VERSION} is known")
    if code in FLOATS:
        rule = f"its entries are floating-point numbers (type {code}), not tokens"
        raise ValueError(f"{path}: {rule}: write the store with integers")
    if code not in DTYPES:
        raise Damaged(f"{path}: type {code} of tokens is unknown; known are {', '.join(map(str, DTYPES))}")
    ends = HEADER.size + np.cumsum([4 * sequences, 8 * sequences, 8 * entries, sequences], dtype=object)
    if size not in ends[2:]:
        what = f"{sequences} sequences and {entries} document entries"
        promised = f"its header promises {ends[2]} (or {ends[3]} with modes): {what}"
        raise Damaged(f"{path} has {size} bytes where {promised}")
    return Header(np.dtype(DTYPES[code]), sequences, entries, ends)


def read_index(path: Path) -> Index:
    """Maps and checks an .idx file; reads all of it. Raises as `read_header`."""
    dtype, sequences, _, ends = read_header(path)
    raw = mapped(path)
    sizes, pointers = raw[HEADER.size : ends[0]].view("<i4"), raw[ends[0] : ends[1]].view("<i8")
    documents = raw[ends[1] : ends[2]].view("<i8")
    tokens = _check_sequences(path, sizes, pointers, dtype.itemsize)
    _check_documents(path, documents, sequences)
    return Index(dtype, sizes, pointers, documents, tokens)


def mapped(path: Path) -> np.ndarray:
    """(bytes,) uint8: a plain array over the map, since slices of `np.memmap` cost microseconds."""
    return np.asarray(np.memmap(path, np.uint8, "r")) if os.stat(path).st_size else np.empty(0, np.uint8)


def _check_sequences(path: Path, sizes: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Tokens of all sequences. They must lie one after the other, without gaps, as all writers put them."""
    tokens = 0
    for start, part in _blocks(sizes):
        if (wrong := np.flatnonzero(part < 0)).size:
            raise Damaged(f"{path}: sequence {start + wrong[0]} has {part[wrong[0]]} tokens")
        ends = tokens + np.cumsum(part, dtype=np.int64)
        expected = (ends - part) * itemsize
        found = pointers[start : start + len(part)]
        if (wrong := np.flatnonzero(found != expected)).size:
            first = wrong[0]
            rule = f"and the sizes of those before it say {expected[first]}"
            raise Damaged(f"{path}: sequence {start + first} begins at byte {found[first]}, {rule}")
        tokens = int(ends[-1])
    return tokens


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        ends = f"from {documents[0]} to {documents[-1]}" if len(documents) else "empty"
        rule = f"it must lead from 0 to the number of sequences, {sequences}"
        raise Damaged(f"{path}: the document index is {ends}: {rule}")
    last = 0
    for start, part in _blocks(documents):
        before = np.concatenate([[last], part[:-1]])
        if (wrong := np.flatnonzero(part < before)).size:
            first = wrong[0]
            found = f"{part[first]}, below the {before[first]} before it"
            raise Damaged(f"{path}: entry {start + first} of the document index is {found}")
        last = int(part[-1])


def _blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(start, aligned copy of up to BLOCK entries)."""
    for start in range(0, len(array), BLOCK):
        yield start, array[start : start + BLOCK].copy()
