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
_BZIP2_BLOCKS = (
    b"\x31\x41\x59\x26\x53\x59",
    b"\x17\x72\x45\x38\x50\x90",
)  # the first block, or the end of an empty file
_LONG_WINDOWS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}  # as `zstd --long=31` writes


@contextmanager
def decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's content.

    Its first bytes tell the compression, not its name; archives of several parts are read whole.

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
    """The file as it is.

    Raises:
        ValueError: it cannot be opened.
    """
    try:
        return io.BufferedReader(io.FileIO(path), _BUFFER)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be opened ({error.strerror}): check the path and its permissions"
        ) from error
