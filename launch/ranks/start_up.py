"""Seconds from a run's launch to its first optimizer step, and what keeps them few."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import time
from pathlib import Path

from data import cache
from launch.ranks import orphans

# A command of deepspeed or torchrun: a program or a module of Python's, and no shell that was told to run it.
LAUNCHER = re.compile(
    r"(\S*python\S* (-\S+ )*)?(\S*/)?(deepspeed(\.launcher\.\w+)?|torchrun|torch\.distributed\.run)( |$)"
)


class StartClock:
    """Seconds since the launch, part by part, in the order in which they end.

    The launch is that of deepspeed or torchrun where one of them started this process on this machine.
    """

    def __init__(self) -> None:
        now, own = time.clock_gettime(time.CLOCK_BOOTTIME), started(os.getpid())
        launcher = started(first_launcher())
        own = now if own is None else own
        self.parts = {"launcher": own - (own if launcher is None else launcher), "compiling": 0.0}
        self._since, self._compiled = own, compiling_seconds()

    def mark(self, part: str) -> None:
        """Count the seconds since the last call as those of `part`, and what was compiled as "compiling"."""
        now, compiled = time.clock_gettime(time.CLOCK_BOOTTIME), compiling_seconds()
        passed, aside = now - self._since, 0.0 if part == "compiling" else compiled - self._compiled
        self.parts[part] = self.parts.get(part, 0.0) + passed - aside
        self.parts["compiling"] += aside
        self._since, self._compiled = now, compiled


def compiling_seconds() -> float:
    """Seconds that torch.compile has taken in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = dynamo.compilation_time_metrics if dynamo else {}
    # A backward pass is compiled in the first of these, with its forward pass, or when it is needed.
    return sum(sum(spent.get(phase, ())) for phase in ("_compile.compile_inner", "backward._backward_impl"))


def keep_compiled_code() -> None:
    """Let torch.compile keep its code with what else is prepared once, not in a temporary directory.

    Has to precede torch's import of its compiler, which settles on a directory.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.default_directory() / "compiled_code"))


def postpone_collections() -> None:
    """Have Python look for no garbage while libraries are imported.

    They leave little of it, and make a million objects that every full collection looks through: without
    collections the imports of a run took 2.5 s instead of 3.6.
    """
    gc.disable()


def resume_collections() -> None:
    """Collect garbage again, but look at nothing that is there now: libraries are never garbage."""
    gc.freeze()
    gc.enable()


def first_launcher() -> int:
    """The process that was typed to launch this one: a launcher above it, or else itself."""
    first = above = os.getpid()
    while (parent := orphans.parent_of(above)) and LAUNCHER.match(orphans.command_of(parent)):
        first = above = parent
    return first


def started(pid: int) -> float | None:
    """Seconds from the machine's start to that of the process; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None
