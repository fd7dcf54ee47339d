"""Reader and writer of token stores: Megatron-LM's indexed datasets, also of Megatron-DeepSpeed and gpt-neox.

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
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.durable_files import DamagedFile, Say, now_and_then, quiet, replacing
from recipes.problems import amount

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
FLOATS = (6, 7)  # float64 and float32; older writers have them the other way round
# Megatron-LM's limit: smaller ones are stored as uint16, others as int32
SIXTEEN_BIT_VOCABULARY = 65500
BLOCK = 1 << 20  # entries to handle at a time
_READ = 1 << 24  # bytes


class Header(NamedTuple):
    """The header of an index."""

    dtype: np.dtype  # of the tokens
    sequences: int
    # (4,) bytes at which sizes, pointers, document index and modes end
    ends: np.ndarray


def read_header(path: Path) -> Header:
    """Read and check the header of an .idx file and the file's length.

    Raises:
        Damaged: truncated, contradicts itself, or is something else.
        ValueError: it is sound, but its tokens are no integers.
    """
    with open(path, "rb") as file:
        raw = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    head = raw[: len(MAGIC)]
    if head != MAGIC:
        raise DamagedFile(
            f"{path} begins with {head!r} and not with {MAGIC!r}: it is no index of a token store"
        )
    if size < HEADER.size:
        raise DamagedFile(
            f"{path} has {size} bytes, less than its header of {HEADER.size}"
        )
    _, version, code, sequences, entries = HEADER.unpack(raw)
    if version != VERSION:
        raise DamagedFile(
            f"{path} is of version {version}, and only version {VERSION} is known"
        )
    if code in FLOATS:
        rule = f"its entries are floating-point numbers (type {code}), not tokens"
        raise ValueError(f"{path}: {rule}: write the store with integers")
    if code not in DTYPES:
        raise DamagedFile(
            f"{path}: type {code} of tokens is unknown; known are {', '.join(map(str, DTYPES))}"
        )
    ends = HEADER.size + np.cumsum(
        [4 * sequences, 8 * sequences, 8 * entries, sequences], dtype=object
    )
    if size not in ends[2:]:
        what = f"{sequences} sequences and {entries} document entries"
        raise DamagedFile(
            f"{path} has {size} bytes where "
            f"its header promises {ends[2]} (or {ends[3]} with modes): {what}"
        )
    return Header(np.dtype(DTYPES[code]), sequences, ends)


def _mapped(path: Path) -> np.ndarray:
    """Map a file as a plain array (bytes,) uint8: slices of `np.memmap` itself cost microseconds."""
    return (
        np.asarray(np.memmap(path, np.uint8, "r"))
        if os.stat(path).st_size
        else np.empty(0, np.uint8)
    )


def _check_sequences(
    path: Path, sizes: np.ndarray, pointers: np.ndarray, itemsize: int
) -> int:
    """Count the tokens of all sequences; check that these follow one another without gaps."""
    tokens = 0
    for start, part in _blocks(sizes):
        wrong = np.flatnonzero(part < 0)
        if wrong.size:
            raise DamagedFile(
                f"{path}: sequence {start + wrong[0]} has {part[wrong[0]]} tokens"
            )
        ends = tokens + np.cumsum(part, dtype=np.int64)
        expected = (ends - part) * itemsize
        begins = pointers[start : start + len(part)]
        wrong = np.flatnonzero(begins != expected)
        if wrong.size:
            first = wrong[0]
            raise DamagedFile(
                f"{path}: sequence {start + first} begins at byte {begins[first]}, "
                f"and the sizes of those before it say {expected[first]}"
            )
        tokens = int(ends[-1])
    return tokens


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        ends = f"from {documents[0]} to {documents[-1]}" if len(documents) else "empty"
        raise DamagedFile(
            f"{path}: the document index is {ends}: "
            f"it must lead from 0 to the number of sequences, {sequences}"
        )
    last = 0
    for start, part in _blocks(documents):
        before = np.concatenate([[last], part[:-1]])
        wrong = np.flatnonzero(part < before)
        if wrong.size:
            first = wrong[0]
            raise DamagedFile(
                f"{path}: entry {start + first} of the document index is "
                f"{part[first]}, below the {before[first]} before it"
            )
        last = int(part[-1])


def _blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start, aligned copy of up to BLOCK entries)."""
    for start in range(0, len(array), BLOCK):
        yield start, array[start : start + BLOCK].copy()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of stored tokens, by Megatron-LM's rule, so that its tools choose the same."""
    name = "<u2" if vocab_size < SIXTEEN_BIT_VOCABULARY else "<i4"
    return np.dtype(name)


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class Checksum(NamedTuple):
    """CRC-32 of the two files, and the largest token; a negative one counts as unsigned."""

    idx: int
    bin: int
    largest: int


