"""Weights given to a run on this machine: its plan, or what refuses it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_configs.plan import HOST, Machine, Plan
from launch.training.job import plan_job
from launch.weights.initial_weights import InitialWeights
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Recipe

ONE_RANK = SimpleNamespace(tensor_group=None, pp=1, dp=1)
MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def tiny(name: str = "default/sotu", settings: tuple[str, ...] = ()) -> Recipe:
    return catalog.load(name, [*settings, "precision=fp32"], tiny=True)


def planned(directory: Path | str, recipe: Recipe) -> Plan:
    return plan_job(recipe, "zero0", MACHINE, compiled=False, initial_weights=InitialWeights(str(directory)))


def refusal(directory: Path | str, recipe: Recipe) -> str:
    """What `plan_job` says; nothing else but ProblemsError is raised."""
    with pytest.raises(ProblemsError) as refused:
        planned(directory, recipe)
    return str(refused.value)


def notices(plan: Plan) -> list[str]:
    """Those on the weights."""
    return [str(notice) for notice in plan.notices if notice.key == "init_from"]
