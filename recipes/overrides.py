"""`--set key=value`: one field of a recipe, the value written as in YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.key_paths import paths, suggestion
from recipes.yaml_lines import YamlError, parse

_HOW = "write --set key=value, as in --set batch.micro=4"


@dataclass(frozen=True)
class Overridden:
    """Values with the overrides in them, the keys that were set, and a line per override that is wrong."""

    values: dict[str, Any]
    keys: frozenset[str]
    problems: tuple[str, ...]


def apply(values: Mapping[str, Any], texts: Sequence[str]) -> Overridden:
    """Lay the overrides over `values`, later ones winning."""
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    known = set(paths())
    problems = []
    keys = set()
    for text in texts:
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            problems.append(f"--set {text}: is not key=value; {_HOW}")
        elif ".".join(path) not in known:
            problems.append(f"--set {text}: {'.'.join(path)}: unknown key; {suggestion(path)}")
        else:
            try:
                _put(changed, path, parse(written, f"--set {text}").value)
                keys.add(".".join(path))
            except YamlError as error:
                problems.append(f"{error}; put the value in quotes if it is text")
    return Overridden(changed, frozenset(keys), tuple(problems))


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        below = values.get(part)
        values[part] = values = below if isinstance(below, dict) else {}  # type: ignore[assignment]
    values[path[-1]] = value
