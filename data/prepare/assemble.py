"""From committed chunks to the finished directory: the store, the articles, what was dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.prepare import chunk_file
from data.prepare.chunk_file import Finished
from data.prepare.duplicates import Duplicates, find_duplicates
from data.prepare.minhash import Bands
from data.prepare.tally import Tally
from data.stores.indexed import StoreWriter

STORE = "store"  # prefix of the store's two files
ARTICLES, SENTENCES, REJECTED = "articles.jsonl", "sentences.jsonl", "rejected"
EXACT, NEAR = "exact copy of an earlier document", "near-duplicate of an earlier document"


@dataclass(frozen=True)
class Index:
    """Facts about all n documents of all chunks, in order; arrays are mapped files."""

    starts: list[int]  # per chunk, its first document; and n
    files: np.ndarray  # (n,) int32
    numbers: np.ndarray  # (n,) int64
    digests: np.ndarray  # (n,) uint64
    marks: np.ndarray  # (n, permutations) uint32


@dataclass(frozen=True)
class StoreFacts:
    documents: int
    sequences: int
    tokens: int
    text_bytes: int
    crc32: dict[str, str]  # of .idx and .bin


def gather(chunks: Path, count: int, documents: int, permutations: int, directory: Path) -> Index:
    """Copies what deduplication needs out of the chunks into mapped files of `directory`."""
    shapes = {"files": ((documents,), "i4"), "numbers": ((documents,), "i8"), "digests": ((documents,), "u8"),
              "marks": ((documents, permutations), "u4")}  # fmt: skip
    arrays = {
        name: _mapped(directory / f"{name}.array", shape, dtype) for name, (shape, dtype) in shapes.items()
    }
    starts = [0]
    for number in range(count):
        columns = chunk_file.read_arrays(chunks, number, list(arrays))
        end = starts[-1] + len(columns[0])
        for array, column in zip(arrays.values(), columns, strict=True):
            array[starts[-1] : end] = column
        starts.append(end)
    assert starts[-1] == documents, (starts[-1], documents)
    return Index(starts, **arrays)


def deduplicate(index: Index, bands: Bands, threshold: float, step: Callable[[], None]) -> Duplicates:
    return find_duplicates(index.digests, index.marks, bands, threshold, step)


def write(
    chunks: Path,
    index: Index,
    duplicates: Duplicates | None,
    names: list[str],
    vocab_size: int,
    out: Path,
    tally: Tally,
    step: Callable[[], None] = lambda: None,
) -> StoreFacts:
    """Writes everything but the report into `out`, and counts the last two steps.

    Args:
        names: the input files.
        step: called after each chunk.
    """
    text_bytes = 0
    with ExitStack() as stack:
        writer = stack.enter_context(StoreWriter(out / STORE, vocab_size))
        files = stack.enter_context(_outputs(out))
        for number, (start, end) in enumerate(zip(index.starts, index.starts[1:], strict=False)):
            chunk = chunk_file.read(chunks, number)
            keep = np.ones(len(chunk), dtype=bool) if duplicates is None else duplicates.of[start:end] < 0
            _add(writer, chunk, keep)
            text_bytes += int(chunk.sizes[keep].sum())
            for name, lines in ((ARTICLES, chunk.articles), (SENTENCES, chunk.sentences)):
                if lines:
                    kept = (
                        lines
                        if keep.all()
                        else b"".join(line for line, k in zip(lines.splitlines(True), keep, strict=True) if k)
                    )
                    files(name).write(kept)
            for rejected, lines in chunk.rejected.items():
                files(f"{REJECTED}/{rejected}.jsonl").write(lines)
            if duplicates is not None:
                _count_duplicates(tally, chunk, duplicates, slice(start, end))
                for line in _duplicate_lines(chunk, duplicates, slice(start, end), index, names):
                    files(f"{REJECTED}/deduplicate.jsonl").write(line)
            written = tally.step("write")
            for side in ("in", "out"):
                setattr(written, f"documents_{side}", getattr(written, f"documents_{side}") + int(keep.sum()))
                setattr(
                    written, f"bytes_{side}", getattr(written, f"bytes_{side}") + int(chunk.sizes[keep].sum())
                )
            step()
    assert writer.checksum is not None
    crc = {"idx": f"{writer.checksum.idx:08x}", "bin": f"{writer.checksum.bin:08x}"}
    return StoreFacts(writer.documents, writer.sequences, writer.tokens, text_bytes, crc)


def _add(writer: StoreWriter, chunk: Finished, keep: np.ndarray) -> None:
    sequences = np.repeat(keep, chunk.sequences)
    tokens = chunk.tokens if keep.all() else chunk.tokens[np.repeat(sequences, chunk.lengths)]
    writer.add_documents(tokens, chunk.lengths[sequences], chunk.sequences[keep])


def _count_duplicates(tally: Tally, chunk: Finished, duplicates: Duplicates, part: slice) -> None:
    step = tally.step("deduplicate")
    of, exact = duplicates.of[part], duplicates.exact[part]
    step.documents_in += len(chunk)
    step.bytes_in += int(chunk.sizes.sum())
    step.documents_out += int((of < 0).sum())
    step.bytes_out += int(chunk.sizes[of < 0].sum())
    for k in np.flatnonzero(of >= 0).tolist():
        step.drop(EXACT if exact[k] else NEAR, int(chunk.sizes[k]))


def _duplicate_lines(
    chunk: Finished, duplicates: Duplicates, part: slice, index: Index, names: list[str]
) -> Iterator[bytes]:
    of, agreement, exact = duplicates.of[part], duplicates.agreement[part], duplicates.exact[part]
    for k in np.flatnonzero(of >= 0).tolist():
        earlier = int(of[k])
        fields = {
            "file": names[chunk.files[k]],
            "number": int(chunk.numbers[k]),
            "reason": EXACT if exact[k] else NEAR,
            "of": {"file": names[index.files[earlier]], "number": int(index.numbers[earlier])},
            "agreement": round(float(agreement[k]), 4),
        }
        yield (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8", "replace")


@contextmanager
def _outputs(out: Path) -> Iterator[Callable[[str], BinaryIO]]:
    """Files by name, opened at their first use and flushed to disk at the end."""
    opened: dict[str, BinaryIO] = {}

    def get(name: str) -> BinaryIO:
        if name not in opened:
            (out / name).parent.mkdir(exist_ok=True)
            opened[name] = open(out / name, "wb")  # noqa: SIM115 - closed with the others below
        return opened[name]

    try:
        yield get
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in opened.values():
            file.close()


def _mapped(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    path.parent.mkdir(exist_ok=True)
    if 0 in shape:  # an empty file cannot be mapped
        return np.zeros(shape, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="w+", shape=shape)
