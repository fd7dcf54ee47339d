"""The first state of a run, and its callbacks: each stands in a file of its own, which a run can do without."""

from __future__ import annotations

from launch.training.run import Callback, TrainingRun
from launch.training.validations import Validations


def begin(run: TrainingRun) -> list[Callback]:
    """Bring a run of ours to its first step; return its callbacks in the order of their calls."""
    validations = Validations(run)
    _bring(run, validations)
    run.recorder.mark("weights")
    # which no first validation needs
    from launch.training.saves import Saves

    callbacks = watchers(run)
    watch = None
    if run.recipe.run.check_every != 0:
        from launch.training.number_watch import NumberWatch

        watch = NumberWatch(run)
        callbacks.append(watch)
    return [*callbacks, Saves(run, validations, watch), validations]


def watchers(run: TrainingRun) -> list[Callback]:
    """Return the callbacks of every loop, which need only the engine and the figures of a step."""
    from launch.training.figure_bounds import FigureBounds
    from launch.training.skipped_steps import SkipCounter

    callbacks: list[Callback] = []
    if run.engine.monitor.enabled:
        from launch.training.monitor import Monitor

        callbacks.append(Monitor(run))
    if run.recipe.run.profile:
        from launch.training.profiling import StepProfiler  # with torch's profiler

        callbacks.append(StepProfiler(run))
    own = [make(run) for make in run.job.callbacks]
    return [*callbacks, SkipCounter(run), FigureBounds(run), *own]


def _bring(run: TrainingRun, validations: Validations) -> None:
    """Load the checkpoint into the engine, or validate the initial weights. Collective."""
    checkpoint = run.start.checkpoint
    given = run.job.initial_weights
    if checkpoint:
        from launch.checkpoints import reading

        reading.load(run.state, checkpoint)
        validations.prove(checkpoint, weights=False)
    elif given and (source := given.checkpoint()):
        validations.prove(source, weights=True)
    if run.start.first:
        run.recorder.validation(run.done, validations.measure(validations.batches))
