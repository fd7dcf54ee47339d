"""A pytest fixture that proves an adapter: `pytest_plugins = ["launch.experiments.proving.fixture"]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.experiments.proving.proving import Proven, prove
from launch.experiments.proving.task import Task


@pytest.fixture(name="prove")
def prove_in_a_test(tmp_path: Path) -> Callable[..., Proven]:
    """Return a function that fails the test with the table if a layout of an adapter does not agree.

    Its arguments: the adapter's file, names of layouts, and by name `resume` and fields of a `Task`.
    """

    def proven(
        adapter: str | Path, *layouts: str, resume: str = "", **how: Any
    ) -> Proven:
        named = {"layout": "dp1", "out": str(tmp_path / "proof"), "steps": 3, **how}
        found = prove(Task(str(Path(adapter).resolve()), **named), layouts, resume)
        if not found.agrees:
            pytest.fail(found.told())
        return found

    return proven
