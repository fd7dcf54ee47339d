"""Token files: the tokens of many documents in one memory-mapped file, with their counts and a checksum.

    64 bytes   header: magic, version, bytes per token, tokens, documents, bytes of text, vocabulary size, CRC-32
    tokens     uint16 (vocabularies up to 65536) or uint32, little endian; each document ends with end-of-document
    counts     uint64 per vocabulary entry: how often it occurs in `tokens`

The checksum covers the header before it, the tokens and the counts.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.cache import Damaged

FORMAT_VERSION = 1
_MAGIC = b"MEGATOKS"
_HEADER = struct.Struct("<8sIIQQQQ")
_CHECKSUM = struct.Struct("<I12x")
_PAYLOAD_START = 64
_CHUNK = 1 << 24
assert _HEADER.size + _CHECKSUM.size == _PAYLOAD_START


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest unsigned type that holds every token of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenFile:
    """An open token file; `tokens` is mapped, not read."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32
    counts: np.ndarray  # (vocab_size,) uint64
    documents: int
    text_bytes: int
    checksum: int


class TokenWriter:
    """Appends documents to a file opened for writing; `finish` completes it."""

    def __init__(self, file: BinaryIO, vocab_size: int):
        self._file = file
        self._dtype = token_dtype(vocab_size)
        self._counts = np.zeros(vocab_size, dtype="<u8")
        self._checksum = 0
        self.tokens = self.documents = self.text_bytes = 0
        file.write(bytes(_PAYLOAD_START))

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Appends one document's tokens, the end-of-document token included."""
        assert ids.size and ids.max() < self._counts.size, "token outside the vocabulary"
        self._counts += np.bincount(ids, minlength=self._counts.size).astype("<u8")
        self._payload(ids.astype(self._dtype).tobytes())
        self.tokens += ids.size
        self.documents += 1
        self.text_bytes += text_bytes

    def finish(self) -> None:
        """Writes the counts, then the header."""
        self._payload(self._counts.tobytes())
        header = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self._dtype.itemsize,
            self.tokens,
            self.documents,
            self.text_bytes,
            self._counts.size,
        )
        self._file.seek(0)
        self._file.write(header + _CHECKSUM.pack(zlib.crc32(header, self._checksum)))

    def _payload(self, part: bytes) -> None:
        self._checksum = zlib.crc32(part, self._checksum)
        self._file.write(part)


def open_tokens(path: Path) -> TokenFile:
    """Opens and checks a token file.

    Raises:
        FileNotFoundError: no such file.
        Damaged: wrong magic, version, length or checksum.
    """
    size = os.stat(path).st_size
    if size < _PAYLOAD_START:
        raise Damaged(f"{path} has {size} bytes, less than its header")
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        (checksum,) = _CHECKSUM.unpack(file.read(_CHECKSUM.size))
    magic, version, itemsize, tokens, documents, text_bytes, vocab_size = _HEADER.unpack(header)
    if magic != _MAGIC or version != FORMAT_VERSION or itemsize not in (2, 4):
        raise Damaged(f"{path} is not a token file of version {FORMAT_VERSION}")
    expected = _PAYLOAD_START + tokens * itemsize + vocab_size * 8
    if size != expected:
        raise Damaged(f"{path} has {size} bytes where its header promises {expected}")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    payload = raw[_PAYLOAD_START:]
    found = 0
    for start in range(0, payload.size, _CHUNK):
        found = zlib.crc32(payload[start : start + _CHUNK].data, found)
    if zlib.crc32(header, found) != checksum:
        raise Damaged(f"{path} does not match its checksum")
    split = tokens * itemsize
    return TokenFile(payload[:split].view(f"<u{itemsize}"), payload[split:].view("<u8"), documents, text_bytes, checksum)
