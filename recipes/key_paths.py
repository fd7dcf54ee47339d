"""The recipe schema seen as key paths: what keys there are, and where a misspelt one may have been meant."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from recipes.problems import nearest
from recipes.schema import Recipe


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `Published | None` or `tuple[BlendPart, ...]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next((found for part in get_args(annotation) if (found := submodel(part))), None)
    return None


def children(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Key in the file -> its submodel, None for a plain value."""
    return {field.alias or name: submodel(field.annotation) for name, field in model.model_fields.items()}


def is_list(model: type[BaseModel], key: str) -> bool:
    """Whether the key of this model holds a list."""
    return any(
        get_origin(field.annotation) is tuple
        for name, field in model.model_fields.items()
        if (field.alias or name) == key
    )


def shown(path: Sequence[str | int]) -> str:
    """A path as users write it: data.blend[1].weight."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def paths(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key: model, model.layers, … Keys inside lists have none."""
    for key, below in children(model).items():
        yield prefix + key
        if below and not is_list(model, key):
            yield from paths(below, f"{prefix}{key}.")


def known_prefix(path: Sequence[str | int]) -> tuple[str | int, ...]:
    """The part of an error's location that names keys of the schema, and models in lists by index from 0.

    pydantic appends union members and indices of plain values.
    """
    kept: list[str | int] = []
    level: type[BaseModel] | None = Recipe
    for part in path:
        if level is None or (isinstance(part, str) and part not in children(level)):
            break
        kept.append(part)
        level = level if isinstance(part, int) else children(level)[part]
    return tuple(kept)


def model_at(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The model that a key holds, or each part of its list."""
    level: type[BaseModel] | None = Recipe
    for part in path:
        if isinstance(part, str):
            level = children(level).get(part) if level else None
    return level


def list_rule(path: Sequence[str | int]) -> str:
    """What the list of a key consists of; empty for a key that holds no list of models."""
    level, key = model_at(path[:-1]), path[-1]
    part = children(level).get(key) if level and isinstance(key, str) and is_list(level, key) else None
    needed = (
        [field.alias or name for name, field in part.model_fields.items() if field.is_required()]
        if part
        else []
    )
    return f"a list of parts, each with {', '.join(needed)}" if needed else ""


def suggestion(path: Sequence[str | int]) -> str:
    """What an unknown key may have been meant as: a sibling spelt alike, or the same word elsewhere."""
    for end in range(1, len(path)):
        if isinstance(path[end], str) and (rule := list_rule(path[:end])):
            return f"{shown(path[:end])} is {rule}: give it as a whole"
    level, last = model_at(path[:-1]), str(path[-1])
    siblings = list(children(level)) if level else []
    near = nearest(last, siblings)
    if near:
        return f"did you mean {' or '.join(shown((*path[:-1], word)) for word in near)}?"
    everywhere = list(paths())
    same = [key for key in everywhere if key.rsplit(".", 1)[-1] == last]
    near = same or ([] if any(isinstance(part, int) for part in path) else nearest(shown(path), everywhere))
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{shown(path[:-1]) or 'a recipe'} has {', '.join(siblings)}" if siblings else "no such key"
