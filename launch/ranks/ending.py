"""The end of a process: refused, cleanly with the other ranks, or with the cause of a failure last."""

from __future__ import annotations

import contextlib
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
from launch.ranks import out_of_memory
from launch.ranks.processes import local_rank, rank, world_size
from recipes.problems import ProblemsError
from recipes.refused_by_system import problem, told_by

LOST_PEER = re.compile("Connection (closed|reset) by peer|Broken pipe|Timed out waiting|NCCL|gloo")
AFTER_STOP_REQUEST = "after_stop_request"  # attribute of an exception that a rank meets once asked to stop
LOST_RANKS = "lost_ranks"  # attribute of an exception over the end of others: what tells of these


class Failed(Exception):
    """A run fails for a reason that a sentence tells in full; on this rank, which says it. Exit code 1."""


def refuse(problem: object, code: int = 2) -> NoReturn:
    """Say what is wrong, once per machine since machines may differ, and end every rank with `code`."""
    explain(problem)
    raise SystemExit(code)


def explain(problem: object) -> None:
    """Print on the first rank of every machine; those other than rank 0 say which machine they are."""
    if local_rank() == 0:
        where = "" if rank() == 0 else f"on {socket.gethostname()}:\n"
        terminal.say(f"\n{where}{problem}\n", sys.stderr)


def keep_error(directory: Path, text: str) -> None:
    """Leave a failing rank's traceback in the run directory, where a closed terminal cannot lose it."""
    with contextlib.suppress(OSError):
        (directory / f"error-rank-{rank()}.txt").write_text(text)


@contextlib.contextmanager
def error_kept(directory: Path, but: type[Exception]) -> Iterator[None]:
    """Keep a failure of the block, `but` that kind, before what surrounds it cleans up, which may hang."""
    try:
        yield
    except Exception as e:
        if not isinstance(e, but) and not (world_size() > 1 and lost_peers(e)):
            keep_error(directory, "".join(traceback.format_exception(e)))
        raise


@contextlib.contextmanager
def out_of_memory_explained(advice: str) -> Iterator[None]:
    """Raise Failed with the advice, if there is any, where memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not advice or (said := out_of_memory.said_by(error)) is None:
            raise
        raise Failed(f"out of memory: {said}\n{advice}") from None


@contextlib.contextmanager
def clean_exit(note_failure: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Run the body, then end the process: 0 after a barrier, 1 with this rank's traceback last on the screen.

    Ends with os._exit: a gloo worker that frees a tensor while Python finalises aborts about one run in forty
    (torch 2.13; https://github.com/pytorch/pytorch/pull/179291, closed unmerged).
    `test_launchers.py::test_thirty_launches_end_with_0` holds it.
    """
    import torch.distributed as dist

    try:
        yield
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except ProblemsError as e:
        code = 2
        explain(e)
    except Failed as e:
        code = 1
        terminal.say(f"\nrank {rank()} of {world_size()} on {socket.gethostname()} failed:\n{e}", sys.stderr)
    except BaseException as e:
        code = 1
        _tell(e, note_failure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(error: BaseException, note_failure: Callable[[str], None]) -> None:
    """Leave this rank's traceback on the screen and with `note_failure`, unless another's end caused it."""
    text = "".join(traceback.format_exception(error))
    if world_size() > 1 and lost_peers(error):
        if getattr(error, AFTER_STOP_REQUEST, False):
            return
        # A consequence of another rank's end. Say nothing, so that the cause stays last on the screen, and
        # let the launcher end this process; speak up only if nothing does.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(20)
        note_failure(text)
        if tell_lost := getattr(error, LOST_RANKS, None):
            tell_lost()
            return
    note_failure(text)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun prints what is in there as the root cause
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if told := told_by(error):
        said = problem(told, Path.cwd(), "use another disk, with the run directory moved there")
        text = f"{said} (the traceback is in error-rank-{rank()}.txt of the run directory, if it took it)\n"
    print(f"\nrank {rank()} of {world_size()} failed:\n{text}", file=sys.stderr, flush=True)


def lost_peers(error: BaseException) -> bool:
    """Whether this rank fails over the end of another one."""
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None
    return lost and out_of_memory.said_by(error) is None  # NCCL may be what found no memory
