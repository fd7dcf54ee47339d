"""The files of a DeepSpeed checkpoint, read without running what they name.

    DIR/latest                                     names the newest save; it is written last
    DIR/global_step6/mp_rank_00_model_states.pt    stages 0 to 2: module, counters, DeepSpeed's configuration
    DIR/global_step6/zero_pp_rank_1_mp_rank_00_model_states.pt    stage 3: the same, of every rank
    DIR/global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt    a rank's partition; bf16_zero_... in bf16
    DIR/global_step6/zero/NAME/fp32.pt             a universal checkpoint: next to it exp_avg.pt, exp_avg_sq.pt

A Trainer's checkpoint-N is such a DIR, with its own files beside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.files import is_file, read_part, read_text, refuse
from recipes.problems import some

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
TRACKERS = ("latest", "latest_universal")
COPY = "copy the whole directory again, or give an older save"
# All that DeepSpeed's own files name besides tensors and plain values; and what Trainer's arguments name.
DEEPSPEED = re.compile(
    r"deepspeed\.(runtime\.fp16\.loss_scaler\.(Dynamic)?LossScaler"
    r"|runtime\.zero\.config\.ZeroStageEnum|utils\.tensor_fragment\.fragment_address)"
)
TRAINER = re.compile(r"(transformers|accelerate)\.[\w.]+")


class StandIn:
    """An object of a class that a pickle names: its arguments and attributes, and none of its code."""

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    arguments: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class SaveFiles(NamedTuple):
    """The files of one save. `models` and `optimizers`: by (data-parallel rank, model-parallel rank)."""

    where: Path
    models: dict[tuple[int, int], Path]
    optimizers: dict[tuple[int, int], Path]

    @property
    def universal(self) -> Path | None:
        """The directory of a universal checkpoint's tensors."""
        path = self.where / "zero"
        return path if path.is_dir() else None


def is_checkpoint(directory: Path) -> bool:
    """Check whether DeepSpeed saved in the directory."""
    return any(is_file(directory / name) for name in TRACKERS) or bool(
        _found(directory, MODEL)
    )


def find(directory: Path) -> SaveFiles:
    """Find the newest save in a directory, or the save that it is. Raises FileError."""
    where = directory
    if not _found(directory, MODEL):
        tracker = next(
            (directory / name for name in TRACKERS if is_file(directory / name)), None
        )
        if tracker is None:
            saved = sorted(path.name for path in directory.glob("global_step*"))
            came = (
                f"holds {some(saved)} and no file `latest`"
                if saved
                else "holds no checkpoint of DeepSpeed"
            )
            fix = "give the directory in which save_checkpoint or Trainer wrote, or one of its global_stepN"
            refuse(
                directory, came, "`latest` is written last and names what is whole", fix
            )
        where = directory / read_text(tracker).strip()
        if not where.is_dir():
            refuse(
                tracker, f"names {where.name[:60]!r}, which is no directory", "", COPY
            )
    models = _found(where, MODEL)
    if not models:
        refuse(
            where, "lacks mp_rank_00_model_states.pt", "it has the run's counters", COPY
        )
    return SaveFiles(where, models, _found(where, OPTIMIZER))


def load(file: Path, named: re.Pattern[str] = DEEPSPEED) -> Any:
    """Read a file of torch.save; objects of the classes `named` become stand-ins, and no code of theirs runs.

    Raises FileError: it names another class or function, or is broken.
    """
    if read_part(file, 0, 4) != b"PK\x03\x04":
        refuse(
            file, "is no file of torch.save", "it was cut off, or is another's", COPY
        )
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        others = [name for name in asked if not named.fullmatch(name)]
        if not others:
            stand_ins: list[Any] = []
            for name in asked:
                stand_ins.append((type("StandIn", (StandIn,), {}), name))
            with torch.serialization.safe_globals(stand_ins):
                return torch.load(
                    file, map_location="cpu", weights_only=True, mmap=True
                )
    # of many types, for an archive or a pickle that is broken
    except Exception as error:
        said = str(error).partition("\n")[0][:120]
        why = f"{type(error).__name__}: {said}"
        refuse(
            file,
            f"cannot be read by torch.load ({why})",
            "it was cut off or changed",
            COPY,
        )
    rule = "nothing that a pickle names is run, and DeepSpeed's own objects alone are known"
    fix = "give a checkpoint whose client_state holds plain values"
    refuse(file, f"names {some(sorted(others))}", rule, fix)


def load_object(file: Path) -> dict[str, Any]:
    """Read a file that holds values by name. Raises FileError."""
    found = load(file)
    if not isinstance(found, dict):
        refuse(file, "holds no values by name", "DeepSpeed's files do", COPY)
    return found


def _found(where: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Return the files of this pattern by (data-parallel rank, model-parallel rank)."""
    found = {}
    try:
        names = sorted(path.name for path in where.iterdir())
    except OSError:
        return {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            found[int(match[1] or 0), int(match[2])] = where / name
    return found


def expect_ranks(
    where: Path, files: dict[tuple[int, int], Path], ranks: int, kind: str
) -> None:
    """Check that there is a file of each of so many data-parallel ranks. Raises FileError."""
    have = {rank for rank, _ in files}
    missing = [str(rank) for rank in range(ranks) if rank not in have]
    more = [str(rank) for rank in sorted(have) if rank >= ranks]
    came = f"lacks the {kind} of rank {some(missing, 4)}"
    if more:
        came = f"has {kind} of rank {some(more, 4)}"
    if missing or more:
        refuse(where, came, f"{ranks} ranks saved it", COPY)


def expect(condition: bool, where: Path, came: str, rule: str, fix: str = COPY) -> None:
    """Raise FileError unless the condition holds."""
    if not condition:
        refuse(where, came, rule, fix)
