"""Files that are expensive to make and can always be made again.

Every file is written under a temporary name, flushed to disk and renamed, so that a reader sees all of it or nothing.
Processes that want the same file at once take turns by `flock`, which the kernel drops when its holder dies: a killed
process never leaves a lock behind.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
SAY_EVERY_S = 10.0  # between lines that tell how far a long job is


class Damaged(Exception):
    """A cached file is truncated or changed; the message says how it shows."""


def default_directory() -> Path:
    """`$MEGARECIPES_CACHE`, or `megarecipes` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("MEGARECIPES_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarecipes"


def ensure_directory(directory: Path) -> Path:
    """Creates the directory where needed.

    Raises:
        ValueError: it cannot be created or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        raise ValueError(
            f"cache directory {directory}: {error.strerror or error}: vocabularies and tokens are kept there; "
            "set MEGARECIPES_CACHE to a directory you can write to"
        ) from error
    return directory


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, what: str, say: Say) -> Iterator[bool]:
    """Holds the lock of `path` (a file beside it). Yields False where the file system has no locks.

    Without locks processes may make the same file twice; the renames make that harmless.
    """
    with open(path.with_name(path.name + ".lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            say(f"{what}: another process is making it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held  # closing the file drops the lock


def fetch(paths: Sequence[Path], read: Callable[[], T], write: Callable[[], None], what: str, say: Say) -> T:
    """What `read` returns, after `write` where the files are missing or damaged.

    Args:
        paths: the files, in one directory; the first one's lock is taken. Leftovers of killed processes are removed.
        read: opens and checks the files; raises OSError or Damaged.
        write: makes the files.
        what: name for messages.

    Raises:
        ValueError: the files must be made and their directory cannot be written to.
    """
    try:
        return read()
    except (OSError, Damaged):
        pass
    ensure_directory(paths[0].parent)
    with locked(paths[0], what, say) as held:
        try:
            return read()  # made while we waited
        except OSError:
            pass
        except Damaged as damage:
            say(f"{what}: {damage}; making it again")
        if held:
            for path in paths:
                for leftover in path.parent.glob(path.name + ".*.tmp"):
                    leftover.unlink(missing_ok=True)
        write()
        return read()
