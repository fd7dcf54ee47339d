"""Whether the numbers of a run may stand beside the published ones of its row."""

from __future__ import annotations

from typing import Any

from launch.files import differences
from recipes.schema import Recipe

# What changes the speed by more than the machine does: a ratio to the published number would compare two things.
SAME_WORK = ("model", "sequence_length", "batch.global", "activation_checkpointing")


def not_comparable(row: Recipe | None, run: Recipe | None, *, tiny: bool, precision: str) -> str | None:
    """Why the run's numbers are not those of the row; None where they are. None for a recipe stands for one that cannot be read."""
    if tiny:
        return "tiny, another model"
    if row is None or run is None:
        return "the recipe cannot be read"
    if changed := changed_work(row, run):
        return f"other {', '.join(changed)}"
    if "emulated" in precision:
        return "fp16 emulated on a CPU"
    return None


def changed_work(row: Recipe, run: Recipe) -> list[str]:
    """Keys of the recipe that differ and decide how much there is to compute."""
    keys = [key for key, _, _ in differences(_plain(row), _plain(run))]
    return [key for key in keys if any(key == part or key.startswith(f"{part}.") for part in SAME_WORK)]


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True)
