"""A watch over numbers that only an optimizer step may change; what is right need not be known.

Weights, master weights and moments lie still from one optimizer step to the next. The sums of their bits are
taken after a step and again before the next one: a flipped bit changes them. Where ranks hold copies, they
compare a running hash of these sums, which also has what went wrong within a step. The bits of a batch are
added up when it is made, and again once it was used. Gradients, activations and messages exist once and
change all the time: they are not watched (docs/running.md has what that would cost).

`EngineState.buffers` lists what is watched.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from data.bit_sums import BLOCK, ODD, WORD, batch_sum, block_sums, signed
from data.loader import StepBatches
from launch.checkpoints.engine_state import Buffer, EngineState
from launch.ranks import processes
from launch.ranks.processes import gathered
from launch.records.facts import Corruption
from launch.training.agreement import all_gather
from launch.training.early_ends import Corrupted
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import counted
from recipes.rank_order import Coordinates, coordinates
from recipes.schema import Recipe

SHARE = 0.005  # of a step's time, for checks of a chosen interval
TRIAL_STEPS = 5  # of a launch, by whose time the interval is chosen
SMALL = 2**16  # elements; of smaller buffers one kernel adds up many
AXES = ("dp", "tp")
Named = tuple[str, str]  # kind and tensor


@dataclass(frozen=True)
class CheckSteps:
    """The steps at which ranks compare their sums, and those around which sums are taken.

    Attributes:
        every: steps from one comparison to the next.
        always: sums are taken around every step; else around the step of a comparison.
        batches: batches are summed in every step; else in that of a comparison.
        trial: a step with a comparison besides, after which the interval is chosen.
        last, save_every: of the run.
    """

    every: int
    always: bool
    batches: bool
    trial: int
    last: int
    save_every: int

    def compares(self, step: int) -> bool:
        return step in (self.trial, self.last) or step % self.every == 0

    def keeps_sums(self, step: int) -> bool:
        """Check whether the sums after this step are needed: by the next one, or by a save."""
        saves = step == self.last or (self.save_every > 0 and step % self.save_every == 0)
        return self.always or saves or self.compares(step + 1)

    def sums_batch(self, step: int) -> bool:
        return self.batches or self.compares(step)


class Costs(NamedTuple):
    """The seconds that one rank measured."""

    step: float
    sums: float  # of all buffers
    batch: float  # the sum of a step's batch
    exchange: float  # a comparison between the ranks

    def choose(self) -> tuple[int, bool, bool]:
        """Choose `every`, `always` and `batches` of CheckSteps so that checks take SHARE of the time."""
        room = SHARE * self.step
        batches = self.batch <= room / 4
        if batches:
            room -= self.batch
        left = room - 2 * self.sums
        if left > 0:
            return max(1, math.ceil(self.exchange / left)), True, batches
        return math.ceil((2 * self.sums + self.batch + self.exchange) / room), False, batches


class Report(NamedTuple):
    """The report of one rank at a comparison, in numbers that travel as one row of a tensor."""

    changed: int  # buffers that changed between steps
    dp: int  # running hash of what data-parallel ranks hold alike
    tp: int  # the same of tensor-parallel ranks
    held: int  # running hash of the batches that were used
    made: int  # the same of the batches that were made
    made_here: int  # 0: another rank made them


@dataclass(frozen=True)
class Details:
    """What one rank tells once something differs: its changed numbers, and a hash of each copied tensor."""

    host: str
    changed: tuple[Named, ...]
    copies: dict[str, dict[Named, int]]  # by axis


class Section:
    """Buffers of one kind and type that are added up at once."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        first = buffers[0]
        self.buffers, self.kind, self.copied = buffers, first.kind, first.copied
        tensor = first.tensor()
        self.device, self._width = tensor.device, tensor.element_size()
        self.blocks = self._block_of(sum(buffer.elements for buffer in buffers) - 1) + 1

    def sums(self) -> torch.Tensor | None:
        """Return (blocks,) sums; None while a tensor is released."""
        flat = []
        for buffer in self.buffers:
            tensor = buffer.tensor()
            if tensor.numel() != buffer.elements:
                return None
            flat.append(tensor.detach().reshape(-1))
        return block_sums(flat[0] if len(flat) == 1 else torch.cat(flat))

    def tensors(self) -> Iterator[tuple[str, slice]]:
        """Yield each tensor's name and the blocks that have some of its elements."""
        start = 0
        for buffer in self.buffers:
            for name, first, end in buffer.places:
                if end > first:
                    blocks = slice(self._block_of(start + first), self._block_of(start + end - 1) + 1)
                    yield name, blocks
            start += buffer.elements

    def _block_of(self, element: int) -> int:
        return element * self._width // (WORD * BLOCK)


