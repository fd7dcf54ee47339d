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

from data.durable_files import DamagedFile, locked
from recipes.problems import system_error, system_problem

T = TypeVar("T")
Say = Callable[[str], None]
SAY_EVERY_S = 10.0  # between progress lines of a long job


class UnwritableCache(ValueError):
    """Failure to write to the cache; the message gives the place, the cause and the fix."""


def default_directory() -> Path:
    """Return `$MEGARECIPES_CACHE`, or `megarecipes` in `$XDG_CACHE_HOME` or ~/.cache."""
    chosen = os.environ.get("MEGARECIPES_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarecipes"
    )


def fetch(
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
                for leftover in chain.from_iterable(
                    directory.glob(f"{path.name}.*.tmp") for path in paths
                ):
                    leftover.unlink(missing_ok=True)
            write()
            return read()
    except OSError as error:
        if system_error(error) is None:
            raise
        raise UnwritableCache(
            str(system_problem(error, directory, elsewhere))
        ) from error
