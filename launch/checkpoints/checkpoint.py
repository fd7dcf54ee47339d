"""Checkpoints: DeepSpeed's files plus layout-free weights, complete only when a marker says so.

    checkpoints/
      step-000100/            DeepSpeed's shards, weights-stage-NN-part-NNN.safetensors
        complete.json         written last, atomically: step, layout, data position, every file with its size

A run killed at any moment, also while saving, leaves a directory without marker, which resuming ignores. What is not
saved needs no saving: dropout and data order are functions of (seed, step).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from data.durable_files import write_atomically
from data.loader import merge_states
from ds_configs.plan import Plan
from launch.checkpoints.weights import save_weights
from launch.deepspeed_fixes.cpu_adam_bias_correction import replay_bias_correction
from modeling.parallel.process_grid import ProcessGrid
from recipes.catalog import digest

MARKER = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    step: int
    data_state: dict  # position in the data, of all ranks
    corpus: str | None = None  # checksum of the training tokens

    @staticmethod
    def read(directory: Path) -> Checkpoint | None:
        """The checkpoint in `directory`, or None if it is not complete: no marker, or files missing or of another size."""
        try:
            marker = json.loads((directory / MARKER).read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        whole = all(
            (directory / name).is_file() and (directory / name).stat().st_size == size
            for name, size in marker["files"].items()
        )
        return Checkpoint(directory, marker["step"], marker["data"], marker.get("corpus")) if whole else None


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints below `root`, oldest first."""
    found = [Checkpoint.read(d) for d in sorted(root.glob("step-*")) if d.is_dir()]
    return sorted((c for c in found if c), key=lambda c: c.step)


def save(
    engine, plan: Plan, grid: ProcessGrid, root: Path, step: int, data_state: dict, corpus: str | None = None
) -> Path:
    """Save the state after `step` optimizer steps and prune old checkpoints. Collective.

    `data_state`: of this rank. `corpus`: checksum of the training tokens.
    """
    directory = root / f"step-{step:06d}"
    if grid.rank == 0:
        if Checkpoint.read(directory) is None and directory.exists():
            shutil.rmtree(directory)  # the remains of a save that was killed
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier(group=grid.control_group)
    engine.save_checkpoint(str(root), tag=directory.name, client_state={"step": step}, save_latest=False)
    save_weights(engine, grid, directory)
    # Every data-parallel rank knows where it is in the files that it reads; gathering also waits for all ranks.
    states: list = [None] * dist.get_world_size()
    dist.all_gather_object(states, data_state, group=grid.control_group)
    if grid.rank == 0:
        files = {
            str(p.relative_to(directory)): p.stat().st_size
            for p in sorted(directory.rglob("*"))
            if p.is_file() and p.name != MARKER
        }
        marker = {"step": step, "recipe": digest(plan.recipe), "layout": asdict(plan.layout), "data": merge_states(states),
                  "corpus": corpus, "files": files}  # fmt: skip
        write_atomically(directory / MARKER, json.dumps(marker, indent=2) + "\n")
        _prune(root, plan.recipe.run.keep_checkpoints)
    dist.barrier(group=grid.control_group)
    return directory


def _prune(root: Path, keep: int | None) -> None:
    for old in complete_checkpoints(root)[:-keep] if keep else []:
        (
            old.directory / MARKER
        ).unlink()  # first, so that a killed removal leaves no checkpoint that looks complete
        shutil.rmtree(old.directory)


def newest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None."""
    return (complete_checkpoints(root) or [None])[-1]


def agreed(root: Path, grid: ProcessGrid) -> Checkpoint | None:
    """The newest complete checkpoint as rank 0 sees it, so that all ranks go on from the same one. Collective.

    Raises ValueError where another machine does not see it.
    """
    choice = [newest(root) if grid.rank == 0 else None]
    dist.broadcast_object_list(choice, src=0, group=grid.control_group)
    seen: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        seen, choice[0] is None or Checkpoint.read(choice[0].directory) is not None, group=grid.control_group
    )
    if not all(seen):
        raise ValueError(
            f"ranks {[i for i, s in enumerate(seen) if not s]} do not see {choice[0].directory} whole: the run directory (--out) must "
            "be on a file system that all machines share"
        )
    return choice[0]


def check_corpus(checkpoint: Checkpoint, corpus: str | None) -> None:
    """Raises ValueError where the run would go on with other training text than it was begun with."""
    if checkpoint.corpus not in (None, corpus):
        raise ValueError(
            f"{checkpoint.directory} was trained on tokens with CRC-32 {checkpoint.corpus}, and the recipe's data now have {corpus}: "
            "its files, or the store of that name, have changed; restore them, or begin a new run with --out (--init_from takes exported "
            "weights along)"
        )


def load(engine, checkpoint: Checkpoint) -> int:
    """Load weights, optimizer, loss scaler and schedule; return the completed optimizer steps. Collective."""
    path, client_state = engine.load_checkpoint(
        str(checkpoint.directory.parent), tag=checkpoint.directory.name
    )
    if path is None:
        raise ValueError(f"{checkpoint.directory}: DeepSpeed could not read this checkpoint")
    replay_bias_correction(engine.basic_optimizer)
    step = checkpoint.step
    assert client_state.get("step", step) == step, (
        f"{checkpoint.directory}: marker says step {step}, shards {client_state}"
    )
    return step