class Sums:
    """The sums of several sections on one device, one after another in one tensor."""

    def __init__(self, sections: Sequence[Section], axes: Sequence[str]) -> None:
        self.sections, device = sections, sections[0].device
        blocks = sum(section.blocks for section in sections)
        self.kept: torch.Tensor | None = None  # after the last step, if the next one compares
        self.running = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.changed = torch.zeros(blocks, dtype=torch.bool, device=device)
        self._released: list[slice] = []  # when the sums were kept
        self._masks = []  # of what is copied along each axis
        for axis in AXES:
            compared = axis in axes
            parts = []
            for section in sections:
                parts.append(torch.full((section.blocks,), compared and axis in section.copied))
            self._masks.append(torch.cat(parts).to(device))

    def keep(self) -> None:
        """Keep the sums after a step."""
        self.kept, self._released = self.add_up()
        self.running = self.running * signed(ODD) + self.kept

    def compare(self) -> None:
        """Compare with the sums that were kept; the verdict stays on the device."""
        if self.kept is None:
            return
        now, released = self.add_up()
        differs = now != self.kept
        for blocks in (*self._released, *released):
            differs[blocks] = False
        self.changed |= differs

    def add_up(self) -> tuple[torch.Tensor, list[slice]]:
        """Return the sums, and the blocks of released tensors, which are gathered before use."""
        parts = []
        released = []
        for section, blocks in self._blocks():
            sums = section.sums()
            if sums is None:
                sums = torch.zeros_like(self.running[blocks])
                released.append(blocks)
            parts.append(sums)
        return torch.cat(parts), released

    def figures(self) -> torch.Tensor:
        """Return whether something changed, and the the running hash along each axis, (3,) int64."""
        hashes = [(self.running * mask).sum() for mask in self._masks]
        return torch.stack([self.changed.any().long(), *hashes])

    def changes(self) -> Iterator[Named]:
        """Yield what changed."""
        changed = self.changed.tolist()
        for section, blocks in self._blocks():
            here = changed[blocks]
            names = [name for name, own in section.tensors() if any(here[own])]
            if any(here) and not names:
                names = ["padding"]
            yield from ((section.kind, name) for name in names)

    def copies(self, axis: str) -> dict[Named, int]:
        """Return a hash of each tensor that is copied along an axis."""
        running = self.running.tolist()
        found: dict[Named, int] = {}
        for section, blocks in self._blocks():
            if axis in section.copied:
                here = running[blocks]
                for name, own in section.tensors():
                    found[section.kind, name] = sum(here[own])
        return found

    def _blocks(self) -> Iterator[tuple[Section, slice]]:
        start = 0
        for section in self.sections:
            yield section, slice(start, start + section.blocks)
            start += section.blocks


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
        self._state, self._batches, self._grid, self._say = state, batches, grid, say
        run, first = recipe.run, step + TRIAL_STEPS
        trial = first if run.check_every is None else 0
        self.steps = CheckSteps(run.check_every or first, True, True, trial, recipe.steps, run.save_every)
        self._seconds: list[float] = []
        self._step = self.sound = step  # completed steps; the last one with a comparison that found nothing
        # Kernels of accelerators add up an embedding's gradient in no fixed order: twice, they differ.
        same = torch.are_deterministic_algorithms_enabled() or not processes.device().own_memory
        self._axes = AXES if same else ("dp",)
        self._sums: list[Sums] = []
        self._kinds: set[str] = set()
        self._held = torch.zeros((), dtype=torch.int64)
        self._made, self._made_here = 0, True
        self._keep()
        if any(partition.swapped for partition in state.partitions):
            say("states on NVMe are not checked for changed bits (run.check_every)")
        # Every engine's update, plain or pipeline, goes through this.
        engine = state.engine
        engine._take_model_step = partial(self._update, engine._take_model_step)

    def check_if_due(self, step: int, seconds: float) -> None:
        """Check after a step of so many seconds, if it is due. Raises Corrupted on all ranks."""
        if step < self.steps.trial:
            self._seconds.append(seconds)
        if self.steps.compares(step):
            self.check(step)
            if step == self.steps.trial:
                self._choose()

    def check(self, step: int, *, again: bool = False) -> None:
        """Compare what was found since the last comparison. Raises Corrupted on all ranks.

        `again`: also compare the sums since the last step, for a save after it.
        """
        if again:
            self._compare()
        table = self._exchange()
        if differences := _differences(table, self._grid):
            raise Corrupted(self._locate(table, differences), self.sound, step)
        self.sound = step
        for sums in self._sums:
            sums.running.zero_()
        self._held.zero_()
        self._made, self._made_here = 0, True

    def _update(self, take_step: Callable[..., None], *how: Any, **more: Any) -> None:
        """Make an optimizer step, between sums where they are due."""
        self._step += 1
        if self.steps.sums_batch(self._step):
            self._take_batch()
        self._compare()
        take_step(*how, **more)
        if self.steps.keeps_sums(self._step):
            self._keep()
        else:
            for sums in self._sums:
                sums.kept = None

    def _take_batch(self) -> None:
        held = batch_sum(self._batches.last)
        self._held = self._held.to(held.device) * signed(ODD) + held
        made = self._batches.bit_sum
        self._made_here = made is not None
        self._made = signed(self._made * ODD + (made or 0))

    def _compare(self) -> None:
        for sums in self._sums:
            sums.compare()

    def _keep(self) -> None:
        """Keep the sums after a step; the first one makes the moments."""
        if len(self._kinds) <= 2:
            self._watch_new()
        for sums in self._sums:
            sums.keep()

    def _watch_new(self) -> None:
        """Watch the buffers of kinds that were not there before."""
        new = [buffer for buffer in self._state.buffers() if buffer.kind not in self._kinds]
        self._kinds.update(buffer.kind for buffer in new)
        by_device: dict[torch.device, list[Section]] = {}
        for section in _sections(new):
            by_device.setdefault(section.device, []).append(section)
        self._sums += [Sums(sections, self._axes) for sections in by_device.values()]

    def _exchange(self) -> list[Report]:
        """Return the reports of all ranks. Waits for the device."""
        figures = [sums.figures().cpu() for sums in self._sums]
        changed, dp, tp = torch.stack(figures).sum(0).tolist()
        own = Report(changed, dp, tp, int(self._held), self._made, int(self._made_here))
        table = torch.empty(dist.get_world_size(), len(own), dtype=torch.int64)
        all_gather(table.view(-1), torch.tensor(own), group=self._grid.control_group)
        return [Report(*row) for row in table.tolist()]

    def _locate(self, table: Sequence[Report], differences: set[str]) -> tuple[Corruption, ...]:
        """Name ranks and tensors. Collective."""
        changed: list[Named] = []
        copies: dict[str, dict[Named, int]] = {axis: {} for axis in sorted(differences.intersection(AXES))}
        for sums in self._sums:
            changed += sums.changes()
            for axis, hashes in copies.items():
                hashes |= sums.copies(axis)
        own = Details(socket.gethostname(), tuple(changed), copies)
        return _corruptions(table, gathered(own, self._grid.control_group), self._grid)

    def _choose(self) -> None:
        """Choose the interval by the slowest rank's times. Collective."""
        step = statistics.median(self._seconds[1:])
        own = Costs(
            step, _seconds_of(self._add_up), _seconds_of(self._sum_batch), _seconds_of(self._exchange)
        )
        ranks = gathered(own, self._grid.control_group)
        slowest = Costs(*map(max, zip(*ranks, strict=True)))
        slowest = slowest._replace(step=ranks[0].step)
        every, always, batches = slowest.choose()
        self.steps = replace(self.steps, every=every, always=always, batches=batches)
        when = f"every {counted(every, 'step')}" if always else f"around one step of {every}"
        self._say(f"numbers are checked for changed bits {when} (run.check_every)")

    def _add_up(self) -> None:
        for sums in self._sums:
            sums.add_up()

    def _sum_batch(self) -> None:
        batch_sum(self._batches.last)


