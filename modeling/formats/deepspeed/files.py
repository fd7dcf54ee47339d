"""The files of a DeepSpeed checkpoint.

    DIR/latest                                     names the newest save; it is written last
    DIR/global_step6/mp_rank_00_model_states.pt    stages 0 to 2: module, counters, DeepSpeed's configuration
    DIR/global_step6/zero_pp_rank_1_mp_rank_00_model_states.pt    stage 3: the same, of every rank
    DIR/global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt    a rank's partition; bf16_zero_... in bf16
    DIR/global_step6/zero/NAME/fp32.pt             a universal checkpoint: next to it exp_avg.pt, exp_avg_sq.pt

A Trainer's checkpoint-N is such a DIR, with its own files beside. Without DeepSpeed the whole optimizer is in
one file, optimizer.pt of Trainer or optimizer.bin of accelerate's save_state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from recipes.files import is_file, read_text, refuse
from recipes.problems import some

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
TRACKERS = ("latest", "latest_universal")
CONFIG = "config.json"
WHOLE_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "iter_*", "release")
SAVES = ("latest", "mp_rank_*_model_states.pt", "zero_pp_rank_*_model_states.pt")
UNIVERSAL = "zero"  # directory of a universal checkpoint's tensors
COPY = "copy the whole directory again, or give an older save"


class SaveFiles(NamedTuple):
    """The files of one save. `models` and `optimizers`: by (data-parallel rank, model-parallel rank)."""

    where: Path
    models: dict[tuple[int, int], Path]
    optimizers: dict[tuple[int, int], Path]


def find(directory: Path) -> SaveFiles:
    """Find the newest save in a directory, or the save that it is. Raises FileError."""
    where = directory
    if not _found(directory, MODEL):
        trackers = (directory / name for name in TRACKERS)
        tracker = next((file for file in trackers if is_file(file)), None)
        if tracker is None:
            _refuse_other(directory)
        where = directory / read_text(tracker).strip()
    models = _found(where, MODEL)
    if not models:
        rule = "it has the run's counters"
        refuse(where, "lacks mp_rank_00_model_states.pt", rule, COPY)
    return SaveFiles(where, models, _found(where, OPTIMIZER))


def whole_optimizer(directory: Path) -> Path | None:
    """Return the file of an optimizer that no ranks share; None: there is none."""
    files = (directory / name for name in WHOLE_OPTIMIZER)
    return next((file for file in files if is_file(file)), None)


def instead_of_weights(directory: Path) -> tuple[str, str, str] | None:
    """Return what came, the rule and the fix for a directory of saves without weights; None: it is none."""
    if _holds(directory, WEIGHTS):
        return None
    if _holds(directory, SAVES):
        rule = "the weights are in the optimizer's files"
        fix = f"go on with the run: launch/pretrain.py --adopt {directory}"
        return "is a save of DeepSpeed", rule, fix
    found = {}
    for path in directory.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal():
            found[int(number)] = str(path)
    below = [found[number] for number in sorted(found, reverse=True)]
    if not below:
        return None
    fix = f"give one of them, such as {below[0]}"
    return f"holds {some(below, 4)}", "each is a save of its own", fix


def _holds(directory: Path, patterns: Iterable[str]) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in patterns)


def _refuse_other(directory: Path) -> NoReturn:
    """Refuse a directory without a save. Raises FileError, which says what to do with it instead."""
    came = "holds no file `latest`"
    rule = "`latest` is written last and names what is whole"
    fix = "give the directory in which save_checkpoint or Trainer wrote, or one of its global_stepN"
    if _holds(directory, WEIGHTS):
        came = "holds weights alone"
        rule = "a run goes on with the moments of its optimizer"
        fix = f"start from the weights: --init_from {directory}"
    elif not _holds(directory, SAVES):
        came, rule, fix = instead_of_weights(directory) or (came, rule, fix)
    refuse(directory, came, rule, fix)


def _found(where: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Return the files of this pattern by (data-parallel rank, model-parallel rank)."""
    found = {}
    for path in sorted(where.glob("*_states.pt")):
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match[1] or 0), int(match[2])] = path
    return found


def expect(condition: bool, where: Path, came: str, rule: str, fix: str = COPY) -> None:
    """Raise FileError unless the condition holds."""
    if not condition:
        refuse(where, came, rule, fix)
