"""Files that are expensive to make and can always be made again.

They are written, and processes that want the same one at once take turns, by `data.durable_files`.
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
SAY_EVERY_S = 10.0  # between lines that tell how far a long job is


class Unwritable(ValueError):
    """Nothing can be written to the cache. The message says where, why and the fix."""


def default_directory() -> Path:
    """`$MEGARECIPES_CACHE`, or `megarecipes` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("MEGARECIPES_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarecipes"


def fetch(paths: Sequence[Path], read: Callable[[], T], write: Callable[[], None], what: str, say: Say) -> T:
    """What `read` returns, after `write` where the files are missing or damaged.

    Args:
        paths: the files, in one directory; the first one's lock is taken. Leftovers of killed processes are
            removed.
        read: opens and checks the files; raises OSError or Damaged.
        write: makes the files.
        what: name for messages.

    Raises Unwritable: the files must be made and their directory cannot be written to.
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
        raise Unwritable(f"{rule}; set MEGARECIPES_CACHE to a directory you can write to") from error
    try:
        return _made(paths, read, write, what, say)
    except OSError as error:
        if told_by(error) is None:
            raise
        elsewhere = "set MEGARECIPES_CACHE to a directory elsewhere"
        raise Unwritable(str(problem(error, directory, elsewhere))) from error


def _made(paths: Sequence[Path], read: Callable[[], T], write: Callable[[], None], what: str, say: Say) -> T:
    """What `read` returns once this process, or another that it waited for, has made the files."""
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
