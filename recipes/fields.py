"""The recipe schema seen as key paths: what keys there are, and where a misspelt one may have been meant."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from recipes.problems import nearest
from recipes.schema import Recipe


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `Published | None`; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := submodel(part))), None)
    return None


def children(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Key in the file -> its submodel, None for a plain value."""
    return {field.alias or name: submodel(field.annotation) for name, field in model.model_fields.items()}


def paths(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key: model, model.layers, …"""
    for key, below in children(model).items():
        yield prefix + key
        if below:
            yield from paths(below, f"{prefix}{key}.")


def known_prefix(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The part of an error's location that names keys of the schema (pydantic appends union members and indices)."""
    kept: list[str] = []
    level: type[BaseModel] | None = Recipe
    for part in path:
        if level is None or part not in children(level):
            break
        kept.append(str(part))
        level = children(level)[str(part)]
    return tuple(kept)


def suggestion(path: tuple[str, ...]) -> str:
    """What an unknown key may have been meant as: a sibling spelt alike, or the same word elsewhere in the recipe."""
    level: type[BaseModel] | None = Recipe
    for part in path[:-1]:
        level = children(level).get(part) if level else None
    siblings = list(children(level)) if level else []
    near = nearest(path[-1], siblings)
    if near:
        return f"did you mean {' or '.join('.'.join((*path[:-1], word)) for word in near)}?"
    everywhere = list(paths())
    same = [key for key in everywhere if key.rsplit(".", 1)[-1] == path[-1]]
    near = same or nearest(".".join(path), everywhere)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{'.'.join(path[:-1]) or 'a recipe'} has {', '.join(siblings)}" if siblings else "no such key"
