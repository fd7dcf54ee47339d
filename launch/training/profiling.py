"""torch's profiler over the steps of run.profile: a trace of each rank. No other run imports it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from launch.ranks import processes
from launch.records.facts import StepRecord
from launch.training.run import TrainingRun

STEP = "ProfilerStep#"  # torch's own name of a step, by which viewers find it
OWN = "megarecipes: "  # beginning of the names of modules in a trace
# classes of modules
ANNOTATED = re.compile("Attention|MLP|Norm|Dropout|Embed|Head|DecoderBias")
MOST_ALLOCATIONS = 100_000  # in a snapshot of memory


class StepProfiler:
    """The profiler of this rank over the steps of run.profile, which writes its trace into RUN/profile."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._engine: Any = run.engine
        self._steps = run.recipe.run.profiled
        run.before_step.append(self._begin)
        self._profile: Any = profile(activities=supported_activities())
        # torch.cuda.memory and its like keep a history of allocations.
        memory = getattr(processes.device_module(), "memory", None)
        self._memory = memory if hasattr(memory, "_record_memory_history") else None
        self._open: list[record_function] = []  # annotations, the innermost last
        self._hooks: list[Any] = []

    def _begin(self, step: int) -> None:
        """Begin a step, if it is to be profiled."""
        if step in self._steps:
            if not self._hooks:
                self._start(step)
            self._enter(f"{STEP}{step}")

    def after_step(self, record: StepRecord) -> None:
        """End a step; after the last one write the trace, and say each that could not be written."""
        if record.step in self._steps:
            self._leave()
            if record.step == self._steps[-1]:
                for problem in self._stop():
                    self._run.recorder.warn(f"no trace of a rank: {problem}")

    def end(self, error: BaseException | None) -> None: ...

    def _start(self, step: int) -> None:
        rank = torch.distributed.get_rank()
        name = f"steps-{step}-{self._steps[-1]}-rank-{rank}.json.gz"
        self._trace = self._run.job.directory / "profile" / name
        for module in self._engine.module.modules():
            name = type(module).__name__
            if ANNOTATED.search(name):
                enter = module.register_forward_pre_hook(
                    lambda *_, name=name: self._enter(OWN + name)
                )
                leave = module.register_forward_hook(
                    lambda *_: self._leave(), always_call=True
                )
                self._hooks += enter, leave
        self._step = self._engine.optimizer.step
        self._engine.optimizer.step = record_function(f"{OWN}optimizer")(self._step)
        if self._memory:
            self._memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile.start()

    def _stop(self) -> list[str]:
        self._profile.stop()
        self._engine.optimizer.step = self._step
        for hook in self._hooks:
            hook.remove()
        problem = None
        try:
            self._trace.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._trace))
            if self._memory:
                self._memory._dump_snapshot(
                    str(self._trace).replace(".json.gz", "-memory.pickle")
                )
        except (OSError, RuntimeError) as error:
            problem = f"{self._trace}: {error}"
        if self._memory:
            self._memory._record_memory_history(enabled=None)
        return processes.texts_of_all([problem], self._run.grid.control_group)

    def _enter(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)
