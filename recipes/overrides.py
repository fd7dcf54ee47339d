"""`--set key=value`: one field of a recipe, the value written as in YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.key_paths import paths, suggestion
from recipes.problems import Problem
from recipes.schema import Origin
from recipes.yaml_lines import KeyPath, YamlError, parse

_HOW = "write --set key=value, as in --set batch.micro=4"


@dataclass(frozen=True)
class Overridden:
    """Values with the overrides in them, the keys that were set, and what is wrong with overrides."""

    values: dict[str, Any]
    keys: frozenset[KeyPath]
    problems: tuple[Problem, ...]


def apply(values: Mapping[str, Any], texts: Sequence[str]) -> Overridden:
    """Lay the overrides over `values`, later ones winning."""
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    known = set(paths())
    problems, keys = list[Problem](), set[KeyPath]()
    for text in texts:
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        dotted, where = ".".join(path), f"--set {text}"
        if not equals or not all(path):
            problems.append(Problem(dotted, "is not key=value", fix=_HOW, where=where))
        elif dotted not in known:
            problems.append(Problem(dotted, dotted, "unknown key", suggestion(path), where=where))
        else:
            try:
                _put(changed, path, parse(written, where).value)
                keys.add(path)
            except YamlError as error:
                fix = "put the value in quotes if it is text"
                problems += [replace(each, fix=fix) for each in error.problems]
    _blend_instead(changed, keys)
    return Overridden(changed, frozenset(keys), tuple(problems))


def _blend_instead(values: dict[str, Any], keys: set[KeyPath]) -> None:
    """A blend that is set takes the place of the recipe's own source; what is set next to it stays."""
    data = values.get("data")
    if ("data", "blend") in keys and isinstance(data, dict) and data.get("blend"):
        for field in Origin.model_fields:
            if ("data", field) not in keys:
                data.pop(field, None)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[path[-1]] = value
