"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices that ranks share.

DeepSpeed 0.19.8 has a Muon, which trains otherwise under each layout:

- `set_optimizer_flags` of `deepspeed/__init__.py` takes every tensor of two dimensions for a matrix that has
  no "embed" or "lm_head" in its name: embeddings and heads of ours too;
- of a matrix that tensor-parallel ranks share each rank orthogonalises its own slice;
- ZeRO 1 to 3 orthogonalise the gradient as they sum it up, and then clip by the norm of the update, which
  grows with the matrices: the step shrinks, and only ZeRO-0 clips the gradient. Upstream:
  https://github.com/deepspeedai/DeepSpeed/issues/8439.

`Muon` here is an optimizer like any other: it gets gradients that are averaged, unscaled and clipped, in the
flat buffers of each ZeRO stage, and gathers the whole matrices in its step. Worth another look when
    `test_upstream_symptoms.py::test_muon_under_zero_has_its_update_clipped_instead_of_the_gradient` fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.deepspeed_fixes.short_steps import Fragment
from modeling import cost
from modeling.cost.parameter_count import is_hidden_matrix
from modeling.initialization import canonical_name, shard_of
from modeling.parallel.process_grid import Group, ProcessGrid

# of the quintic iteration, and its number; as in torch.optim.Muon
LINEAR = 3.4445
CUBIC = -4.7750
QUINTIC = 2.0315
ITERATIONS = 5
LEAST_NORM = 1e-7
QKV = ".attention.qkv.weight"  # rows in the order (head, q/k/v, D)


