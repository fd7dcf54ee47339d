"""The end of a process: a refusal, a clean end with the other ranks, or a failure with its cause last.

Only rank 0 writes results, and where another rank runs out of memory the launcher ends rank 0, often in a
collective. So `error-rank-N.txt` tells it; the next launch into the directory removes that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from launch.console import terminal
from launch.ranks.processes import local_rank, rank, world_size
from recipes.problems import ProblemsError, system_error, system_problem

LEFT_PEER = re.compile("Connection (closed|reset) by peer|Broken pipe")
LOST_PEER = re.compile(f"{LEFT_PEER.pattern}|Timed out waiting|NCCL|gloo")
# attribute of an exception, with the `StopRequest` that it left
STOP_REQUEST = "stop_request"
# seconds that a launcher has, after another rank of the machine has refused, to end this one
LATER = 5.0
# torch on a GPU, cuBLAS, NCCL and pinned memory, torch and numpy on a CPU.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|(CUDA|Cuda|HIP)\b.*out of memory|"
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
)
ERROR_FILES = "error-rank-*.txt"
HANG_REPORT = "hang.txt"  # of a watchdog, in the run directory


class Failed(Exception):
    """A failure on this rank that needs one sentence and no traceback. Exit code 1."""


def refuse(problem: object, code: int = 2) -> NoReturn:
    """Print the problem once per machine, since machines may differ, and end this rank with `code`.

    A launcher ends all ranks with the first that ends: others than the machine's first one wait for that, and
    print the problem if it has not come.
    """
    if local_rank() != 0:
        time.sleep(LATER)
    explain(problem, everywhere=True)
    raise SystemExit(code)


def explain(problem: object, *, everywhere: bool = False) -> None:
    """Print the problem on the first rank of every machine, with the machine's name unless it is rank 0.

    `everywhere`: on this rank, whichever it is.
    """
    if everywhere or local_rank() == 0:
        where = "" if rank() == 0 else f"on {socket.gethostname()}:\n"
        terminal.say(f"\n{where}{problem}\n", sys.stderr)
        leave_to_torchrun(str(problem))


def leave_to_torchrun(said: str) -> None:
    """Let torchrun end its own traceback with the first line of what was said here."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and said.strip():
        line = said.strip().splitlines()[0]
        told = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}))


def keep_error(directory: Path, text: str) -> None:
    """Write a failing rank's traceback into the run directory, safe from a closed terminal."""
    with contextlib.suppress(OSError):
        (directory / f"error-rank-{rank()}.txt").write_text(text)


def forget_errors(directory: Path) -> None:
    """Remove the tracebacks of former launches' ranks, and what their watchdogs reported."""
    for pattern in (ERROR_FILES, HANG_REPORT, "hang-*rank-*", "stacks-rank-*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def keep_error_of_block(directory: Path, but: type[Exception]) -> Iterator[None]:
    """Keep the error of a failing block, `but` not that type, before a cleanup that may hang."""
    try:
        yield
    except Exception as e:
        if not isinstance(e, but) and not (world_size() > 1 and lost_peers(e)):
            keep_error(directory, "".join(traceback.format_exception(e)))
        raise


@contextlib.contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block into Failed with the advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = out_of_memory_said_by(error)
        if said is None:
            raise
        raise Failed(f"out of memory: {said}\n{advice}") from None


@contextlib.contextmanager
def clean_exit(
    note_failure: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """Run the body, then end the process: 0 after a barrier, 1 with this rank's traceback last on the screen.

    Ends with os._exit: a gloo worker that frees a tensor while Python finalises aborts about one run in forty
    (torch 2.13; https://github.com/pytorch/pytorch/pull/179291, unmerged; test_thirty_launches_end_with_0).
    """
    import torch.distributed as dist

    try:
        yield
        code = 0
        if dist.is_initialized():
            try:
                dist.barrier()
                dist.destroy_process_group()
            # a rank that is through may have closed its connections
            except RuntimeError as e:
                if not LEFT_PEER.search(str(e)):
                    raise
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except ProblemsError as e:
        code = 2
        explain(e)
    except Failed as e:
        code = 1
        terminal.say(
            f"\nrank {rank()} of {world_size()} on {socket.gethostname()} failed:\n{e}",
            sys.stderr,
        )
    except BaseException as e:
        code = 1
        _tell(e, note_failure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(error: BaseException, note_failure: Callable[[str], None]) -> None:
    """Print and note this rank's traceback, unless another rank's end caused it."""
    text = "".join(traceback.format_exception(error))
    if world_size() > 1 and lost_peers(error):
        # A consequence of another rank's end. Say nothing, so that the cause stays last on the screen, and
        # let the launcher or the lifeline end this process; speak up only if nothing does.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        request = getattr(error, STOP_REQUEST, None)
        if request and request.reason:
            return  # the launcher has asked already
        time.sleep(20)
    note_failure(text)
    # torchrun prints what is in there as the root cause
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    told = system_error(error)
    if told:
        said = system_problem(
            told, Path.cwd(), "use another disk, with the run directory moved there"
        )
        text = f"{said} (the traceback is in error-rank-{rank()}.txt of the run directory, if it took it)\n"
    print(
        f"\nrank {rank()} of {world_size()} failed:\n{text}",
        file=sys.stderr,
        flush=True,
    )


def lost_peers(error: BaseException) -> bool:
    """Check whether this rank fails because another one has ended."""
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None
    # NCCL may be what found no memory
    return lost and out_of_memory_said_by(error) is None


def out_of_memory_line(text: str) -> str | None:
    """Find the line of a traceback or message on an OOM, or None; indented source code does not count."""
    for each in text.splitlines():
        indented = not each[:1].strip()
        if not indented and OUT_OF_MEMORY.search(each):
            return each.strip()
    return None


def out_of_memory_said_by(error: BaseException) -> str | None:
    """Return the line of an exception that shows an OOM, or None."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    return out_of_memory_line(f"{type(error).__name__}: {error}")


def out_of_memory_reason(directory: Path) -> str | None:
    """Name the lowest rank with an OOM traceback, its line and the number of others, or None."""
    causes = []
    for path in directory.glob(ERROR_FILES):
        number = path.stem.rpartition("-")[2]
        with contextlib.suppress(OSError):
            said = out_of_memory_line(
                path.read_text(encoding="utf-8", errors="replace")
            )
            if said and number.isdecimal():
                causes.append((int(number), said))
    if not causes:
        return None
    first, said = min(causes)
    others = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"rank {first}: {said}{others}"
