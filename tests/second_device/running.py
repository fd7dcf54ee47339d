"""Running commands and layouts on the second device, and the same on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from compared import train
from launching import environment
from second_device import build

from launch.experiments.parity.layout_cases import LayoutCase
from launch.experiments.parity.layout_runs import Layouts
from launch.experiments.proving.task import Found
from recipes import catalog

START = Path(__file__).parent / "start"
needed = pytest.mark.skipif(
    bool(build.missing()),
    reason=f"the second device is compiled with g++ and ninja; not found: {build.missing()}",
)


def on_board(**variables: object) -> dict[str, str]:
    """The environment that gives a command, its launchers and its ranks the second device."""
    path = os.pathsep.join((str(START), environment()["PYTHONPATH"]))
    more = {name: str(value) for name, value in variables.items()}
    return {"DS_ACCELERATOR": "board", "PYTHONPATH": path, **more}


def train_layouts(
    recipe: str,
    settings: Sequence[str],
    cases: Iterable[LayoutCase],
    out: Path,
    steps: int,
    env: dict[str, str] | None = None,
) -> dict[str, Found]:
    """Train the shrunk recipe under each case; what rank 0 finds, by name.

    `env`: that of `on_board`, or None for the CPU.
    """
    return train(Layouts(catalog.load(recipe, settings, tiny=True, steps=steps), out), cases, env)


def check_equal(
    out: Path,
    recipe: str,
    settings: Sequence[str],
    cases: Sequence[LayoutCase],
    steps: int = 3,
    tolerance: float = 2e-6,
) -> None:
    """Check that every case has the losses of the same case on the CPU."""
    here = train_layouts(recipe, settings, cases, out / "board", steps, on_board())
    there = train_layouts(recipe, settings, cases, out / "cpu", steps)
    for name, found in here.items():
        expected = there[name].losses
        assert len(found.losses) == steps
        print(name, "differs by at most", apart(found.losses.values(), expected.values()))
        assert found.losses == pytest.approx(expected, abs=tolerance), name


def apart(found: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))
