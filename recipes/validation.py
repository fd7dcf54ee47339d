"""From a mapping to a Recipe, or to every problem in it at once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from recipes.consistency import known_problems
from recipes.key_paths import known_prefix, list_rule, shown, suggestion
from recipes.overrides import Overridden
from recipes.partial_recipe import incomplete, row_problems
from recipes.problems import ProblemsError
from recipes.schema import Recipe
from recipes.yaml_lines import Document, KeyPath

_MISSING = "missing"
_UNKNOWN = "extra_forbidden"
_NO_LIST = "tuple_type"

ErrorPath = tuple[str | int, ...]  # keys, and indices of the parts of a list


class RecipeError(ProblemsError):
    """A recipe that cannot be had: every problem, one line each."""


def validate(
    values: dict[str, Any],
    name: str,
    document: Document,
    roots: Sequence[KeyPath],
    overridden: Overridden | None = None,
) -> Recipe:
    """The Recipe in `values`.

    Args:
        values: the recipe as plain data, keys as in the file.
        name: of the recipe, to start each line with.
        document: the file it comes from; `roots` are the paths in it under which a key of the recipe may stand.
        overridden: where the values come from `--set`: its problems are reported with those found here.

    Raises:
        RecipeError: all problems.
    """
    lines = list(overridden.problems) if overridden else []
    set_keys = overridden.keys if overridden else frozenset()
    found: list[tuple[ErrorPath, str]] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        found = _lines(error, values)
    if "rows" in document.value:  # of a run's recipe.yaml only what training needs is asked
        found += row_problems(values, document.value.get("columns") or ())
    for path, message in found:
        key = _outside_lists(path)
        dotted = ".".join(key)
        was_set = any(part == dotted or (key and part.startswith(f"{dotted}.")) for part in set_keys)
        place = " (--set)" if was_set else _place(key, document, roots)
        lines.append(f"{name}: {message}{place}")
    if recipe is not None and not lines:
        return recipe
    raise RecipeError(list(dict.fromkeys(lines)))


def _lines(error: ValidationError, values: dict[str, Any]) -> list[tuple[ErrorPath, str]]:
    """(path, message) of each problem, those that unknown keys and wrong values hid included."""
    details = error.errors()
    found = [pair for detail in details for pair in _describe(detail)]
    unknown = [detail["loc"] for detail in details if detail["type"] == _UNKNOWN]
    rest = copy.deepcopy(values)
    if unknown:  # pydantic compares no fields of a model with an unknown key: look again without those
        for loc in unknown:
            _remove(rest, loc)
        try:
            Recipe.model_validate(rest)
        except ValidationError as second:
            details = [*details, *second.errors()]
            found += [pair for detail in second.errors() for pair in _describe(detail) if pair not in found]
    if all(path for path, _ in found):  # nor the fields of a recipe with a wrong value
        wrong = {
            known_prefix(detail["loc"])
            for detail in details
            if detail["type"] not in (_UNKNOWN, "value_error")
        }
        found += [((), line) for line in known_problems(incomplete(Recipe, rest, wrong))]
    return _one_per_union(found)


def _one_per_union(found: list[tuple[ErrorPath, str]]) -> list[tuple[ErrorPath, str]]:
    """A value that fits no member of a union is reported by pydantic once per member; joined here."""
    joined: dict[ErrorPath, list[str]] = {}
    for path, message in found:
        joined.setdefault(path, []).append(message)
    result = []
    for path, messages in joined.items():
        if len(messages) == 1 or not path:
            result += [(path, message) for message in messages]
        else:
            came = messages[0].split(": ", 1)[0]
            rules = [message.split(": ", 1)[1] for message in messages]
            result.append((path, f"{came}: {', or '.join(dict.fromkeys(rules))}"))
    return result


def _describe(detail: ErrorDetails) -> list[tuple[ErrorPath, str]]:
    loc = detail["loc"]
    if detail["type"] == _UNKNOWN:
        return [(loc, f"{shown(loc)}: unknown key; {suggestion(loc)}")]
    path = known_prefix(loc)
    key = shown(path)
    if detail["type"] == _MISSING:
        return [(loc, f"{shown(loc)}: is missing; the recipe must state it")]
    if detail["type"] == "value_error":  # ours: each line says what came, the rule and the fix
        lines = detail["msg"].removeprefix("Value error, ").splitlines()
        if path != _outside_lists(
            path
        ):  # a part of data.blend has the rules of data, which know nothing of a list
            lines = [line.replace("data.", f"{key}.") for line in lines]
        return [(path, line) for line in lines]
    if detail["type"] == _NO_LIST:
        return [(path, f"{key}={detail['input']!r}: should be {list_rule(path) or 'a list'}")]
    rule = detail["msg"][0].lower() + detail["msg"][1:]
    return [(path, f"{key}={detail['input']!r}: {rule.replace('input should', 'should')}")]


def _outside_lists(path: ErrorPath) -> KeyPath:
    """The path up to its first list: what is in a list has no line and no --set of its own."""
    return tuple(str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), path))


def _place(path: KeyPath, document: Document, roots: Sequence[KeyPath]) -> str:
    """Where a key stands, as " (recipes/default.yaml:14)"; empty for one that is not in the file."""
    lines = (document.lines.get((*root, *path)) for root in roots if path)
    line = next(filter(None, lines), None)
    return f" ({document.where}:{line})" if line else ""


def _remove(values: Any, loc: Sequence[str | int]) -> None:
    for part in loc[:-1]:
        values = values[part]
    values.pop(loc[-1], None)
