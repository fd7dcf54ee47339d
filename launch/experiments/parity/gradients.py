"""The gradients of a run's first step, in the form of a checkpoint, to compare layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from launch.checkpoints import manifest, tensor_file
from launch.checkpoints.manifest import Manifest, Progress, file_name
from launch.checkpoints.names import MOMENTS
from launch.checkpoints.shares import Part, contents
from launch.ranks.processes import gathered, merged
from launch.records.facts import StepRecord
from launch.training.run import TrainingRun
from modeling.cost.parameter_count import is_hidden_matrix

DIRECTORY = "first-gradients"  # in a run directory
KIND = MOMENTS[0]


class FirstGradients:
    """Writes the gradient of every parameter, before clipping, after the first optimizer step.

    They are read from Adam's first moment, which after one step is (1 - beta1) times the clipped gradient;
    Muon's is 1 - momentum times it.
    This works under every ZeRO stage and in the pipeline, which makes backward pass and step in one call.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def end(self, error: BaseException | None) -> None: ...

    def after_step(self, record: StepRecord) -> None:
        run = self._run
        if run.done != 1:
            return
        grid = run.grid
        adam = run.recipe.optimizer
        norm = record.grad_norm
        clipped = min(1.0, adam.clip / (norm + 1e-6)) if adam.clip and norm else 1.0
        of_adam = (1 - adam.betas[0]) * clipped
        of_muon = (1 - float(adam.of_muon["momentum"])) * clipped
        directory = run.job.directory / DIRECTORY
        if grid.rank == 0:
            directory.mkdir()
        gathered(None, grid.control_group)
        entries, tensors = contents(run.state, (KIND,), grid.rank)
        scaled = []
        for entry, (name, tensor) in zip(entries, tensors.items(), strict=True):
            matrix = is_hidden_matrix(name, len(tensor.shape))
            scale = of_muon if adam.name == "muon" and matrix else of_adam
            scaled.append(replace(entry, read=partial(_divided, entry.read, scale)))
        written = tensor_file.write(directory / file_name(grid.rank), scaled)
        run.state.close()
        own = Part(grid.rank, {file_name(grid.rank): written}, tensors, {})
        whole = merged(own, Part.followed_by, grid.control_group, Part)
        if grid.rank == 0:
            recipe = run.recipe.as_data()
            progress = Progress(step=1, adam_steps=1, schedule=1)
            held = (whole.files, whole.tensors, (KIND,))
            manifest.write(Manifest(progress, {}, "", recipe, {}, {}, *held), directory)
        gathered(None, grid.control_group)


def _divided(read: Callable[[], torch.Tensor], by: float) -> torch.Tensor:
    return read() / by
