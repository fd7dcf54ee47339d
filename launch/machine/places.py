"""The room where a run's directory will be."""

from __future__ import annotations

import os
from pathlib import Path

from launch.machine.checks import Check, failed, ok, warning


def space(directory: Path, checkpoint: float, kept: int | None) -> Check:
    """Check the room for checkpoints, each of `checkpoint` bytes.

    `kept`: the largest number at one time; None: an unknown number, since all are kept.
    """
    free = free_bytes(existing(directory))
    room = f"{amount(free)} free"
    if kept == 0 or not checkpoint:
        return ok(f"{room}; the recipe saves no checkpoint")
    came, fit = f"{room}, and a checkpoint takes {amount(checkpoint)}", int(free // checkpoint)
    if not fit:
        return failed(came, "make room, or name another disk with --out")
    if kept is None:
        came += f": room for {fit:,}; all that are saved are kept"
        fewer = f"keep fewer, e.g. --set run.keep_checkpoints={min(fit, 3) - 1 or 1}"
        return ok(came) if fit >= 100 else warning(came, fewer)
    if fit < kept:
        fewer = f"keep fewer (--set run.keep_checkpoints={max(1, fit - 1)})"
        fix = f"{fewer}, make room, or take another disk (--out)"
        return warning(f"{came}: room for {fit} of the {kept} that lie there at once", fix)
    return ok(f"{came}; {kept} at most lie there at once")


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def free_bytes(place: Path) -> float:
    """Return the bytes that this user may still write there, without regard to quotas."""
    facts = os.statvfs(place)
    return float(facts.f_bavail * facts.f_frsize)


def amount(size: float) -> str:
    """Write bytes as 3.73 GB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"
