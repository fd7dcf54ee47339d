"""Plans of rows and their steps, for the tests of what is predicted of them."""

from __future__ import annotations

from ds_configs.plan import Plan
from launch.planning.prediction import workload
from launch.planning.resolved_plans import published_plan
from recipes import catalog


def plan(name: str, *settings: str) -> Plan:
    """A row as published, with settings of its recipe changed."""
    return published_plan(catalog.load(name, settings))


def work(name: str, *settings: str) -> workload.Workload:
    """The step of that plan."""
    return workload.of_plan(plan(name, *settings))
