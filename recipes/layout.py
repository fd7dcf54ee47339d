"""The layout: tp x pp x dp processes, and micro x accumulation x dp = global samples per optimizer step.

Global ranks have the order of DeepSpeed's PipeModelDataParallelTopology: tensor fastest, pipeline slowest.
With tp=2, dp=2, pp=2:

                 stage 0                stage 1
              tp 0    tp 1           tp 0    tp 1
    dp 0   rank 0   rank 1        rank 4   rank 5
    dp 1   rank 2   rank 3        rank 6   rank 7

    tensor groups    [0 1] [2 3] [4 5] [6 7]    share every layer
    data groups      [0 2] [1 3] [4 6] [5 7]    hold the same slice, see other samples
    pipeline groups  [0 4] [1 5] [2 6] [3 7]    hold consecutive layers

Training makes its process groups in this order (`modeling/parallel/process_grid.py`), planning its maps.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from recipes.problems import Problem, Setting, Words, either


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and the shares of one optimizer step's batch.

    `dataclasses.asdict` and `Layout(**values)` take it to JSON and back.

    Attributes:
        tp, pp, dp: degrees of tensor, pipeline and data parallelism, in ranks.
        micro: samples per forward pass and data-parallel rank.
        accumulation: micro-batches per optimizer step and data-parallel rank.
        global_batch: samples per optimizer step, over all data-parallel ranks.
    """

    tp: int
    pp: int
    dp: int
    micro: int
    accumulation: int
    global_batch: int

    def __post_init__(self) -> None:
        assert self.micro * self.accumulation * self.dp == self.global_batch, self

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    def degrees(self, sequence: bool = False) -> str:
        """Describe the degrees: "tp 8 x pp 1 x dp 2"; `sequence`: tensor ranks cut the positions, too."""
        tensor = f"tp {self.tp}{' (and sequence)' * sequence}"
        return f"{tensor} x pp {self.pp} x dp {self.dp}"

    def identity(self) -> str:
        """Describe the batch in one line: "8 micro x 1 accumulation x 1 dp = 8 global"."""
        micro = f"{self.micro} micro"
        accumulation = f"{self.accumulation} accumulation"
        return f"{micro} x {accumulation} x {self.dp} dp = {self.global_batch} global"


# of equal steps: steps and samples before it, and samples of each step
Stretch = tuple[int, int, int]


@dataclass(frozen=True)
class BatchSchedule:
    """Samples of each optimizer step, in stretches of equal steps, of which the last is endless."""

    stretches: tuple[Stretch, ...]

    def samples(self, step: int) -> int:
        """Return the samples that the first `step` steps read of the training order."""
        before, read, size = self.stretches[
            bisect_right(self.stretches, step, key=itemgetter(0)) - 1
        ]
        return read + (step - before) * size

    def size(self, step: int) -> int:
        """Return the samples of the step after `step` completed ones."""
        return self.samples(step + 1) - self.samples(step)

    def until(self, step: int) -> tuple[Stretch, ...]:
        """Return the stretches that begin before `step`."""
        return tuple(stretch for stretch in self.stretches if stretch[0] < step)

    def counted_from(self, sample: int) -> BatchSchedule:
        """Return the schedule with its samples counted from `sample` on."""
        return BatchSchedule(
            tuple((step, read - sample, n) for step, read, n in self.stretches)
        )


