"""Refusals of the system (a full disk, a quota, rights, file handles) as problems with a fix."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from recipes.problems import Problem, ProblemsError

_SPACE = {errno.ENOSPC, errno.EDQUOT}
_RIGHTS = {errno.EROFS, errno.EACCES, errno.EPERM}
_HANDLES = {errno.EMFILE, errno.ENFILE}
_DEVICE = {errno.EIO, errno.ESTALE}
_MANY_FILES = 65536
# names of files in errors of writing there
OUTPUTS = ("standard output", "standard error")
_KNOWN = {*_SPACE, *_RIGHTS, *_HANDLES, *_DEVICE, errno.EFBIG}


def take_file_handles(least: int) -> None:
    """Raise this process's limit of open files. Raises ProblemsError if `least` is out of reach."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(least, _MANY_FILES)
    if most != resource.RLIM_INFINITY:
        wanted = min(most, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < least:
        came = f"a process may have {most} files open here"
        rule = (
            f"{least} are needed, for files, threads and connections to other processes"
        )
        raise ProblemsError(
            [
                Problem(
                    "ulimit -n", came, rule, f"raise the hard limit: ulimit -Hn {least}"
                )
            ]
        )


def told_by(error: BaseException) -> OSError | None:
    """Return the known refusal of the system in an error and its causes, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _KNOWN:
            return cause
        cause = cause.__cause__
    return None


def problem(error: OSError, place: Path, elsewhere: str) -> Problem:
    """Turn a refusal of the system into a problem with the file, the free space and the fix.

    `place`: the file, if the error names none; `elsewhere`: advice to name another place.
    """
    path = (
        Path(os.fsdecode(error.filename))
        if isinstance(error.filename, str | bytes)
        else place
    )
    said = error.strerror or str(error)
    if error.filename in OUTPUTS:
        fix = "redirect it to a file on another disk, or to /dev/null"
        return Problem(
            str(path),
            f"{path} cannot be written ({said})",
            "the command writes there",
            fix,
        )
    if error.errno in _HANDLES:
        came = f"cannot be opened ({said})"
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Problem(str(path), came, f"a process may have {most} files open", "raise it: ulimit -n 65536",
                       where=str(path))  # fmt: skip
    came = f"cannot be opened or written ({said})"
    fix = elsewhere
    if error.errno == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        rule = f"a file may have {most:,} bytes"
        fix = f"raise it (ulimit -f unlimited), or {elsewhere}"
    elif error.errno in _SPACE:
        rule = _free(path)
        fix = f"make room there, or {elsewhere}"
    elif error.errno in _DEVICE:
        rule = "the disk or its server does not answer"
        fix = f"look at dmesg and the mount, or {elsewhere}"
    else:
        rule = "it has to be written"
    return Problem(str(path), came, rule, fix, where=str(path))


def _free(path: Path) -> str:
    """Describe the room for this user on the file system of `path`."""
    above = next(
        (each for each in (path, *path.absolute().parents) if each.exists()), Path("/")
    )
    try:
        facts = os.statvfs(above)
    except OSError:
        return "how much is free is not known"
    free, total = (
        count * facts.f_frsize / 1e6 for count in (facts.f_bavail, facts.f_blocks)
    )
    room = f"{free:,.1f} MB of {total:,.0f} MB are free"
    return f"{room}, and {facts.f_favail:,} more files" if facts.f_files else room
