"""Files as they are without compression, read as a stream: gzip, bzip2, xz, Zstandard or none."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

READ_ERRORS = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
)  # what reading a cut off or damaged archive raises
_BUFFER = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@contextmanager
def decompressed(path: Path) -> Iterator[BinaryIO]:
    """The file's content, whatever it is compressed with: its first bytes tell, not its name.

    Raises:
        ValueError: the file cannot be opened.
    """
    with opened(path) as file:
        head = file.read(10)
        file.seek(0)
        if head.startswith(b"\x1f\x8b"):
            content: Any = gzip.GzipFile(fileobj=file)
        elif head.startswith(b"BZh") and head[4:] in (
            b"\x31\x41\x59\x26\x53\x59",
            b"\x17\x72\x45\x38\x50\x90",
        ):
            content = bz2.open(file)  # noqa: SIM115  closed below
        elif head.startswith(b"\xfd7zXZ\0"):
            content = lzma.open(file)  # noqa: SIM115
        elif head.startswith(_ZSTD_MAGIC) or (
            head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
        ):  # frame; skippable frame
            content = io.BufferedReader(_ZstdReader(file), _BUFFER)
        else:
            content = file
        with content:
            yield content


def opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=_BUFFER)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be opened ({error.strerror}): check the path and its permissions"
        ) from error


class _ZstdReader(io.RawIOBase):
    """Zstandard frames, one after the other. The library's own reader takes a cut-off frame for a whole one."""

    _FEED = 4 << 10  # compressed bytes at once: 4 of them can stand for 128 KiB

    def __init__(self, file: BinaryIO):
        import zstandard

        self._file, self._error = file, zstandard.ZstdError
        self._library = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` writes
        self._frame: Any = None
        self._output = memoryview(b"")
        self._damage: OSError | None = None  # met behind the output that is still to be read

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._output:
            if self._damage:
                raise self._damage
            feed = self._file.read(self._FEED)
            if not feed:
                if self._frame:
                    raise EOFError("the last zstandard frame is cut off")
                return 0
            self._output = memoryview(self._decompress(feed))
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress(self, feed: bytes) -> bytes:
        output = []
        while feed:
            self._frame = self._frame or self._library.decompressobj()
            try:
                output.append(self._frame.decompress(feed))
            except self._error as error:
                self._damage = OSError(f"zstandard: {error}")
                break
            feed = b""
            if self._frame.eof:
                feed, self._frame = self._frame.unused_data, None
        return b"".join(output)
