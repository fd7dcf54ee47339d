"""A watch over numbers that only an optimizer step may change. It does not need to know the right ones.

Weights, master weights and moments lie still from one optimizer step to the next. The sums of their bits are
kept after a step and compared before the next one: a flipped bit changes them. Where ranks hold copies, they
compare a running hash of these sums. The hash also shows errors made within a step. The bits of a batch are
added up when it is made or received, and again after its use. Gradients, activations and messages exist once
and change all the time: they are not watched (docs/running.md says what that would cost).
"""

from __future__ import annotations

import itertools
import math
import operator
import socket
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from data.bit_sums import BLOCK, ODD, WORD, batch_sum, block_sums
from launch.checkpoints.engine_state import Buffer
from launch.ranks import processes
from launch.records.facts import Corruption, StepRecord
from launch.training.agreement import all_gather
from launch.training.early_ends import Corrupted, Diverged
from launch.training.run import TrainingRun, due
from modeling.initialization import canonical_name
from modeling.parallel.process_grid import ProcessGrid
from recipes.layout import data_groups, tensor_groups

# of the time of steps, for checks of a chosen interval: half a percent with what noise adds
SHARE = 0.004
TRIAL_STEPS = 5  # of a launch, by whose time the interval is chosen
# axis of copies -> the groups of ranks along it
AXES = {"dp": data_groups, "tp": tensor_groups}
Named = tuple[str, str, str]  # axis of copies ("": no copies), kind and tensor


class NumberReport(NamedTuple):
    """The report of one rank at a check, in numbers that travel as one row of a tensor."""

    changed: int  # blocks that changed between steps, and batches
    dp: int  # running hash of what data-parallel ranks hold alike
    tp: int  # the same of tensor-parallel ranks


class Details(NamedTuple):
    """The details of one rank after a difference: its numbers that changed, and hashes of its copies."""

    host: str
    changed: list[Named]
    copies: list[tuple[Named, int]]


