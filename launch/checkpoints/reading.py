"""The choice of a checkpoint to resume, and reading it into an engine of any layout."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from launch.checkpoints import inspection, run_checkpoints
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.manifest import Manifest
from launch.checkpoints.names import NAME, WEIGHT
from launch.checkpoints.run_checkpoints import (
    Checkpoint,
    CheckpointChoice,
    DamagedCheckpoint,
)
from launch.checkpoints.stored import StoredTensors, TensorPlacement
from launch.ranks.processes import from_rank_0, gathered
from modeling.parallel.process_grid import ProcessGrid
from recipes import files
from recipes.schema import Recipe


def choose(
    root: Path, grid: ProcessGrid, recipe: Recipe, corpus: str
) -> CheckpointChoice:
    """Choose the newest checkpoint of `recipe` whose files are sound (`inspection.file_faults`). Collective.

    Rank 0 reads the names and one manifest after the other, until a checkpoint is whole; each rank reads a
    share of its files. `corpus`: checksum of the training tokens. Raises ValueError on every rank if all
    checkpoints are damaged, if a machine does not see one, or if it was trained on other tokens.
    """
    every = run_checkpoints.found(root, sizes=False) if grid.rank == 0 else iter(())

    def inspected() -> Checkpoint | DamagedCheckpoint | None:
        return inspect(next(every, None), grid, recipe)

    chosen = run_checkpoints.first_whole(iter(inspected, None))
    if (
        chosen.checkpoint
        and (trained_on := chosen.checkpoint.manifest.corpus) != corpus
    ):
        raise ValueError(
            f"{chosen.checkpoint.directory} was trained on tokens with CRC-32 {trained_on}, and the recipe's "
            f"data now have {corpus}: its files, or the store of that name, have changed; restore them, or "
            "begin a new run with --out (--init_from takes its weights along)"
        )
    if chosen.damaged and not chosen.checkpoint:
        lines = "".join(f"\n  {each}" for each in chosen.damaged)
        raise ValueError(
            f"--resume: no checkpoint of {root.parent} is whole, and what it trained is not thrown away: "
            f"restore one, or begin a new run with --out.{lines}"
        )
    return chosen


def inspect(
    own: Checkpoint | DamagedCheckpoint | None,
    grid: ProcessGrid,
    recipe: Recipe | None = None,
) -> Checkpoint | DamagedCheckpoint | None:
    """Return what rank 0 has found, with the damage of its files. Collective.

    `recipe`: the run's, if the checkpoint's has not been compared with it.
    """
    found = of_rank_0(own, grid.control_group)
    if isinstance(found, Checkpoint):
        other = recipe and inspection.other_recipe(found.manifest, recipe)
        why = other or problem_of(found, grid)
        if why:
            return DamagedCheckpoint(found.directory, why)
    return found


def of_rank_0(
    own: Checkpoint | DamagedCheckpoint | None, group: dist.ProcessGroup
) -> Checkpoint | DamagedCheckpoint | None:
    """Return the checkpoint that rank 0 has found, if any. Collective."""
    found = None
    if own is not None:
        held = own.manifest if isinstance(own, Checkpoint) else own.why
        found = (own.directory, held)
    told = from_rank_0(found, group, tuple[Path, Manifest | str] | None)
    if told is None:
        return None
    directory, held = told
    if isinstance(held, str):
        return DamagedCheckpoint(directory, held)
    return Checkpoint(directory, held)


def problem_of(candidate: Checkpoint, grid: ProcessGrid) -> str | None:
    """Read a checkpoint's files; return the damage, also of their numbers, or None. Collective."""
    held = candidate.manifest
    mine = sorted(held.files)[grid.rank :: dist.get_world_size()]
    own = None
    if files.is_file(candidate.directory / NAME):  # which rank 0 has read
        own = list[str]()
        for name in mine:
            own += map(str, inspection.file_faults(candidate.directory, held, name))
    told = gathered(own, grid.control_group)
    blinded = [rank for rank, faults in enumerate(told) if faults is None]
    if blinded:
        raise ValueError(
            f"ranks {blinded} do not see {candidate.directory}: the run directory (--out) must be on a "
            "file system that all machines share"
        )
    return "; ".join(chain.from_iterable(filter(None, told))) or None


@torch.no_grad()
def load(state: EngineState, checkpoint: Checkpoint) -> None:
    """Read weights, moments, loss scaler and schedule of any layout into an engine. Collective.

    Each rank reads the pieces that it needs. Raises FileError if the checkpoint has another model.
    """
    progress = checkpoint.manifest.progress
    stored = StoredTensors(checkpoint.directory, checkpoint.manifest)
    state.begin_filling()
    for partition in state.partitions:
        state.open(partition)
        master = partition.master()
        buffers = {WEIGHT: master.data}
        moments = state.held(partition, checkpoint.manifest.kinds[1:])
        if moments:
            state.new_moments(partition, progress.adam_steps, moments)
            buffers |= {name: state.adam.state[master][name] for name in moments}
        for fragment in partition.fragments:
            place = TensorPlacement.of(fragment.parameter)
            for kind, buffer in buffers.items():
                stored.fill(fragment.within(buffer), place, fragment.first, kind)
        state.write_back()
    state.finish()
    state.set_scaler(progress.loss_scaler)
    engine = state.engine
    engine.global_steps = progress.step
    engine.skipped_steps = progress.skipped
    recipe = Recipe.model_validate(checkpoint.manifest.recipe)
    engine.global_samples = recipe.sizes.samples(progress.step)
    engine.lr_scheduler.load_state_dict({"completed": progress.schedule})
