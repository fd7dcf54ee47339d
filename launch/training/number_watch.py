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
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from data.bit_sums import BLOCK, ODD, WORD, batch_sum, block_sums
from data.loader import StepBatches
from launch.checkpoints.engine_state import Buffer, EngineState
from launch.ranks import processes
from launch.records.facts import Corruption
from launch.training.agreement import all_gather
from launch.training.early_ends import Corrupted
from modeling.initialization import canonical_name
from modeling.parallel.process_grid import ProcessGrid
from recipes.layout import coordinates
from recipes.schema import Recipe

# of the time of steps, for checks of a chosen interval: half a percent with what noise adds
SHARE = 0.004
TRIAL_STEPS = 5  # of a launch, by whose time the interval is chosen
AXES = ("dp", "tp")
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
        words = (
            sum(each.elements for each in buffer.fragments)
            * buffer.tensors[0].element_size()
            / WORD
        )
        blocks = math.ceil(words / BLOCK) if self.kept is None else len(self.kept)
        self.running = torch.zeros(
            blocks, dtype=torch.int64, device=buffer.tensors[0].device
        )
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
        width = self.buffer.tensors[0].element_size()
        values = sums.tolist()
        found = {}
        for parameter, _, offset, elements in self.buffer.fragments:
            first = offset * width // WORD // BLOCK
            last = (offset + elements - 1) * width // WORD // BLOCK
            name = canonical_name(parameter)
            found[axis, self.buffer.kind, name] = sum(values[first : last + 1])
        return found


class NumberWatch:
    """The watch over one engine's numbers. `check_if_due` and `check` are collective."""

    def __init__(
        self,
        state: EngineState,
        batches: StepBatches,
        grid: ProcessGrid,
        recipe: Recipe,
        step: int,
        say: Callable[[str], None],
    ) -> None:
        """Begin after `step` steps, with the weights in place. `say`: takes a line for the user."""
        self._state = state
        self._batches = batches
        self._grid = grid
        self._say = say
        self._run = recipe.run
        self._last = recipe.steps
        self._trial = step + TRIAL_STEPS if recipe.run.check_every is None else 0
        # steps from one check to the next
        self.every = recipe.run.check_every or self._trial
        self.always = True  # sums are kept after every step, not only before a check
        self._times = [clock()]  # at the ends of the steps up to the trial
        self._step = step  # completed steps
        self.sound = step  # completed steps at the last check that found nothing
        self._watched: list[Watched] = []
        self._batch = torch.zeros((), dtype=torch.int64)  # not 0: a batch changed
        self._keep()
        if any(partition.swapped for partition in state.partitions):
            say("run.check_every: states on NVMe are not watched")
        # Every engine's update, plain or pipeline, goes through this.
        engine = state.engine
        engine._take_model_step = partial(self._update, engine._take_model_step)

    def check_if_due(self, step: int) -> None:
        """Check after a step, if it is due. Raises Corrupted on all ranks."""
        if step <= self._trial:
            self._times.append(clock())
        if self._due(step):
            self.check(step)
        if step == self._trial:
            self._choose()

    def check(self, step: int, *, again: bool = False) -> None:
        """Compare what was found since the last check. Raises Corrupted on all ranks.

        `again`: compare the sums kept after the last step too, for a save.
        """
        if again:
            self._compare()
        table = self._exchange()
        if not is_sound(table, self._grid):
            own = Details(socket.gethostname(), *self._details())
            details = processes.gathered(own, self._grid.control_group, Details)
            raise Corrupted(corruptions(details, self._grid), self.sound, step)
        self.sound = step
        for watched in self._watched:
            watched.running.zero_()

    def _due(self, step: int) -> bool:
        return step in (self._trial, self._last) or step % self.every == 0

    def _update(self, take_step: Callable[..., None], *how: Any) -> None:
        """Make an optimizer step, between sums where they are due."""
        self._step += 1
        changed = batch_sum(self._batches.last) ^ self._batches.bit_sum
        self._batch = self._batch.to(changed.device) | changed
        self._compare()
        take_step(*how)
        saves = self._run.save_every and self._step % self._run.save_every == 0
        if (
            self.always
            or saves
            or self._step == self._last
            or self._due(self._step + 1)
        ):
            self._keep()
        else:
            for watched in self._watched:
                watched.kept = None

    def _keep(self) -> None:
        """Keep the sums; moments are there after the first step."""
        kinds = {watched.buffer.kind for watched in self._watched}
        if len(kinds) <= 2:
            new = [
                buffer for buffer in self._state.buffers() if buffer.kind not in kinds
            ]
            self._watched += map(Watched, new)
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
        exact = (
            torch.are_deterministic_algorithms_enabled()
            or not processes.device().own_memory
        )
        if axis == "dp" or exact:
            yield from (
                watched for watched in self._watched if watched.buffer.copied == axis
            )

    def _hash(self, axis: str) -> int:
        sums = [watched.running.sum() for watched in self._copies(axis)]
        if sums:
            return int(torch.stack(sums).sum())
        return 0

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
        sums = seconds_of(self._add_up)
        exchange = seconds_of(self._exchange)
        ranks = processes.gathered((step, sums, exchange), self._grid.control_group)
        slowest = [max(times) for times in zip(*ranks, strict=True)]
        self.every, self.always = interval(*slowest)
        if self.always:
            when = f"after every step and told each {self.every}"
            seen = "a flip between steps is seen"
        else:
            when = f"around one step of {self.every}"
            seen = f"a single flip is seen with a chance of 1 in {self.every}"
        self._say(
            f"numbers are checked for changed bits {when}: {seen} (run.check_every)"
        )

    def _add_up(self) -> None:
        for watched in self._watched:
            watched.sums()


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
    times = []
    for _ in range(3):
        started = clock()
        work()
        times.append(clock() - started)
    return max(times)


