"""Worker processes that take chunks; the main process frames while they work."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from data.prepare.inputs import Chunk
from data.prepare.work import Done, Plan, Worker, serve

PATIENCE_S = 5.0  # for workers to end by themselves


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""


def run(plan: Plan, chunks: Iterator[Chunk], workers: int, on_done: Callable[[Done], None]) -> None:
    """Has every chunk processed and committed; at most one chunk per worker is framed ahead.

    Args:
        workers: processes; 0: this one does the work, for a debugger.

    Raises:
        WorkerDied: a worker was killed, as happens when memory runs out.
        Exception: what a step, the framing or `on_done` raised.
    """
    if not workers:
        worker = Worker(plan)
        for chunk in chunks:
            on_done(Done(chunk.number, worker.process(chunk), chunk.progress, 0, 0.0))
        return
    with _started(plan, workers) as team:
        idle, busy = list(team), set[Connection]()
        ready: deque[Chunk] = deque()
        more = True
        while more or ready or busy:
            framing = more and len(ready) < workers
            for connection in wait(list(busy), timeout=0 if framing else None) if busy else ():
                assert isinstance(connection, Connection)
                on_done(_answer(connection, team[connection]))
                busy.remove(connection)
                idle.append(connection)
            while idle and ready:
                connection = idle.pop()
                _send(connection, ready.popleft(), team[connection])
                busy.add(connection)
            if framing:
                chunk = next(chunks, None)
                more = chunk is not None
                if chunk is not None:
                    ready.append(chunk)


@contextmanager
def _started(plan: Plan, workers: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Workers by their connection. They end when it closes, even if this process is killed."""
    # Not by fork: the tokenizers' and torch's threads do not survive it.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["data.prepare.work"])  # seconds of imports, once for all workers
    team: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, plan), daemon=True)
            process.start()
            theirs.close()
            team[ours] = process
        yield team
        for connection in team:
            connection.close()
        for process in team.values():
            process.join(PATIENCE_S)
    finally:
        for connection, process in team.items():
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join(PATIENCE_S)


def _send(connection: Connection, chunk: Chunk, process: BaseProcess) -> None:
    try:
        connection.send(chunk)
    except OSError:
        raise _died(process) from None


def _answer(connection: Connection, process: BaseProcess) -> Done:
    try:
        answer = connection.recv()
    except (EOFError, OSError):
        raise _died(process) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _died(process: BaseProcess) -> WorkerDied:
    process.join(PATIENCE_S)
    code = process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
    return WorkerDied(
        f"a worker process ended with {how}; if memory ran out (signal 9), the same command with fewer --workers goes on from here"
    )
