"""Resuming: which checkpoint a run starts from, and loading it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from launch.checkpoints.checkpoint import Checkpoint, newest
from launch.deepspeed_fixes.cpu_adam_bias_correction import replay_bias_correction
from launch.machine.processes import gathered
from modeling.parallel.process_grid import ProcessGrid


def choose(root: Path, grid: ProcessGrid, corpus: str | None) -> Checkpoint | None:
    """The checkpoint from which all ranks resume: the newest complete one of rank 0, or None. Collective.

    `corpus`: checksum of the training tokens. Raises ValueError on every rank where another machine does not
    see the checkpoint, or where it was trained on other tokens.
    """
    choice = [newest(root) if grid.rank == 0 else None]
    dist.broadcast_object_list(choice, src=0, group=grid.control_group)
    (checkpoint,) = choice
    if checkpoint is None:
        return None
    seen = gathered(Checkpoint.read(checkpoint.directory) is not None, grid.control_group)
    if blind := [rank for rank, sees in enumerate(seen) if not sees]:
        raise ValueError(
            f"ranks {blind} do not see {checkpoint.directory} whole: the run directory (--out) must be on a "
            "file system that all machines share"
        )
    if checkpoint.corpus not in (None, corpus):
        raise ValueError(
            f"{checkpoint.directory} was trained on tokens with CRC-32 {checkpoint.corpus}, and the recipe's "
            f"data now have {corpus}: its files, or the store of that name, have changed; restore them, or "
            "begin a new run with --out (--init_from takes exported weights along)"
        )
    return checkpoint


def load(engine: DeepSpeedEngine, checkpoint: Checkpoint) -> None:
    """Load weights, optimizer, loss scaler and schedule. Collective."""
    directory = checkpoint.directory
    path, client_state = engine.load_checkpoint(str(directory.parent), tag=directory.name)
    if path is None:
        raise ValueError(f"{directory}: DeepSpeed could not read this checkpoint")
    replay_bias_correction(engine.basic_optimizer)
    saved = client_state.get("step", checkpoint.step)
    assert saved == checkpoint.step, f"{directory}: marker says step {checkpoint.step}, shards {saved}"