@dataclass(frozen=True, eq=False)
class Store:
    """An open store, made by `open_store`: both files are mapped, not read.

    The arrays over sequences lie in the file without alignment. Copy them before a search, or numpy copies
    them at each call.
    """

    prefix: Path
    dtype: np.dtype
    tokens_array: np.ndarray  # (tokens,) of all sequences, in order
    sizes: np.ndarray  # (n,) int32 tokens per sequence
    pointers: np.ndarray  # (n,) int64 bytes
    document_index: np.ndarray  # (documents + 1,) int64 sequences

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    @property
    def documents(self) -> int:
        return len(self.document_index) - 1

    @property
    def tokens(self) -> int:
        return len(self.tokens_array)

    def document(self, document: int) -> np.ndarray:
        """Return a view of the tokens (tokens,) of a document."""
        start, end = self.sequence_starts(
            self.document_index[document : document + 2]
        ).tolist()
        return self.tokens_array[start:end]

    def sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return the int64 places in `tokens_array` at which `sequences` begin; `len(store)`: the end."""
        starts = np.full(sequences.shape, self.tokens, np.int64)
        inside = sequences < len(self)
        starts[inside] = self.pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def checksum(self, say: Say = quiet) -> Checksum:
        """Read both files; `say` the progress every few seconds."""
        idx, _ = _read_through(idx_path(self.prefix), say)
        return Checksum(idx, *_read_through(bin_path(self.prefix), say, self.dtype))

    def outside(self, vocab_size: int) -> int:
        """Return the place of the first token outside a vocabulary. Raises ValueError: there is none."""
        for start, part in _blocks(self.tokens_array):
            beyond = part >= vocab_size
            wrong = np.flatnonzero(beyond | (part < 0))
            if wrong.size:
                return start + int(wrong[0])
        raise ValueError("every token is in the vocabulary")


def open_store(prefix: Path) -> Store:
    """Open a store and check that the two files are whole and belong together.

    It reads all of .idx, and only the length of .bin.

    Raises:
        FileNotFoundError: neither file is there.
        Damaged: one half is missing, truncated, contradicts itself or the other half, or is something else.
        ValueError: the store is sound, but its tokens are no integers.
    """
    missing = [
        path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()
    ]
    if len(missing) == 2:
        raise FileNotFoundError(
            f"{prefix}: there is no {missing[0].name} and no {missing[1].name}"
        )
    if missing:
        raise DamagedFile(
            f"{missing[0]} is missing: a token store is a .bin and an .idx of one name"
        )
    path = idx_path(prefix)
    dtype, sequences, ends = read_header(path)
    raw = _mapped(path)
    sizes = raw[HEADER.size : ends[0]].view("<i4")
    pointers = raw[ends[0] : ends[1]].view("<i8")
    documents = raw[ends[1] : ends[2]].view("<i8")
    tokens = _check_sequences(path, sizes, pointers, dtype.itemsize)
    _check_documents(path, documents, sequences)
    size = os.stat(bin_path(prefix)).st_size
    promised = tokens * dtype.itemsize
    if size != promised:
        why = f"{path.name} promises {promised} ({tokens} tokens of {dtype.itemsize})"
        raise DamagedFile(
            f"{bin_path(prefix)} has {size} bytes where {why}: "
            "one of the two is truncated or belongs to another store"
        )
    return Store(
        prefix, dtype, _mapped(bin_path(prefix)).view(dtype), sizes, pointers, documents
    )


class StoreWriter:
    """Writer of a store, document by document, in constant memory.

    Both files appear when the store is complete, .bin first. `finish` or the good end of a `with` block
    completes it; an exception in the block leaves nothing. An older store of that name is replaced.
    """

    def __init__(self, prefix: Path, vocab_size: int):
        """Open the temporary files of a store, in an existing directory.

        Args:
            vocab_size: decides the type of the tokens; every token must be below it.
        """
        self.dtype = token_dtype(vocab_size)
        self.tokens = self.sequences = self.documents = 0
        self.checksum: Checksum | None = None  # of the two files, once finished
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._bin_crc = self._largest = 0
        self._files = ExitStack()
        # Files take their names in reverse order: .idx, which a reader looks at first, comes last.
        self._idx = self._files.enter_context(replacing(idx_path(prefix)))
        self._bin = self._files.enter_context(replacing(bin_path(prefix)))
        # The document index; as an array it would be 8 bytes of memory per document.
        index = tempfile.TemporaryFile(dir=prefix.parent)  # noqa: SIM115 - closed with the others
        self._index = self._files.enter_context(index)
        self._idx.write(bytes(HEADER.size))
        self._index.write(np.int64(0).tobytes())

    def add_document(self, sequences: Sequence[np.ndarray]) -> None:
        """Append one document, possibly empty, without its empty sequences."""
        tokens = np.concatenate(sequences) if len(sequences) else np.empty(0, np.int64)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        self.add_documents(tokens, lengths, np.array([len(sequences)]))

    def add_documents(
        self, tokens: np.ndarray, sizes: np.ndarray, counts: np.ndarray
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: (N,) integers, of all sequences in order.
            sizes: (S,) tokens of each sequence; they add up to N.
            counts: (D,) sequences of each document; they add up to S.
        """
        assert sizes.sum() == len(tokens) and counts.sum() == len(sizes), (
            "sizes do not match"
        )
        known = len(tokens) == 0 or (
            tokens.min() >= 0 and tokens.max() < self._vocab_size
        )
        assert known, "token outside the vocabulary"
        filled = sizes > 0
        filled_before = np.concatenate([[0], np.cumsum(filled)])
        ends = self.sequences + filled_before[np.cumsum(counts)]
        payload = tokens.astype(self.dtype).tobytes()
        self._bin.write(payload)
        self._bin_crc = zlib.crc32(payload, self._bin_crc)
        self._largest = max(self._largest, int(tokens.max(initial=0)))
        self._idx.write(sizes[filled].astype("<i4").tobytes())
        self._index.write(ends.astype("<i8").tobytes())
        self.tokens += len(tokens)
        self.sequences += int(filled_before[-1])
        self.documents += len(counts)

    def finish(self) -> None:
        """Complete the files, flush them to disk and give them their names."""
        start = 0
        # sizes are read back, pointers are written behind them
        for first in range(0, self.sequences, BLOCK):
            self._idx.seek(HEADER.size + 4 * first)
            sizes = np.frombuffer(
                self._idx.read(4 * min(BLOCK, self.sequences - first)), "<i4"
            )
            ends = start + np.cumsum(sizes, dtype=np.int64)
            self._idx.seek(HEADER.size + 4 * self.sequences + 8 * first)
            self._idx.write(
                ((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes()
            )
            start = int(ends[-1])
        self._index.seek(0)
        shutil.copyfileobj(self._index, self._idx)
        self._idx.seek(0)
        self._idx.write(
            HEADER.pack(
                MAGIC, VERSION, _CODES[self.dtype], self.sequences, self.documents + 1
            )
        )
        self._idx.flush()
        idx, _ = _read_through(Path(self._idx.name))
        self.checksum = Checksum(idx, self._bin_crc, self._largest)
        # Between the two renames no .idx may stand next to a .bin that is not its own.
        idx_path(self._prefix).unlink(missing_ok=True)
        self._files.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self._files.__exit__(kind, *error)
        elif self.checksum is None:
            with self._files:  # a full disk leaves nothing either
                self.finish()


def _read_through(
    path: Path, say: Say = quiet, dtype: np.dtype | None = None
) -> tuple[int, int]:
    """Return the CRC-32 of a file and, of tokens of a type, the largest as unsigned; 0 without one."""
    crc = largest = 0
    unsigned = dtype and f"<u{dtype.itemsize}"
    tell = now_and_then(say)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while part := file.read(_READ):
            crc = zlib.crc32(part, crc)
            if unsigned:
                tokens = np.frombuffer(part, unsigned)
                largest = max(largest, int(tokens.max()))
            tell(f"{path}: {amount(file.tell())} of {amount(size)} checked")
    return crc, largest
