"""The master weights and moments of an engine, put together from all ranks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.manifest import MOMENTS, WEIGHT, Kind
from launch.checkpoints.stored import TensorPlacement


def full_state(state: EngineState) -> dict[tuple[Kind, str], torch.Tensor]:
    """(kind, name) -> the full tensor, joined over the ranks. Collective."""
    pieces = []
    for partition in state.partitions:
        for fragment in state.owned(partition):
            place = TensorPlacement.of(fragment.parameter)
            for kind in state.held(partition, (WEIGHT, *MOMENTS)):
                numbers = state.read(partition, fragment, kind).cpu().clone()
                cut = place.cut and (place.cut.dim, place.cut.start)
                pieces.append(((kind, place.name), cut, fragment.first, numbers, place.shape))
    state.close()
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, pieces)
    slices: dict = {}
    for key, cut, first, numbers, shape in itertools.chain(*of_ranks):
        slices.setdefault((key, shape), {}).setdefault(cut, []).append((first, numbers))
    found = {}
    for (key, shape), of_cuts in slices.items():
        whole = []
        for cut in sorted(of_cuts, key=lambda each: each or ()):
            flat = torch.cat([numbers for _, numbers in sorted(of_cuts[cut], key=lambda each: each[0])])
            if cut is not None:
                rest = [n for dim, n in enumerate(shape) if dim != cut[0]]
                count = flat.numel() // (rest[0] if rest else 1)
                flat = flat.view([count if dim == cut[0] else n for dim, n in enumerate(shape)])
            whole.append(flat)
        dim = next(iter(of_cuts))[0] if None not in of_cuts else 0
        full = torch.cat(whole, dim=dim)
        found[key] = full.view(-1, *shape[1:])[: shape[0]]
    return found
