"""The checksums of a store's files as they are now, read once for every version of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data import cache
from data.cache import Say
from data.durable_files import Damaged, write_atomically
from data.tokens.indexed import Checksum, Store, bin_path, idx_path

READ_BY_ALL = 1 << 26  # bytes of a .bin that every process reads for itself: 0.05 s at zlib's 1.3 GB/s


def checksum_of(store: Store, directory: Path, say: Say) -> Checksum:
    """CRC-32 of both files.

    One process of those that share the cache `directory` reads a large store, and leaves what it found there
    for all later ones, until size, inode or times of a file change.
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
    except cache.Unwritable:  # then every process reads for itself
        return store.checksum(say)
