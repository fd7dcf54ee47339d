"""A command's output paths, and their checks: nothing of the user's is ever overwritten."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from recipes.files import path_of
from recipes.problems import Problem, ProblemsError


def working_directory() -> str:
    """Return the directory in which the command was started. Raises ProblemsError if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        came = "the working directory was removed"
        rule = "paths are seen from there"
        raise ProblemsError(
            [Problem("cd", came, rule, "cd to one that is there")]
        ) from None


def directory(flag: str, text: str | Path) -> Path:
    """Check that the directory exists or can be made. Raises ProblemsError."""
    path = path_of(text, flag)
    problem = place_problem(path)
    if not problem and path.exists() and not path.is_dir():
        problem = "is a file", "a directory is made here"
    if problem:
        raise refusal(flag, text, *problem, "name another directory")
    return path


def place_problem(path: Path) -> tuple[str, str] | None:
    """Try to make something at the path, as access rights mislead; return (what came, the rule) or None."""
    try:
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
        if path.is_symlink() and above != path:
            return "is a link to nothing", "it has to be made"
        if above == path and not path.is_dir():
            return (
                None
                if os.access(path, os.W_OK)
                else ("is not writable", "it has to be written")
            )
        if not above.is_dir():
            return f"cannot be made ({above} is a file)", "it has to be made"
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        return f"cannot be made ({error.strerror})", "it has to be made"
    return None


def refusal(flag: str, text: object, came: str, rule: str, fix: str) -> ProblemsError:
    return ProblemsError([Problem(flag, f"{flag} {text} {came}", rule, fix)])


def run_directory(recipe_name: str, ds_name: str) -> Path:
    """Name the run directory without --out: runs/default-sotu-zero3_offload for "default/sotu"."""
    return Path(
        "runs", re.sub(r"[^A-Za-z0-9._]+", "-", f"{recipe_name}-{ds_name}").strip("-")
    )
