"""Export of a checkpoint as a universal checkpoint of DeepSpeed, under the names of the `transformers` model.

    DIR/
      latest_universal                    the name of the next directory, by which Trainer finds it
      global_step6_universal/
        mp_rank_00_model_states.pt        steps and schedule; ZeRO-3 reads it as zero_pp_rank_0_mp_rank_00_…
        zero/optimizer_state.pt           the learning rate of the next step
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
      trainer_state.json, scheduler.pt    steps and schedule for Trainer
      config.json, tokenizer.json, …      of the model
      export.json                         the origin, and the recipe's optimizer, schedule and batch

Read by DeepSpeed 0.19.8: checkpoint/universal_checkpoint.py, runtime/base_optimizer.py (ZeRO 1 and 2, and
BF16_Optimizer), runtime/zero/stage3.py and runtime/engine.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers import TrainerControl, TrainerState

from data import durable_files
from launch.checkpoints import inspection
from launch.checkpoints.manifest import Manifest
from launch.checkpoints.names import MOMENTS
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.stored import StoredTensors
from launch.machine.checks import free_bytes
from launch.weights import export
from launch.weights.deepspeed_weights import NAMES
from launch.weights.their_settings import TOLD
from modeling import cost
from modeling.families import meta_parameters
from recipes.problems import Problem, ProblemsError, amount, existing
from recipes.schema import Recipe

FLAG = "--universal"
BYTES = 4 * len(NAMES)  # of a parameter
BYTES_OF_FILES = 8192  # of a tensor, besides its numbers: names, and blocks of the disk
ALONE = "launch/export_hf.py exports the weights alone"


def check_exportable(held: Manifest, recipe: Recipe, out: Path) -> None:
    """Check that DeepSpeed can go on from a checkpoint, and that the disk of `out` has room for it.

    Raises ProblemsError with every reason against it.
    """
    problems = []
    if not set(MOMENTS) <= {*held.kinds}:
        problems.append(
            Problem(
                FLAG,
                f"the checkpoint of step {held.step} holds weights only",
                "a universal checkpoint holds both moments of the optimizer",
                f"name a later step as RUN@STEP; {ALONE}",
            )
        )
    if recipe.optimizer.name != "adamw":
        problems.append(
            Problem(
                "optimizer.name",
                f"optimizer.name={recipe.optimizer.name}",
                "DeepSpeed loads universal checkpoints of AdamW, under ZeRO 1 to 3",
                ALONE,
            )
        )
    if recipe.model.shared_layers:
        problems.append(
            Problem(
                "model.shared_layers",
                "model.shared_layers=true",
                "the layers of transformers' model would be trained apart",
                ALONE,
            )
        )
    needed = size_of(recipe) + BYTES_OF_FILES * len(meta_parameters(recipe))
    free = free_bytes(existing(out))
    if free < needed:
        problems.append(
            Problem(
                FLAG,
                f"{FLAG} {out}: {amount(free)} are free",
                f"the export has {amount(needed)}",
                "name a directory on another disk",
            )
        )
    if problems:
        raise ProblemsError(problems)


def size_of(recipe: Recipe) -> int:
    """Return the bytes of the exported tensors."""
    return BYTES * cost.parameters(recipe.model, recipe.positions)


def describe(checkpoint: Checkpoint, out: Path) -> str:
    """Describe the export and how to go on from it."""
    held = checkpoint.manifest
    scaler = held.progress.loss_scaler
    scale = ""
    if scaler is not None:
        power = round(math.log2(scaler.cur_scale))
        scale = f'\n  "fp16": {{"initial_scale_power": {power}}}, which is the run\'s'
    return f"""go on from it with ZeRO 1, 2 or 3 and, in the DeepSpeed JSON,
  "checkpoint": {{"load_universal": true}}{scale}
in your loop
  engine.load_checkpoint("{out}")
in a script with transformers' Trainer
  --config_name {out} --tokenizer_name {out} --resume_from_checkpoint {out}
