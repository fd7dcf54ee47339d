"""Work done ahead of its use by threads, handed out in order.

Threads and not processes: mapped files and tokenizers (which let go of Python's lock) are shared, and nothing is copied.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
JOIN_TIMEOUT_S = 5.0  # for a thread that waits for the network; it ends with the process


class InTurn(Generic[T]):
    """The same without threads: everything is made when it is asked for."""

    def __init__(self, produce: Callable[[int], T], start: int):
        self._produce, self._next = produce, start

    def next(self) -> T:
        value = self._produce(self._next)
        self._next += 1
        return value

    def close(self) -> None:
        """Nothing is running."""


class Prefetcher(Generic[T]):
    """`next` gives produce(start), produce(start + 1), ...; threads are up to `depth` of them ahead.

    An exception of `produce` is raised by the `next` whose turn it is, and by all later ones. With one thread the calls are
    made in order. Dropping the object, `close` and the interpreter's end all end the threads.
    """

    def __init__(
        self,
        produce: Callable[[int], T],
        start: int,
        threads: int,
        depth: int | None = None,
        prepare: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            produce: must not hold this object, nor what owns it; else neither can be dropped.
            depth: results that are kept ready; by default one more than there are threads.
            prepare: called once in every thread.
        """
        assert threads > 0
        self._queue: _Queue[T] = _Queue(start, depth or threads + 1)
        self._threads = [
            threading.Thread(
                target=_work, args=(self._queue, produce, prepare), name=f"loader-{i}", daemon=True
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue, self._threads)

    def next(self) -> T:
        return self._queue.get()

    def close(self) -> None:
        self._finalizer()


class _Queue(Generic[T]):
    """Results by number. A thread takes the next number that is not too far ahead."""

    def __init__(self, start: int, depth: int):
        self._changed = threading.Condition()
        self._wanted = self._unclaimed = start
        self._depth = depth
        self._results: dict[int, tuple[T | None, BaseException | None]] = {}
        self._closed = False

    def claim(self) -> int | None:
        """The number to work on; None: there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._unclaimed < self._wanted + self._depth)
            if self._closed:
                return None
            self._unclaimed += 1
            return self._unclaimed - 1

    def put(self, number: int, value: T | None, error: BaseException | None = None) -> None:
        with self._changed:
            self._results[number] = (value, error)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted in self._results)
            if self._closed:
                raise RuntimeError("the loader is closed")
            value, error = self._results[self._wanted]
            if error is not None:
                raise error
            del self._results[self._wanted]
            self._wanted += 1
            self._changed.notify_all()
            return value  # type: ignore[return-value]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._results.clear()
            self._changed.notify_all()


def _work(queue: _Queue[Any], produce: Callable[[int], Any], prepare: Callable[[], None]) -> None:
    prepared = False
    while (number := queue.claim()) is not None:
        try:
            if not prepared:
                prepare()
                prepared = True
            value = produce(number)
        except BaseException as error:
            queue.put(number, None, error)
            return  # a reader that failed has no defined place to go on from
        queue.put(number, value)


def _stop(queue: _Queue[Any], threads: list[threading.Thread]) -> None:
    queue.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(JOIN_TIMEOUT_S)
