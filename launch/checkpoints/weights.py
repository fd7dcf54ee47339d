"""Weights in their layout-free form: full, unpadded float32 tensors under canonical names.

Every checkpoint carries them next to DeepSpeed's own files, so that a run of any layout can be exported,
sampled from and compared. Each pipeline stage writes parts of at most `PART_BYTES`, in the order of its
parameters:

    weights-stage-00-part-000.safetensors ...     the metadata of a stage's last part says how many

so that saving never holds a whole stage in host memory (392 GB for 98 billion parameters). A parameter is
assembled from its ZeRO partitions by DeepSpeed and from its tensor slices here, one parameter at a time.
Checkpoints of earlier versions have one file per stage, weights-stage-00.safetensors, and are read too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from launch.deepspeed_fixes.optimizer_state_links import link_optimizer_states
from modeling.initialization import Shard
from modeling.parallel.process_grid import ProcessGrid
from recipes.schema import Optimizer

Read = Callable[[torch.nn.Parameter], torch.Tensor]
PATTERN = "weights-stage-*.safetensors"
PART_BYTES = 4 * 1024**3  # of a file's tensors; a single larger tensor has a part of its own


def save_weights(engine: DeepSpeedEngine, grid: ProcessGrid, directory: Path) -> None:
    """Write the master weights of every stage into `directory`. Collective."""
    _save(engine, grid, directory, "weights", _master_weight)


def save_first_gradients(
    engine: DeepSpeedEngine, grid: ProcessGrid, directory: Path, optimizer: Optimizer, norm: float | None
) -> None:
    """Write the gradient of every parameter, before clipping, after the first optimizer step. Collective.

    Read from Adam's first moment, which after one step is (1 - beta1) times the clipped gradient: that works
    alike under every ZeRO stage and in the pipeline, where there is no moment between backward and step at
    which to look.
    """
    clipped = min(1.0, optimizer.clip / (norm + 1e-6)) if optimizer.clip and norm else 1.0
    scale = (1 - optimizer.betas[0]) * clipped
    link_optimizer_states(engine)
    _save(engine, grid, directory, "gradients", lambda p: _first_moment(engine, p) / scale)


def write_parts(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, stem: str) -> None:
    """Write named host tensors to `directory`/`stem`-part-NNN.safetensors, replacing what is there of `stem`.

    Takes one tensor at a time and lets go of a written part: it holds `PART_BYTES` and one tensor at most.
    """
    for old in (*directory.glob(f"{stem}.safetensors"), *directory.glob(f"{stem}-part-*.safetensors")):
        old.unlink()
    part: dict[str, torch.Tensor] = {}
    files = (directory / f"{stem}-part-{number:03d}.safetensors" for number in itertools.count())
    written = 1
    for name, tensor in tensors:
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > PART_BYTES:
            save_file(part, next(files))
            part.clear()
            written += 1
        part[name] = tensor
    save_file(part, next(files), metadata={"parts": str(written)})


def load_tensors(directory: Path, pattern: str = PATTERN) -> dict[str, torch.Tensor]:
    """All stages' tensors by canonical name. Raises FileNotFoundError if one or all are missing."""
    files = sorted(Path(directory).glob(pattern))
    if not files:
        raise FileNotFoundError(f"{directory} holds no {pattern}")
    _check_parts(files)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _check_parts(files: list[Path]) -> None:
    """Raises FileNotFoundError where a part of a stage is not among `files`; other files are whole."""
    stages: dict[str, dict[int, Path]] = {}
    for file in files:
        if part := re.fullmatch(r"(.+)-part-(\d+)\.safetensors", file.name):
            stages.setdefault(part[1], {})[int(part[2])] = file
    for stem, parts in stages.items():
        with safe_open(parts[max(parts)], framework="pt") as last:
            told = (last.metadata() or {}).get("parts")
        if sorted(parts) != list(range(len(parts))) or told != str(len(parts)):
            raise FileNotFoundError(
                f"{files[0].parent} holds {len(parts)} of the {told or 'more'} parts of {stem}: "
                "restore the others"
            )


def _save(engine: DeepSpeedEngine, grid: ProcessGrid, directory: Path, stem: str, read: Read) -> None:
    # A copy that is tied on a later stage is left out.
    own = (p for p in engine.module.parameters() if not getattr(p, "ds_pipe_replicated", False))
    tensors = ((p.canonical_name, _full(read(p), p, grid)) for p in own)
    if grid.at.tp == 0 and grid.at.dp == 0:
        host = ((name, full.cpu().contiguous()) for name, full in tensors)
        write_parts(host, directory, f"{stem}-stage-{grid.at.pp:02d}")
    else:
        for _ in tensors:  # joining is collective
            pass


def _master_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    master = safe_get_full_fp32_param(parameter)
    return parameter.data if master is None else master


def _first_moment(engine: DeepSpeedEngine, parameter: torch.nn.Parameter) -> torch.Tensor:
    moment = safe_get_full_optimizer_state(parameter, "exp_avg")
    return engine.optimizer.state[parameter]["exp_avg"] if moment is None else moment


def _full(local: torch.Tensor, parameter: torch.nn.Parameter, grid: ProcessGrid) -> torch.Tensor:
    """The full, unpadded float32 tensor on every rank of the tensor group; `local`: flat or in its shape."""
    local = local.view(getattr(parameter, "ds_shape", parameter.shape)).detach().float()
    shard: Shard | None = parameter.shard  # type: ignore[attr-defined]
    if shard is None:
        return local
    local = local.contiguous()
    slices = [local]
    if shard.size > 1:
        slices = [torch.empty_like(local) for _ in range(shard.size)]
        dist.all_gather(slices, local, group=grid.tensor_group)
    return shard.join(slices)
