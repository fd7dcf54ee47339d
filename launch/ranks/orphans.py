"""The end of ranks whose launcher was killed, so that no orphan trains on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from launch.console import terminal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY_S = 1.0
# what only torchrun and deepspeed set
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}


def end_with_launcher() -> None:
    """Send this rank SIGTERM when its launcher is gone: before training it ends, later it saves first.

    Linux sends it at the parent's death. A thread looks as well, for other systems, and for the parent of
    deepspeed's launcher (the command that was typed, or pdsh's remote shell), which the launcher outlives.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # a system without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if (
        parent == 1
        and LAUNCHERS & {*os.environ}
        and not re.search("torch|deepspeed", command_of(1))
    ):
        parent = 0  # it was killed already; unless it is a container's first process
    grandparent = (
        parent_of(parent) if "deepspeed.launcher.launch" in command_of(parent) else None
    )
    threading.Thread(target=_look, args=(parent, grandparent), daemon=True).start()


def _look(parent: int, grandparent: int | None) -> None:
    while os.getppid() == parent and (
        grandparent is None or parent_of(parent) == grandparent
    ):
        time.sleep(LOOK_EVERY_S)
    with contextlib.suppress(OSError):  # the screen may be gone with the launcher
        terminal.say("the launcher has ended: so does this rank", sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it is gone or the system does not say."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .decode(errors="replace")
            .replace("\0", " ")
        )
    return ""


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if it is gone or the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
