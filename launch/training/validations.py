"""The held-out text of a run, and its losses by the engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from data.loader import MicroBatch, micro_batch, validation_batches
from data.samples.fields import HeldOut
from data.text.documents import SkippedRecords
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import processes
from launch.ranks.watchdog import Phase
from launch.records.facts import StepRecord, Validation, finite
from launch.training.engine import other_shape, validate
from launch.training.run import TrainingRun, due
from recipes.families import fields_of
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launch.checkpoints.manifest import KnownLoss

SAMPLE_POSITIONS = 32


class Validations:
    """The validations every run.validate_every steps and after the last, followed by the test split.

    Methods that return a loss are collective.

    Attributes:
        batches: of the validation split.
        sample: the first held-out sample as a micro-batch of one row; checkpoints keep its loss.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.batches = self._batches_of(run.corpus.validation)
        self._named: set[str] = set()  # broken records
        self.sample = short_sample(run.corpus.validation, run.recipe)

    def after_step(self, record: StepRecord) -> None:
        run = self._run
        step = record.step
        run.watchdog.enter(Phase.VALIDATING)
        last = step == run.recipe.steps
        if not (last or due(step, run.recipe.run.validate_every)):
            return
        losses = self.measure(self.batches)
        run.recorder.validation(step, losses)
        if run.engine.monitor.enabled:
            from launch.training import monitor

            monitor.write(run, "validation", losses)
        if last and run.corpus.test is not None:
            losses = self.measure(self._batches_of(run.corpus.test))
            run.recorder.validation(step, losses, "test")
        if run.corpus.skipped:
            self._name_skipped_records()

    def end(self, error: BaseException | None) -> None: ...

    def _name_skipped_records(self) -> None:
        """Name the broken stream records that were skipped on any rank since the last call."""
        run = self._run
        own = list[str]()
        for skipped in run.corpus.skipped:
            own += skipped.found()
        told = processes.texts_of_all(own, run.grid.control_group)
        new = sorted(set(told) - self._named)
        if new:
            self._named.update(new)
            run.recorder.say(
                f"data.broken_records=skip: {SkippedRecords.describe(new)}"
            )

    def _batches_of(self, samples: HeldOut) -> list[list[MicroBatch]]:
        """Return this rank's batches of a split."""
        layout = self._run.job.plan.layout
        # No more micro-batches than the samples fill: a validation step may be shorter than a training step.
        filled = math.ceil(len(samples) / (layout.micro * layout.dp))
        passes = min(layout.accumulation, filled)
        dp_rank = self._run.grid.at.dp
        return validation_batches(samples, layout.micro, passes, layout.dp, dp_rank)

    def measure(self, batches: Sequence[Sequence[MicroBatch]]) -> Validation:
        """Return the mean losses of these batches of a split."""
        run = self._run
        return validate(run.engine, batches, run.grid, run.forward)

    def sample_loss(self, sample: MicroBatch) -> float:
        """Return the loss of a micro-batch of one row in evaluation mode, the same on each rank."""
        fields = fields_of(sample)
        if not (fields.uneven or fields.padded):
            counted = int(sample["weights"].nonzero()[-1, 1]) + 1
            counted += -counted % self._run.grid.tp  # which may share the positions
            sample = {name: values[:, :counted] for name, values in sample.items()}
        with contextlib.ExitStack() as stack:
            if self._run.job.compiled:  # and not for this shape
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(other_shape(self._run.engine))
            return self.measure([[sample]]).loss

    def known_loss(self) -> KnownLoss | None:
        """Return the loss of `sample`, for a checkpoint."""
        loss = finite(self.sample_loss(self.sample))
        batch = {name: values.tolist() for name, values in self.sample.items()}
        if loss is None:
            return None
        from launch.checkpoints.manifest import KnownLoss

        return KnownLoss(loss, self._run.job.plan.precision, batch)

    def prove(self, checkpoint: Checkpoint, *, weights: bool) -> None:
        """Prove that the engine holds what was read of a checkpoint. Raises FileError on all ranks."""
        from launch.checkpoints import proof

        run = self._run
        sample = proof.ProofSample(
            run.recipe,
            run.job.plan.precision,
            self.sample,
            self.sample_loss,
            run.next_step,
        )
        proof.check(run.state, checkpoint, sample, run.recorder.say, weights=weights)


def short_sample(held_out: HeldOut, recipe: Recipe) -> MicroBatch:
    """Return the first held-out sample as a micro-batch of one row.

    Of a dense causal model's only the first SAMPLE_POSITIONS count: what follows them changes nothing there.
    """
    sample = micro_batch(held_out.take([0]), np.ones(1))
    fields = fields_of(sample)
    if not (fields.uneven or fields.padded or recipe.model.attention_window):
        weights = sample["weights"]
        weights[:, SAMPLE_POSITIONS:] = 0
        weights /= weights.sum()
    return sample
