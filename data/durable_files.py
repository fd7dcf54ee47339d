"""Files that survive a crash whole, and locks that do not survive their process.

A file is written under a temporary name, flushed to disk and renamed, so that a reader sees all of it or
nothing. Locks are the kernel's, which drops them when their holder dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar


class Damaged(Exception):
    """A file is truncated or changed; the message says how it shows."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the place of `path` when the block ends well, and vanishes otherwise."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # of a write, which does not say where
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a directory be opened and synchronised
        sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path`: a crash leaves the old or the new text, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def left_by_a_crash(name: str) -> bool:
    """Whether a file of this name is a temporary of `replacing` or a lock."""
    return name == Lock.FILE or re.fullmatch(r".+\.[0-9a-f]{8}\.tmp", name) is not None


@contextmanager
def locked(path: Path, what: str, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of `path` (a file next to it). Yields False where the file system has no locks.

    Without locks processes may make the same file twice; the renames make that harmless.
    """
    with open(path.with_name(path.name + ".lock"), "ab") as file:
        held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}: another process is making it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            held = False
        yield held  # closing the file drops the lock


@dataclasses.dataclass
class Lock:
    """One process at a time in a directory; a record lock, which forked loader workers do not inherit."""

    FILE: ClassVar = ".lock"
    descriptor: int | None

    @classmethod
    def take(cls, directory: Path) -> Lock:
        """Take a directory's lock, if its file system has any. Raises BlockingIOError: who holds it."""
        descriptor = os.open(directory / cls.FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            if isinstance(error, BlockingIOError | PermissionError):  # POSIX: either means "held by another"
                raise BlockingIOError(holder or "another process") from None
            return cls(None)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
