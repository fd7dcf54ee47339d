"""The files of a checkpoint of Megatron-LM or Megatron-DeepSpeed: pipeline stages of tensor-parallel slices.

    iter_0001000/mp_rank_01/model_optim_rng.pt                  slice 1; also below release/
    iter_0001000/mp_rank_01_002/model_optim_rng.pt              slice 1 of pipeline stage 2
    iter_0001000/mp_rank_01/model_rng.pt                        next to a distributed optimizer, whose part 3
    iter_0001000/mp_rank_01_003/optim.pt                        of slice 1 is left
    global_step1000/mp_rank_01_model_states.pt                  DeepSpeed without its pipeline: slice 1
    global_step1000/layer_05-model_01-model_states.pt           DeepSpeed's pipeline: slice 1 of layer 5

Above them latest_checkpointed_iteration.txt, or DeepSpeed's latest, names the newest iteration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.files import is_file, read_text, refuse
from recipes.problems import some

RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
PLAIN = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
PARTITIONED = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
DISTRIBUTED = re.compile(r".+\.distcp|common\.pt")
SAVED = re.compile(r"iter_\d+|release|global_step\d+")
TRACKER = "latest_checkpointed_iteration.txt"
OPTIMIZER = "optim.pt"  # a rank's part of a distributed optimizer
# the second next to a distributed optimizer
WEIGHTS = ("model_optim_rng.pt", "model_rng.pt")
WHOLE = "copy the whole directory again"
STAGE = "pipeline stage "
FORMS = (RANK, PLAIN, LAYER, PARTITIONED, DISTRIBUTED)
ANOTHER = "give a checkpoint that Megatron-LM saved, with --ckpt-format torch"


class Files(NamedTuple):
    """Files of one iteration.

    Attributes:
        where: its directory.
        stages: the slices, in order, of each pipeline stage, or of each layer if `by_layer`.
        stated: the file with arguments and version.
        by_layer: True if a file is one layer of DeepSpeed's pipeline.
    """

    where: Path
    stages: Sequence[Sequence[Path]]
    stated: Path
    by_layer: bool = False


def is_checkpoint(directory: Path) -> bool:
    """Check whether the directory has the file names of a Megatron checkpoint."""
    names = _names(directory)
    # transformers' Trainer leaves a global_stepN next to one
    if "config.json" in names:
        return False
    return TRACKER in names or any(_matches(form, names) for form in (SAVED, *FORMS))


def find(directory: Path) -> Files:
    """Find the files of the iteration in `directory`, or of the newest below it. Raises FileError."""
    where = _iteration(directory)
    names = _names(where)
    layers = [(int(m[1]), int(m[2]), where / m[0]) for m in _matches(LAYER, names)]
    if layers:
        stated = where / "mp_rank_00_model_states.pt"
        if not is_file(stated):
            refuse(
                where,
                f"lacks {stated.name}",
                "it holds arguments and checkpoint version",
                "copy it next to the layers",
            )
        return Files(where, _stages(where, layers, "layer_"), stated, by_layer=True)
    slices = [(0, int(m[1]), where / m[0]) for m in _matches(PLAIN, names)]
    if not slices:
        for m in _matches(RANK, names):
            held = _names(where / m[0])
            name = next((name for name in WEIGHTS if name in held), None)
            if name:
                stage = int(m[2] or 0)
                slices.append((stage, int(m[1]), where / m[0] / name))
            elif OPTIMIZER not in held:
                fix = ANOTHER if held else WHOLE
                refuse(
                    where / m[0],
                    f"holds {some(held, 4) or 'nothing'}, and neither {WEIGHTS[0]} nor {WEIGHTS[1]}",
                    "",
                    fix,
                )
    if not slices:
        _refuse_form(where, names)
    stages = _stages(where, slices, STAGE)
    return Files(where, stages, stages[0][0])


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError:  # a later read of a file reports it
        return []


def _matches(pattern: re.Pattern[str], names: Sequence[str]) -> list[re.Match[str]]:
    return [*filter(None, map(pattern.fullmatch, names))]


def _iteration(directory: Path) -> Path:
    names = _names(directory)
    saved = [match[0] for match in _matches(SAVED, names)]
    if any(_matches(form, names) for form in FORMS):
        return directory
    tracker = directory / TRACKER
    if is_file(tracker):
        said = read_text(tracker).strip()
        asked = [said]
        if re.fullmatch(r"\d{1,18}", said):
            number = int(said)
            asked = [f"iter_{number:07d}", f"global_step{number}"]
    elif is_file(tracker := directory / "latest"):
        asked = [read_text(tracker).strip()]
    elif len(saved) == 1:
        asked = saved
    else:
        refuse(
            directory,
            f"holds {some(saved)}",
            f"{TRACKER}, which says what is newest, is missing",
            f"give one of them, {directory}/{saved[-1]}",
        )
    chosen = [name for name in asked if name in names]
    if not chosen:
        refuse(
            tracker,
            f"says {asked[0][:60]!r}, and next to it is {some(saved) if saved else 'no iteration'}",
            "it names the newest iteration",
            "give the directory of one iteration",
        )
    return directory / chosen[0]


def _stages(
    where: Path, numbered: Sequence[tuple[int, int, Path]], kind: str
) -> Sequence[Sequence[Path]]:
    """Sort (stage or layer, slice, file) by stage; refuse a missing slice or stage.

    `kind`: STAGE or "layer_".
    """
    by_stage: dict[int, dict[int, Path]] = {}
    for stage, index, file in numbered:
        other = by_stage.setdefault(stage, {}).setdefault(index, file)
        if other != file:
            refuse(
                where,
                f"holds {other.relative_to(where)} and {file.relative_to(where)}",
                "a rank has one file",
                "leave out the one of another save",
            )
    count = 1 + max(index for _, index, _ in numbered)
    missing = list[str]()
    stages = []
    for stage, slices in sorted(by_stage.items()):
        missing += (
            f"slice {index} of {count} of {kind}{stage:02d}"
            for index in range(count)
            if index not in slices
        )
        stages.append([slice_ for _, slice_ in sorted(slices.items())])
    if missing:
        refuse(where, f"lacks {some(missing, 4)}", "every slice is needed", WHOLE)
    if kind == STAGE and (absent := set(range(max(by_stage))) - by_stage.keys()):
        refuse(
            where,
            f"lacks {STAGE}{min(absent)}",
            f"it holds stage {max(by_stage)}",
            WHOLE,
        )
    return stages


def _refuse_form(where: Path, names: Sequence[str]) -> None:
    if _matches(PARTITIONED, names):
        rule = (
            "ZeRO-3 partitions weights over the ranks, and such files are not read here"
        )
        refuse(
            where,
            "was saved by DeepSpeed under ZeRO-3",
            rule,
            f"go on with the run: launch/pretrain.py --adopt {where}",
        )
    if _matches(DISTRIBUTED, names):
        refuse(
            where,
            "is a distributed checkpoint (torch_dist)",
            f"only {WEIGHTS[0]} of each rank is read here",
            "save it again by Megatron-LM with --ckpt-format torch",
        )
    refuse(
        where,
        "holds no weights of Megatron",
        f"they are in mp_rank_00/{WEIGHTS[0]} and so on",
        ANOTHER,
    )
