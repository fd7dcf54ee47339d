"""A run on this rank without its loop: what is done around every step, and what stands next to training.

The loop is in launch/training/loop.py, or is `transformers.Trainer`'s
(launch/training/transformers_trainer.py). Both call `begin_step`, `begin_computing` and `end_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.corpus import Corpus
from data.loader import MicroBatch, StepBatches
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import ending, processes
from launch.ranks.meeting import Meeting
from launch.ranks.watchdog import Phase, Watchdog
from launch.records.facts import SilentRecorder, StepRecord
from launch.training.agreement import RankReports, StepReport, send_report
from launch.training.early_ends import (
    REASONS,
    BrokenData,
    EarlyEnd,
    EarlyStop,
    StopRequest,
)
from launch.training.engine import Forward, forward
from launch.training.job import Job
from launch.training.micro_batches import end_together, next_step
from modeling.parallel.process_grid import ProcessGrid

if TYPE_CHECKING:
    from launch.checkpoints.engine_state import EngineState

MONITOR = "DeepSpeed's monitor"


@dataclass(frozen=True)
class Start:
    """The facts of a run on which all ranks agreed before its start."""

    job: Job
    recorder: SilentRecorder
    corpus: Corpus
    grid: ProcessGrid
    checkpoint: Checkpoint | None = None
    meeting: Meeting | None = None  # of all ranks; None: no watchdog asks them

    @property
    def done(self) -> int:
        """The number of optimizer steps before the run starts."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def first(self) -> bool:
        """Whether the run has made no step of its own; a branch begins at one of another run's."""
        return self.done == self.job.plan.recipe.begins_after


class Callback(Protocol):
    """Something that a run may have next to training, made of the run before its first step.

    Its methods are collective. It ends the run by raising an EarlyEnd.
    """

    def after_step(self, record: StepRecord) -> None:
        """Follow a recorded step, of which `TrainingRun.reports` has what all ranks said."""

    def end(self, error: BaseException | None) -> None:
        """End, after all callbacks that come later in the list; `error`: what ended the training."""


