"""Token stores of finite sources in the cache, and the checksums of stores.

Document d of a cached store is document d of the source, empty ones too, so that one store serves every
split. A JSON file next to it has its origin and its checksums.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from transformers import PreTrainedTokenizerFast

from data import cache, durable_files
from data.cache import SAY_EVERY_S, Say
from data.durable_files import Damaged, write_atomically
from data.text.encoder import Encoder, SentenceEncoder
from data.text.records import Document, SkippedRecords, Source
from data.text.vocabulary import vocabulary_digest, vocabulary_size
from data.tokens.store import Checksum, Store, StoreWriter, bin_path, idx_path, open_store
from recipes.problems import counted
from recipes.schema import Origin

READ_BY_ALL = 1 << 26  # bytes; every process reads a .bin up to this size itself: 0.05 s at zlib's 1.3 GB/s


def checksum_of(store: Store, directory: Path, say: Say) -> Checksum:
    """Return the CRC-32 of both files.

    Of processes with one cache `directory`, one reads a large store and keeps the result there for all later
    ones, until size, inode or times of a file change.
    """
    if store.tokens_array.nbytes <= READ_BY_ALL:
        return store.checksum()
    paths = (idx_path(store.prefix).resolve(), bin_path(store.prefix).resolve())
    facts = [(path, path.stat()) for path in paths]
    version = [(str(path), f.st_size, f.st_ino, f.st_mtime_ns, f.st_ctime_ns) for path, f in facts]
    kept = directory / f"{hashlib.sha256(json.dumps(version).encode()).hexdigest()[:20]}.crc32.json"

    def read() -> Checksum:
        try:
            return Checksum(**json.loads(kept.read_text()))
        except (TypeError, ValueError) as error:
            raise Damaged(f"{kept} holds no checksums") from error

    def write() -> None:
        write_atomically(kept, json.dumps(store.checksum(say)._asdict()))

    try:
        return cache.fetch((kept,), read, write, f"checksum of {store.prefix}", say)
    except cache.UnwritableCache:  # then every process reads for itself
        return store.checksum(say)


FORMAT_VERSION = 2


@dataclass(frozen=True)
class OpenedStore:
    """An open store and facts about it."""

    name: str
    store: Store
    text_bytes: int | None  # UTF-8 bytes of its documents; None: unknown
    checksum: str


def cached_store(
    sequences: Literal["documents", "sentences"],
    origin: Origin,
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    say: Say,
) -> OpenedStore:
    """Open the cached token store of a source; make it where the cache lacks it.

    Raises ValueError: the source or the cache directory cannot be read.
    """
    sentences = origin.sentences if sequences == "sentences" else None
    made_of = {
        "format": FORMAT_VERSION,
        "source": source.fingerprint(),
        "vocabulary": vocabulary_digest(tokenizer),
        "tokenizers": tokenizers.__version__,
        "sentences": sentences,
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:20]
    prefix = directory / f"{key}.{sequences}"
    facts_path = prefix.with_name(prefix.name + ".json")
    what = f"tokens of {source.name}"

    def write() -> None:
        encode = SentenceEncoder(tokenizer, sentences) if sentences else Encoder(tokenizer)
        writer = StoreWriter(prefix, vocabulary_size(tokenizer))
        facts = made_of | _tokenize(encode(source.documents()), writer, what, say)
        left_out = source.skipped.found() if source.skipped else []
        facts["left_out"] = SkippedRecords.describe(left_out) if left_out else ""
        content = json.dumps(facts, indent=2)
        with durable_files.replacing(facts_path) as file:
            file.write(f"{content}\n{hashlib.sha256(content.encode()).hexdigest()}\n".encode())

    def read() -> OpenedStore:
        content, _, digest = facts_path.read_bytes().rstrip(b"\n").rpartition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise Damaged(f"{facts_path} does not match its checksum")
        facts, store = json.loads(content), open_store(prefix)
        if (store.documents, store.tokens) != (facts["documents"], facts["tokens"]):
            found = f"{store.documents} documents and {store.tokens} tokens"
            raise Damaged(f"{prefix} has {found}, not those of {facts_path.name}")
        stated = Checksum(facts["idx_crc32"], facts["bin_crc32"])
        if checksum_of(store, directory, say) != stated:
            raise Damaged(f"{prefix} does not match its checksum")
        if facts.get("left_out"):
            say(f"{what}: {facts['left_out']}")
        return OpenedStore(source.name, store, facts["text_bytes"], f"{stated.bin:08x}")

    return cache.fetch((facts_path, bin_path(prefix), idx_path(prefix)), read, write, what, say)


def _tokenize(
    encoded: Iterable[tuple[Document, Any]], writer: StoreWriter, what: str, say: Say
) -> dict[str, int]:
    """Write the documents to a store; `say` the progress every few seconds and at the end."""
    text_bytes, started = 0, time.monotonic()
    said = started

    def progress(since: str) -> None:
        done = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
        say(f"{what}: {done} {since} {time.monotonic() - started:.1f} s")

    with writer:
        for document, tokens in encoded:
            for _ in range(writer.documents, document.index):
                writer.add_document([])  # the source passes over its empty documents
            writer.add_document(tokens if isinstance(tokens, list) else [tokens])
            text_bytes += len(document.text.encode())
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                progress("after")
    progress("in")
    assert writer.checksum is not None
    made = {"documents": writer.documents, "tokens": writer.tokens, "text_bytes": text_bytes}
    return made | {"idx_crc32": writer.checksum.idx, "bin_crc32": writer.checksum.bin}
