"""Worker processes that take chunks; the main process frames while they work."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

from data.prepare import fork_server
from data.prepare.inputs import Chunk
from data.prepare.settings import PreparationFailed
from data.prepare.work import Done, Plan, Worker, answer, begin


class WorkerDied(PreparationFailed):
    """A worker process ended without an answer."""

    exit_code = 1


def run(plan: Plan, chunks: Iterator[Chunk], workers: int, on_done: Callable[[Done], None]) -> None:
    """Have every chunk processed and committed; at most one chunk per worker is framed ahead.

    Args:
        workers: processes; 0: this one does the work, for a debugger.

    Raises:
        WorkerDied: a worker was killed, as happens when memory runs out.
        Exception: what a step, the framing or `on_done` raised.
    """
    if not workers:
        worker = Worker(plan)
        for chunk in chunks:
            on_done(worker.answer(chunk))
        return
    # Workers read the plan, megabytes, from a file: by a pipe each would be given it after the one before.
    path = plan.directory / "plan.pickle"
    path.write_bytes(pickle.dumps(plan))
    fork_server.start()
    # Threads of tokenizers and torch do not survive a fork.
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, initializer=begin, initargs=(path,))
    team: list[BaseProcess] = []
    running: set[Future[Done]] = set()
    try:
        more = True
        while more or running:
            framing = more and len(running) < 2 * workers
            done, running = wait(running, 0 if framing else None, FIRST_COMPLETED)
            for future in done:
                on_done(future.result())
            if framing:
                if more := (following := next(chunks, None)) is not None:
                    running.add(pool.submit(answer, following))
                team = team or list(multiprocessing.active_children())
        pool.shutdown()
    except BrokenProcessPool:
        for process in team:
            process.join()  # the pool ends the others by SIGTERM
        codes = [process.exitcode or 0 for process in team if process.exitcode not in (0, -signal.SIGTERM)]
        how = " and ".join(f"signal {-code}" if code < 0 else f"code {code}" for code in codes) or "signal 15"
        fix = "if memory ran out (signal 9), the same command with fewer --workers resumes from here"
        raise WorkerDied(f"a worker process ended with {how}; {fix}") from None
    finally:  # nothing waits for the work of a run that ends early
        pool.shutdown(wait=False, cancel_futures=True)
        for process in team:
            process.kill()
