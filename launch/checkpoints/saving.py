"""Saving a checkpoint: DeepSpeed's files, layout-free weights, and last the marker that makes it complete."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from data.durable_files import write_atomically
from data.loader import merge_states
from ds_configs.plan import Plan
from launch.checkpoints.checkpoint import MARKER, Checkpoint, complete_checkpoints
from launch.checkpoints.weights import save_weights
from launch.machine.processes import gathered
from modeling.parallel.process_grid import ProcessGrid
from recipes.catalog import digest


def save(
    engine: DeepSpeedEngine, plan: Plan, grid: ProcessGrid, root: Path, step: int, data: dict, crc: str | None
) -> None:
    """Save the state after `step` optimizer steps below `root` and prune old checkpoints. Collective.

    `data`: this rank's position. `crc`: checksum of the training tokens.
    """
    directory = root / f"step-{step:06d}"
    if grid.rank == 0:
        if Checkpoint.read(directory) is None and directory.exists():
            shutil.rmtree(directory)  # the remains of a save that was killed
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier(group=grid.control_group)
    engine.save_checkpoint(str(root), directory.name, client_state={"step": step}, save_latest=False)
    save_weights(engine, grid, directory)
    # Every data-parallel rank knows its place in the files that it reads; gathering also waits for all ranks.
    states = gathered(data, grid.control_group)
    if grid.rank == 0:
        files = [p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != MARKER]
        marker = {
            "step": step,
            "recipe": digest(plan.recipe),
            "layout": asdict(plan.layout),
            "data": merge_states(states),
            "corpus": crc,
            "files": {str(p.relative_to(directory)): p.stat().st_size for p in files},
        }
        write_atomically(directory / MARKER, json.dumps(marker, indent=2) + "\n")
        keep = plan.recipe.run.keep_checkpoints
        for old in complete_checkpoints(root)[:-keep] if keep else []:
            (old.directory / MARKER).unlink()  # first: a killed removal leaves nothing that looks complete
            shutil.rmtree(old.directory)
    dist.barrier(group=grid.control_group)
