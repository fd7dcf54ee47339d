"""Files of finished chunks, and the counts of each step."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from pydantic import TypeAdapter

from data import durable_files
from data.durable_files import DamagedFile
from data.prepare.inputs import Cursor

BROKEN = "broken: "  # prefix of reasons of `read`; they count against --max_broken
# types of the columns of numbers but the tokens'
DTYPES = {
    "files": "i4",
    "numbers": "i8",
    "sizes": "i8",
    "digests": "u8",
    "marks": "u4",
    "shingles": "u4",
    "set_sizes": "i8",
    "sequences": "i4",
    "lengths": "i4",
}
_PER_DIRECTORY = 1000
_REJECTED = "rejected:"


@dataclass
class ChunkStep:
    """Counts of a step: bytes of UTF-8 text (read: of records), seconds of processor time."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    changed: int = 0  # documents that the step altered
    seconds: float = 0.0
    # reason: [documents, bytes]
    dropped: dict[str, list[int]] = field(default_factory=dict)

    def enter(self, documents: int, size: int) -> None:
        self.documents_in += documents
        self.bytes_in += size

    def leave(self, documents: int, size: int) -> None:
        self.documents_out += documents
        self.bytes_out += size

    def drop(self, reason: str, size: int, documents: int = 1) -> None:
        counts = self.dropped.setdefault(reason, [0, 0])
        counts[0] += documents
        counts[1] += size

    def add(self, other: ChunkStep) -> None:
        self.enter(other.documents_in, other.bytes_in)
        self.leave(other.documents_out, other.bytes_out)
        self.changed += other.changed
        self.seconds += other.seconds
        for reason, (documents, size) in other.dropped.items():
            self.drop(reason, size, documents)


class Tally(dict[str, ChunkStep]):
    """Steps by name, in the order in which they ran."""

    def step(self, name: str) -> ChunkStep:
        return self.setdefault(name, ChunkStep())

    def add(self, other: Mapping[str, ChunkStep]) -> None:
        for name, step in other.items():
            self.step(name).add(step)

    def json(self) -> dict[str, Any]:
        return {name: asdict(step) for name, step in self.items()}

    @property
    def records(self) -> int:
        return self.step("read").documents_in


class DamagedChunk(DamagedFile):
    """A damaged file of a chunk."""

    def __init__(self, path: Path, said: str) -> None:
        super().__init__(said)
        self.path = path


@dataclass(frozen=True)
class FinishedChunk:
    """A chunk after all steps on single documents: its d remaining documents, in input order."""

    end: Cursor
    tally: Tally
    rejected: dict[str, bytes]  # by step ("broken" for records): lines of JSON
    files: np.ndarray  # (d,) int32: number of the input file
    numbers: np.ndarray  # (d,) int64: record in it
    sizes: np.ndarray  # (d,) int64: bytes of text
    digests: np.ndarray  # (d,) uint64 of the text
    # (d, permutations) uint32; (0,): no near-duplicates are looked for
    marks: np.ndarray
    # (shingles,) uint32: the documents' sets, one after the other
    shingles: np.ndarray
    set_sizes: np.ndarray  # (d,) int64; or (0,)
    sequences: np.ndarray  # (d,) int32: sequences of each document
    lengths: np.ndarray  # (sequences,) int32: tokens of each sequence
    tokens: np.ndarray  # (tokens,) of the store's type
    # one line of JSON per document; b"" where they are not wanted
    articles: bytes
    sentences: bytes

    def __len__(self) -> int:
        return len(self.numbers)


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{number // _PER_DIRECTORY:05d}" / f"{number:08d}.chunk"


@dataclass(frozen=True)
class ChunkHead:
    """The head of a chunk's file: its place, and the digest of the manifest it was made by."""

    number: int
    origin: str
    end: Cursor
    tally: dict[str, ChunkStep]


_HEAD = TypeAdapter(ChunkHead)


def commit(directory: Path, number: int, origin: str, finished: FinishedChunk) -> None:
    """Write the file of a chunk by an atomic rename; `origin`: as of `ChunkHead`."""
    fields = vars(finished) | {
        _REJECTED + step: lines for step, lines in finished.rejected.items()
    }
    del fields["rejected"]
    head = ChunkHead(number, origin, fields.pop("end"), fields.pop("tally"))
    fields["head"] = _HEAD.dump_json(head)
    path = path_of(directory, number)
    path.parent.mkdir(exist_ok=True)
    with durable_files.replacing(path) as file:
        arrays = {
            k: np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v
            for k, v in fields.items()
        }
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_arrays(
    directory: Path, number: int, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Read some arrays of a chunk's file, or all.

    Raises:
        OSError: there is no such file.
        DamagedChunk: it is not whole, or not this chunk.
    """
    path = path_of(directory, number)
    try:
        with np.load(path) as file:  # checksums are compared as arrays are read
            held = _HEAD.validate_json(file["head"].tobytes()).number
            if held != number:
                raise ValueError(f"it holds chunk {held}")
            return {name: file[name] for name in names or file.files}
    except (
        BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        KeyError,
        TypeError,
        NotImplementedError,
    ) as error:
        raise DamagedChunk(path, f"{path} is damaged ({error})") from error


def read_head(directory: Path, number: int, origin: str) -> ChunkHead:
    """Read the head of a chunk; raises as `read_arrays`, also for one of another preparation."""
    head = _HEAD.validate_json(
        read_arrays(directory, number, ["head"])["head"].tobytes()
    )
    if head.origin != origin:
        path = path_of(directory, number)
        raise DamagedChunk(path, f"{path} is of another preparation, or of other input")
    return head


def read(directory: Path, number: int) -> FinishedChunk:
    """Read the whole chunk; raises as `read_arrays`."""
    fields = read_arrays(directory, number)
    head = _HEAD.validate_json(fields.pop("head").tobytes())
    fields |= {name: fields[name].tobytes() for name in ("articles", "sentences")}
    steps = [name for name in fields if name.startswith(_REJECTED)]
    rejected = {
        name.removeprefix(_REJECTED): fields.pop(name).tobytes() for name in steps
    }
    return FinishedChunk(head.end, Tally(head.tally), rejected, **fields)


def json_line(**fields: object) -> bytes:
    """Write an object as a line of JSON."""
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8", "replace")
