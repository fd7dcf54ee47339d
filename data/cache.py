"""The cache of vocabularies and tokens: expensive to make, safe to delete.

`data.durable_files` writes the files and lets processes that want the same one take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from data.durable_files import Damaged, locked
from recipes.refused_by_system import problem, told_by

T = TypeVar("T")
Say = Callable[[str], None]
SAY_EVERY_S = 10.0  # between progress lines of a long job


class UnwritableCache(ValueError):
    """Failure to write to the cache; the message gives the place, the cause and the fix."""


def default_directory() -> Path:
    """Return `$MEGARECIPES_CACHE`, or `megarecipes` in `$XDG_CACHE_HOME` or ~/.cache."""
    if chosen := os.environ.get("MEGARECIPES_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarecipes"


def fetch(paths: Sequence[Path], read: Callable[[], T], write: Callable[[], None], what: str, say: Say) -> T:
    """Return the result of `read`; call `write` before it where the files are missing or damaged.

    Args:
        paths: the files, in one directory; the first one's lock is held while they are made, and leftovers
            of killed processes are removed.
        read: opens and checks the files; raises OSError or Damaged.
        write: makes the files.
        what: name for messages.

    Raises UnwritableCache: the files must be made and their directory cannot be written to.
    """
    with suppress(OSError, Damaged):
        return read()
    directory = paths[0].parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        rule = (
            f"cache directory {directory}: {error.strerror or error}: vocabularies and tokens are kept there"
        )
        raise UnwritableCache(f"{rule}; set MEGARECIPES_CACHE to a directory you can write to") from error
    try:
        return _make(paths, read, write, what, say)
    except OSError as error:
        if told_by(error) is None:
            raise
        elsewhere = "set MEGARECIPES_CACHE to a directory elsewhere"
        raise UnwritableCache(str(problem(error, directory, elsewhere))) from error


def _make(paths: Sequence[Path], read: Callable[[], T], write: Callable[[], None], what: str, say: Say) -> T:
    """Make the files, or wait until another process has made them; return the result of `read`."""
    directory = paths[0].parent
    with locked(paths[0], what, say) as held:
        try:
            return read()  # made while we waited
        except OSError:
            pass
        except Damaged as damage:
            say(f"{what}: {damage}; making it again")
        if held:
            for leftover in chain.from_iterable(directory.glob(f"{path.name}.*.tmp") for path in paths):
                leftover.unlink(missing_ok=True)
        write()
        return read()
