"""One recipe, the same numbers under every layout, on real processes; breakages are noticed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import broken_layouts
import pytest
import torch
from compared import COMMAND, check_noticed, outcome, rows_of, train_and_compare, train_broken
from launching import run

from launch.parity import comparison
from launch.parity.comparison import Outcome, compare, read_outcome
from launch.parity.layout_cases import CASES, FORCED, REFERENCE, case_plan
from recipes import catalog

STEPS = 6
# The others are in the long test of all.
FAST = [
    "accumulation 4", "recomputed by 2", "tp2", "tp2 zero3", "pp2", "pp2 accumulation 4, recomputed",
    "dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp2 zero3 offload", "tp2 pp2 dp2",
]  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """Run directories of the layouts in FAST, and the table of their comparison."""
    out = tmp_path_factory.mktemp("layouts")
    return out, train_and_compare(out, FAST, catalog.DEFAULT_RECIPE, [], STEPS)


@pytest.fixture(scope="module")
def reference(compared) -> Outcome:
    return outcome(compared[0], REFERENCE.name)


def test_reference_trains(reference):
    assert reference.failure is None
    assert len(reference.losses) == len(reference.norms) == STEPS
    assert reference.losses[-1] < reference.losses[0] - 0.05, (
        "six steps must show learning, or equal losses say little"
    )
    assert min(reference.norms) < 1.0 < max(reference.norms), (
        "clipping at 1 must be active in some steps, or a wrong norm hides"
    )
    assert reference.weights["word.weight"].shape == (509, 64), (
        "509 is prime: tensor parallelism has to pad it"
    )


@pytest.mark.parametrize("name", FAST)
def test_layout_agrees(compared, reference, name):
    out, printed = compared
    assert rows_of(printed)[name] == "yes"
    found = outcome(out, name)
    difference = compare(reference, found)
    assert difference.agrees, f"{difference}"
    assert difference.loss <= 1e-4 and difference.norm <= 1e-4
    assert found.weights.keys() == reference.weights.keys() == found.gradients.keys()


def test_the_command_compares_what_is_asked_for(tmp_path):
    flags = ["--out", str(tmp_path / "out"), "--plot", str(tmp_path / "curves.svg")]
    done = run([*COMMAND, "--steps", "2", "--only", "pp2", *flags])
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {"pp2": "yes"}
    assert (tmp_path / "out" / "pp2" / "result.json").is_file()
    assert "on top of it 1 layouts" in (tmp_path / "curves.svg").read_text()
    done = run([*COMMAND, "--plot", str(tmp_path / "curves.txt")])
    assert done.returncode == 2 and "name a file that ends in .png, .svg, .pdf" in done.stdout


def test_cases_keep_to_what_they_are_named():
    cases = {case.name: case for case in CASES}
    assert len(cases) == len(CASES)
    assert set(FAST) < set(cases)
    assert {case.processes for case in cases.values()} == {1, 2, 4, 8}
    assert {case.accumulation for case in cases.values()} == {1, 4}
    assert {case.checkpointing for case in cases.values()} == {"none", "full", "2"}
    for name, case in cases.items():
        for axis in ("tp", "pp", "dp"):
            named = re.search(rf"\b{axis}(\d)", name)
            assert getattr(case, axis) == (int(named[1]) if named else 1), name


# Broken on purpose


@pytest.fixture(scope="module")
def broken(compared, tmp_path_factory) -> Path:
    """Run directories of the broken layouts, all trained by one launch of two ranks."""
    return train_broken(compared[0] / "recipe.yaml", tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("breakage", broken_layouts.BREAKAGES, ids=lambda b: b.case.name)
def test_breakage_is_noticed(broken, reference, breakage):
    difference = check_noticed(reference, outcome(broken, breakage.case.name), breakage)
    assert "NO   first: " in comparison.table(reference, [difference])


def test_unbroken_layout_agrees(broken, reference):
    difference = compare(reference, outcome(broken, broken_layouts.CONTROL.case.name))
    assert difference.agrees, f"{difference}"


# The comparison itself


def made_up(**changes) -> Outcome:
    weights = {
        "word.weight": torch.ones(4, 2),
        "layers.0.mlp.expand.weight": torch.ones(3),
        "final_norm.bias": torch.ones(2),
    }
    return replace(Outcome("made up", 2, [3.0, 2.0], [1.0, 0.5], dict(weights), dict(weights)), **changes)


def test_equal_runs_agree():
    difference = compare(made_up(), made_up())
    assert (difference.loss, difference.norm, difference.gradient, difference.weight) == (0, 0, 0, 0)
    assert difference.agrees and difference.diverging is None


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": [3.0, 2.0002]},
        {"losses": [3.0, math.nan]},
        {"losses": [math.nan, 2.0]},
        {"norms": [1.0, 0.5001]},
        {"norms": [math.nan, 0.5]},
        {"failure": "killed"},
    ],
)
def test_another_loss_or_norm_does_not_agree(changes):
    assert not compare(made_up(), made_up(**changes)).agrees


@pytest.mark.parametrize("kind", ["gradients", "weights"])
@pytest.mark.parametrize("value", [1.01, math.nan, math.inf])
def test_first_diverging_tensor_is_named(kind, value):
    """In the order in which an error spreads: weights forward, gradients backward."""
    first = {"gradients": "final_norm.bias", "weights": "layers.0.mlp.expand.weight"}[kind]
    tensors = {
        **made_up().weights,
        "final_norm.bias": torch.full((2,), value),
        "layers.0.mlp.expand.weight": torch.full((3,), value),
    }
    difference = compare(made_up(), made_up(**{kind: tensors}))
    assert not difference.agrees and difference.diverging.startswith(first)


def test_rounding_agrees():
    near = {name: t * (1 + 1e-6) for name, t in made_up().weights.items()}
    assert compare(
        made_up(), made_up(losses=[3.00001, 2.0], norms=[1.00001, 0.5], gradients=near, weights=near)
    ).agrees


def test_what_failed_is_said_below_the_table():
    table = comparison.table(made_up(), [compare(made_up(), made_up(name="tp2", failure="refused: heads=3"))])
    assert "FAILED" in table and table.endswith("tp2: refused: heads=3")


def test_a_failing_reference_is_said():
    failed = made_up(name="one process", failure="no such file")
    assert not compare(failed, made_up()).agrees
    assert comparison.table(failed, [compare(failed, made_up())]) == "one process: no such file"


def test_outcome_of_a_refused_layout_is_its_reason(tmp_path):
    (tmp_path / "refused.txt").write_text("heads=3 is not divisible by tp=2\n")
    assert read_outcome("tp2", 2, tmp_path, tmp_path / "no log").failure == "heads=3 is not divisible by tp=2"


def test_outcome_of_a_killed_layout_is_its_traceback(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "noise\nrank 1 of 2 failed:\nTraceback (most recent call last):\nZeroDivisionError: here\n"
    )
    failure = read_outcome("tp2", 2, tmp_path / "never made", log).failure
    assert failure.startswith("did not finish: Traceback") and failure.endswith("ZeroDivisionError: here")


# The command


def test_unknown_layout_is_refused():
    done = run([*COMMAND, "--only", "tp2", "tp3"], timeout=60)
    assert done.returncode == 2 and "--only tp3: no such layout; there are: " in done.stdout


def test_layouts_are_listed_by_processes():
    done = run([*COMMAND, "--list", "--processes", "2"], timeout=60)
    listed = done.stdout.splitlines()
    fitting = [case.name for case in CASES if case.processes <= 2]
    assert done.returncode == 0
    assert [re.split(r"\s{2,}", line)[0] for line in listed[-len(fitting) :]] == fitting


def test_plans_keep_the_global_batch():
    """Whatever the layout, a step sees the same samples."""
    from ds_configs.plan import Machine

    recipe = catalog.load(catalog.DEFAULT_RECIPE, list(FORCED), tiny=True)
    machine = Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=True)
    for case in CASES:
        plan = case_plan(recipe, case, machine)
        assert plan.layout.micro * plan.layout.accumulation * plan.layout.dp == recipe.batch.global_, (
            case.name
        )
        assert plan.layout.accumulation == case.accumulation and plan.precision == "fp32", case.name
        assert plan.padded_vocab % (128 * case.tp) == 0 and plan.padded_vocab > recipe.model.vocab_size


# The full set


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_all_layouts_agree_over_twenty_steps(tmp_path):
    done = run([*COMMAND, "--out", str(tmp_path)], timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {case.name: "yes" for case in CASES}
    assert "20 steps" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_layouts_agree(tmp_path):
    names = ["tp2", "tp2 zero3", "pp2", "recomputed"]
    done = run(
        [*COMMAND, "--compile", "--steps", str(STEPS), "--out", str(tmp_path), "--only", *names], timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:]
    rows = rows_of(done.stdout)
    assert {f"{name} compiled" for name in names} < set(rows) and set(rows.values()) == {"yes"}
