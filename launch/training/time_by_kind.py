"""Where the time of profiled steps went: each moment of theirs belongs to one kind of work.

An operation belongs to the innermost annotated module that runs it, or whose gradient it is; else its name
decides. A device's time is that of its kernels: collectives get what no computation hides, the host what
nothing fills. On a CPU an operation computes where it calls no other one, since collectives wait inside.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

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

Intervals = list[tuple[int, int]]  # ns


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