@functools.lru_cache
def batch_schedule(
    full: int,
    start: int,
    increment: int,
    samples: int,
    before: tuple[Stretch, ...] = (),
    step: int = 0,
) -> BatchSchedule:
    """Return Megatron-LM's ramp: a step grows to `full` samples in equal parts of the first `samples`.

    `before`: stretches of the first `step` steps, after which the ramp decides.
    """
    parts = max(1, (full - start) // increment)
    read = BatchSchedule(before).samples(step) if before else 0
    stages = list(before)
    while (part := read * parts // samples) < parts and (
        size := start + part * increment
    ) < full:
        stages.append((step, read, size))
        # of steps up to the next part
        count = -(((part + 1) * samples // -parts + read) // size)
        step = step + count
        read = read + count * size
    return BatchSchedule((*stages, (step, read, full)))


def padded_vocab(vocab: int, tp: int, divisible_by: int = 128) -> int:
    """Round `vocab` up to a multiple of `divisible_by` x tp, as Megatron-LM pads the vocabulary."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [
        candidate
        for candidate in range(1, math.isqrt(number) + 1)
        if number % candidate == 0
    ]
    return sorted({*small, *(number // candidate for candidate in small)})


def share_batch(
    micro: int | None,
    accumulation: int | None,
    total: int,
    dp: int,
    pp: int,
    *,
    dp_is_stated: bool = False,
) -> tuple[int, int] | Problem:
    """Return (micro, accumulation) with micro x accumulation x dp = total, or the problem.

    A share of None is derived. With neither given, the micro-batch is the largest that leaves a pipeline of
    `pp` stages at least `pp` micro-batches: with fewer, some stage would always wait.

    Args:
        dp_is_stated: True if the recipe states dp; else dp follows from the number of processes.
    """
    per_rank, over = divmod(total, dp)
    whole = Setting("batch.global", total)
    ranks: Words = Setting("parallel.dp", dp) if dp_is_stated else f"dp={dp}"
    if over:
        near = _nearest(dp, divisors(total))
        start = (f"start a number of processes that gives a dp of {either(near)}",)
        fixes = *_set({"batch.global": _multiples_near(total, dp)}), ", or "
        fixes += _set({"parallel.dp": near}) if dp_is_stated else start
        return Problem(
            "batch.global",
            (whole, " is not divisible by ", ranks),
            "every data-parallel rank takes the same number of samples",
            fixes,
        )
    if micro is None and accumulation is None:
        accumulation = min((d for d in divisors(per_rank) if d >= pp), default=per_rank)
        return per_rank // accumulation, accumulation
    rule = "micro x accumulation x dp = global"
    if micro is not None and accumulation is not None:
        taken = micro * accumulation
        if taken == per_rank:
            return micro, accumulation
        options = {"batch.global": [taken * dp]}
        quotients = [
            ("batch.accumulation", per_rank, micro),
            ("batch.micro", per_rank, accumulation),
        ]
        if dp_is_stated:
            quotients.append(("parallel.dp", total, taken))
        for key, dividend, divisor in quotients:
            if dividend % divisor == 0:
                options[key] = [dividend // divisor]
        return Problem(
            "batch",
            (
                Setting("batch.micro", micro),
                " x ",
                Setting("batch.accumulation", accumulation),
                " x ",
                ranks,
                f" = {taken * dp} is not ",
                whole,
            ),
            rule,
            _set(options),
        )
    key, number = (
        ("batch.micro", micro)
        if accumulation is None
        else ("batch.accumulation", accumulation)
    )
    assert number is not None
    other, over = divmod(per_rank, number)
    if over:
        options = {key: _nearest(number, divisors(per_rank))}
        options["batch.global"] = _multiples_near(total, number * dp)
        came = Setting(key, number), " with ", ranks, " does not divide ", whole
        return Problem(key, came, rule, _set(options))
    if accumulation is None:
        return (number, other)
    return (other, number)


def _set(options: Mapping[str, Iterable[int]]) -> tuple[Words, ...]:
    """Write fixes as "--set batch.micro=2 or 4, or --set batch.global=6"."""
    words: list[Words] = []
    for key, numbers in options.items():
        words += [
            ", or --set " if words else "--set ",
            Setting(key, either(dict.fromkeys(numbers))),
        ]
    return tuple(words)


def _multiples_near(number: int, step: int) -> list[int]:
    """Return the multiples of `step` below and above `number`."""
    return [max(step, number // step * step), (number // step + 1) * step]


def _nearest(number: int, options: list[int]) -> list[int]:
    """Return the two options nearest to `number`, in ascending order."""
    return sorted(
        sorted(options, key=lambda option: (abs(option - number), option))[:2]
    )


class Coordinates(NamedTuple):
    """Place of one rank in the grid."""

    tp: int
    dp: int
    pp: int


def coordinates(rank: int, tp: int, dp: int) -> Coordinates:
    """Return the place of global `rank` in a grid of tensor degree `tp` and data degree `dp`."""
    return Coordinates(tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp))


def _groups(within: str, tp: int, pp: int, dp: int) -> list[list[int]]:
    """List the global ranks of every group whose places differ in the coordinates `within` alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(tp * pp * dp):
        at = coordinates(rank, tp, dp)._asdict()
        for axis in within.split():
            del at[axis]
        found.setdefault(tuple(at.values()), []).append(rank)
    return [*found.values()]


# (tp, pp, dp) -> the global ranks of every group, in ascending order
tensor_groups = functools.partial(_groups, "tp")
data_groups = functools.partial(_groups, "dp")
pipeline_groups = functools.partial(_groups, "pp")
# of every copy of the model: all tensor ranks of all stages
model_groups = functools.partial(_groups, "tp pp")
