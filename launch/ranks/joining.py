"""The start of a command's ranks: the launcher's environment, a first meeting, devices, the process group.

If one rank refuses, all ranks end with its message and exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.console import terminal
from launch.ranks import ending, interfaces, launch_environment, processes, start_up
from launch.ranks.meeting import Meeting
from recipes.problems import take_file_handles


def meet(check: Callable[[], None] = lambda: None, out: str | None = None) -> Meeting:
    """Take the place among the ranks that the launcher gives this process, and meet the others. Collective.

    `check`: of flags, before a rank waits for others; raises ValueError. `out`: the run directory's flag.
    """
    terminal.quiet_libraries()
    try:
        processes.check_launch(start=True)
        check()
    except ValueError as e:
        ending.refuse(e)
    take_file_handles(0)  # rank 0 has a connection to each rank
    if processes.launched():
        start_up.end_with_launcher()
    elif said := launch_environment.forgotten_srun(os.environ):
        terminal.say(said, sys.stderr)
    meeting = Meeting(_existing(out))
    take_environment(meeting)
    start_up.keep_compiled_code()
    return meeting


@contextlib.contextmanager
def joined(
    meeting: Meeting,
    tp: int,
    *,
    admit: Callable[[], Any] = lambda: None,
    note_failure: Callable[[str], None] = lambda text: None,
    out_of_memory_advice: str = "",
) -> Iterator[Any]:
    """Form the process group for the block, and end the process after it (`ending.clean_exit`). Collective.

    Args:
        tp: the largest tensor-parallel degree in the block.
        admit: settles the rest before the group is formed; its value is yielded.
        note_failure: takes this rank's traceback.
        out_of_memory_advice: printed instead of a traceback if memory runs out.
    """
    order_kernels(tp)
    meeting.compare(meeting.settle(own_place), processes.check_shared_devices)
    admitted = admit()
    with ending.clean_exit(note_failure):
        processes.start_processes(store=meeting.store)
        try:
            with ending.explain_out_of_memory(out_of_memory_advice):
                yield admitted
        except SystemExit:  # of all ranks alike
            meeting.end()
            raise
        meeting.end()


def order_kernels(tp: int) -> None:
    """Have a GPU take kernels of all streams in their order; call it before anything asks CUDA.

    Between tensor ranks an all-reduce then begins before the product that it overlaps with, as Megatron-LM
    demands.
    """
    if tp > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _existing(out: str | None) -> Path:
    """Return the directory of this name, or the nearest one above it that is there."""
    place = Path(out or "").absolute()
    return next(above for above in (place, *place.parents) if os.path.isdir(above))


def take_environment(meeting: Meeting) -> None:
    """Take over rank 0's variables that the launcher did not carry to this machine. Collective.

    Call it early: libraries read them when they are imported.
    """
    theirs = launch_environment.carried(
        meeting.from_rank_0(launch_environment.carried(os.environ))
    )
    lacking = {name: value for name, value in theirs.items() if name not in os.environ}
    os.environ.update(lacking)
    if lacking and processes.local_rank() == 0:
        terminal.say(
            f"{socket.gethostname()} has from rank 0's machine: {', '.join(sorted(lacking))}"
        )


def own_place() -> tuple[str, str] | None:
    """Return the identity of this rank's GPU, or None. Raises ValueError for no device or no network."""
    processes.check_device()
    interfaces.check_named(os.environ)
    interfaces.follow_nccl()
    if processes.one_machine():
        interfaces.stay_on_loopback()
    if processes.several_machines():
        interfaces.check_own_address(os.environ)
    return processes.device_identity()
