"""How fast checkpoints are saved and loaded, next to what the disk itself does."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

BLOCK = 2**24  # bytes of a raw write or read
MOST_RAW = 2**32  # of a raw file, whose seconds stand for more


def measure(system: Any, folder: str, times: int) -> dict[str, Any]:
    """Save and load the engine's state so many times. Collective; the numbers are rank 0's.

    Returns:
        bytes: of a checkpoint; blocked, saved: seconds for which training waited, and until it was whole;
            checked, loaded: seconds of the checksums that --resume compares, and of reading it into the
            engine, from the disk as far as it can be told to forget; written, read: of a raw file of as many
            bytes, flushed.
    """
    import torch.distributed as dist

    from launch.checkpoints import reading
    from launch.checkpoints import run_checkpoints as checkpoint
    from launch.checkpoints.engine_state import EngineState
    from launch.checkpoints.manifest import Progress
    from launch.checkpoints.saving import Saved, Saver

    heard: list[Saved] = []

    class Listener:
        def say(self, text: str) -> None: ...

        def saved(self, saved: Saved) -> None:
            heard.append(saved)

    data = system.data
    state, root = EngineState(system.engine, data.grid), Path(folder) / "checkpoints"
    saver = Saver(state, data.plan, data.grid, root, Listener())
    found: dict[str, Any] = {"checked": [], "loaded": [], "written": [], "read": []}
    for number in range(1, times + 1):
        saver.save(Progress(number, state.adam_steps, number, 0, state.scaler()), data.batches.state(), None)
        saver.finish()
        if saver.problem:
            raise ValueError(f"the checkpoint could not be saved: {saver.problem}")
        directory = checkpoint.directory_of(root, number)
        forget(directory)
        started = time.perf_counter()
        chosen = reading.choose(root, data.grid, None).checkpoint
        found["checked"].append(time.perf_counter() - started)
        assert chosen is not None
        forget(directory)
        started = time.perf_counter()
        reading.load(state, chosen)
        found["loaded"].append(time.perf_counter() - started)
        if data.grid.rank == 0:
            write, read = raw_seconds(root / "raw", heard[-1].bytes)
            found["written"].append(write)
            found["read"].append(read)
            shutil.rmtree(directory)
        dist.barrier(group=data.grid.control_group)
    of = {"blocked": [s.blocking_seconds for s in heard], "saved": [s.seconds for s in heard]}
    return {"bytes": heard[-1].bytes, **of, **found}


def forget(directory: Path) -> None:
    """Have the system drop what it keeps of these files in memory, as far as it does."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_seconds(path: Path, size: int) -> tuple[float, float]:
    """Seconds to write and flush a file of so many bytes, and to read it from the disk."""
    scale, size = size / min(size, MOST_RAW), min(size, MOST_RAW)
    block, left = memoryview(os.urandom(min(BLOCK, size))), size
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(block[:left])
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    forget_one = getattr(os, "posix_fadvise", None)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        if forget_one:
            forget_one(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        into = bytearray(len(block))
        while file.readinto(into):
            pass
    read = time.perf_counter() - started
    path.unlink()
    return scale * written, scale * read
