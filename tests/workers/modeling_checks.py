"""Four ranks that check the modeling, with tp 2 (two groups side by side) and tp 4.

Started by tests/modeling/test_modeling.py.

    modeling_checks.py OUT [graphs]     graphs: those that trace a layer, instead of the others
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepspeed
import randomness
import sequence_parallel
import shared_draws
import sparse
import tensor_parallel
import torch.distributed as dist
from reporting import Checks, run_checks

from modeling.parallel.process_grid import ProcessGrid

PROCESSES = 4
DEGREES = (2, 4)


def checks_of(tp: int) -> dict[str, Callable[[ProcessGrid, Path], None]]:
    found: dict[str, Callable[[ProcessGrid, Path], None]] = {}
    for_group = {**tensor_parallel.CHECKS, **sequence_parallel.CHECKS, **sparse.CHECKS}
    for name, check in for_group.items():
        found[name] = partial(lambda check, grid, directory: check(grid.tensor_group), check)
    found["imported weights"] = lambda grid, directory: tensor_parallel.imported_weights(
        grid.tensor_group, directory
    )
    for_grid = {**tensor_parallel.GRID_CHECKS, **randomness.CHECKS, **sparse.GRID_CHECKS}
    if tp < PROCESSES:
        for_grid |= randomness.DATA_PARALLEL_CHECKS
    for name, check in for_grid.items():
        found[name] = partial(lambda check, grid, directory: check(grid), check)
    return found


EVERY = [f"{name}, tp {tp}" for tp in DEGREES for name in checks_of(tp)]
EVERY += shared_draws.CHECKS
GRAPHS = [name for name in EVERY if "one graph" in name]
NAMES = [name for name in EVERY if name not in GRAPHS]


def prepare(names: list[str], directory: Path) -> Checks:
    checks = {**shared_draws.CHECKS}
    for tp in DEGREES:
        grid = ProcessGrid(tp, 1, dist.get_world_size() // tp)
        for name, check in checks_of(tp).items():
            checks[f"{name}, tp {tp}"] = partial(configured, check, grid, directory)
    return {name: checks[name] for name in names}


def configured(check: Callable[[ProcessGrid, Path], None], grid: ProcessGrid, directory: Path) -> None:
    deepspeed.checkpointing.configure(grid)
    check(grid, directory)


if __name__ == "__main__":
    run_checks(partial(prepare, GRAPHS if "graphs" in sys.argv else NAMES), Path(sys.argv[1]))
