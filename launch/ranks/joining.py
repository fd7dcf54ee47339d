"""What a rank takes over from the launch before it joins the others: variables, and its device."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from launch.console import terminal
from launch.ranks import interfaces, launch_environment, processes

if TYPE_CHECKING:
    from launch.ranks.meeting import Meeting


def take_environment(meeting: Meeting) -> None:
    """Set what rank 0's environment has, and the launcher has not carried to this machine. Collective.

    Before anything reads it: libraries do when they are imported.
    """
    theirs = meeting.from_rank_0(launch_environment.carried(os.environ))
    lacking = {name: value for name, value in theirs.items() if name not in os.environ}
    os.environ.update(lacking)
    if lacking and processes.local_rank() == 0:
        terminal.say(f"{socket.gethostname()} has from rank 0's machine: {', '.join(sorted(lacking))}")


def own_place() -> tuple[str, str] | None:
    """The device of this rank, where it is a GPU. Raises ValueError: there is none, or no way to it."""
    processes.check_device()
    interfaces.follow_nccl()
    interfaces.check_own_address(os.environ, processes.local_world_size() < processes.world_size())
    return processes.device_identity()
