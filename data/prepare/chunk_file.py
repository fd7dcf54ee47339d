"""A chunk after all steps that look at one document: one file, which is there whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from data import durable_files
from data.durable_files import Damaged
from data.prepare.batch import Documents
from data.prepare.inputs import Cursor
from data.prepare.tally import Tally

_PER_DIRECTORY = 1000


@dataclass(frozen=True)
class Finished:
    """Documents are those that passed every step so far, in the order of the input."""

    end: Cursor
    tally: Tally
    rejected: dict[str, bytes]  # by step ("broken" for records): lines of JSON
    files: np.ndarray  # (d,) int32: number of the input file
    numbers: np.ndarray  # (d,) int64: record in it
    sizes: np.ndarray  # (d,) int64: bytes of text
    digests: np.ndarray  # (d,) uint64 of the text
    marks: np.ndarray  # (d, permutations) uint32; (d, 0): no near-duplicates are looked for
    sequences: np.ndarray  # (d,) int32: sequences of each document
    lengths: np.ndarray  # (sequences,) int32: tokens of each sequence
    tokens: np.ndarray  # (tokens,) of the store's type
    articles: bytes = b""  # one line of JSON per document, where they are written
    sentences: bytes = b""

    def __len__(self) -> int:
        return len(self.numbers)


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{number // _PER_DIRECTORY:05d}" / f"{number:08d}.chunk"


def token_arrays(documents: Documents, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The last three arrays of `Finished`."""
    flat = [sequence for sequences in documents.tokens for sequence in sequences]
    return {
        "sequences": np.array([len(sequences) for sequences in documents.tokens], dtype=np.int32),
        "lengths": np.array([len(sequence) for sequence in flat], dtype=np.int32),
        "tokens": np.concatenate(flat).astype(dtype) if flat else np.zeros(0, dtype=dtype),
    }


def commit(directory: Path, number: int, finished: Finished) -> None:
    """Writes the file of a chunk by an atomic rename."""
    fields = {f.name: getattr(finished, f.name) for f in dataclasses.fields(finished)}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    blobs = {f"rejected:{step}": lines for step, lines in finished.rejected.items()}
    blobs |= {"articles": finished.articles, "sentences": finished.sentences}
    head = {"end": dataclasses.asdict(finished.end), "tally": finished.tally.json()}
    blobs["head"] = json.dumps(head).encode()
    arrays |= {name: np.frombuffer(blob, dtype=np.uint8) for name, blob in blobs.items()}
    path = path_of(directory, number)
    path.parent.mkdir(exist_ok=True)
    with durable_files.replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_head(directory: Path, number: int) -> tuple[Cursor, Tally]:
    """Where the chunk ended and what it counted.

    Raises:
        OSError: there is no such file.
        Damaged: it is not a chunk.
    """
    with _opened(directory, number) as file:
        return _head(file)


def read(directory: Path, number: int) -> Finished:
    """The whole chunk; raises as `read_head`."""
    with _opened(directory, number) as file:
        end, tally = _head(file)
        arrays = {name: file[name] for name in file.files if name != "head"}
    rejected = {
        name.partition(":")[2]: arrays.pop(name).tobytes()
        for name in list(arrays)
        if name.startswith("rejected:")
    }
    blobs = {name: arrays.pop(name).tobytes() for name in ("articles", "sentences")}
    return Finished(end=end, tally=tally, rejected=rejected, **arrays, **blobs)


def read_arrays(directory: Path, number: int, names: Sequence[str]) -> list[np.ndarray]:
    """Some arrays of the chunk, without reading the others; raises as `read_head`."""
    with _opened(directory, number) as file:
        return [file[name] for name in names]


def _opened(directory: Path, number: int) -> Any:
    path = path_of(directory, number)
    try:
        return np.load(path)
    except (BadZipFile, ValueError, EOFError) as error:
        raise Damaged(f"{path} is not a chunk of prepared documents ({error})") from error


def _head(file: Any) -> tuple[Cursor, Tally]:
    head = json.loads(file["head"].tobytes())
    return Cursor(**head["end"]), Tally.from_json(head["tally"])
