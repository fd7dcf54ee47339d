"""The commands of launch/checkpoint.py: show and verify."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.checkpoints import inspection, run_checkpoints
from launch.checkpoints.manifest import Fault, Manifest
from launch.checkpoints.run_checkpoints import Checkpoint, DamagedCheckpoint
from launch.checkpoints.tensor_file import DTYPES
from launch.console import terminal
from launch.console.progress import bar
from launch.console.text_table import NOTHING, Page
from recipes import files
from recipes.problems import amount, counted

BY_SIZE = "whole: by its manifest and the sizes of its files; `verify` reads them"

# --- show


def show(path: Path, step: int | None) -> int:
    """Print the list of checkpoints, or one with its tensors."""
    every = run_checkpoints.below(path, step)
    if step is not None or every[0].directory == path:
        print(_one(every[0]))
        return 0
    headings = ("step", "saved", "size", "saved under", "state")
    page = Page(terminal.columns(), indent=0)
    place = str(every[0].directory.parent)
    page.table(map(_row, every), headings, "rlrll", heading=[place])
    print(page)
    terminal.say(BY_SIZE)
    return 0


def _row(each: Checkpoint | DamagedCheckpoint) -> tuple[str, ...]:
    if isinstance(each, DamagedCheckpoint):
        return f"{each.step}", NOTHING, NOTHING, NOTHING, f"damaged: {each.why}"
    held = each.manifest
    return (
        f"{each.step}",
        held.saved[:16].replace("T", " "),
        amount(held.bytes),
        _saved_under(held),
        "whole",
    )


def _one(each: Checkpoint | DamagedCheckpoint) -> str:
    width = terminal.columns()
    if isinstance(each, DamagedCheckpoint):
        return terminal.wrapped(str(each), width)
    held = each.manifest
    types = _dtypes(each)
    progress = held.progress
    plan = held.plan
    skipped = (
        f", {counted(progress.skipped, 'step')} skipped by the loss scaler"
        if progress.skipped
        else ""
    )
    versions = (
        f"{name} {version}" for name, version in held.versions.items() if version
    )
    facts = [
        ("checkpoint", each.directory),
        ("recipe", held.recipe.get("title", NOTHING)),
        ("step", f"{each.step}{skipped}"),
        ("saved", held.saved or NOTHING),
        (
            "saved under",
            ": ".join(
                map(str, filter(None, (plan.get("ds_name"), _saved_under(held))))
            ),
        ),
        ("by", ", ".join(versions) or NOTHING),
        ("size", f"{amount(held.bytes)} in {counted(len(held.files), 'file')}"),
        ("holds", f"{', '.join(held.kinds)} of {counted(len(held.tensors), 'tensor')}"),
        ("state", BY_SIZE.replace(":", "")),
    ]
    rows = []
    for name, tensor in held.tensors.items():
        shape = " x ".join(map(str, tensor.shape))
        pieces = sum(map(len, tensor.series))
        rows.append((name, shape, pieces, _type(types[name], tensor.form)))
    page = Page(width, indent=0)
    page.facts(*facts)
    page.table(rows, ("tensor", "shape", "pieces", "type"), "llrl")
    return str(page)


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Map each tensor and kind to its type, from the headers of the files. Raises FileError."""
    found: dict[str, dict[str, str]] = {
        name: {} for name in checkpoint.manifest.tensors
    }
    for file in checkpoint.manifest.files:
        for key, tensor in files.read_safetensors_header(
            checkpoint.directory / file
        ).items():
            kind, _, name = key.partition("/")
            if name in found:
                found[name][kind] = str(
                    DTYPES.get(tensor.dtype, tensor.dtype)
                ).removeprefix("torch.")
    return found


def _type(types: dict[str, str], form: str) -> str:
    """Name the type of all kinds, or of each kind if they differ, and another form than the canonical one."""
    alike = len(set(types.values())) == 1
    said = (
        next(iter(types.values()))
        if alike
        else ", ".join(f"{kind} {t}" for kind, t in types.items())
    )
    return said if form == "canonical" else f"{said}, as {form} has it"


def _saved_under(held: Manifest) -> str:
    """Name layout, ZeRO stage, offload and precision."""
    plan = held.plan
    layout = held.plan.get("layout")
    layout = layout if isinstance(layout, dict) else {}
    degrees = " x ".join(
        f"{kind} {layout[kind]}" for kind in ("tp", "pp", "dp") if kind in layout
    )
    stage = f"ZeRO-{plan['zero_stage']}" if "zero_stage" in plan else ""
    offload = (
        f"offload {plan['offload']}" if plan.get("offload", "none") != "none" else ""
    )
    return (
        ", ".join(
            map(str, filter(None, (degrees, stage, offload, plan.get("precision"))))
        )
        or NOTHING
    )


# --- verify


def verify(path: Path, step: int | None) -> int:
    """Read checkpoints and print their damage."""
    every = [each.directory for each in run_checkpoints.below(path, step)]
    total = sum(
        file.stat().st_size
        for directory in every
        for file in directory.glob("*.safetensors")
    )
    found: dict[Path, list[Fault]] = {}
    with bar(sys.stderr, total=total, unit="B", unit_scale=True) as shown:
        for directory in every:
            shown.set_description_str(directory.name)
            faults = list(inspection.faults(directory, shown.update))
            if directory.exists():
                found[directory] = faults
            else:
                terminal.say(
                    f"{directory}: removed meanwhile, as the run keeps newer ones"
                )
    for directory, faults in found.items():
        terminal.say(f"{directory}: {'damaged' if faults else 'whole'}")
        for fault in faults:
            terminal.say(f"  {fault}")
    return int(any(found.values()))
