"""The type and the compression of a file, by its first bytes and its suffix."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from backports import zstd  # in Python 3.14's standard library: compression.zstd

# Errors of reading a damaged or cut archive.
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)
BUFFER = 1 << 20
# the first block, or the end of an empty file
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
# as `zstd --long=31` writes
_LONG_WINDOWS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}

JSON_LINES = "JSON lines"
JSON_LIST = "one JSON list and not an object per line"
RAW = "a file of raw numbers, as nanoGPT's train.bin"
ARROW = "an Arrow file, as datasets saves it"
_CSV = "a table (CSV, TSV)"
_HTML = "an HTML page"
DUMP = "a Wikipedia dump"
_WEB = "a web archive (WARC, WET)"
_ZIP = "a zip archive (.docx, .epub, .npz and .pt are such)"
_MARKS = {
    b"PAR1": "a parquet file",
    b"PARE": "an encrypted parquet file",
    b"ARROW1\0\0": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    b"MMIDIDX": "the index of a token store",
    b"TNTIDX\0\0": "the index of fairseq's token store",
    b"PK\x03\x04": _ZIP,
    b"PK\x05\x06": _ZIP,
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\x04\x22\x4d\x18": "an LZ4 archive",
    b"\x02\x21\x4c\x18": "an LZ4 archive",
    b"LZIP\x01": "an lzip archive",
    b"\x5d\0\0": "an LZMA archive",
    b"\x89LZO": "an LZO archive",
    b"\x1f\x9d": "a .Z archive",
    b"\xff\x06\0\0sNaPpY": "a snappy archive",
    b"!<arch>\n": "an ar archive",
    b"SQLite format 3\0": "an SQLite database",
    b"\x89HDF\r\n": "an HDF5 file",
    b"Obj\x01": "an Avro file",
    b"\x93NUMPY": "a numpy array",
    **{b"\x80" + bytes([protocol]): "a pickle" for protocol in range(2, 6)},
    b"GGUF": "weights of a model (GGUF)",
    b"\x89PNG\r\n": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"\x7fELF": "a program",
    b"\xff\xfe\0\0": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office document",
    b"{\\rtf1": "an RTF document",
    b"%PDF-": "a PDF",
    b"%!PS-": "a PostScript file",
    b"WARC/": _WEB,
    b"filedesc://": _WEB,
}
_PATTERNS = {
    rb"(<\?xml[^>]*>\s*)?<mediawiki\b": DUMP,
    rb"(?is)((<!--.*?-->|<\?xml[^>]*>)\s*)*<(!doctype html|html)\b": _HTML,
    rb"<\?xml\b": "an XML file",
    rb'\[\s*[{"]': JSON_LIST,
    rb'\{(\s*"|\})': JSON_LINES,
    rb'(?i)(?=.*\b(text|content|sentence|label|title|id|url)\b)("?\w+"?[,;\t])+"?\w+"?\r?\n': _CSV,
}
_SUFFIXES = {".csv": _CSV, ".tsv": _CSV, ".html": _HTML, ".htm": _HTML, ".xhtml": _HTML}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_PLAIN = "plain text"
# Source by which a type is read; of the others none does.
SOURCES = {
    "a parquet file": "parquet",
    JSON_LINES: "jsonl",
    "the index of a token store": "store",
    _PLAIN: "text",
}
_EMPTY = "an empty file"
_NOT_UTF8 = "text that is not UTF-8"
_BY_NAME = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": "a parquet file",
}
_WAYS = {
    ARROW: "make parquet of it: python -c \"import datasets; datasets.Dataset.from_file('FILE.arrow')"
    ".to_parquet('FILE.parquet')\"",
    _CSV: "make parquet of it: python -c \"import pandas; pandas.read_csv('FILE', sep=None, engine='python')"
    ".to_parquet('FILE.parquet')\"",
    RAW: 'data/README.md shows under "Stores" how to make a store of them',
    DUMP: "extract its articles: pip install wikiextractor==3.1.0; "
    "python -m wikiextractor.WikiExtractor --json FILE -o DIR; and give DIR as JSON lines",
    _WEB: "take the text out of it first, as datatrove does, and give JSON lines",
    _EMPTY: "remove it, or name the others by a glob",
    JSON_LIST: "make lines of it: jq -c '.[]' FILE > FILE.jsonl",
    _NOT_UTF8: "make UTF-8 of it, if it is Latin-1: iconv -f LATIN1 -t UTF-8 FILE",
    "UTF-32": "make UTF-8 of it: iconv -f UTF-32 -t UTF-8 FILE",
    "UTF-16": "make UTF-8 of it: iconv -f UTF-16 -t UTF-8 FILE",
}


def looks_like(path: Path) -> str | None:
    """Guess a file's type; None where it shows none.

    Only unmistakable types: by the first bytes, decompressed, or else by the suffix.
    """
    try:
        return _shown_type(path, _head(path))
    except (*READ_ERRORS, ValueError):
        return None


def type_of(path: Path) -> str:
    """Tell a file's type. Text shows no type of its own. Raises ValueError: the file cannot be opened."""
    try:
        head = _head(path)
        shown = _shown_type(path, head)
        if shown:
            return shown
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return _NOT_UTF8
    except READ_ERRORS as error:
        return f"damaged or cut off ({error})"
    suffix = _without_compression(path).suffix.lower()
    if not head:
        return _EMPTY
    if b"\0" in head:
        return "a file with NUL bytes"
    if suffix in _BY_NAME:
        return f"not {_BY_NAME[suffix]}, as its name says"
    return _PLAIN


