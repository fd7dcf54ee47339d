"""Find the run directories named by a user: directories, globs, and folders with runs below them."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.problems import Problem, ProblemsError, did_you_mean

# A directory with any of these files is a run, complete or not.
RUN_FILES = ("recipe.yaml", "result.json", "metrics.jsonl")
WHAT_A_RUN_HOLDS = "a run directory holds recipe.yaml, metrics.jsonl and, once it has ended, result.json"


def find(arguments: Sequence[str]) -> list[Path]:
    """Return the run directories of `arguments`, in their order, each once.

    Raises:
        ProblemsError: every argument that leads to no run, one line each.
    """
    found: dict[Path, Path] = {}
    problems = []
    for argument in arguments:
        try:
            for path in _runs_of(argument):
                found.setdefault(path.resolve(), path)
        except OSError as error:  # a name too long, a directory that may not be read
            why = f"cannot be looked into ({error.strerror or error})"
            problems.append(Problem(argument, f"{argument} {why}", fix="name directories you may read"))
        except ValueError as error:
            problems.append(Problem(argument, str(error)))
    if problems:
        raise ProblemsError(problems)
    return list(found.values())


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def _runs_of(argument: str) -> list[Path]:
    path = Path(argument).expanduser()
    if path.is_dir():
        if runs := list(_below(path, set())):
            return runs
        names = sorted(child.name for child in path.iterdir())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        held = f"it holds {', '.join(names[:3])}{more}" if names else "it is empty"
        neither = f"{argument}: neither it nor a directory below it is a run"
        raise ValueError(f"{neither} ({held}): {WHAT_A_RUN_HOLDS}")
    if path.exists():
        raise ValueError(f"{argument} is a file: give the directory of a run; {WHAT_A_RUN_HOLDS}")
    if glob.has_magic(argument):
        matches = (Path(match) for match in sorted(glob.glob(str(path), recursive=True)))
        if runs := [run for match in matches if match.is_dir() for run in _below(match, set())]:
            return runs
        raise ValueError(f"{argument}: no run directory matches; {WHAT_A_RUN_HOLDS}")
    if not path.parent.is_dir():
        missing = f"{path.parent} does not exist either; {WHAT_A_RUN_HOLDS}"
    else:
        missing = did_you_mean(path.name, [child.name for child in _subdirectories(path.parent)][:50])
    raise ValueError(f"{argument}: no such directory: {missing}")


def _below(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the run at `path`, or the runs below it sorted by name; do not search inside runs."""
    if path.resolve() in seen:  # a link that leads back up
        return
    seen.add(path.resolve())
    if is_run(path):
        yield path
        return
    for child in _subdirectories(path):
        yield from _below(child, seen)


def _subdirectories(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each path: the fewest last parts that make it unique."""
    parts = [path.resolve().parts for path in paths]
    found = []
    for own in parts:
        others = [other for other in parts if other != own]
        lengths = (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others))
        found.append("/".join(own[-next(lengths, len(own)) :]).replace("//", "/"))
    return found
