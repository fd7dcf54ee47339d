"""Finding and reading of a DeepSpeed JSON: near matches for a missing file, the place in a malformed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes import files
from recipes.problems import Problem, ProblemsError, nearest

FOLDER = Path(__file__).resolve().parent


class ConfigError(ProblemsError):
    """A ds_config that cannot run this recipe here: every problem, one line each."""


def available() -> list[str]:
    """List the names of the JSONs in ds_configs/."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find(ds_path: str | Path, flag: str = "--ds_config") -> Path:
    """Find a JSON by its path, or by its bare name in ds_configs/; ConfigError with near names.

    `flag`: where it was given.
    """
    path = files.path_of(ds_path, flag)
    tried = [path, FOLDER.parent / path]
    if path.name == str(path):
        tried += [FOLDER / path.name, FOLDER / f"{path.name}.json"]
    for candidate in tried:
        if files.is_file(candidate):
            return candidate
    near = nearest(path.stem, available())
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"ds_configs/ has {', '.join(available())}"
    )
    kind = "is a directory, not a JSON file" if path.is_dir() else "no such file"
    where = f"{flag} {ds_path}"
    raise ConfigError([Problem(where, kind, fix=hint, where=where)])


def read(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; ConfigError, with line and column, for a malformed one."""
    try:
        return files.read_json_object(path)
    except files.FileError as error:
        raise ConfigError(error.problems) from None
