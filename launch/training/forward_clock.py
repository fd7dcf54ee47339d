"""A clock of this rank's forward passes, on its accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from launch.ranks import processes


class ForwardClock:
    """Measure the forward passes of training; call `on_pass` after every pass.

    Each pass has two marks: events on an accelerator's stream, without waiting for it, or times on a CPU.
    """

    def __init__(self, engine: DeepSpeedEngine, on_pass: Callable[[], None] = lambda: None) -> None:
        self._engine, self._on_pass = engine, on_pass
        self._on_stream = processes.device().own_memory
        self._marks: list[Any] = []  # begin, end, begin, end, ...
        # The pipeline's engine calls its module. Hooks of a plain module would be compiled with it.
        called = engine.module if isinstance(engine, PipelineEngine) else engine
        called.register_forward_pre_hook(lambda *_: self._mark())
        called.register_forward_hook(self._end)

    def take(self) -> float:
        """Return the seconds of the passes since the last call."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        self._marks = []
        if not self._on_stream:
            return sum(end - begin for begin, end in pairs)
        if pairs and not pairs[-1][1].query():  # mostly done: the step has waited for its norm
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000

    def _end(self, *_: Any) -> None:
        self._mark()
        self._on_pass()

    def _mark(self) -> None:
        if self._engine.module.training:
            on_stream = get_accelerator().Event(enable_timing=True) if self._on_stream else None
            self._marks.append(on_stream or time.perf_counter())
            if on_stream:
                on_stream.record()
