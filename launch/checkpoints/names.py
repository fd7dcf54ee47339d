"""The names of checkpoints and of what they hold, for code that reads none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

NAME = "manifest.json"
Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
WEIGHT: Kind = "weight"
# torch's names of Adam's moments
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
DIRECTORY = re.compile(r"step-(\d+)")


def step_of(directory: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory; None: it is named otherwise."""
    named = DIRECTORY.fullmatch(directory.name)
    return int(named[1]) if named else None