def _sections(buffers: Sequence[Buffer]) -> list[Section]:
    """Group small buffers by kind, type and copies; each large one is a section of its own."""
    groups: dict[Any, list[Buffer]] = {}
    for number, buffer in enumerate(buffers):
        key: Any = number
        if buffer.elements < SMALL:
            tensor = buffer.tensor()
            key = buffer.kind, buffer.copied, tensor.dtype, tensor.device
        groups.setdefault(key, []).append(buffer)
    return [Section(group) for group in groups.values()]


def _seconds_of(work: Callable[[], object]) -> float:
    """Return the least time of three calls, with the device's."""
    times = []
    for _ in range(3):
        get_accelerator().synchronize()
        started = time.perf_counter()
        work()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _differences(table: Sequence[Report], grid: ProcessGrid) -> set[str]:
    """Return what differs: "changed", "batch", and axes along which copies do."""
    found = set()
    if any(report.changed for report in table):
        found.add("changed")
    for axis in AXES:
        for ranks in _copies_of(axis, grid):
            if len({getattr(table[rank], axis) for rank in ranks}) > 1:
                found.add(axis)
    if _wrong_batches(table, grid):
        found.add("batch")
    return found


def _copies_of(axis: str, grid: ProcessGrid) -> list[list[int]]:
    """Return the groups of ranks that differ by their place on one axis of the grid."""
    groups: dict[Coordinates, list[int]] = {}
    for rank in range(grid.tp * grid.dp * grid.pp):
        at = coordinates(rank, grid.tp, grid.dp)
        groups.setdefault(at._replace(**{axis: 0}), []).append(rank)
    return list(groups.values())


