"""One run as it was asked for: what, how, where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_configs.plan import Plan


@dataclass(frozen=True)
class Job:
    """One run: what, how, where."""

    plan: Plan
    name: str
    directory: Path
    resume: bool = False
    compiled: bool = False
    record_gradients: bool = False  # write the gradients of the first step, for compare_layouts
    initial_weights: str | None = None
    cache: Path | None = None
