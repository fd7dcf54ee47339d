"""Weights in their layout-free form: full, unpadded float32 tensors under canonical names.

Every checkpoint carries them beside DeepSpeed's own files, one `weights-stage-NN.safetensors` per pipeline stage, so that a
run of any layout can be exported, sampled from and compared. A parameter is assembled from its ZeRO partitions by
DeepSpeed and from its tensor slices here, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file, save_file

from modeling.initialization import Shard
from modeling.process_grid import ProcessGrid
from recipes.schema import Optimizer

PATTERN = "weights-stage-*.safetensors"


def save_weights(engine, grid: ProcessGrid, directory: Path) -> None:
    """Write the master weights of every stage into `directory`. Collective."""
    _save(engine, grid, directory / f"weights-stage-{grid.at.pp:02d}.safetensors", _master_weight)


def save_first_gradients(engine, grid: ProcessGrid, directory: Path, optimizer: Optimizer, norm: float | None) -> None:
    """Write the gradient of every parameter, before clipping, after the first optimizer step. Collective.

    Read from Adam's first moment, which after one step is (1 - beta1) times the clipped gradient: that works alike under
    every ZeRO stage and in the pipeline, where there is no moment between backward and step at which to look.
    """
    clipped = min(1.0, optimizer.clip / (norm + 1e-6)) if optimizer.clip and norm else 1.0
    scale = (1 - optimizer.betas[0]) * clipped
    if getattr(engine.optimizer, "_hp_optimizer_states_linked", False):
        # ZeRO 1/2 links moments to parameters after stepping its first parameter group, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    path = directory / f"gradients-stage-{grid.at.pp:02d}.safetensors"
    _save(engine, grid, path, lambda p: _first_moment(engine, p) / scale)


def load_tensors(directory: Path, pattern: str = PATTERN) -> dict[str, torch.Tensor]:
    """All stages' tensors by canonical name.

    Raises FileNotFoundError if there are none.
    """
    files = sorted(Path(directory).glob(pattern))
    if not files:
        raise FileNotFoundError(f"{directory} holds no {pattern}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def named_parameters(engine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This stage's parameters by canonical name; a tied copy on a later stage is left out."""
    for parameter in engine.module.parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            yield parameter.canonical_name, parameter


def _save(engine, grid: ProcessGrid, path: Path, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
    writer = grid.at.tp == 0 and grid.at.dp == 0
    tensors = {}
    for name, parameter in named_parameters(engine):
        full = _join(read(parameter).detach().float(), parameter, grid)
        if writer:
            tensors[name] = full.cpu().contiguous()
    if writer:
        save_file(tensors, path)


def _master_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    master = safe_get_full_fp32_param(parameter)
    return (parameter.data if master is None else master).view(_local_shape(parameter))


def _first_moment(engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    moment = safe_get_full_optimizer_state(parameter, "exp_avg")
    if moment is None:
        moment = engine.optimizer.state[parameter]["exp_avg"]
    return moment.view(_local_shape(parameter))


def _local_shape(parameter: torch.nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _join(local: torch.Tensor, parameter: torch.nn.Parameter, grid: ProcessGrid) -> torch.Tensor:
    """The full, unpadded tensor on every rank of the tensor group."""
    shard: Shard | None = parameter.shard  # type: ignore[attr-defined]
    if shard is None:
        return local
    local = local.contiguous()
    slices = [local]
    if shard.size > 1:
        slices = [torch.empty_like(local) for _ in range(shard.size)]
        dist.all_gather(slices, local, group=grid.tensor_group)
    return shard.join(slices)
