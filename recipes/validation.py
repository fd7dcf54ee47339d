"""Validation of a mapping and `--set key=value`: a Recipe, or all its problems at once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from operator import eq
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from recipes import consistency
from recipes.files import FileError
from recipes.key_paths import (
    is_text,
    known_prefix,
    list_rule,
    paths,
    shown,
    submodel,
    suggestion,
)
from recipes.problems import Problem, RecipeError, Setting, uncapitalised
from recipes.schema import Origin, Recipe
from recipes.yaml_lines import KeyPath, YamlDocument, YamlError, parse


def _override(
    values: dict[str, Any], overrides: Sequence[str]
) -> tuple[set[KeyPath], list[Problem]]:
    """Lay the overrides over `values`, later ones over earlier; return their keys and their problems."""
    problems = list[Problem]()
    keys = set[KeyPath]()
    for text in overrides:
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        dotted = ".".join(path)
        where = f"--set {text}"
        came = dotted
        rule = ""
        if not equals or not all(path):
            came = "is not key=value"
            fix = "write --set key=value, as in --set batch.micro=4"
        elif path[0] == "branch":
            rule = "is written by the run that it is of"
            fix = "--branch RUN[@STEP] goes on from a run's checkpoint"
        elif dotted not in paths() and path[:2] != ("model", "config"):
            rule = "unknown key"
            fix = suggestion(path)
        else:
            try:
                value = _value(path, written, where)
            except YamlError as error:
                fix = "put the value in quotes if it is text"
                problems += [replace(each, fix=fix) for each in error.problems]
                continue
            keys.add(path)
            of_config = path[:2] == ("model", "config") and len(path) > 2
            if not of_config or _has_keys(values.get("model")):
                _put(values, path, value)
            continue
        problems.append(Problem(dotted, came, rule, fix, where=where))
    data = values.get("data")
    if ("data", "blend") in keys and isinstance(data, dict) and data.get("blend"):
        # in place of the recipe's own source; keys set next to the blend stay
        for field in Origin.model_fields:
            if ("data", field) not in keys:
                data.pop(field, None)
    return keys, problems


def _has_keys(model: Any) -> bool:
    """Read a model's config where it names a file; False: it cannot be read, as its check will tell."""
    from recipes.transformers_config import open_config

    try:
        if isinstance(model, dict):
            open_config(model)
    except FileError:
        return False
    return True


def _value(path: KeyPath, written: str, where: str) -> Any:
    """Read a value as YAML; for a key that takes any text, it is what is typed: 2024, 7e12345, yes, *.txt."""
    plain = written.strip()
    empty = plain in ("", "~", "null")
    if is_text(path) and not empty and plain[0] not in "'\"":
        return plain
    return parse(written, where).value


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[path[-1]] = value


ErrorPath = tuple[str | int, ...]  # keys, and indices of the parts of a list


def validate(
    values: Mapping[str, Any],
    name: str,
    document: YamlDocument,
    roots: Sequence[KeyPath],
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """Check `values`, with `settings` over them and `overrides` over both, and return them as a Recipe.

    Args:
        values: the recipe as plain data, keys as in the file.
        name: of the recipe, at the start of each line.
        document: the recipe's file.
        roots: paths of its sections that may hold a key of the recipe.
        overrides: texts of `--set`; their problems are reported together with those of `values`.
        settings: dotted key -> value.

    Raises RecipeError: all problems.
    """
    # A run's recipe.yaml has no rows and fewer rules: those of training alone.
    columns = document.value.get("columns") or () if "rows" in document.value else None
    changed = copy.deepcopy(dict(values))
    for key, value in (settings or {}).items():
        _put(changed, key.split("."), copy.deepcopy(value))
    overridden, problems = _override(changed, overrides)
    found: list[tuple[Problem, list[ErrorPath]]] = []  # with the keys that it is about
    model = changed.get("model")
    if isinstance(model, dict) and model.get("config"):
        from recipes.transformers_config import complete

        found += [(each, [("model", "config")]) for each in complete(model)]
    try:
        recipe = Recipe.model_validate(changed)
    except ValidationError as error:
        details = error.errors()
        if found:  # by the config, which says the shape
            lacks = "missing", "model"
            details = [d for d in details if (d["type"], d["loc"][0]) != lacks]
        found += [
            (problem, [path]) for path, problem in _field_problems(details).items()
        ]
        wrong = {
            known_prefix(detail["loc"])
            for detail in details
            if detail["type"] != "extra_forbidden"
        }
        recipe = _partial(Recipe, changed, wrong)
    for problem in consistency.problems(recipe, whole=not found, columns=columns):
        found.append(
            (problem, [tuple(key.partition("[")[0].split(".")) for key in problem.keys])
        )
    for problem, places in found:
        keys = [_outside_lists(path) for path in places]
        # Set where one key is the other or a part of it: `map` ends with the shorter.
        was_set = any(all(map(eq, key, other)) for key in keys for other in overridden)
        place = "--set" if was_set else _place(keys, document, roots)
        problems.append(replace(problem, where=name, place=place))
    if problems:
        raise RecipeError(problems)
    return recipe


def _partial(
    model: type[BaseModel],
    values: Mapping[str, Any],
    wrong: Set[ErrorPath],
    path: KeyPath = (),
) -> Any:
    """Build a `model` without the fields at `wrong` and without required ones absent from `values`.

    To read such a field raises AttributeError. Values are as in the file, lists of models, too.
    """
    built = model.model_construct()
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = submodel(field.annotation)
        if (*path, key) in wrong:
            built.__dict__.pop(name, None)
        elif inner and isinstance(values.get(key), Mapping):
            built.__dict__[name] = _partial(inner, values[key], wrong, (*path, key))
        elif key in values:
            built.__dict__[name] = values[key]
    return built


def _field_problems(details: Sequence[ErrorDetails]) -> dict[ErrorPath, Problem]:
    """Return the problem of each key; pydantic reports a value once per unfit member of a union."""
    found: dict[ErrorPath, Problem] = {}
    for path, problem in map(_describe, details):
        known = found.setdefault(path, problem)
        if problem.rule != known.rule:
            found[path] = replace(known, rule=f"{known.rule}, or {problem.rule}")
    return found


def _describe(detail: ErrorDetails) -> tuple[ErrorPath, Problem]:
    loc = detail["loc"]
    kind = detail["type"]
    whole = shown(detail["loc"])
    if kind == "extra_forbidden":
        return loc, Problem(whole, whole, "unknown key", suggestion(loc))
    if kind == "missing":
        return loc, Problem(whole, whole, "is missing", "the recipe must state it")
    path = known_prefix(loc)
    rule = uncapitalised(detail["msg"]).replace("input should", "should")
    if kind == "tuple_type":
        rule = f"should be {list_rule(path) or 'a list'}"
    return path, Problem(shown(path), Setting(shown(path), repr(detail["input"])), rule)


def _outside_lists(path: ErrorPath) -> KeyPath:
    """Cut the path at its first list: values in a list have no line and no --set of their own."""
    return tuple(
        str(part)
        for part in itertools.takewhile(lambda part: isinstance(part, str), path)
    )


def _place(
    keys: Sequence[KeyPath], document: YamlDocument, roots: Sequence[KeyPath]
) -> str:
    """Return the line of the first of the keys, as recipes/default.yaml:14; empty if none is in the file."""
    lines = (document.lines.get((*root, *key)) for root in roots for key in keys if key)
    line = next(filter(None, lines), None)
    return f"{document.where}:{line}" if line else ""
