"""A run on this rank without its loop: the start, records, validations and saves.

The loop is in launch/training/loop.py, or is `transformers.Trainer`'s
(launch/training/transformers_trainer.py). Both call `fetch_next`, `exchange`, `news`, `record`,
`save_if_due`, `validate_if_due` and `end_if_due` after every step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.corpus import Corpus
from data.loader import MicroBatch, StepBatches, validation_batches
from data.samples.fields import HeldOut
from data.text.documents import SkippedRecords
from ds_configs.plan import Plan
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.saving import Saver
from launch.ranks import ending, processes
from launch.ranks.meeting import Meeting
from launch.ranks.watchdog import Phase, Watchdog
from launch.records.facts import SilentRecorder, StepRecord, Validation, finite
from launch.training.agreement import StepExchange, StepNews, StepReport
from launch.training.early_ends import (
    REASONS,
    BrokenData,
    Corrupted,
    Diverged,
    EarlyStop,
    FigureBounds,
    NotSavedError,
    SkipCounter,
    StopRequest,
)
from launch.training.engine import (
    Forward,
    end_monitors,
    forward,
    sample_loss,
    short_sample,
    validate,
)
from launch.training.job import Job
from launch.training.micro_batches import end_together, next_step
from launch.training.number_watch import NumberWatch
from modeling.parallel.process_grid import ProcessGrid

if TYPE_CHECKING:
    from launch.checkpoints.manifest import KnownLoss

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


class TrainingRun:
    """One run on this rank, under either loop. Its methods are collective.

    A context manager: if the loss is lost, it waits for the checkpoint that is being written; if the next
    step's data cannot be read, it saves the last step.
    """

    def __init__(
        self,
        start: Start,
        engine: DeepSpeedEngine,
        batches: StepBatches,
        stop: StopRequest,
        watchdog: Watchdog,
        forward: Forward = forward,
    ):
        """Load the checkpoint into the engine, or validate the initial weights.

        `batches`: of this rank, after the checkpoint's step; `forward`: computes the loss.
        """
        self.job = job = start.job
        self.recorder = recorder = start.recorder
        self.corpus = corpus = start.corpus
        self.grid = grid = start.grid
        self.recipe = job.plan.recipe
        self.engine = engine
        self.batches = batches
        self.forward = forward
        self.stop = stop
        self.watchdog = watchdog
        if engine.monitor.enabled:  # DeepSpeed's engine calls it too
            keeping = recorder.keeping(MONITOR)
            engine.monitor.write_events = keeping(engine.monitor.write_events)
        self.clock = ForwardClock(engine, watchdog.advance)
        self.held_out = held_out_batches(corpus.validation, job.plan, grid)
        self.skipped = SkipCounter(job.plan.precision)
        self.start_step = self.done = self.saved = start.done
        self._sample = short_sample(corpus.validation, self.recipe)
        self._saved_at = time.monotonic()  # when the last save began
        self._unreadable: str | None = None  # why this rank cannot read the next step
        self._reported: set[str] = set()  # broken records that were already named
        self.state = EngineState(engine, grid)
        self.saver = Saver(self.state, job.plan, grid, job.checkpoints, recorder)
        if start.checkpoint:
            from launch.checkpoints import reading

            reading.load(self.state, start.checkpoint)
            self._prove(start.checkpoint, weights=False)
        elif job.initial_weights:
            given = job.initial_weights.checkpoint()
            if given:
                self._prove(given, weights=True)
        if start.first:
            recorder.validation(self.done, self.validate(self.held_out))
        recorder.mark("weights")
        self.bounds = FigureBounds(recorder.say)
        self.watch: NumberWatch | None = None
        if self.recipe.run.check_every != 0:
            self.watch = NumberWatch(
                self.state, batches, grid, self.recipe, self.done, recorder.say
            )
        self._profiler: Any = None
        if self.recipe.run.profile:
            from launch.training.profiling import StepProfiler  # with torch's profiler

            steps = self.recipe.run.profiled
            folder = job.directory / "profile"
            self._profiler = StepProfiler(engine, steps, grid, folder)
            self._profiler.begin(self.done + 1)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        self.watchdog.enter(Phase.SAVING)
        # On all ranks alike.
        if isinstance(error, BrokenData) and self.done > self.saved:
            self._save(self.done)
        if isinstance(error, Diverged | BrokenData | Corrupted):
            self.saver.finish()
        if isinstance(error, Diverged) and self.watch:
            # a flipped bit may be the cause
            self.watch.check(self.done + 1, again=True)
        if isinstance(error, BrokenData):
            kept = (
                f"the run is saved after step {self.done}"
                if self.done
                else "no step was made"
            )
            if self.saver.problem:
                kept = f"the state after step {self.done} could not be saved: {self.saver.problem}"
            error.advice = (
                f"{kept}; once that is done, the same command with --resume continues"
            )
        with self.recorder.keeping(MONITOR):
            end_monitors(self.engine)

    def fetch_next(self, step: int) -> float:
        """Fetch the step after `step` of a stream, while a GPU computes; return the seconds of waiting."""
        started = time.perf_counter()
        if step < self.recipe.steps:
            with self.watchdog.aside(Phase.DATA):
                self._unreadable = self.batches.fetch()
        return time.perf_counter() - started

    def exchange(self, waited: float) -> StepExchange:
        """Send this rank's report of a step to the others; it `waited` so many seconds for data.

        A later request to stop is heard at the end of the next step.
        """
        with self.watchdog.aside(Phase.RECORDING):
            stop = REASONS.index(self.stop.look())
        every = self.recipe.run.save_every_minutes
        overdue = every is not None and time.monotonic() - self._saved_at >= 60 * every
        seconds = waited + self.clock.take()
        unreadable = self._unreadable is not None
        own = StepReport(stop, seconds, unreadable, self.saver.written, overdue)
        return StepExchange(own, self.grid.control_group)

    def news(self, exchange: StepExchange) -> StepNews:
        """Wait for the reports of all ranks, after this one has the outcome of its step."""
        self.watchdog.enter(Phase.COMPUTED)
        return exchange.wait()

    def record(
        self,
        outcome: StepRecord,
        seconds: float,
        waited: float,
        ranks: Mapping[str, Any],
    ) -> None:
        """Record and check an optimizer step. Raises Diverged or Corrupted.

        `outcome`: the engine's figures; `seconds`: wall time, with the seconds `waited` for the batch;
        `ranks`: `StepNews.rank_seconds`.
        """
        self.watchdog.enter(Phase.RECORDING)
        record = replace(outcome, seconds=seconds, data_seconds=waited, **ranks)
        step = record.step
        self.recorder.step(record)
        self._monitor(
            "train", record, lr=record.lr, grad_norm=record.grad_norm, seconds=seconds
        )
        if self._profiler:
            for problem in self._profiler.end(step):
                self.recorder.say(f"WARNING: no trace of a rank: {problem}")
        self.done = step
        self.skipped.see(record)
        self.bounds.see(record)
        self.job.after_step(self, record)
        if self.watch:
            self.watch.check_if_due(step)

    def _monitor(
        self, group: str, outcome: StepRecord | Validation, **more: float | None
    ) -> None:
        """Give finite values to DeepSpeed's monitor, which has the rate alone by itself."""
        monitor = self.engine.monitor
        if monitor.enabled:
            values = {"loss": outcome.loss, **outcome.parts, **more}
            at = self.engine.global_samples
            known = (
                (f"{group}/{name}", finite(value), at) for name, value in values.items()
            )
            monitor.write_events([event for event in known if event[1] is not None])

    def validate_if_due(self, step: int) -> None:
        """Validate every run.validate_every steps and after the last, followed by the test split."""
        self.watchdog.enter(Phase.VALIDATING)
        last = step == self.recipe.steps
        if not (last or due(step, self.recipe.run.validate_every)):
            return
        found = self.validate(self.held_out)
        self.recorder.validation(step, found)
        self._monitor("validation", found)
        if last and self.corpus.test is not None:
            tested = held_out_batches(self.corpus.test, self.job.plan, self.grid)
            self.recorder.validation(step, self.validate(tested), "test")
        if self.corpus.skipped:
            self._report_skipped_records()

    def save_if_due(self, step: int, news: StepNews) -> None:
        """Save every run.save_every steps and run.save_every_minutes, at the end and at a stop.

        Training goes on while files are written; at its end it waits for the disk, before anything that may
        fail.
        """
        last = step == self.recipe.steps
        run = self.recipe.run
        self.watchdog.enter(Phase.SAVING)
        if news.written:
            self.saver.complete()
        if (
            news.stopped
            or (last and run.save_last)
            or due(step, run.save_every)
            or news.overdue
        ):
            self._save(step)
        elif last and self.watch:
            self.watch.check(step, again=True)
        if news.stopped or last:
            self.saver.finish()

    def end_if_due(self, step: int, news: StepNews) -> EarlyStop | None:
        """Return the early stop that was asked for.

        Raises NotSavedError if the last checkpoint could not be written, BrokenData if a rank cannot read the
        next step, Diverged if the last loss is far above the first.
        """
        if self.saver.problem and (news.stopped or step == self.recipe.steps):
            raise NotSavedError(self.saver.problem)
        if step == self.recipe.steps:
            self.bounds.check_end()
        if step < self.recipe.steps and news.stopped:
            return EarlyStop(news.stopped, step, self.recipe.steps)
        if step < self.recipe.steps and news.unreadable:
            end_together(self._unreadable, self.grid.control_group)
        if self._profiler:
            self._profiler.begin(step + 1)
        return None

    def _save(self, step: int) -> None:
        progress = replace(self.state.progress(), step=step)
        self.saver.save(
            progress,
            self.batches.state(),
            checksum(self.corpus),
            self._known_loss,
            self._next_step(),
        )
        if self.watch:
            try:
                # after the copy, which is sound if the state still is
                self.watch.check(step, again=True)
            except Corrupted:
                self.saver.discard()
                raise
        self.saved = step
        self._saved_at = time.monotonic()

    def _next_step(self) -> int | None:
        # no stream has to answer for the last checkpoint
        if self.done < self.recipe.steps or self.corpus.train.random_access:
            return next_step(self.job.plan, self.batches, self.grid, self.done)
        return None

    def _known_loss(self) -> KnownLoss | None:
        loss = finite(self._sample_loss(self._sample))
        batch = {name: values.tolist() for name, values in self._sample.items()}
        if loss is None:
            return None
        from launch.checkpoints.manifest import KnownLoss

        return KnownLoss(loss, self.job.plan.precision, batch)

    def _sample_loss(self, sample: MicroBatch) -> float:
        return sample_loss(
            self.engine, sample, self.grid, self.forward, compiled=self.job.compiled
        )

    def _prove(self, checkpoint: Checkpoint, *, weights: bool) -> None:
        """Prove that the engine holds what was read of a checkpoint. Raises FileError on all ranks."""
        from launch.checkpoints import proof

        sample = proof.ProofSample(
            self.recipe,
            self.job.plan.precision,
            self._sample,
            self._sample_loss,
            self._next_step,
        )
        proof.check(self.state, checkpoint, sample, self.recorder.say, weights=weights)

    def _report_skipped_records(self) -> None:
        """Name the broken stream records that were skipped on any rank since the last call."""
        own = [each for skipped in self.corpus.skipped for each in skipped.found()]
        found = sorted(processes.texts_of_all(own, self.grid.control_group))
        new = [each for each in found if each not in self._reported]
        if new:
            self._reported.update(new)
            self.recorder.say(
                f"data.broken_records=skip: {SkippedRecords.describe(new)}"
            )

    def validate(self, held_out: Sequence[Sequence[MicroBatch]]) -> Validation:
        return validate(self.engine, held_out, self.grid, self.forward)


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
            on_stream = (
                get_accelerator().Event(enable_timing=True) if self._on_stream else None
            )
            self._marks.append(on_stream or time.perf_counter())
            if on_stream:
                on_stream.record()


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


def held_out_batches(
    samples: HeldOut, plan: Plan, grid: ProcessGrid
) -> Sequence[Sequence[MicroBatch]]:
    """Return this rank's batches of a held-out split."""
    layout = plan.layout
    # No more micro-batches than the samples fill: a validation step may be shorter than a training step.
    passes = min(
        layout.accumulation, math.ceil(len(samples) / (layout.micro * layout.dp))
    )
    return validation_batches(samples, layout.micro, passes, layout.dp, grid.at.dp)


def checksum(corpus: Corpus) -> str:
    """Return the checksum of the training tokens; of a stream, of its head."""
    return str(corpus.summary["train_tokens_crc32"])


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
