"""Recipes resolved with a DeepSpeed JSON, and the problems that refuse them."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from ds_configs.findings import FOLDER, ConfigError
from ds_configs.plan import HOST, Machine, Plan
from ds_configs.resolver import resolve
from recipes import catalog
from recipes.problems import Problem
from recipes.schema import Recipe

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)


@functools.cache
def recipe(sets: tuple[str, ...]) -> Recipe:
    """The default recipe with settings of its own."""
    return catalog.load("default", sets)


@functools.cache
def shipped(name: str) -> dict[str, Any]:
    """A JSON of ds_configs/."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with dotted keys set."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section[name] = section.get(name) if isinstance(section.get(name), dict) else {}
            section = section[name]
        section[last] = value
    return config


def written(folder: Path, base: str = "zero1", changes: dict[str, Any] | None = None) -> Path:
    """The file mine.json: a JSON of ds_configs/ with dotted keys changed."""
    path = folder / "mine.json"
    path.write_text(json.dumps(changed(shipped(base), changes or {})))
    return path


def plan(config: Any, *sets: str, world: int = 1, machine: Machine = CPU, **how: Any) -> Plan:
    return resolve(recipe(sets), config, world, machine, **how)


def problems(config: Any, *sets: str, **how: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as error:
        plan(config, *sets, **how)
    return error.value.problems


def only(config: Any, *sets: str, **how: Any) -> str:
    """The one problem, as a sentence."""
    (problem,) = problems(config, *sets, **how)
    return str(problem)