def is_sound(table: Sequence[NumberReport], grid: ProcessGrid) -> bool:
    """Check the reports of all ranks, in rank order."""
    if any(report.changed for report in table):
        return False
    for axis in AXES:
        hashes = [getattr(report, axis) for report in table]
        if odd_ranks(hashes, axis, grid):
            return False
    return True


def odd_ranks(values: Sequence[object], axis: str, grid: ProcessGrid) -> list[int]:
    """Return the ranks that differ from the majority along an axis; all of them where there is none."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(len(values)):
        place = coordinates(rank, grid.tp, grid.dp)._replace(**{axis: 0})
        groups.setdefault(place, []).append(rank)
    odd: list[int] = []
    for ranks in groups.values():
        most, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
        if count == len(ranks):
            continue
        tied = 2 * count <= len(ranks)
        odd += ranks if tied else [rank for rank in ranks if values[rank] != most]
    return odd


def corruptions(
    details: Sequence[Details], grid: ProcessGrid
) -> tuple[Corruption, ...]:
    """Name ranks and tensors by the details of all ranks, in rank order.

    Where a rank saw its own numbers change, copies that differ are not named: the change explains them.
    """
    found: dict[tuple[int, str, bool], list[str]] = {}
    for rank, each in enumerate(details):
        for _, kind, name in each.changed:
            found.setdefault((rank, kind, False), []).append(name)
    if not found:
        copies = [dict(each.copies) for each in details]
        every_name: dict[Named, None] = {}
        for held in copies:
            every_name |= dict.fromkeys(held)
        for named in every_name:
            axis, kind, name = named
            hashes = [held.get(named) for held in copies]
            for rank in odd_ranks(hashes, axis, grid):
                found.setdefault((rank, kind, True), []).append(name)
    named_corruptions = []
    for (rank, kind, among_copies), names in sorted(found.items()):
        host = details[rank].host
        named_corruptions.append(
            Corruption(rank, host, kind, tuple(names), among_copies)
        )
    return tuple(named_corruptions)