which logs, evaluates and saves as {out / "trainer_state.json"} says, every 500 steps: edit it
JSON and script decide all else; the run's optimizer, schedule and batch stand in {out / "export.json"}
{checkpoint.directory} -> {out}: step {held.step}, with both moments of Adam"""


def write(  # noqa: PLR0913
    checkpoint: Checkpoint,
    recipe: Recipe,
    tokenizer: Tokenizer,
    rate: float,
    out: Path,
    *,
    run: Path,
    seen: inspection.Seen = lambda number: None,
) -> None:
    """Write `out`, a new or empty directory, which appears whole or not at all.

    Memory holds a few times the largest tensor.

    Args:
        rate: learning rate of the next step.
        seen: gets the bytes of the checkpoint that are checked, and those of the tensors that are written.

    Raises FileError: checkpoint or tokenizer are damaged, or `out` cannot be made.
    """
    export.check_whole(checkpoint, recipe, tokenizer, run, tuple(NAMES), seen)
    step = checkpoint.step
    tag = f"global_step{step}_universal"
    with export.appearing(FLAG, out) as directory:
        folder = directory / tag
        zero = folder / "zero"
        for kind, file in NAMES.items():
            stored = StoredTensors(checkpoint.directory, checkpoint.manifest, kind)
            converted = export.ConvertedTensors(stored, recipe, torch.float32)
            for name in converted.names:
                # else the file would hold all that the tensor is a part of
                numbers = converted.read(name).clone(
                    memory_format=torch.contiguous_format
                )
                _save(zero / name / f"{file}.pt", {"param": numbers})
                seen(numbers.nbytes)
        progress = checkpoint.manifest.progress
        for name in converted.names:
            # torch's Adam counts in the tensor
            count = torch.tensor(float(progress.adam_steps))
            _save(zero / name / "step.pt", count)
        scheduler = scheduler_state(progress.schedule, rate)
        _save(
            zero / "optimizer_state.pt",
            optimizer_state(progress.adam_steps, rate, len(converted.names)),
        )
        engine = {
            "global_steps": step,
            "global_samples": recipe.sizes.samples(step),
            "skipped_steps": progress.skipped,
            "lr_scheduler": scheduler,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": deepspeed.__version__,
        }
        _save(folder / "mp_rank_00_model_states.pt", engine)
        _save(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", engine)
        _save(directory / "scheduler.pt", scheduler)
        micro = checkpoint.manifest.plan.get("layout", {}).get("micro", 1)
        # Trainer's first save looks up the state of each of its callbacks
        state = TrainerState(
            global_step=step,
            max_steps=recipe.steps,
            train_batch_size=micro,
            stateful_callbacks=[TrainerControl()],  # type: ignore[list-item]
        )
        state.save_to_json(str(directory / "trainer_state.json"))
        config = export.model_config(recipe, tokenizer, torch.float32)
        config.save_pretrained(directory)
        export.write_tokenizer(recipe, tokenizer, directory)
        told = recipe.model_dump(mode="json", by_alias=True, include={*TOLD})
        export.write_facts(checkpoint, recipe, directory, run=str(run), **told)
        durable_files.write_atomically(directory / "latest_universal", tag)


def scheduler_state(completed: int, rate: float) -> dict[str, Any]:
    """Return the state of a schedule after `completed` steps, for those of torch and of DeepSpeed.

    What shapes them is of the one that loads it.
    """
    return {
        "last_epoch": completed,
        "_step_count": completed + 1,
        "_last_lr": [rate],
        "lr_lambdas": [],
        "last_batch_iteration": completed - 1,
    }


def optimizer_state(updates: int, rate: float, tensors: int) -> dict[str, Any]:
    """Return what the optimizers of all ZeRO stages load besides tensors.

    DeepSpeed pairs its groups of parameters with the listed ones and leaves out what has no partner, so there
    is one for each of `tensors`. ZeRO-3 gives the first to every group: it holds nothing that may differ
    between them. All of ZeRO-3's groups share one count of updates, which therefore is no tensor.
    """
    group = {"lr": rate}
    return {
        "ds_version": deepspeed.__version__,
        "param_groups": [group] * tensors,
        "optimizer_state_dict": {
            "state": {0: {"step": updates}},
            "param_groups": [group],
        },
    }


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_files.replacing(path) as file:
        torch.save(value, file)
