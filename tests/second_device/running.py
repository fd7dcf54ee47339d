"""Running commands and layouts on the second device, and the same on the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from launching import ROOT, environment, run_ranks
from second_device import build

from launch.experiments.parity.comparison import RunOutcome
from launch.experiments.parity.layout_cases import LayoutCase
from launch.experiments.parity.layout_runs import run_cases
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
) -> dict[str, RunOutcome]:
    """Train the shrunk recipe under each case, with one launch per number of ranks; outcomes by name.

    `env`: that of `on_board`, or None for the CPU.
    """
    start = functools.partial(_start, env)
    shrunk = catalog.load(recipe, settings, tiny=True, steps=steps)
    return {outcome.name: outcome for outcome in run_cases(shrunk, list(cases), out, start=start)}


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
    for name, outcome in here.items():
        assert outcome.failure is None and len(outcome.losses) == steps, f"{name}: {outcome.failure}"
        print(name, "differs by at most", apart(outcome.losses, there[name].losses))
        assert outcome.losses == pytest.approx(there[name].losses, abs=tolerance), name


def apart(found: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def _start(env: dict[str, str] | None, processes: int, jobs: Path, log: Path) -> None:
    script = ROOT / "launch/experiments/parity/layout_runs.py"
    log.write_text(run_ranks(processes, script, jobs, env=env, timeout=500).stdout)
