"""A run around its optimizer steps: going on from a checkpoint, batches, records, validations, checkpoints, stopping.

The loop itself is `pretrain.train`'s, or that of `transformers.Trainer` (launch/training/transformers_trainer.py): both hand every finished step
to `TrainingRun.completed`.
"""

from __future__ import annotations

import contextlib
import math
import time

from data.loader import StepBatches, validation_batches
from launch.checkpoints import checkpoint
from launch.checkpoints.weights import save_first_gradients
from launch.machine import ending, stop_request
from launch.training import agreement
from launch.training.engine import Forward, SkippedInARow, Step, forward, validate
from launch.training.job import Job


class TrainingRun:
    """One run on this rank, whichever loop performs its steps.

    Attributes:
        done: optimizer steps of the checkpoint that the run goes on from; 0: it starts.
        batches: of the training text, from that step on; each `next` is one optimizer step's micro-batches of this rank.
    """

    def __init__(self, job, metrics, corpus, grid):
        """Collective. Ends the process with code 2 where the checkpoint was trained on other text."""
        self.job, self.metrics, self.corpus, self.grid = job, metrics, corpus, grid
        self.plan, self.recipe = job.plan, job.plan.recipe
        self.text = corpus.summary.get("train_tokens_crc32")
        self.held_out = held_out_batches(corpus.validation, self.plan.layout, grid)
        self.saved = checkpoint.agreed(job.directory / "checkpoints", grid) if job.resume else None
        if self.saved:
            try:
                checkpoint.check_corpus(self.saved, self.text)
            except ValueError as e:
                ending.refuse(e)
        self.done = self.saved.step if self.saved else 0
        self._skipped = SkippedInARow(self.plan.precision)

    def begin(self, engine, forward: Forward = forward) -> TrainingRun:
        """Take the engine: load the checkpoint, or validate its initial weights. `forward`: how it computes the loss. Collective."""
        self.engine, self.forward = engine, forward
        if self.saved:
            step = checkpoint.load(engine, self.saved)
            assert step == self.done, f"checkpoint of step {self.done} holds step {step}"
        self.batches = StepBatches(
            self.corpus.train, self.recipe.seed, self.plan.layout, self.grid.at.dp, self.done,
            self.saved.data_state if self.saved else None, workers=self.recipe.run.loader_workers,
        )  # fmt: skip
        if not self.done:
            self.metrics.validation(0, self.validate(self.held_out))
        return self

    def close(self) -> None:
        self.batches.close()

    def validate(self, held_out):
        return validate(self.engine, held_out, self.grid, self.forward)

    def completed(
        self, step: int, report: Step, seconds: float, waited: float, stop: stop_request.StopRequest
    ) -> str | None:
        """Record the `step`-th optimizer step, and validate and save where that is due. Returns why training stops here, or None.

        `seconds` of wall time, of which `waited` were spent on the batch. Raises engine.Diverged where no later step will help.
        """
        job, run = self.job, self.recipe.run
        self.metrics.step(step, report, seconds, waited)
        self._skipped.see(report)
        if job.record_gradients and step == 1:
            save_first_gradients(
                self.engine, self.grid, job.directory, self.recipe.optimizer, report.grad_norm
            )

        stopped, last = stop.agreed(self.grid.control_group), step == self.recipe.steps
        if last or due(step, run.validate_every):
            self.metrics.validation(step, self.validate(self.held_out))
        if last and self.corpus.test is not None:
            tested = held_out_batches(self.corpus.test, self.plan.layout, self.grid)
            self.metrics.validation(step, self.validate(tested), "test")
        if stopped or (last and run.save_last) or due(step, run.save_every):
            if stopped or last:
                self.metrics.saving(agreement.peak_memory(self.grid.control_group))
            self.save(step)
        if stopped and not last:
            return f"{stopped}: stopped after step {step} of {self.recipe.steps}, checkpoint saved"
        return None

    def save(self, step: int) -> None:
        root = self.job.directory / "checkpoints"
        checkpoint.save(self.engine, self.plan, self.grid, root, step, self.batches.state(), self.text)


def held_out_batches(samples, layout, grid):
    """This rank's batches of a held-out split."""
    # No more micro-batches than the samples fill: a validation step may be shorter than a training step.
    passes = min(layout.accumulation, math.ceil(len(samples) / (layout.micro * layout.dp)))
    return validation_batches(samples, layout.micro, passes, layout.dp, grid.at.dp)


def due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def train(job: Job, metrics, corpus, grid) -> str | None:
    """The whole training on this rank. Returns why it was stopped early, or None.

    `metrics` records on rank 0 and is silent elsewhere. Raises engine.Diverged when the loss is lost.
    """
    from launch.training.engine import build_engine, closing, train_step

    pass
    from modeling.parallel.random_state import seed_step

    plan, recipe = job.plan, job.plan.recipe
    if recipe.model.implementation == "transformers":
        from launch.training import transformers_trainer

        return transformers_trainer.train(job, metrics, corpus, grid)
    engine = build_engine(
        plan, grid, compiled=job.compiled, initial_weights=job.initial_weights, say=metrics.say
    )
    run = TrainingRun(job, metrics, corpus, grid).begin(engine)
    with closing(engine), contextlib.closing(run), stop_request.StopRequest(job.directory / "STOP") as stop:
        for step in range(run.done, recipe.steps):
            started = time.perf_counter()
            seed_step(recipe.seed, step, grid.at)
            # DeepSpeed accumulates, clips, scales the loss, averages over data-parallel ranks and steps the schedule.
            micro_batches = next(run.batches)
            waited = time.perf_counter() - started
            report = train_step(engine, micro_batches, grid)
            # Records, validates, and saves where one of these is due.
            if stopped := run.completed(step + 1, report, time.perf_counter() - started, waited, stop):
                return stopped
    return None
