"""The check at the start that all machines of a run share its directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from launch.ranks import processes
from launch.ranks.meeting import Meeting

LOOK_FOR_S = 10.0  # network file systems may show a new file late
EVERY_S = 0.25


@contextlib.contextmanager
def token(directory: Path) -> Iterator[str]:
    """Make a file in the directory during the block, on rank 0; yield its name."""
    name = f"shared.{secrets.token_hex(4)}.tmp"  # in the form of `left_by_a_crash`
    path = directory / name
    path.touch()
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def wait_for(directory: Path, name: str) -> bool:
    """Wait for the file in the directory, on another rank; return False if it does not appear."""
    deadline = time.monotonic() + LOOK_FOR_S
    while not (directory / name).exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(directory)  # makes NFS ask its server
        time.sleep(EVERY_S)
    return True


def seen_here(meeting: Meeting, directory: Path) -> bool:
    """Return whether this rank sees in the directory what rank 0 writes there. Collective."""
    first = processes.rank() == 0
    with token(directory) if first else contextlib.nullcontext("") as made:
        name = meeting.from_rank_0(made)
        return meeting.all_or_none(lambda: first or wait_for(directory, name))


def check_all(meeting: Meeting, directory: Path) -> None:
    """Check that every rank sees in the directory what rank 0 writes there. Collective."""
    seen = seen_here(meeting, directory)
    # With the token gone: where a rank refuses, its launcher ends this one.
    meeting.all_or_none(lambda: check(seen, directory))


def check(seen: bool, directory: Path) -> None:
    """Check that this rank has seen the file. Raises ValueError."""
    if not seen:
        raise ValueError(
            f"{directory.absolute()} does not hold what rank 0 has just written into its run directory: that "
            "must be on a file system that all machines share; name one with --out, best by its absolute path"
        )
