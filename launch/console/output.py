"""Checks of a command's output paths: nothing of the user's is ever overwritten."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes.files import FileError, path_of, read_part
from recipes.problems import Problem, ProblemsError, either


def directory(flag: str, text: str | Path) -> Path:
    """Check that the directory exists or can be made. Raises ProblemsError."""
    path = path_of(text, flag)
    problem = _place_problem(path)
    if not problem and path.exists() and not path.is_dir():
        problem = "is a file", "a directory is made here"
    if problem:
        raise _refusal(flag, text, *problem, "name another directory")
    return path


def new_directory(flag: str, text: str | Path, resumed: str = "") -> Path:
    """Check that the directory is new or empty. Raises ProblemsError.

    `resumed`: words on how to continue in a directory that is not empty.
    """
    path = directory(flag, text)
    if path.exists() and any(path.iterdir()):
        rule = "nothing is overwritten or mixed"
        raise _refusal(flag, text, "is not empty", rule, f"name a new directory{resumed}")
    return path


def new_file(flag: str, text: str | Path, endings: Sequence[str] = (), own: bytes = b"") -> Path:
    """Check that the file is new, in an existing directory. Raises ProblemsError.

    `endings`: the allowed endings of its name, such as ".png". `own`: first bytes of the command's own files,
    which are replaced.
    """
    path = path_of(text, flag)
    problem = _place_problem(path)
    if endings and path.suffix not in endings:
        problem = "has another ending", f"the form is told by it: {either(endings)}"
    elif not problem and path.exists() and not (own and _begins_with(path, own)):
        is_directory = path.is_dir()
        kept = "only this command's own files are replaced" if own else "nothing is overwritten"
        problem = ("is a directory", "a file is made here") if is_directory else ("exists already", kept)
    elif not problem and not path.parent.is_dir():
        problem = f"lies in {path.parent}, which is not there", "a file is made in a directory that exists"
    if problem:
        raise _refusal(flag, text, *problem, "name another file")
    return path


def _begins_with(path: Path, own: bytes) -> bool:
    try:
        return read_part(path, 0, len(own)) == own
    except FileError:
        return False


def _place_problem(path: Path) -> tuple[str, str] | None:
    """Try to make something at the path, as access rights mislead; return (what came, the rule) or None."""
    try:
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
        if path.is_symlink() and above != path:
            return "is a link to nothing", "it has to be made"
        if above == path and not path.is_dir():
            return None if os.access(path, os.W_OK) else ("is not writable", "it has to be written")
        if not above.is_dir():
            return f"cannot be made ({above} is a file)", "it has to be made"
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        return f"cannot be made ({error.strerror})", "it has to be made"
    return None


def _refusal(flag: str, text: object, came: str, rule: str, fix: str) -> ProblemsError:
    return ProblemsError([Problem(flag, f"{flag} {text} {came}", rule, fix)])
