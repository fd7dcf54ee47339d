"""torch's profiler over the steps of run.profile, and where their time went; no other run imports it.

Each moment belongs to one kind of work. An operation belongs to the innermost annotated module that runs it,
or whose gradient it is; else its name decides. A device's time is that of its kernels: collectives get what
no computation hides, the host what nothing fills. On a CPU an operation computes where it calls no other one,
since collectives wait inside.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function, supported_activities

from launch.ranks import processes
from launch.records.facts import StepProfile
from modeling.parallel.process_grid import ProcessGrid

OWN = "megarecipes: "  # beginning of annotations of modules and of steps
STEP = f"{OWN}step "
# Kind -> what names of modules, operations and kernels contain; the first that fits counts.
KINDS = {
    "attention": "Attention|attention|flash|fmha",
    "MLP": "MLP|gelu",
    "layer norm and dropout": "Norm|Dropout|layer_norm|dropout",
    "embedding, head and loss": "Embed|Head|DecoderBias|CrossEntropy|embedding|softmax|nll_loss",
    "optimizer": "ptimizer|[Aa]dam|multi_tensor",
    "copies": "Memcpy|Memset|copy_|aten::(cat|clone)$",
    "other matrix products": "mm|linear|gemm",
    "compiled code": "Compiled|triton|graph_",
    "other operations": "",
}
OTHER = [*KINDS][-1]
BACKEND = re.compile(r"_?c10d(_functional)?::|(gloo|nccl|xccl|mpi):|nccl(Dev)?Kernel")
COLLECTIVE = re.compile("(all|reduce|)(reduce|scatter|gather|broadcast|send|recv|barrier)")

ANNOTATED = re.compile("Attention|MLP|Norm|Dropout|Embed|Head|DecoderBias")  # classes of modules
MOST_ALLOCATIONS = 100_000  # in a snapshot of memory

Intervals = list[tuple[int, int]]  # ns


class StepProfiler:
    """The profiler of this rank over `steps`, which writes its trace into `folder`."""

    def __init__(self, engine: Any, steps: range, grid: ProcessGrid, folder: Path) -> None:
        self._engine, self._steps, self._group = engine, steps, grid.control_group
        self._folder = folder
        self._profile: Any = profile(activities=supported_activities())
        # torch.cuda.memory and its like keep a history of allocations.
        memory = getattr(processes.device_module(), "memory", None)
        self._memory = memory if hasattr(memory, "_record_memory_history") else None
        self._waited = 0.0  # seconds for data
        self._open: list[record_function] = []  # annotations, the innermost last
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """Begin a step, if it is to be profiled."""
        if step in self._steps:
            if not self._hooks:
                self._start(step)
            self._enter(f"{STEP}{step}")

    def end(self, step: int, waited: float) -> StepProfile | None:
        """End a step that `waited` so many seconds for data; return the profile after the last."""
        if step not in self._steps:
            return None
        self._leave()
        self._waited += waited
        return self._stop() if step == self._steps[-1] else None

    def _start(self, step: int) -> None:
        self._first, rank = step, torch.distributed.get_rank()  # in a resumed run any of the steps
        self._trace = self._folder / f"steps-{step}-{self._steps[-1]}-rank-{rank}.json.gz"
        for module in self._engine.module.modules():
            if ANNOTATED.search(name := type(module).__name__):
                enter = module.register_forward_pre_hook(lambda *_, name=name: self._enter(OWN + name))
                leave = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
                self._hooks += enter, leave
        self._step = self._engine.optimizer.step
        self._engine.optimizer.step = record_function(f"{OWN}optimizer")(self._step)
        if self._memory:
            self._memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile.start()

    def _stop(self) -> StepProfile:
        self._profile.stop()
        self._engine.optimizer.step = self._step
        for hook in self._hooks:
            hook.remove()
        problem = None
        try:
            self._trace.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._trace))
            if self._memory:
                self._memory._dump_snapshot(str(self._trace).replace(".json.gz", "-memory.pickle"))
        except (OSError, RuntimeError) as error:
            problem = f"{self._trace}: {error}"
        if self._memory:
            self._memory._record_memory_history(enabled=None)
        events = self._profile.profiler.kineto_results.events()
        every = processes.gathered((seconds_by_kind(events, self._waited), problem), self._group)
        total = sum((Counter(seconds) for seconds, _ in every), Counter[str]())
        steps = range(self._first, self._steps[-1] + 1)
        shares = {kind: each / len(every) / len(steps) for kind, each in total.most_common()}
        return StepProfile(steps[0], steps[-1], shares, tuple(each for _, each in every if each))

    def _enter(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


def seconds_by_kind(events: Iterable[Any], waited: float) -> dict[str, float]:
    """Return the seconds of each kind; they add up to those of the steps.

    `events`: of torch's profiler, by Kineto; without a device's kernels, the host's operations count;
    `waited`: seconds for data.
    """
    events = sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))
    # Calls of a device's runtime, which are linked, have numbers of their own.
    on_host = [e for e in events if e.device_type() == DeviceType.CPU and not e.linked_correlation_id()]
    on_device = any(event.device_type() != DeviceType.CPU for event in events)
    operations = [event for event in on_host if not event.is_async()]
    steps = [event for event in operations if event.name().startswith(STEP)]
    kinds, callers = kinds_on_host(operations)
    work = defaultdict[tuple[bool, str], Intervals](list)  # (calls others, kind) -> its intervals
    computing = {event.start_thread_id() for event in operations if event.fwd_thread_id()}
    computing |= {event.start_thread_id() for event in steps}
    for event in events if on_device else on_host:
        key = False, _kind(event.name())
        if on_device:
            if event.device_type() == DeviceType.CPU or event.is_user_annotation():
                continue
            launched = kinds.get(event.linked_correlation_id(), OTHER)
            if launched != OTHER and key[1] in KINDS and key[1] != "copies":
                key = False, launched
        elif not event.is_async():
            if event.start_thread_id() not in computing or event.name().startswith(OWN):
                continue
            key = event.correlation_id() in callers, kinds[event.correlation_id()]
        work[key].append((event.start_ns(), event.end_ns()))
    collectives = sorted({kind for _, kind in work} - {*KINDS})
    seconds, covered = defaultdict[str, float](float), Intervals()
    windows = [(event.start_ns(), event.end_ns()) for event in steps]
    for calls, order in ((False, (*KINDS, *collectives)), (True, (*collectives, *KINDS))):
        for kind in order:
            cut = [(max(a, start), min(b, end)) for a, b in windows for start, end in work[calls, kind]]
            before, covered = _length(covered), _union(covered + [each for each in cut if each[0] < each[1]])
            seconds[kind] += (_length(covered) - before) / 1e9
    rest = (_length(windows) - _length(covered)) / 1e9
    seconds |= {"waiting for data": min(waited, rest), "host": max(0.0, rest - waited)}
    return {kind: each for kind, each in seconds.items() if each}


def kinds_on_host(operations: list[Any]) -> tuple[dict[int, str], set[int]]:
    """Return the kinds of operations by number, and the numbers of those that call others."""
    kinds, callers = dict[int, str](), set[int]()
    forward = dict[tuple[int, int], str]()  # (thread, number of the gradient) -> kind
    running = defaultdict[int, list[Any]](list)  # by thread, the innermost last
    for event in operations:
        name, thread, gradient = event.name(), event.start_thread_id(), event.sequence_nr()
        outer = running[thread]
        while outer and outer[-1].end_ns() <= event.start_ns():
            outer.pop()
        kind = forward.get((event.fwd_thread_id(), gradient), OTHER)  # no thread of an operation is 0
        if outer:
            callers.add(outer[-1].correlation_id())
            kind = kinds[outer[-1].correlation_id()] if kind == OTHER else kind
        if kind == OTHER or name.startswith(OWN) or BACKEND.match(name):
            kind = _kind(name)
        if gradient >= 0 and not event.fwd_thread_id():
            forward[thread, gradient] = kind
        kinds[event.correlation_id()] = kind
        outer.append(event)
    return kinds, callers


def _kind(name: str) -> str:
    if BACKEND.match(name):
        found = COLLECTIVE.search(name.replace("_", "").lower())
        return "-".join(filter(None, found.groups())) if found else "other collectives"
    return next(kind for kind, parts in KINDS.items() if re.search(parts, name.removeprefix(OWN)))


def _union(intervals: Intervals) -> Intervals:
    merged = Intervals()
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)
