"""Whether all machines of a run share its directory: found out at the start, not at the first save."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_FOR_S = 10.0  # network file systems show a new file late
EVERY_S = 0.25


@contextlib.contextmanager
def token(directory: Path) -> Iterator[str]:
    """Rank 0's: name of a file that lies in the directory during the block."""
    name = f"shared.{secrets.token_hex(4)}.tmp"  # of the form that `left_by_a_crash` knows
    path = directory / name
    path.touch()
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def shows(directory: Path, name: str) -> bool:
    """Whether the file appears in the directory, as another rank sees it."""
    deadline = time.monotonic() + LOOK_FOR_S
    while not (directory / name).exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(directory)  # has NFS ask its server
        time.sleep(EVERY_S)
    return True


def require(seen: bool, directory: Path) -> None:
    """Raise ValueError unless the file was seen."""
    if not seen:
        raise ValueError(
            f"{directory.absolute()} does not hold what rank 0 has just written into its run directory: that "
            "must be on a file system that all machines share; name one with --out, best by its absolute path"
        )
