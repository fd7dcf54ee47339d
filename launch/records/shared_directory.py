"""The check at the start that all machines of a run share its directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from launch.ranks import processes
from launch.ranks.meeting import Meeting

LOOK_FOR_S = 10.0  # network file systems may show a new file late
EVERY_S = 0.25


def check_all(meeting: Meeting, directory: Path) -> None:
    """Check that every rank sees in the directory what rank 0 writes there. Collective."""
    first = processes.rank() == 0
    # in the form of `left_by_a_crash`
    made = directory / f"shared.{secrets.token_hex(4)}.tmp"
    if first:
        made.touch()
    try:
        file = directory / meeting.from_rank_0(made.name)
        seen = meeting.all_or_none(lambda: first or appears(file))
    finally:
        made.unlink(missing_ok=True)

    # With the file gone: where a rank refuses, its launcher ends this one.
    meeting.all_or_none(lambda: check(seen, directory))


def appears(file: Path) -> bool:
    """Wait for another rank's file; return False if it does not appear."""
    deadline = time.monotonic() + LOOK_FOR_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # makes NFS ask its server
        time.sleep(EVERY_S)
    return True


def check(seen: bool, directory: Path) -> None:
    """Check that this rank has seen the file. Raises ValueError."""
    if not seen:
        raise ValueError(
            f"{directory.absolute()} does not hold what rank 0 has just written into its run directory: that "
            "must be on a file system that all machines share; name one with --out, best by its absolute path"
        )