class Watched:
    """A buffer with the sums of its blocks."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        # after the last step; None while a tensor is released, or no step compares
        self.kept = self.sums()
        first = buffer.tensors[0]
        octets = sum(each.elements for each in buffer.fragments) * first.element_size()
        blocks = math.ceil(octets / WORD / BLOCK)
        if self.kept is not None:
            blocks = len(self.kept)
        self.running = torch.zeros(blocks, dtype=torch.int64, device=first.device)
        self.changed = torch.zeros_like(self.running)  # not 0: it did

    def sums(self) -> torch.Tensor | None:
        """Add up the bits of the buffer by blocks; None while a tensor is released."""
        flat = [tensor.detach().reshape(-1) for tensor in self.buffer.tensors]
        if not all(map(len, flat)):
            return None
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
        return block_sums(whole)

    def named(self, axis: str, sums: torch.Tensor) -> dict[Named, int]:
        """Return the sum of each tensor's blocks."""
        block = BLOCK * WORD // self.buffer.tensors[0].element_size()  # elements
        values = sums.tolist()
        found = {}
        for parameter, _, offset, elements in self.buffer.fragments:
            after = (offset + elements - 1) // block + 1
            name = canonical_name(parameter)
            found[axis, self.buffer.kind, name] = sum(values[offset // block : after])
        return found


class NumberWatch:
    """The watch over one engine's numbers. Its methods are collective."""

    def __init__(self, run: TrainingRun) -> None:
        """Begin after the run's steps so far, with the weights in place."""
        state = run.state
        self._grid = run.grid
        step = run.done
        self._run = run
        every = run.recipe.run.check_every
        self._trial = step + TRIAL_STEPS if every is None else 0
        self.every = every or self._trial  # steps from one check to the next
        self.always = True  # sums are kept after every step, not only before a check
        self._times = [clock()]  # at the ends of the steps up to the trial
        self._step = step  # completed steps
        self.sound = step  # completed steps at the last check that found nothing
        self._watched: list[Watched] = []
        self._batch = torch.zeros((), dtype=torch.int64)  # not 0: a batch changed
        self._keep()
        if any(partition.swapped for partition in state.partitions):
            self._run.recorder.say("run.check_every: states on NVMe are not watched")
        # Every engine's update, plain or pipeline, goes through this.
        engine = state.engine
        engine._take_model_step = partial(self._update, engine._take_model_step)

    def after_step(self, record: StepRecord) -> None:
        """Check after a step, if it is due. Raises Corrupted on all ranks."""
        step = record.step
        if step <= self._trial:
            self._times.append(clock())
        if self._due(step):
            self.check(step)
        if step == self._trial:
            self._choose()

    def end(self, error: BaseException | None) -> None:
        """Check once more where the loss is lost: a flipped bit may be the cause."""
        if isinstance(error, Diverged):
            self.check(self._run.done + 1, again=True)

    def check(self, step: int, *, again: bool = False) -> None:
        """Compare what was found since the last check. Raises Corrupted on all ranks.

        `again`: compare the sums kept after the last step too, for a save.
        """
        if again:
            self._compare()
        heard = witnesses(self._exchange(), self._grid)
        if heard:
            raise Corrupted(self._named(heard), self.sound, step)
        self.sound = step
        for watched in self._watched:
            watched.running.zero_()

    def _named(self, heard: Collection[int]) -> tuple[Corruption, ...]:
        """Name what changed. Rank 0 hears the details of these ranks, and tells all. Collective."""
        rank = self._grid.rank
        group = self._grid.control_group
        own = {}
        if rank in heard:
            own[rank] = Details(socket.gethostname(), *self._details())
        details = processes.merged(own, operator.or_, group, dict[int, Details])
        found = corruptions(details, self._grid)  # only on rank 0 of all
        return processes.from_rank_0(found, group, tuple[Corruption, ...])

    def _due(self, step: int) -> bool:
        ends = (self._trial, self._run.recipe.steps)
        return step in ends or step % self.every == 0

    def _update(self, take_step: Callable[..., None], *how: Any) -> None:
        """Make an optimizer step, between sums where they are due."""
        self._step += 1
        batches = self._run.batches
        recipe = self._run.recipe
        changed = batch_sum(batches.last) ^ batches.bit_sum
        self._batch = self._batch.to(changed.device) | changed
        self._compare()
        take_step(*how)
        saves = self._step == recipe.steps or due(self._step, recipe.run.save_every)
        if self.always or saves or self._due(self._step + 1):
            self._keep()
        else:
            for watched in self._watched:
                watched.kept = None

    def _keep(self) -> None:
        """Keep the sums; moments are there after the first step."""
        kinds = {watched.buffer.kind for watched in self._watched}
        if len(kinds) <= 2:
            for buffer in self._run.state.buffers():
                if buffer.kind not in kinds:
                    self._watched.append(Watched(buffer))
        for watched in self._watched:
            watched.kept = watched.sums()
            if watched.kept is not None and watched.buffer.copied:
                watched.running.mul_(ODD).add_(watched.kept)

    def _compare(self) -> None:
        """Compare with the kept sums; the verdict stays on the device."""
        for watched in self._watched:
            if watched.kept is None:
                continue
            now = watched.sums()
            if now is not None:
                watched.changed |= now ^ watched.kept

    def _exchange(self) -> list[NumberReport]:
        """Return the reports of all ranks. Waits for the device."""
        changed = sum(watched.changed.count_nonzero() for watched in self._watched)
        own = NumberReport(
            int(changed) + bool(self._batch), self._hash("dp"), self._hash("tp")
        )
        table = torch.empty(dist.get_world_size(), len(own), dtype=torch.int64)
        all_gather(table.view(-1), torch.tensor(own), group=self._grid.control_group)
        return [NumberReport(*row) for row in table.tolist()]

    def _copies(self, axis: str) -> Iterator[Watched]:
        """Yield what is compared along an axis."""
        # Accelerators add up an embedding's gradient in no fixed order: tensor ranks differ in rounding.
        deterministic = torch.are_deterministic_algorithms_enabled()
        exact = deterministic or not processes.device().own_memory
        for watched in self._watched:
            if watched.buffer.copied == axis and (axis == "dp" or exact):
                yield watched

    def _hash(self, axis: str) -> int:
        return int(sum(watched.running.sum() for watched in self._copies(axis)))

    def _details(self) -> tuple[list[Named], list[tuple[Named, int]]]:
        changed: list[Named] = [("", "batch", "")] if self._batch else []
        copies: dict[Named, int] = {}
        for watched in self._watched:
            found = watched.named("", watched.changed != 0)
            names = [named for named, blocks in found.items() if blocks]
            if not names and watched.changed.any():
                names = [("", watched.buffer.kind, "padding")]
            changed += names
        for axis in AXES:
            for watched in self._copies(axis):
                copies |= watched.named(axis, watched.running)
        return changed, list(copies.items())

    def _choose(self) -> None:
        """Choose the interval by the slowest rank's times. Collective."""
        steps = [end - begin for begin, end in itertools.pairwise(self._times)]
        step = statistics.median(steps[1:])
        sums = seconds_of(lambda: [watched.sums() for watched in self._watched])
        exchange = seconds_of(self._exchange)
        slowest = torch.tensor((step, sums, exchange), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self._grid.control_group)
        self.every, self.always = interval(*slowest.tolist())
        if self.always:
            when = f"after every step and told each {self.every}"
            seen = "a flip between steps is seen"
        else:
            when = f"around one step of {self.every}"
            seen = f"a single flip is seen with a chance of 1 in {self.every}"
        self._run.recorder.say(
            f"numbers are checked for changed bits {when}: {seen} (run.check_every)"
        )


def interval(step: float, sums: float, exchange: float) -> tuple[int, bool]:
    """Choose the steps between checks that take SHARE of the time, and whether every step has its sums.

    `step`, `sums`, `exchange`: seconds of a step, of all sums once, and of a check between the ranks.
    """
    left = SHARE * step - 2 * sums
    if left > 0:
        return math.ceil(exchange / left), True
    return math.ceil((2 * sums + exchange) / (SHARE * step)), False


def clock() -> float:
    """Return seconds of this process's work: a host's own, which no neighbour changes, or a device's."""
    if processes.device().own_memory:
        get_accelerator().synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the largest time of three calls: between steps, caches are cold."""
    return max(timeit.repeat(work, timer=clock, repeat=3, number=1))


def witnesses(table: Sequence[NumberReport], grid: ProcessGrid) -> set[int]:
    """Return the ranks whose details tell what changed, by the reports of all, in rank order; none: nothing.

    Where ranks saw their own numbers change, those: the change explains copies that differ. Else odd copies,
    and as many others as outvote them.
    """
    found = {rank for rank, report in enumerate(table) if report.changed}
    if found:
        return found
    for axis, groups in AXES.items():
        for ranks in groups(grid.tp, grid.pp, grid.dp):
            odd = odd_ranks({rank: getattr(table[rank], axis) for rank in ranks})
            if odd:
                others = [rank for rank in ranks if rank not in odd]
                found |= odd.union(others[: len(odd) + 1])
    return found


def odd_ranks(values: Mapping[int, object]) -> set[int]:
    """Return the ranks that differ from the majority; all of them where there is none."""
    counts = Counter(values.values()).items()
    sound = [value for value, count in counts if 2 * count > len(values)]
    return {rank for rank, value in values.items() if value not in sound}


def corruptions(
    details: Mapping[int, Details], grid: ProcessGrid
) -> tuple[Corruption, ...]:
    """Name ranks and tensors by the details of the witnesses."""
    found: dict[tuple[int, str, bool], list[str]] = {}
    for rank, each in details.items():
        for _, kind, name in each.changed:
            found.setdefault((rank, kind, False), []).append(name)
    copies = {rank: dict(each.copies) for rank, each in details.items()}
    every_name: dict[Named, None] = {}
    for held in copies.values() if not found else ():
        every_name |= dict.fromkeys(held)
    for named in every_name:
        axis, kind, name = named
        for ranks in AXES[axis](grid.tp, grid.pp, grid.dp):
            sums = {rank: copies[rank].get(named) for rank in ranks if rank in copies}
            for rank in odd_ranks(sums):
                found.setdefault((rank, kind, True), []).append(name)
    return tuple(
        Corruption(rank, details[rank].host, kind, tuple(names), among_copies)
        for (rank, kind, among_copies), names in sorted(found.items())
    )
