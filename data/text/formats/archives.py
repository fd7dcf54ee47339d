"""Compressed files read as a stream: gzip, bzip2, xz, Zstandard, or files without compression."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backports import zstd  # in Python 3.14's standard library: compression.zstd

# What reading a damaged or cut archive raises.
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BUFFER = 1 << 20
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # the first block, or the end of an empty file
_LONG_WINDOWS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}  # as `zstd --long=31` writes


@contextmanager
def decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's content. Its first bytes tell the compression, not its name; all parts of it are read.

    Raises:
        ValueError: the file cannot be opened.
    """
    with opened(path) as file:
        head = file.read(10)
        file.seek(0)
        content: io.BufferedIOBase = file
        if head.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=file)
        elif head.startswith(b"BZh") and head[4:] in _BZIP2_BLOCKS:
            content = bz2.BZ2File(file)
        elif head.startswith(b"\xfd7zXZ\0"):
            content = lzma.LZMAFile(file)  # noqa: SIM115 - closed below
        elif head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
            content = zstd.ZstdFile(file, options=_LONG_WINDOWS)  # a frame, or a skippable one
        with content:
            yield content


def opened(path: Path) -> io.BufferedReader:
    """The file as it is. Raises ValueError: it cannot be opened."""
    try:
        return io.BufferedReader(io.FileIO(path), _BUFFER)
    except OSError as error:
        fix = "check the path and its permissions"
        raise ValueError(f"{path}: cannot be opened ({error.strerror}): {fix}") from error
