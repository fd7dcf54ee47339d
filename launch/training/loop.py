"""The loop over the optimizer steps."""

from __future__ import annotations

import contextlib

from launch.ranks import ending
from launch.training import callbacks
from launch.training.early_ends import EarlyEnd, EarlyStop, StopRequest
from launch.training.engine import build_engine, release_at_end, train_step
from launch.training.micro_batches import dropout_seeds_of_step, training_batches
from launch.training.run import Start, TrainingRun, next_batch, run_watchdog
from modeling.parallel.layers import seed_step


def train(start: Start) -> EarlyStop | None:
    """Train on this rank to the recipe's last step; return an early stop, or None. Collective.

    Raises Diverged where the loss is lost.
    """
    job = start.job
    recorder = start.recorder
    grid = start.grid
    plan = job.plan
    recipe = plan.recipe
    if recipe.model.implementation == "transformers":
        # Imports Trainer and accelerate, which no other run needs.
        from launch.training import transformers_trainer

        return transformers_trainer.train(start)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(run_watchdog(start))
        # A branch may have more positions than are stored.
        engine = build_engine(job, grid, recorder.say, resumed=not start.first)
        batches = training_batches(plan, start.corpus, grid, start.checkpoint)
        recorder.mark("engine")
        stack.enter_context(release_at_end(engine))
        stack.enter_context(contextlib.closing(batches))
        stop = stack.enter_context(StopRequest(job.stop_file))
        stack.enter_context(ending.keep_error_of_block(job.directory, but=EarlyEnd))
        run = stack.enter_context(
            TrainingRun(start, engine, stop, watchdog, callbacks.begin, batches)
        )
        for step in range(run.done + 1, recipe.steps + 1):
            run.begin_step(step)
            seed_step(recipe.seed, step - 1, grid.at)
            micro_batches = next_batch(batches)
            run.begin_computing()
            # DeepSpeed accumulates, scales the loss, averages over data ranks, clips, steps the schedule.
            dropout_seeds = dropout_seeds_of_step(
                plan, grid.at.dp, step - 1, engine.device
            )
            read_outcome = train_step(engine, micro_batches, grid, dropout_seeds)
            early = run.end_step(step, read_outcome)
            if early:
                return early
    return None
