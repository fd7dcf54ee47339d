"""Checks of paths at which a command makes something new."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.console.arguments import directory, place_problem, refusal
from recipes.files import FileError, path_of, read_part
from recipes.problems import Problem, ProblemsError, either


def new_directory(flag: str, text: str | Path) -> Path:
    """Check that the directory is new or empty. Raises ProblemsError."""
    path = directory(flag, text)
    if path.exists() and any(path.iterdir()):
        raise refusal(
            flag,
            text,
            "is not empty",
            "nothing is overwritten or mixed",
            "name a new directory",
        )
    return path


def new_file(
    flag: str, text: str | Path, endings: Sequence[str] = (), own: bytes = b""
) -> Path:
    """Check that the file is new, in an existing directory. Raises ProblemsError.

    `endings`: the allowed endings of its name, such as ".png". `own`: first bytes of files that are
    replaced, this command's own.
    """
    path = path_of(text, flag)
    problem = place_problem(path)
    if endings and path.suffix not in endings:
        problem = "has another ending", f"the form is told by it: {either(endings)}"
    elif not problem and path.exists() and not (own and _begins_with(path, own)):
        is_directory = path.is_dir()
        kept = (
            "only this command's own files are replaced"
            if own
            else "nothing is overwritten"
        )
        problem = (
            ("is a directory", "a file is made here")
            if is_directory
            else ("exists already", kept)
        )
    elif not problem and not path.parent.is_dir():
        problem = (
            f"lies in {path.parent}, which is not there",
            "a file is made in a directory that exists",
        )
    if problem:
        raise refusal(flag, text, *problem, "name another file")
    return path


def own_files(flag: str, folder: Path, beginnings: Mapping[str, str]) -> list[str]:
    """Check that files of a folder are new, or begin as such files do; return the names of those there.

    Raises ProblemsError with every other file.
    """
    there = [name for name in beginnings if os.path.lexists(folder / name)]
    problems = list[Problem]()
    for name in there:
        try:
            new_file(flag, folder / name, own=beginnings[name].encode())
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return there


def _begins_with(path: Path, own: bytes) -> bool:
    try:
        return read_part(path, 0, len(own)) == own
    except FileError:
        return False