def _head(path: Path) -> bytes:
    with open_decompressed(path) as file:
        return file.read(4096)


def way_from(name: str) -> str:
    """Say how to make a readable file of one of this type."""
    usual = (
        "unpack it"
        if "archive" in name
        else "give JSON lines, parquet or plain text made of it"
    )
    return _WAYS.get(name, usual)


def _shown_type(path: Path, head: bytes) -> str | None:
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head[4:10] == b'\0\0\0\0{"':
        return "weights of a model (safetensors)"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for pattern, name in _PATTERNS.items():
        if re.match(pattern, text):
            return name
    suffix = _without_compression(path).suffix
    if suffix == ".bin" and b"\0" in head:
        return RAW
    return _SUFFIXES.get(suffix.lower()) if head else None


def _without_compression(path: Path) -> Path:
    if path.suffix.lower() in _COMPRESSED:
        return path.with_suffix("")
    return path


@contextmanager
def open_decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file and decompress all its parts; its first bytes tell the compression, not its name.

    Raises ValueError: the file cannot be opened.
    """
    with open_file(path) as file:
        head = file.read(10)
        file.seek(0)
        content: io.BufferedIOBase = file
        if head.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=file)
        elif head.startswith(b"BZh") and head[4:] in _BZIP2_BLOCKS:
            content = io.BufferedReader(_Streams(file, bz2.BZ2Decompressor))
        elif head.startswith(b"\xfd7zXZ\0"):
            content = io.BufferedReader(
                _Streams(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))
            )
        elif head.startswith(b"\x28\xb5\x2f\xfd") or (
            head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
        ):
            # a frame, or a skippable one
            content = zstd.ZstdFile(file, options=_LONG_WINDOWS)
        with content:
            yield content


class _Streams(io.RawIOBase):
    """Content of the bzip2 or xz streams of a file, one after another.

    Zeros may stand behind a stream by fours, as xz pads it. All else has to be a stream: Python's own readers
    take whatever they cannot read there for the end.
    """

    def __init__(self, file: io.BufferedReader, begin: Callable[[], Any]) -> None:
        """Read `file`; `begin` makes the decompressor of a stream."""
        self._file = file
        self._begin = begin
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError, LZMAError, EOFError: the file is damaged or cut off."""
        content = b""
        while not content:
            packed = b""
            if self._stream.eof:
                packed = self._behind(self._stream.unused_data)
                if not packed:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input:
                packed = self._file.read(BUFFER)
                if not packed:
                    raise EOFError("it ends within a stream")
            content = self._stream.decompress(packed, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _behind(self, packed: bytes) -> bytes:
        """Return what comes behind a stream and its padding, with the zeros that are too many for it."""
        zeros = 0
        while not (begun := packed.lstrip(b"\0")):
            zeros += len(packed)
            packed = self._file.read(BUFFER)
            if not packed:
                break
        zeros += len(packed) - len(begun)
        return bytes(zeros % 4) + begun


def open_file(path: Path) -> io.BufferedReader:
    """Open a file without decompression. Raises ValueError: it cannot be opened."""
    try:
        return io.BufferedReader(io.FileIO(path), BUFFER)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be opened ({error.strerror}): "
            "check the path and its permissions"
        ) from error
