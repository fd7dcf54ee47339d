"""Crash-safe files, locks for processes, and the cache of vocabularies and tokens.

A file is written under a temporary name, flushed to disk and renamed, so that a reader sees all of it or
nothing. The kernel drops a lock when its holder dies. What the cache holds is expensive to make and safe to
delete; processes that want the same file take turns.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, TypeVar

from recipes.problems import system_error, system_problem

# With these errors a file system refuses to open or to flush directories.
_NOT_OF_DIRECTORIES = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
}
T = TypeVar("T")
Say = Callable[[str], None]
SAY_EVERY_S = 10.0  # between progress lines of a long job


def quiet(line: str) -> None:
    """Say nothing."""


def now_and_then(say: Say) -> Say:
    """Return a `say` for the progress of a long job, which passes a line on every few seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SAY_EVERY_S:
            last = time.monotonic()
            say(line)

    return tell


class DamagedFile(Exception):
    """A truncated or changed file; the message says what is wrong with it."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary binary file; rename it to `path` if the block succeeds, remove it if it fails."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # an error of a write names no file
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_names(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path`: a crash leaves the old or the new text, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object, indent: int = 1) -> None:
    """Replace the file at `path` by a value as JSON."""
    write_atomically(path, json.dumps(value, indent=indent) + "\n")


def sync_names(directory: Path) -> None:
    """Flush a directory's list of names to the disk, on a file system that does so. Raises OSError."""
    try:
        sync(directory)
    except OSError as error:
        if error.errno not in _NOT_OF_DIRECTORIES:
            raise


def sync(path: Path) -> None:
    """Flush a file to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def left_by_a_crash(name: str) -> bool:
    """Tell by its name whether a file is a temporary one of `replacing` or a lock."""
    return name == Lock.FILE or re.fullmatch(r".+\.[0-9a-f]{8}\.tmp", name) is not None


@contextmanager
def locked(path: Path, what: str, say: Say) -> Iterator[bool]:
    """Hold the lock file next to `path`; yield False where the file system has no locks.

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
    """A lock on a directory, for one process; a record lock, so forked loader workers do not inherit it."""

    FILE: ClassVar = ".lock"
    descriptor: int | None

    @classmethod
    def take(cls, directory: Path) -> Lock:
        """Lock a directory, if its file system has locks. Raises BlockingIOError: names the holder."""
        descriptor = os.open(directory / cls.FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            # POSIX: either means "held by another"
            if isinstance(error, BlockingIOError | PermissionError):
                raise BlockingIOError(holder or "another process") from None
            return cls(None)
        os.truncate(descriptor, 0)
        os.pwrite(
            descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
        )
        return cls(descriptor)

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class UnwritableCache(ValueError):
    """Failure to write to the cache; the message gives the place, the cause and the fix."""


def cache_directory() -> Path:
    """Return `$MEGARECIPES_CACHE`, or `megarecipes` in `$XDG_CACHE_HOME` or ~/.cache."""
    chosen = os.environ.get("MEGARECIPES_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarecipes"
    )


def cached(
    paths: Sequence[Path],
    read: Callable[[], T],
    write: Callable[[], None],
    what: str,
    say: Say,
) -> T:
    """Return the result of `read`; call `write` before it where the files are missing or damaged.

    Args:
        paths: the files, in one directory; the first one's lock is held while they are made, and leftovers
            of killed processes are removed.
        read: opens and checks the files; raises OSError or Damaged.
        write: makes the files.
        what: name for messages.

    Raises UnwritableCache: the files must be made and their directory cannot be written to.
    """
    with suppress(OSError, DamagedFile):
        return read()
    directory = paths[0].parent
    elsewhere = "set MEGARECIPES_CACHE to a directory you can write to"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = "vocabularies and tokens are kept there"
        raise UnwritableCache(
            f"cache directory {directory}: {error.strerror}: {rule}; {elsewhere}"
        ) from error
    try:
        with locked(paths[0], what, say) as held:
            try:
                return read()  # made while we waited
            except OSError:
                pass
            except DamagedFile as damage:
                say(f"{what}: {damage}; making it again")
            if held:
                for path in paths:
                    for leftover in directory.glob(f"{path.name}.*.tmp"):
                        leftover.unlink(missing_ok=True)
            write()
            return read()
    except OSError as error:
        if system_error(error) is None:
            raise
        raise UnwritableCache(
            str(system_problem(error, directory, elsewhere))
        ) from error