def _wrong_batches(table: Sequence[Report], grid: ProcessGrid) -> list[int]:
    """Return the ranks that used another batch than was made, or made another than most."""
    wrong = []
    by_place: dict[int, list[int]] = {}
    for rank in range(len(table)):
        by_place.setdefault(coordinates(rank, grid.tp, grid.dp).dp, []).append(rank)
    for ranks in by_place.values():
        made = {rank: table[rank].made for rank in ranks if table[rank].made_here}
        odd = _odd_ones(made)
        first = next(iter(made.values()))
        wrong += [rank for rank in ranks if rank in odd or table[rank].held != made.get(rank, first)]
    return wrong


def _odd_ones(values: dict[int, int]) -> list[int]:
    """Return the ranks whose value is not that of most ranks; all, where no value is."""
    most, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return [*values]
    return [rank for rank, value in values.items() if value != most]


def _corruptions(
    table: Sequence[Report], details: Sequence[Details], grid: ProcessGrid
) -> tuple[Corruption, ...]:
    """Name ranks and tensors by what all ranks told, in rank order."""
    found: dict[tuple[int, str, bool], list[str]] = {}
    for rank, each in enumerate(details):
        for kind, name in each.changed:
            found.setdefault((rank, kind, False), []).append(name)
    for rank in _wrong_batches(table, grid):
        found[rank, "batch", False] = []
    known = {rank for rank, *_ in found}
    for axis in details[0].copies:
        for ranks in _copies_of(axis, grid):
            if known.intersection(ranks):  # that explains why its copies differ
                continue
            for kind, name in details[ranks[0]].copies[axis]:
                hashes = {rank: details[rank].copies[axis][kind, name] for rank in ranks}
                if len(set(hashes.values())) > 1:
                    for rank in _odd_ones(hashes):
                        found.setdefault((rank, kind, True), []).append(name)
    corruptions = []
    for (rank, kind, among_copies), names in sorted(found.items()):
        corruptions.append(Corruption(rank, details[rank].host, kind, tuple(names), among_copies))
    return tuple(corruptions)
