"""When a run saves its checkpoints."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from launch.checkpoints.saving import Saver
from launch.ranks.watchdog import Phase
from launch.records.facts import StepRecord
from launch.training.early_ends import BrokenData, Corrupted, Diverged, NotSavedError
from launch.training.run import TrainingRun, checksum, due
from launch.training.validations import Validations

if TYPE_CHECKING:
    from launch.training.number_watch import NumberWatch


class SaveSchedule:
    """When a run saves: every run.save_every steps and run.save_every_minutes, at its end and at a stop."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._began = time.monotonic()  # the last save, or the run
        run.reported["overdue"] = self._overdue

    def _overdue(self) -> bool:
        minutes = self._run.recipe.run.save_every_minutes
        return minutes is not None and time.monotonic() - self._began >= 60 * minutes

    def begins(self, step: int) -> bool:
        """Decide whether all ranks save after a step, from which the minutes then count."""
        recipe = self._run.recipe
        reports = self._run.reports
        last = step == recipe.steps and recipe.run.save_last
        asked = bool(reports.stopped) or reports.overdue
        begins = last or asked or due(step, recipe.run.save_every)
        if begins:
            self._began = time.monotonic()
        return begins


class Saves:
    """The checkpoints of a run.

    Training goes on while files are written; at its end it waits for the disk, before anything that may fail.
    """

    def __init__(
        self, run: TrainingRun, validations: Validations, watch: NumberWatch | None
    ) -> None:
        self._run = run
        self._known_loss = validations.known_loss
        self._watch = watch
        self._schedule = SaveSchedule(run)
        self._saved = run.done
        job = run.job
        self.saver = Saver(run.state, job.plan, run.grid, job.checkpoints, run.recorder)
        run.reported["written"] = lambda: self.saver.written

    def after_step(self, record: StepRecord) -> None:
        reports = self._run.reports
        step = record.step
        last = step == self._run.recipe.steps
        self._run.watchdog.enter(Phase.SAVING)
        if reports.written:
            self.saver.complete()
        if self._schedule.begins(step):
            self._save()
        elif last and self._watch:
            self._watch.check(step, again=True)
        if reports.stopped or last:
            self.saver.finish()

    def end(self, error: BaseException | None) -> None:
        """Save the last step if the next one cannot be read; wait for the disk if the loss is lost.

        Raises NotSavedError if the last checkpoint could not be written.
        """
        done = self._run.done
        if error is None and self.saver.problem:
            raise NotSavedError(self.saver.problem)
        if isinstance(error, BrokenData) and done > self._saved:
            self._save()
        if isinstance(error, Diverged | BrokenData | Corrupted):
            self.saver.finish()
        if isinstance(error, BrokenData):
            kept = f"the run is saved after step {done}" if done else "no step was made"
            if self.saver.problem:
                kept = f"the state after step {done} could not be saved: {self.saver.problem}"
            error.advice = (
                f"{kept}; once that is done, the same command with --resume continues"
            )

    def _save(self) -> None:
        run = self._run
        progress = replace(run.state.progress(), step=run.done)
        data = run.batches.state()
        corpus = checksum(run.corpus)
        self.saver.save(progress, data, corpus, self._known_loss, run.next_step())
        if self._watch:
            try:
                # after the copy, which is sound if the state still is
                self._watch.check(run.done, again=True)
            except Corrupted:
                self.saver.discard()
                raise
        self._saved = run.done
