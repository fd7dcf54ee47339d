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
from pathlib import Path
from typing import NamedTuple

from recipes.files import is_file, read_text, refuse
from recipes.problems import some

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
TRACKERS = ("latest", "latest_universal")
CONFIG = "config.json"
WHOLE_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
# flag -> patterns of what it reads; what such a directory is for the other flag, and why
READERS = {
    "--adopt": (
        ("latest*", "*_model_states.pt", *WHOLE_OPTIMIZER),
        "is a save of a run",
        "its weights are in the optimizer's files",
    ),
    "--init_from": (
        ("*.safetensors", "pytorch_model*.bin", "iter_*", "release"),
        "holds weights alone",
        "a run goes on with the moments of its optimizer",
    ),
}
UNIVERSAL = "zero"  # directory of a universal checkpoint's tensors
COPY = "copy the whole directory again, or give an older save"


class SaveFiles(NamedTuple):
    """The files of one save, by model-parallel rank, then by data-parallel rank."""

    where: Path
    models: dict[int, dict[int, Path]]
    optimizers: dict[int, dict[int, Path]]


def find(directory: Path) -> SaveFiles:
    """Find the newest save in a directory, or the save that it is. Raises FileError."""
    where = directory
    if not _found(directory, MODEL):
        trackers = (directory / name for name in TRACKERS)
        tracker = next((file for file in trackers if is_file(file)), None)
        if tracker is None:
            rule = "`latest` is written last and names what is whole"
            fix = "give the directory in which save_checkpoint or Trainer wrote, or one of its global_stepN"
            other = "holds no file `latest`", rule, fix
            refuse(directory, *(elsewhere(directory, "--adopt") or other))
        where = directory / read_text(tracker).strip()
    models = _found(where, MODEL)
    if not models:
        refuse(
            where, "lacks mp_rank_00_model_states.pt", "it has the run's counters", COPY
        )
    return SaveFiles(where, models, _found(where, OPTIMIZER))


def whole_optimizer(directory: Path) -> Path | None:
    """Return the file of an optimizer that no ranks share; None: there is none."""
    files = (directory / name for name in WHOLE_OPTIMIZER)
    return next((file for file in files if is_file(file)), None)


def elsewhere(directory: Path, flag: str) -> tuple[str, str, str] | None:
    """Return what came, the rule and the fix where a directory has nothing for a flag, and something else."""
    instead = None
    for reader, (patterns, came, rule) in READERS.items():
        if any(next(directory.glob(pattern), None) for pattern in patterns):
            if reader == flag:
                return None
            instead = came, rule, f"launch/pretrain.py {reader} {directory} reads it"
    below = sorted(
        directory.glob("checkpoint-*"), key=lambda path: (len(path.name), path)
    )
    if instead is None and below:
        came = f"holds {some([str(path) for path in below], 4)}"
        instead = (
            came,
            "each is a save of its own",
            f"give one of them, such as {below[-1]}",
        )
    return instead


def _found(where: Path, pattern: re.Pattern[str]) -> dict[int, dict[int, Path]]:
    """Return the files of this pattern by model-parallel and data-parallel rank."""
    by_rank: dict[int, dict[int, Path]] = {}
    for path in sorted(where.glob("*_states.pt")):
        match = pattern.fullmatch(path.name)
        if match:
            of_rank = by_rank.setdefault(int(match[2]), {})
            of_rank[int(match[1] or 0)] = path
    return by_rank


def expect(condition: bool, where: Path, came: str, rule: str, fix: str = COPY) -> None:
    """Raise FileError unless the condition holds."""
    if not condition:
        refuse(where, came, rule, fix)