class TrainingRun:
    """One run on this rank, under either loop. Its methods are collective.

    A context manager: it makes its callbacks, and ends them, the last one first.
    """

    def __init__(
        self,
        start: Start,
        engine: DeepSpeedEngine,
        stop: StopRequest,
        watchdog: Watchdog,
        begin: Callable[[TrainingRun], Sequence[Callback]],
        batches: StepBatches | None = None,
        forward: Forward = forward,
    ):
        """Take what a run is made of.

        `begin` prepares it for its first step, and returns its callbacks; `batches`: of this rank, after the
        checkpoint's step, None: Trainer makes them; `forward`: computes the loss.
        """
        self.start = start
        self.job = start.job
        self.recorder = start.recorder
        self.corpus = start.corpus
        self.grid = start.grid
        self.recipe = start.job.plan.recipe
        self.engine = engine
        self.batches: Any = batches
        self.forward = forward
        self.watchdog = watchdog
        self.done = start.done  # optimizer steps
        self.callbacks: Sequence[Callback] = ()
        self.reports: RankReports  # of the last step
        # what callbacks add: work before a step, and fields of this rank's `StepReport`
        self.before_step: list[Callable[[int], None]] = []
        self.reported: dict[str, Callable[[], bool]] = {}
        self._begin = begin
        self._stop = stop
        self._clock = ForwardClock(engine, watchdog.advance)
        self._unreadable: str | None = None  # why this rank cannot read the next step
        # wall time when the step began; seconds it waited for its batch
        self._began = self._waited = 0.0
        guarded = self.recorder.keeping(MONITOR)  # DeepSpeed's engine calls it too
        engine.monitor.write_events = guarded(engine.monitor.write_events)

    @cached_property
    def state(self) -> EngineState:
        """The engine's state in full precision."""
        from launch.checkpoints.engine_state import EngineState

        return EngineState(self.engine, self.grid)

    def __enter__(self) -> TrainingRun:
        self.callbacks = self._begin(self)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        self.watchdog.enter(Phase.SAVING)
        try:
            self._end(error)
        except EarlyEnd as bad:
            if error is None:
                self._end(bad)
            raise

    def _end(self, error: BaseException | None) -> None:
        for callback in reversed(self.callbacks):
            callback.end(error)

    def begin_step(self, step: int) -> None:
        """Begin a step by its wait for data."""
        for work in self.before_step:
            work(step)
        self.watchdog.enter(Phase.DATA, step)
        self._began = time.perf_counter()

    def begin_computing(self) -> None:
        """End the step's wait for its batch."""
        self._waited = time.perf_counter() - self._began
        self.watchdog.enter(Phase.COMPUTING)

    def end_step(
        self, step: int, read_outcome: Callable[[], StepRecord]
    ) -> EarlyStop | None:
        """Record a step and call all callbacks; return the early stop that was asked for.

        The ranks report to each other while a GPU still computes; `read_outcome` waits for it. Raises an
        EarlyEnd of a callback, or BrokenData if a rank cannot read the next step.
        """
        waited = self._waited + self._fetch_next(step)
        hear_reports = self._send_report(waited)
        outcome = read_outcome()
        seconds = time.perf_counter() - self._began
        self.watchdog.enter(Phase.COMPUTED)
        self.reports = reports = hear_reports()
        self.watchdog.enter(Phase.RECORDING)
        record = replace(
            outcome, seconds=seconds, data_seconds=waited, **reports.rank_seconds
        )
        self.recorder.step(record)
        self.done = step
        for callback in self.callbacks:
            callback.after_step(record)
        if step == self.recipe.steps:
            return None
        if reports.stopped:
            return EarlyStop(reports.stopped, step, self.recipe.steps)
        if reports.unreadable:
            end_together(self._unreadable, self.grid.control_group)
        return None

    def _fetch_next(self, step: int) -> float:
        """Fetch the step after `step` of a stream, while a GPU computes; return the seconds of waiting."""
        started = time.perf_counter()
        if self.batches is not None and step < self.recipe.steps:
            with self.watchdog.aside(Phase.DATA):
                self._unreadable = self.batches.fetch()
        return time.perf_counter() - started

    def _send_report(self, waited: float) -> Callable[[], RankReports]:
        """Send this rank's report of a step, whose data took `waited` seconds.

        A later request to stop is heard at the end of the next step.
        """
        with self.watchdog.aside(Phase.RECORDING):
            stop = REASONS.index(self._stop.look())
        seconds = waited + self._clock.take()
        more = {field: read() for field, read in self.reported.items()}
        own = StepReport(stop, seconds, self._unreadable is not None, **more)
        return send_report(own, self.grid.control_group)

    def next_step(self) -> int | None:
        """Return the sum of the next step's batch and dropout; None where it cannot be read."""
        # no stream has to answer for the last checkpoint
        if self.done < self.recipe.steps or self.corpus.train.random_access:
            return next_step(self.job.plan, self.batches, self.grid, self.done)
        return None


class ForwardClock:
    """Measure the forward passes of training; call `on_pass` after every pass.

    Each pass has two marks: events on an accelerator's stream, without waiting for it, or times on a CPU.
    """

    def __init__(
        self, engine: DeepSpeedEngine, on_pass: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._on_pass = on_pass
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
            seconds: float = sum(end - begin for begin, end in pairs)
            return seconds
        # mostly done: the step has waited for its norm
        if pairs and not pairs[-1][1].query():
            pairs[-1][1].synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in pairs)
        return milliseconds / 1000

    def _end(self, *_: Any) -> None:
        self._mark()
        self._on_pass()

    def _mark(self) -> None:
        if self._engine.module.training:
            mark: Any = time.perf_counter()
            if self._on_stream:
                mark = get_accelerator().Event(enable_timing=True)
                mark.record()
            self._marks.append(mark)


def run_watchdog(start: Start) -> AbstractContextManager[Watchdog]:
    """Run this rank's watchdog during the block."""
    return Watchdog(
        start.job.directory, start.job.plan.recipe.run.hang_after, start.meeting
    ).running()


def next_batch(batches: StepBatches) -> list[MicroBatch]:
    """Return the micro-batches of the next step. Raises Failed if this rank cannot make them."""
    try:
        return next(batches)
    except (MemoryError, BrokenData):  # out of memory; an end on which all ranks agreed
        raise
    # of threads, tokenizers, file systems, networks: each has its own
    except Exception as e:
        if ending.lost_peers(e):
            raise
        what = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ending.Failed(
            f"there is no batch for step {batches.step + 1}: {what}\nWhat a run reads must stay as it is, "
            "and readable, until it ends; --resume continues from the newest complete checkpoint"
        ) from e


def checksum(corpus: Corpus) -> str:
    """Return the checksum of the training tokens; of a stream, of its head."""
    return str(corpus.summary["train_tokens_crc32"])


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
