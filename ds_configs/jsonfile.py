"""Find and read a DeepSpeed JSON: near matches for a missing file, file:line:column for a malformed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.problems import Problem, ProblemsError, nearest

FOLDER = Path(__file__).resolve().parent


class ConfigError(ProblemsError):
    """A ds_config that cannot run this recipe here: every problem, one line each."""


def available() -> list[str]:
    """Names of the JSONs in ds_configs/."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find(ds_path: str | Path) -> Path:
    """The file meant by a path, or by the bare name of a file of ds_configs/; else ConfigError: near ones."""
    path = Path(ds_path).expanduser()
    tried = [path, FOLDER.parent / path]
    if path.name == str(path):
        tried += [FOLDER / path.name, FOLDER / f"{path.name}.json"]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    near = nearest(path.stem, available())
    hint = f"did you mean {' or '.join(near)}?" if near else f"ds_configs/ has {', '.join(available())}"
    kind = "is a directory, not a JSON file" if path.is_dir() else "no such file"
    raise _refusal(f"--ds_config {ds_path}", kind, "", hint)


def read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError with line and column: malformed, a key twice, no object."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise _refusal(path, f"not UTF-8 at byte {error.start}", "", "save the file as UTF-8") from None
    except OSError as error:
        raise _refusal(path, "cannot be read", error.strerror or str(error)) from None
    except json.JSONDecodeError as error:
        raise _malformed(path, text, error) from None
    except _DuplicateKeyError as error:
        written = json.dumps(error.args[0])
        lines = [number for number, line in enumerate(text.splitlines(), 1) if written in line]
        came = f"key {written} stands twice in one object (lines {', '.join(map(str, lines))})"
        where = f"{path}:{lines[-1]}" if lines else path
        rule, fix = "JSON readers keep one of them silently", "remove the other"
        raise _refusal(where, came, rule, fix) from None
    if not isinstance(value, dict):
        raise _refusal(path, f"holds {type(value).__name__}", "a DeepSpeed config is an object, {...}")
    return value


def _refusal(where: str | Path, came: str, rule: str = "", fix: str = "") -> ConfigError:
    return ConfigError([Problem(str(where), came, rule, fix, where=str(where))])


class _DuplicateKeyError(Exception):
    """A key that stands twice in one object."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(key)
        found[key] = value
    return found


def _malformed(path: Path, text: str, error: json.JSONDecodeError) -> ConfigError:
    lines = text.splitlines()
    shown = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    reason = error.msg[0].lower() + error.msg[1:]
    hint = ""
    if shown.startswith(("//", "#", "/*")):
        hint = "JSON has no comments"
    elif "property name" in reason or "expecting value" in reason:
        hint = "is there a comma too many?"
    return _refusal(f"{path}:{error.lineno}:{error.colno}", "not JSON", f"{reason}: {shown!r}", hint)
