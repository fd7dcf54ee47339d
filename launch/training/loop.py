"""The loop over the optimizer steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from data.corpus import Corpus
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import ending
from launch.ranks.stop_request import StopRequest
from launch.ranks.watchdog import Phase
from launch.records.silence import Silence
from launch.training.engine import build_engine, released, train_step
from launch.training.job import Job
from launch.training.micro_batches import salts_of_step
from launch.training.run import EXPECTED, EarlyStop, TrainingRun, next_batch, watching
from launch.training.training_batches import training_batches
from modeling.parallel.process_grid import ProcessGrid
from modeling.parallel.random_state import seed_step


def train(
    job: Job, recorder: Silence, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None = None,
    after: Callable[[TrainingRun], None] = lambda run: None,
) -> EarlyStop | None:  # fmt: skip
    """Train on this rank, from `checkpoint` on, which all ranks have agreed upon.

    `after`: follows the last step, also of a run that had made it before; not one of transformers' Trainer.
    Returns how the run was stopped early, or None. Raises Diverged where the loss is lost.
    """
    plan, recipe = job.plan, job.plan.recipe
    if recipe.model.implementation == "transformers":
        from launch.training import (
            transformers_trainer,
        )  # with Trainer and accelerate: no other run needs them

        return transformers_trainer.train(job, recorder, corpus, grid, checkpoint)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(watching(job, recorder, grid))
        resumed, reached = checkpoint is not None, recorder.reached
        engine = build_engine(job, grid, recorder.say, resumed=resumed, reached=reached)
        batches = training_batches(plan, corpus, grid, checkpoint)
        recorder.reached("engine")
        stack.enter_context(released(engine))
        stack.enter_context(contextlib.closing(batches))
        stop = stack.enter_context(StopRequest(job.stop_file))
        stack.enter_context(ending.error_kept(job.directory, but=EXPECTED))
        run = TrainingRun(job, recorder, corpus, grid, engine, batches, checkpoint, stop, watchdog)
        stack.enter_context(run)
        for step in range(run.start_step + 1, recipe.steps + 1):
            watchdog.enter(Phase.DATA, step)
            started = time.perf_counter()
            seed_step(recipe.seed, step - 1, grid.at)
            micro_batches = next_batch(batches)
            waited = time.perf_counter() - started
            watchdog.enter(Phase.COMPUTING)
            # DeepSpeed accumulates, scales the loss, averages over data ranks, clips, steps the schedule.
            salts = salts_of_step(plan, grid.at.dp, step - 1, engine.device)
            performed = train_step(engine, micro_batches, grid, salts)
            telling = run.tell(waited)
            outcome = performed.outcome()
            seconds, news = time.perf_counter() - started, run.hear(telling)
            run.record(step, outcome, seconds, waited, news.rank_seconds)
            run.validate_if_due(step)
            run.save_if_due(step, news.stopped)
            if news.stopped and step < recipe.steps:
                return EarlyStop(news.stopped, step, recipe.steps)
        after(run)
    return None
