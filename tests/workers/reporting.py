"""Running named checks on the ranks of one launch, and keeping what each rank found."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from launch.console import terminal
from launch.ranks import ending, processes

Checks = Mapping[str, Callable[[], None]]


def run_checks(prepare: Callable[[Path], Checks], directory: Path) -> None:
    """Run every check on every rank, whatever became of those before, and write `rank-N.json`.

    Name -> traceback or null.

    A check makes all its collective calls before its first assertion, so that a rank that fails does not
    leave the others waiting. `prepare` builds the checks once the process group stands.
    """
    terminal.quiet_libraries()
    with ending.clean_exit():
        processes.start_processes(timedelta(minutes=1))
        found: dict[str, str | None] = {}
        for name, check in prepare(directory).items():
            try:
                check()
                found[name] = None
            except Exception:
                found[name] = traceback.format_exc()
        (directory / f"rank-{processes.rank()}.json").write_text(json.dumps(found))