class Muon(torch.optim.AdamW):
    """Muon of the matrices of transformer layers, and torch's AdamW of all other parameters.

    The step of a matrix, with gradient G and momentum M: M = m M + (1 - m) G; the direction (1 - m) G + m M is
    orthogonalised as a whole matrix, queries, keys and values each for themselves, and added times the rate
    and the factor of `adjusted`; before, weights decay by rate x weight_decay. States: exp_avg of a matrix,
    which is M; torch's of the others. Steps are collective over the data- and tensor-parallel ranks of a
    pipeline stage, each of which orthogonalises a share of its matrices, in rounds that bound the memory. A
    step leaves the direction in the place of the gradient.
    """

    def __init__(
        self,
        parameters: Iterable[dict[str, Any]],
        grid: ProcessGrid,
        *,
        heads: int,
        dtype: torch.dtype,
        momentum: float,
        adjust_lr: str,
        adam_lr: float,
        **numbers: Any,
    ) -> None:
        """Take this rank's groups of `parameters`.

        Args:
            heads: attention heads of the model.
            dtype: of the orthogonalisation.
            momentum, adjust_lr, adam_lr: by the recipe's `optimizer`.
            numbers: lr of the matrices, betas, eps and weight_decay.
        """
        self.grid = grid
        self.heads = heads
        self.dtype = dtype
        self.adjust_lr = adjust_lr
        self.matrices: list[torch.nn.Parameter] = []
        of_muon = {"params": self.matrices, "momentum": momentum}
        share = adam_lr / numbers["lr"]
        others = [{**group, "params": [], "lr_share": share} for group in parameters]
        for group, other in zip(parameters, others, strict=True):
            for parameter in group["params"]:
                shape = _local_shape(parameter)
                chosen = is_hidden_matrix(canonical_name(parameter), len(shape))
                (self.matrices if chosen else other["params"]).append(parameter)
        super().__init__([of_muon, *others], fused=True, **numbers)
        # Whoever clips divides the gradients themselves, which both steps read.
        self.defaults["fused"] = False
        self._fragments: dict[int, tuple[Fragment, ...]] = {}
        self._rounds: dict[tuple[int, ...], list[_Division]] = {}

    def locate(self, partitions: Iterable[Any]) -> None:
        """Take note of what each buffer of master weights holds, once the engine is built.

        `partitions`: those of `launch.checkpoints.engine_state`.
        """
        for partition in partitions:
            self._fragments[id(partition.master())] = partition.fragments

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective."""
        assert closure is None, "DeepSpeed computes the loss before"
        every = self.param_groups
        self.param_groups = [group for group in every if "momentum" not in group]
        super().step()
        self.param_groups = every
        for group in every:
            if "momentum" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        masters = [each for each in group["params"] if each.grad is not None]
        if not masters:
            return
        key = tuple(map(id, masters))
        if key not in self._rounds:
            self._rounds[key] = self._divide(masters)
        directions = [self._direction(master, group["momentum"]) for master in masters]
        for master in masters:
            master.mul_(1 - group["lr"] * group["weight_decay"])
        for division in self._rounds[key]:
            updates = division.orthogonalised(directions)
            for matrix, update in zip(division.matrices, updates, strict=True):
                rate = group["lr"] * adjusted(self.adjust_lr, *matrix.parts)
                matrix.within(masters).add_(update, alpha=-rate)

    def _direction(self, master: Tensor, momentum: float) -> Tensor:
        """Bring the momentum up to date; turn the gradient into Nesterov's direction."""
        gradient = master.grad
        assert gradient is not None
        state = self.state[master]
        if not state:
            state["exp_avg"] = torch.zeros_like(master)
        average = state["exp_avg"].lerp_(gradient, 1 - momentum)
        return gradient.lerp_(average, momentum)

    def _divide(self, masters: Sequence[Tensor]) -> list[_Division]:
        """Give the matrices of these buffers to the ranks of this pipeline stage, in rounds. Collective."""
        located = {}
        for number, master in enumerate(masters):
            for parameter, _, offset, elements in self._fragments[id(master)]:
                located[id(parameter)] = (number, offset, elements)
        matrices = []
        for parameter in self.matrices:
            place = located.get(id(parameter), (0, 0, 0))
            matrices.append(_Matrix(parameter, self.heads, *place))
        counts = [matrix.elements for matrix in matrices]
        own = torch.tensor(counts, device=masters[0].device)
        table = [own]
        if self.grid.dp > 1:
            table = [torch.empty_like(own) for _ in range(self.grid.dp)]
            dist.all_gather(table, own, group=self.grid.data_group)
        held = torch.stack(table).cpu()
        here = held.sum(0) > 0
        # Under ZeRO-3 other buffers hold the other matrices.
        held = held[:, here]
        matrices = list(itertools.compress(matrices, here))
        tp = self.grid.tp
        ranks = self.grid.dp * tp
        owners = share_out([each.operations for each in matrices], ranks)
        loads = held.clone()
        for item, matrix in enumerate(matrices):
            loads[owners[item] // tp, item] += matrix.local_size
        # A single rank exchanges nothing.
        most = cost.MUON_AT_ONCE if ranks > 1 else 0
        nothing = torch.empty(0, dtype=self.dtype, device=own.device)
        rounds = []
        for items in in_rounds(loads, most):
            of_round = [matrices[item] for item in items]
            their_owners = [owners[item] for item in items]
            pieces = held[:, items]
            division = _Division(self.grid, of_round, their_owners, pieces, nothing)
            rounds.append(division)
        return rounds


def adjusted(rule: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's rate, as torch.optim.Muon's `adjust_lr_fn`.

    match_rms_adamw: gives the update the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2);
    original: Jordan's.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return the matrix (rows, columns) with all singular values near 1, in its type.

    A quintic Newton-Schulz iteration on the smaller side, with the arithmetic of torch.optim.Muon.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        factor = torch.addmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
        x = torch.addmm(x, factor, x, beta=LINEAR)
    return x.t() if tall else x


def _local_shape(parameter: torch.nn.Parameter) -> torch.Size:
    # ZeRO-3 leaves an empty tensor behind
    return getattr(parameter, "ds_shape", parameter.shape)


class _Matrix:
    """A hidden matrix, and this data-parallel rank's piece of its tensor-parallel slice."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        heads: int,
        buffer: int,
        offset: int,
        elements: int,
    ) -> None:
        """`buffer`, `offset`, `elements`: where the piece lies among the master weights."""
        self.buffer = buffer
        self.offset = offset
        self.elements = elements
        self.local_shape = _local_shape(parameter)
        self.local_size = math.prod(self.local_shape)
        shard = shard_of(parameter)
        self.cut = shard.dim if shard is not None and shard.size > 1 else None
        shape = list(self.local_shape)
        if self.cut is not None:
            shape[self.cut] = shard.entries
        self.rows, self.columns = shape
        self.heads = heads if canonical_name(parameter).endswith(QKV) else 0

    @property
    def parts(self) -> tuple[int, int]:
        """Rows and columns of what is orthogonalised at once."""
        rows = self.rows // 3 if self.heads else self.rows
        return rows, self.columns

    @property
    def operations(self) -> int:
        """Operations of its orthogonalisation, up to a factor."""
        small, large = sorted(self.parts)
        return (3 if self.heads else 1) * small**2 * (2 * large + small)

    def within(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return this rank's piece, flat."""
        flat = buffers[self.buffer].view(-1)
        return flat[self.offset : self.offset + self.elements]

    def joined(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the whole matrix of the flat slices of all tensor-parallel ranks."""
        views = [each.view(self.local_shape) for each in slices if each.numel()]
        return views[0] if len(views) == 1 else torch.cat(views, dim=self.cut or 0)

    def slices(self, matrix: Tensor, ranks: int) -> Sequence[Tensor]:
        """Return the slice of each tensor-parallel rank."""
        return [matrix] * ranks if self.cut is None else matrix.chunk(ranks, self.cut)

    def orthogonalised(self, matrix: Tensor) -> Tensor:
        """Orthogonalise the whole matrix; queries, keys and values each as one."""
        if not self.heads:
            return orthogonalise(matrix)
        by_head = matrix.view(self.heads, 3, -1, self.columns)
        parts = []
        for number in range(3):
            part = orthogonalise(by_head[:, number].reshape(self.parts))
            parts.append(part.view(self.heads, -1, self.columns))
        return torch.stack(parts, dim=1).view(matrix.shape)


class _Division:
    """A round of a step on some buffers, divided over the ranks of a pipeline stage."""

    def __init__(
        self,
        grid: ProcessGrid,
        matrices: Sequence[_Matrix],
        owners: Sequence[int],
        held: Tensor,
        nothing: Tensor,
    ) -> None:
        """Take note of a round.

        Args:
            owners: of each matrix, the rank of this stage that orthogonalises it.
            held: elements of the slice of each matrix on each data-parallel rank (ranks, matrices).
            nothing: an empty tensor of the type and on the device of the exchange.
        """
        self.matrices = matrices
        self.ranks = grid.tp
        of_data = [owner // grid.tp for owner in owners]
        sizes = torch.tensor([each.local_size for each in matrices])
        whole = held[of_data, torch.arange(len(matrices))] == sizes
        self.over_data = _Exchange(grid.data_group, of_data, held, whole, nothing)
        self.gathered = [matrices[number] for number in self.over_data.own]
        of_tensor = [owners[number] % grid.tp for number in self.over_data.own]
        whole = torch.tensor([each.cut is None for each in self.gathered]).bool()
        slices = sizes[self.over_data.own].expand(grid.tp, -1)
        self.over_tensor = _Exchange(
            grid.tensor_group, of_tensor, slices, whole, nothing
        )

    def orthogonalised(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of the orthogonalised matrices in flat `buffers`. Collective."""
        updates = self._updates(buffers)
        slices = self.over_tensor.give_back(updates)
        del updates
        pieces: list[Sequence[Tensor]] = []
        for number, slice_ in zip(self.over_data.own, slices, strict=True):
            counts = self.over_data.held[:, number].tolist()
            # Under ZeRO-0 every rank holds the whole slice.
            copied = sum(counts) > len(slice_)
            pieces.append([slice_] * len(counts) if copied else slice_.split(counts))
        return self.over_data.give_back(pieces)

    def _updates(self, buffers: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the slices of the matrices that this rank orthogonalises. Collective."""
        dtype = self.over_data.nothing.dtype
        collected = self.over_data.collect(
            [each.within(buffers).to(dtype) for each in self.matrices]
        )
        slices = self.over_tensor.collect([torch.cat(each) for each in collected])
        updates = []
        for number, parts in zip(self.over_tensor.own, slices, strict=True):
            matrix = self.gathered[number]
            update = matrix.orthogonalised(matrix.joined(parts))
            updates.append(matrix.slices(update, self.ranks))
        return updates


def share_out(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that gets each item: the costliest first, each to the rank with the least so far."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owner = loads.index(min(loads))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def in_rounds(loads: Tensor, most: int) -> list[list[int]]:
    """Group items into rounds, each item into the first round in which it loads no rank beyond `most`.

    `loads`: (ranks, items). An item that does so alone has a round of its own.
    """
    rounds: list[list[int]] = []
    for item in range(loads.shape[1]):
        for items in rounds:
            if loads[:, [*items, item]].sum(1).max() <= most:
                items.append(item)
                break
        else:
            rounds.append([item])
    return rounds


class _Exchange:
    """Tensors whose flat pieces lie on the ranks of a group, brought to one rank each, and back."""

    def __init__(
        self,
        group: Group,
        owners: Sequence[int],
        held: Tensor,
        whole: Tensor,
        nothing: Tensor,
    ) -> None:
        """Take note of the pieces.

        Args:
            owners: the rank that gets each tensor.
            held: elements of each tensor on each rank (ranks, tensors), in whose order they follow each other.
            whole: whether the owner of each tensor holds all of it already, as other ranks may, too.
            nothing: an empty tensor of their type and device.
        """
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.owners = owners
        self.held = held
        self.nothing = nothing
        self.own = [item for item, owner in enumerate(owners) if owner == self.rank]
        elsewhere = torch.arange(len(held))[:, None] != torch.tensor(owners)
        self.sent = held.masked_fill(whole & elsewhere, 0)

    def collect(self, pieces: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return all pieces of this rank's tensors, given its piece of every tensor. Collective."""
        outgoing: list[list[Tensor]] = [[] for _ in self.held]
        counts = self.sent[self.rank].tolist()
        for piece, count, owner in zip(pieces, counts, self.owners, strict=True):
            outgoing[owner].append(piece[:count])
        expected = self.sent[:, self.own].tolist()
        return list(zip(*self._swapped(outgoing, expected), strict=True))

    def give_back(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return this rank's piece of every tensor, given all pieces of its own tensors. Collective."""
        outgoing: list[list[Tensor]] = [[] for _ in self.held]
        for pieces in tensors:
            for rank, piece in enumerate(pieces):
                outgoing[rank].append(piece.reshape(-1))
        expected: list[list[int]] = [[] for _ in self.held]
        counts = self.held[self.rank].tolist()
        for count, owner in zip(counts, self.owners, strict=True):
            expected[owner].append(count)
        received = self._swapped(outgoing, expected)
        return [received[owner].pop(0) for owner in self.owners]

    def _swapped(
        self, outgoing: list[list[Tensor]], expected: list[list[int]]
    ) -> list[list[Tensor]]:
        """Send flat tensors to each rank; return those of `expected` sizes from each. Collective."""
        if len(outgoing) == 1:
            return outgoing
        to_each = [sum(map(len, pieces)) for pieces in outgoing]
        from_each = [sum(sizes) for sizes in expected]
        sent = torch.cat([self.nothing, *itertools.chain(*outgoing)])
        received = self.nothing.new_empty(sum(from_each))
        dist.all_to_all_single(received, sent, from_each, to_each, group=self.group)
        parts = zip(received.split(from_each), expected, strict=True)
        return [list(part.split(sizes)) for part, sizes in parts]
