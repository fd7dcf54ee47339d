"""The commands of launch/checkpoint.py: show and verify."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.checkpoints import inspection, run_checkpoints
from launch.checkpoints.manifest import Fault, Manifest
from launch.checkpoints.run_checkpoints import Checkpoint, DamagedCheckpoint
from launch.console import terminal
from launch.console.progress import bar
from launch.console.text_table import NOTHING, Page
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
    progress = held.progress
    versions = [f"{name} {found}" for name, found in held.versions.items() if found]
    size = f"{amount(held.bytes)} in {counted(len(held.files), 'file')}"
    tensors = counted(len(held.tensors), "tensor")
    facts = [
        ("checkpoint", each.directory),
        ("recipe", held.recipe.get("title", NOTHING)),
        ("step", f"{each.step}, {progress.skipped} skipped by the loss scaler"),
        ("saved", held.saved),
        ("saved under", f"{held.plan.get('ds_name', '')}: {_saved_under(held)}"),
        ("by", ", ".join(versions)),
        ("holds", f"{', '.join(held.kinds)} of {tensors}, {size}"),
        ("state", BY_SIZE.replace(":", "")),
    ]
    rows = []
    for name, tensor in held.tensors.items():
        shape = " x ".join(map(str, tensor.shape))
        pieces = sum(map(len, tensor.series))
        rows.append((name, shape, pieces, tensor.form))
    page = Page(width, indent=0)
    page.facts(*facts)
    page.table(rows, ("tensor", "shape", "pieces", "form"), "llrl")
    return str(page)


def _saved_under(held: Manifest) -> str:
    """Name layout, ZeRO stage, offload and precision."""
    plan = held.plan
    layout = plan.get("layout")
    layout = layout if isinstance(layout, dict) else {}  # a manifest may hold anything
    degrees = [
        f"{kind} {layout[kind]}" for kind in ("tp", "pp", "dp") if kind in layout
    ]
    facts = [" x ".join(degrees), f"ZeRO-{plan.get('zero_stage', NOTHING)}"]
    if plan.get("offload", "none") != "none":
        facts.append(f"offload {plan['offload']}")
    return ", ".join([*facts, str(plan.get("precision", NOTHING))])


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
    damaged = sum(map(bool, found.values()))
    read = f"read {amount(total)} of {counted(len(found), 'checkpoint')}"
    terminal.say(f"{read}: {damaged or 'none'} damaged")
    return int(damaged > 0)
