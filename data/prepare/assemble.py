"""Assembly of the result from committed chunks: the store, the articles, the dropped documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.prepare import chunk_file
from data.prepare.chunk_file import DTYPES, Tally, json_line
from data.prepare.duplicates import Duplicates, ShingleSets
from data.tokens.store import StoreWriter

STORE = "store"  # prefix of the store's two files
ARTICLES = "articles.jsonl"
SENTENCES = "sentences.jsonl"
REJECTED = "rejected"
EXACT = "exact copy of an earlier document"
NEAR = "near-duplicate of an earlier document"
_COLUMNS = ("files", "numbers", "digests", "marks", "shingles", "set_sizes")


@dataclass(frozen=True)
class Index:
    """Facts about all n documents of all chunks, in order; arrays are mapped files."""

    chunks: Path  # the directory with their files
    names: list[str]  # of the input files
    starts: list[int]  # per chunk, its first document; and n
    files: np.ndarray  # (n,) int32
    numbers: np.ndarray  # (n,) int64
    digests: np.ndarray  # (n,) uint64
    marks: np.ndarray  # (n, permutations) uint32
    sets: ShingleSets
    bytes: int  # of all these


def gather(
    chunks: Path, names: list[str], count: int, permutations: int, directory: Path
) -> Index:
    """Copy the columns for deduplication from the chunks into mapped files of `directory`.

    Args:
        names: the input files.
        count: number of chunks.
    """
    directory.mkdir(exist_ok=True)
    paths = {name: directory / f"{name}.array" for name in _COLUMNS}
    for path in paths.values():
        path.write_bytes(b"")
    starts = [0]
    for number in range(count):
        columns = chunk_file.read_arrays(chunks, number, [*_COLUMNS])
        starts.append(starts[-1] + len(columns["files"]))
        for name, path in paths.items():
            with open(path, "ab") as file:
                columns[name].tofile(file)
    arrays = {}
    for name, path in paths.items():
        dtype = DTYPES[name]
        empty = not path.stat().st_size  # it cannot be mapped
        arrays[name] = np.zeros(0, dtype) if empty else np.memmap(path, dtype, "r")
    size = sum(array.nbytes for array in arrays.values())
    sets = ShingleSets(arrays.pop("shingles"), np.cumsum(arrays.pop("set_sizes")))
    marks = arrays.pop("marks").reshape(starts[-1], permutations)
    return Index(chunks, names, starts, marks=marks, sets=sets, bytes=size, **arrays)


def write(
    index: Index,
    duplicates: Duplicates | None,
    vocab_size: int,
    unknown: int | None,
    out: Path,
    tally: Tally,
    step: Callable[[float], None],
) -> dict[str, Any]:
    """Write everything but the report into `out`, and count the last two steps.

    Args:
        unknown: number of the token that stands for what a vocabulary lacks.
        step: called after each chunk with their number so far.

    Returns:
        size and checksums of the store, and how many of its tokens are `unknown`.
    """

    def append(name: str, lines: bytes) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        with open(out / name, "ab") as file:
            file.write(lines)

    lacking = 0
    with StoreWriter(out / STORE, vocab_size) as writer:
        for number, (start, end) in enumerate(pairwise(index.starts)):
            chunk = chunk_file.read(index.chunks, number)
            keep = (
                duplicates.of[start:end] < 0
                if duplicates
                else np.ones(len(chunk), bool)
            )
            left = int(keep.sum()), int(chunk.sizes[keep].sum())
            sequences = np.repeat(keep, chunk.sequences)
            tokens = chunk.tokens[np.repeat(sequences, chunk.lengths)]
            writer.add_documents(
                tokens, chunk.lengths[sequences], chunk.sequences[keep]
            )
            lacking += int(np.count_nonzero(tokens == unknown))
            for name, lines in (
                (ARTICLES, chunk.articles),
                (SENTENCES, chunk.sentences),
            ):
                if lines:
                    append(name, b"".join(compress(lines.splitlines(True), keep)))
            for rejected, lines in chunk.rejected.items():
                append(f"{REJECTED}/{rejected}.jsonl", lines)
            if duplicates:
                deduplicated = tally.step("deduplicate")
                deduplicated.enter(len(chunk), int(chunk.sizes.sum()))
                deduplicated.leave(*left)
                dropped = []
                for k in np.flatnonzero(~keep).tolist():
                    reason = EXACT if duplicates.exact[start + k] else NEAR
                    deduplicated.drop(reason, int(chunk.sizes[k]))
                    dropped.append(
                        json_line(
                            **_place(index, start + k),
                            reason=reason,
                            of=_place(index, int(duplicates.of[start + k])),
                            jaccard=round(float(duplicates.jaccard[start + k]), 4),
                        )
                    )
                if dropped:
                    append(f"{REJECTED}/deduplicate.jsonl", b"".join(dropped))
            written = tally.step("write")
            written.enter(*left)
            written.leave(*left)
            step(number + 1)
    assert writer.checksum
    counts = {
        name: getattr(writer, name) for name in ("documents", "sequences", "tokens")
    }
    crc32 = {"idx": f"{writer.checksum.idx:08x}", "bin": f"{writer.checksum.bin:08x}"}
    return {
        **counts,
        "unknown_tokens": lacking,
        "text_bytes": tally.step("write").bytes_out,
        "crc32": crc32,
    }


def _place(index: Index, document: int) -> dict[str, object]:
    return {
        "file": index.names[index.files[document]],
        "number": int(index.numbers[document]),
    }
