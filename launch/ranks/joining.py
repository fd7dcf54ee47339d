"""The start of a command's ranks: the launcher's environment, a first meeting, devices, the process group.

If one rank refuses, all ranks end with its message and exit code 2. A rank has a clock until its first step,
ways to take less time until then, and a launcher that it does not outlive.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data import durable_files
from launch.console import terminal
from launch.ranks import ending, interfaces, processes
from launch.ranks.meeting import Meeting
from recipes.problems import ProblemsError, take_file_handles

# A command of deepspeed or torchrun: a program or a module of Python's, and no shell that runs it.
LAUNCHER = re.compile(
    r"(\S*python\S* (-\S+ )*)?(\S*/)?(deepspeed(\.launcher\.\w+)?|torchrun|torch\.distributed\.run)( |$)"
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY_S = 1.0
# what only torchrun and deepspeed set
LAUNCHER_VARIABLES = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}


def meet(check: Callable[[], None] = lambda: None, out: str | None = None) -> Meeting:
    """Take the place among the ranks that the launcher gives this process, and meet the others. Collective.

    `check`: of flags, before a rank waits for others; raises ValueError. `out`: the run directory's flag.
    """
    terminal.quiet_libraries()
    try:
        processes.check_launch()
        check()
    except ValueError as e:
        ending.refuse(e)
    meeting = Meeting()
    if processes.launched():
        end_with_launcher()
    elif "SLURM_JOB_ID" in os.environ:
        from launch.ranks.launch_environment import forgotten_srun

        if said := forgotten_srun(os.environ):
            terminal.say(said, sys.stderr)
    if processes.world_size() > 1:
        from launch.ranks.ranks_meeting import RanksMeeting

        take_file_handles(0)  # rank 0 has a connection to each rank
        meeting = RanksMeeting(_existing(out))
        take_environment(meeting)
    # each machine has a cache of its own: one that refuses ends the ranks of all
    meeting.all_or_none(keep_compiled_code)
    return meeting


@contextlib.contextmanager
def joined(
    meeting: Meeting,
    tp: int,
    *,
    admit: Callable[[], Any] = lambda: None,
    note_failure: Callable[[str], None] = lambda text: None,
) -> Iterator[Any]:
    """Form the process group for the block, and end the process after it (`ending.clean_exit`). Collective.

    Args:
        tp: the largest tensor-parallel degree in the block.
        admit: settles the rest before the group is formed; its value is yielded.
        note_failure: takes this rank's traceback.
    """
    order_kernels(tp)
    if processes.world_size() > 1:
        check_places(meeting)
    elif processes.device().own_memory:
        meeting.all_or_none(processes.check_device)
    admitted = admit()
    with ending.clean_exit(note_failure):
        processes.start_processes(store=meeting.store)
        try:
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
    if tp != 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _existing(out: str | None) -> Path:
    """Return the directory of this name, or the nearest one above it that is there."""
    place = Path(out or "").absolute()
    return next(above for above in (place, *place.parents) if os.path.isdir(above))


def take_environment(meeting: Meeting) -> None:
    """Take over rank 0's variables that the launcher did not carry to this machine. Collective.

    Call it early: libraries read them when they are imported.
    """
    from launch.ranks.launch_environment import carried

    theirs = carried(meeting.from_rank_0(carried(os.environ)))
    lacking = {name: value for name, value in theirs.items() if name not in os.environ}
    os.environ.update(lacking)
    if lacking and processes.local_rank() == 0:
        terminal.say(
            f"{socket.gethostname()} has from rank 0's machine: {', '.join(sorted(lacking))}"
        )


def check_places(meeting: Meeting) -> None:
    """Check that every rank has a device of its own, and a network to the others. Collective."""
    meeting.compare(meeting.all_or_none(own_place), processes.check_shared_devices)


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


class StartClock:
    """A clock of the parts of a launch, in the order of their ends.

    A launch begins with deepspeed or torchrun if one of them started this process on this machine.
    """

    def __init__(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        own = started(os.getpid()) or now
        waited = 0.0
        if LAUNCHER_VARIABLES & {*os.environ}:
            waited = own - (started(first_launcher()) or own)
        self.parts = {"launcher": waited, "compiling": 0.0}
        self._since = own
        self._compiled = compiling_seconds()

    def mark(self, part: str) -> None:
        """Add the seconds since the last call to `part`, and those of compiling to "compiling"."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        compiled = compiling_seconds()
        passed = now - self._since
        compiling = compiled - self._compiled
        self.parts[part] = self.parts.get(part, 0.0) + passed - compiling
        self.parts["compiling"] += compiling
        self._since = now
        self._compiled = compiled


def compiling_seconds() -> float:
    """Return the seconds of torch.compile in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = dynamo.compilation_time_metrics if dynamo else {}
    # A backward pass is compiled in the first of these, with its forward pass, or when it is needed.
    phases = ("_compile.compile_inner", "backward._backward_impl")
    return sum(sum(spent.get(phase, ())) for phase in phases)


def keep_compiled_code() -> None:
    """Let torch.compile keep its code in the project's cache, not in a temporary directory.

    Call it before torch imports its compiler, which then chooses a directory. Raises ProblemsError: other
    accounts could write there what this one runs.
    """
    cache = durable_files.cache_directory()
    if cache.is_dir() and cache.stat().st_mode & stat.S_IWOTH:
        raise ProblemsError.of(
            "MEGARECIPES_CACHE",
            f"cache directory {cache}",
            "a run executes compiled code from there, and every account may write it",
            f"chmod o-w {cache}, or set MEGARECIPES_CACHE to another directory",
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled_code"))


def postpone_collections() -> None:
    """Switch Python's garbage collection off for the imports of libraries.

    They leave little of it, and make a million objects that every full collection looks through: without
    collections the imports of a run took 2.5 s instead of 3.6.
    """
    gc.disable()


def resume_collections() -> None:
    """Collect garbage again, but skip all present objects: libraries are never garbage."""
    gc.freeze()
    gc.enable()


def first_launcher() -> int:
    """Return the first launcher above this process, or this process itself."""
    first = above = os.getpid()
    while (parent := parent_of(above)) and LAUNCHER.match(command_of(parent)):
        first = above = parent
    return first


def started(pid: int) -> float | None:
    """Return the start of a process in seconds since the machine's; None if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None


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
        and LAUNCHER_VARIABLES & {*os.environ}
        and not re.search("torch|deepspeed", command_of(1))
    ):
        parent = 0  # it was killed already; unless it is a container's first process
    grandparent = (
        parent_of(parent) if "deepspeed.launcher.launch" in command_of(parent) else None
    )
    threading.Thread(
        target=_look_for_parents, args=(parent, grandparent), daemon=True
    ).start()


def _look_for_parents(parent: int, grandparent: int | None) -> None:
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
