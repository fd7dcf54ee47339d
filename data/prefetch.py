"""Results computed ahead of their use by threads, and handed out in order.

Threads share mapped files and tokenizers, so nothing is copied; tokenizers release Python's lock.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
JOIN_TIMEOUT_S = 5.0  # for a thread that waits for the network


class Prefetcher(Generic[T]):
    """Iterator over produce(start), produce(start + 1), ...; threads work up to `depth` results ahead.

    Where a call fails, its `next` and all later ones raise the error. One thread makes the calls in order.
    The threads end with `close`, with the object or with the interpreter.
    """

    def __init__(
        self,
        produce: Callable[[int], T],
        start: int,
        threads: int,
        depth: int | None = None,
        prepare: Callable[[], None] = lambda: None,
    ):
        """Start the threads.

        Args:
            produce: must hold neither this object nor its owner; else neither can be freed.
            depth: results to keep ready; by default one more than threads.
            prepare: called once in every thread.
        """
        running: list[threading.Thread] = []
        failed: list[int] = []

        def begin() -> None:
            running.append(threading.current_thread())
            prepare()

        def produce_until_one_fails(number: int) -> T:
            if failed and number > min(failed):  # a failed reader cannot continue
                raise CancelledError
            try:
                return produce(number)
            except BaseException:
                failed.append(number)
                raise

        def end() -> None:
            pool.shutdown(wait=False, cancel_futures=True)
            for thread in running:
                if thread is not threading.current_thread():
                    thread.join(JOIN_TIMEOUT_S)

        self._produce, self._following = produce_until_one_fails, start
        self._pool = pool = ThreadPoolExecutor(threads, "loader-", begin)
        self._results: deque[Future[T]] = deque()
        for _ in range(depth or threads + 1):
            self._submit()
        self._finalizer = weakref.finalize(self, end)

    def _submit(self) -> None:
        self._results.append(self._pool.submit(self._produce, self._following))
        self._following += 1

    def next(self) -> T:
        """Wait for the next result.

        Raises RuntimeError: `close` was called.
        """
        try:
            if not self._finalizer.alive:
                raise CancelledError
            value = self._results[0].result()
        except CancelledError:
            raise RuntimeError("the loader is closed") from None
        self._results.popleft()
        self._submit()
        return value

    def close(self) -> None:
        self._finalizer()
