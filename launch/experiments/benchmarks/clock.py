"""Clock for the phases of a training step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator

PHASES = ("data", "forward", "backward", "optimizer")


class Clock:
    """Sum of seconds by phase while `running`; waits for the GPU at both ends of a phase."""

    def __init__(self) -> None:
        self.running = False
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self.running:
            yield
            return
        started = now()
        yield
        self._seconds[phase] += now() - started

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its calls count as `phase`."""

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            with self(phase):
                return function(*args, **keywords)

        return call

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


def now() -> float:
    """Return the time in seconds, after the GPU has finished its work."""
    get_accelerator().synchronize()
    return time.perf_counter()
