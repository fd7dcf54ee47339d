"""Seconds of the parts of a step, for those steps in which somebody asks for them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "optimizer")


class Clock:
    """Adds up seconds by phase while it is `running`: then it waits for a GPU at each end of a phase."""

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
        """`function`, whose calls belong to `phase`."""

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            with self(phase):
                return function(*args, **keywords)

        return call

    def take(self) -> dict[str, float]:
        """What was added up since the last call."""
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
