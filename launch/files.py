"""Files that survive a crash, one process at a time per directory, and the difference between two nested mappings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no record locks: two launches into one directory then go unnoticed
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path`: after a crash at any moment it holds the old or the new text, never a part."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def left_by_a_crash(name: str) -> bool:
    """Whether a file of this name is a temporary of `write_atomically` or a lock."""
    return name == Lock.FILE or (name.startswith(".") and name.endswith(".tmp"))


@dataclasses.dataclass
class Lock:
    """One process at a time in a directory.

    A record lock: it dies with its process, and forked loader workers do not inherit it.
    """

    FILE = ".lock"

    descriptor: int | None

    @classmethod
    def take(cls, directory: Path) -> Lock:
        """Raises BlockingIOError where another process holds it. A file system without locks does not refuse."""
        if fcntl is None:
            return cls(None)
        descriptor = os.open(directory / cls.FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError | PermissionError):  # POSIX allows either for "held by another"
                raise BlockingIOError(f"{directory} is locked by another process") from None
            return cls(None)
        return cls(descriptor)

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) for every leaf of nested mappings; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of the leaves that differ; "absent" where one side lacks the key."""
    before, after = dict(flatten(old)), dict(flatten(new))
    pairs = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in {**before, **after}]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _sync_directory(path: Path) -> None:
    """Make the rename itself durable, where the system lets a directory be opened and synchronised."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
