"""With dropout of the residual stream layouts give the same numbers as without; breakages are noticed."""

from __future__ import annotations

from pathlib import Path

import broken_layouts
import pytest
from compared import (
    check_all_layouts,
    check_compiled_layouts,
    check_noticed,
    outcome,
    rows_of,
    train_and_compare,
    train_broken,
)

from launch.experiments.parity.comparison import compare
from launch.experiments.parity.layout_cases import REFERENCE
from recipes import catalog

STEPS = 4
DROPPED = "dropout.hidden=0.1"
# The others are in the long test of all. A BERT's padding is cut by micro-batch, and not in the pipeline.
RUNS = {
    catalog.DEFAULT_RECIPE: [
        "accumulation 4", "tp2 zero3", "pp2 accumulation 4, recomputed", "dp2 zero1", "sequence tp2",
        "sequence tp2 pp2",
    ],
    "bert/sotu": ["accumulation 4", "tp2", "sequence tp2", "pp2 accumulation 4, recomputed"],
}  # fmt: skip
EVERY_LAYOUT = [(recipe, name) for recipe, names in RUNS.items() for name in names]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Of every recipe: its run directories, and the table of their comparison."""
    done = {}
    for recipe, names in RUNS.items():
        out = tmp_path_factory.mktemp("dropout")
        done[recipe] = out, train_and_compare(out, names, recipe, [DROPPED], STEPS)
    return done


@pytest.mark.parametrize(("recipe", "name"), EVERY_LAYOUT)
def test_layout_agrees(compared, recipe, name):
    out, printed = compared[recipe]
    assert rows_of(printed)[name] == "yes"
    difference = compare(outcome(out, REFERENCE.name), outcome(out, name))
    assert difference.agrees and difference.loss <= 1e-4 and difference.norm <= 1e-4, f"{difference}"


@pytest.fixture(scope="module")
def broken(compared, tmp_path_factory) -> Path:
    """Run directories of the broken layouts, all trained by one launch of two ranks."""
    recipe = compared[catalog.DEFAULT_RECIPE][0] / "recipe.yaml"
    return train_broken(recipe, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("breakage", broken_layouts.DROPOUT_BREAKAGES, ids=lambda b: b.case.name)
def test_breakage_is_noticed(compared, broken, breakage):
    reference = outcome(compared[catalog.DEFAULT_RECIPE][0], REFERENCE.name)
    check_noticed(reference, outcome(broken, breakage.case.name), breakage)


def test_unbroken_layout_agrees(compared, broken):
    reference = outcome(compared[catalog.DEFAULT_RECIPE][0], REFERENCE.name)
    difference = compare(reference, outcome(broken, broken_layouts.CONTROL.case.name))
    assert difference.agrees, f"{difference}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RUNS)
def test_all_layouts_agree_over_twenty_steps(tmp_path, recipe):
    check_all_layouts(tmp_path, "--recipe", recipe, "--set", DROPPED)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_layouts_agree(tmp_path):
    check_compiled_layouts(tmp_path, ["tp2", "dp2 zero3", "pp2"], STEPS, "--set", DROPPED)
