"""The door for what a command writes where the user says: checked first, never overwriting."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes.files import FileError, path_of, read_part
from recipes.problems import Problem, ProblemsError, either


def directory(flag: str, text: str | Path) -> Path:
    """A directory that is there, or can be made. Raises ProblemsError."""
    path = path_of(text, flag)
    problem = _place_problem(path)
    if not problem and path.exists() and not path.is_dir():
        problem = "is a file", "a directory is made here"
    if problem:
        raise _refusal(flag, text, *problem, "name another directory")
    return path


def new_directory(flag: str, text: str | Path, resumed: str = "") -> Path:
    """A directory that is not there yet, or is empty. Raises ProblemsError.

    `resumed`: what to say where it is not empty, about continuing what is there.
    """
    path = directory(flag, text)
    if path.exists() and any(path.iterdir()):
        rule = "nothing is overwritten or mixed"
        raise _refusal(flag, text, "is not empty", rule, f"name a new directory{resumed}")
    return path


def new_file(flag: str, text: str | Path, endings: Sequence[str] = (), own: bytes = b"") -> Path:
    """A file that is not there yet, in a directory that is. Raises ProblemsError.

    `endings`: such as ".png", of which its name must have one. `own`: how every file begins that the command
    itself writes; such a one is replaced.
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
    """Why nothing can be made at the path (what came, the rule): tried, as access rights mislead."""
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
