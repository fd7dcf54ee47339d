"""Checks of a run's directory: rights, room, kind of file system, clock."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from launch.console import output
from launch.machine.checks import Check, failed, ok, unchecked, warning

# File systems that other machines may see; all others belong to this machine.
NETWORK = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|glusterfs|fuse\.|9p|virtiofs|wekafs|panfs|orangefs|pvfs|afs|daos"
)
CLOCK_S = 2.0  # seconds; with a larger difference of clocks, times of files mislead


def writable(directory: Path) -> Check:
    """Check by a file that the run directory is writable or can be made."""
    output.directory("--out", directory)
    return ok(f"{directory} " + ("is writable" if directory.exists() else "can be made"))


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


def clock(directory: Path) -> Check:
    """Compare a file server's clock with this machine's, by the time of a new file."""
    place = existing(directory)
    if NETWORK.match(kind_of(place) or ""):
        return judge_clock("the file server", server_time(place) - time.time())
    return unchecked("the file system is this machine's: no other clock to compare with")


def judge_clock(whose: str, ahead: float) -> Check:
    """Judge another clock, which is `ahead` of this one by so many seconds."""
    if abs(ahead) <= CLOCK_S:
        return ok(f"{whose} is {abs(ahead):.1f} s away")
    came = f"{whose} is {abs(ahead):,.1f} s {'ahead' if ahead > 0 else 'behind'}"
    return warning(f"{came}: times of files and logs mislead", "set the clocks by NTP (chronyd)")


def server_time(place: Path) -> float:
    """Return the seconds since 1970 on the machine with the files of `place`."""
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def free_bytes(place: Path) -> float:
    """Return the bytes that this user may still write there, without regard to quotas."""
    facts = os.statvfs(place)
    return float(facts.f_bavail * facts.f_frsize)


def kind_of(place: Path) -> str | None:
    """Return the type of `place`'s file system, such as ext4; None if the system does not say."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return None
    mounts = [(line.split(" ")[1].encode().decode("unicode_escape"), line.split(" ")[2]) for line in lines]
    real = place.resolve()
    holding = [(mount, kind) for mount, kind in mounts if real.is_relative_to(mount)]
    # The last of equals was mounted over the others.
    return max(reversed(holding), key=lambda held: len(held[0]))[1] if holding else None


def amount(size: float) -> str:
    """Write bytes as 3.73 GB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"
