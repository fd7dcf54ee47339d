"""compare_layouts: what it compares, says and refuses; which layouts there are."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compared import COMMAND, ODD_SHAPES, folder, rows_of, train_and_compare
from launching import run
from matplotlib.figure import Figure

from ds_configs.plan import HOST, Machine
from launch import compare_layouts
from launch.console import ends
from launch.experiments.parity import comparison
from launch.experiments.parity.comparison import RunOutcome, compare, read_outcome
from launch.experiments.parity.curves import draw_curves
from launch.experiments.parity.layout_cases import CASES, FORCED, REFERENCE, LayoutCase, case_plan
from launch.experiments.parity.layout_runs import run_cases
from recipes import catalog
from recipes.problems import Problem

MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)


@pytest.mark.long
def test_the_command_compares_what_is_asked_for(tmp_path):
    flags = ["--out", str(tmp_path / "out"), "--plot", str(tmp_path / "curves.svg")]
    done = run([*COMMAND, "--steps", "2", "--only", "pp2", *flags])
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {"pp2": "yes"}
    assert (tmp_path / "out" / "pp2" / "result.json").is_file()
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_the_picture_says_how_many_layouts_differ_by_how_much_at_most(tmp_path, monkeypatch):
    """One line below: the largest difference of each step; layouts in bf16 and cut short do not count."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes))
    cases = [case for case in CASES if case.states == "fp32"][:3]
    (bf16, *_) = [case for case in CASES if case.states == "bf16"]
    losses = ([6.0, 5.0], [6.0, 5.0 + 2**-21], [6.0 - 2**-20, 5.0], [6.0])
    one, *others = map(RunOutcome, (REFERENCE, *cases), losses)
    draw_curves(
        one, [*others, RunOutcome(bf16, [6.1, 5.1])], tmp_path / "curves.png", "GPT-2 of 2M parameters"
    )
    ((above, below),) = drawn
    assert above.get_title(loc="left") == "GPT-2 of 2M parameters"
    assert "2 layouts, largest difference 9.5e-7" in [text.get_text() for text in below.texts]
    (line,) = below.get_lines()
    assert list(line.get_ydata()) == [2**-20, 2**-21] and line.get_drawstyle() == "steps-mid"
    (band,) = below.collections
    top = band.get_paths()[0].get_extents().y1
    assert top == 4 * 2**-21, "units in the last place of fp32, of a loss from 4 to 8"


def test_a_loss_that_is_lost_is_said(tmp_path):
    said = train_and_compare(tmp_path, ["accumulation 4"], catalog.DEFAULT_RECIPE, ["init_std=1e25"], 2)
    assert said == "one process: did not finish: the loss is nan in fp32"


def test_where_one_process_fails_the_command_does(monkeypatch, capsys):
    failed = RunOutcome(REFERENCE, failure="did not finish: the loss is nan in fp32")
    monkeypatch.setattr(sys, "argv", [*COMMAND[1:], "--only", "tp2"])
    monkeypatch.setattr(compare_layouts, "run_cases", lambda *_, **__: iter([failed]))
    monkeypatch.setattr(compare_layouts, "check_data", lambda recipe: None)
    with pytest.raises(SystemExit) as ended:
        compare_layouts.main()
    assert ended.value.code == 1 and failed.failure in capsys.readouterr().out


def test_cases_keep_to_what_they_are_named():
    cases = {case.name: case for case in CASES}
    assert len(cases) == len(CASES)
    assert {case.processes for case in cases.values()} == {1, 2, 3, 4, 8}
    assert {case.accumulation for case in cases.values()} == {None, 1, 4}
    assert {case.checkpointing for case in cases.values()} == {"none", "selective", "full", "2"}
    for name, case in cases.items():
        for axis in ("tp", "pp", "dp"):
            named = re.search(rf"\b{axis}(\d)", name)
            assert getattr(case, axis) == (int(named[1]) if named else 1), name
        assert (case.sequence, case.checkpointing == "selective") == ("sequence" in name, "selective" in name)


def test_the_recipe_shares_out_its_own_batch():
    recipe = catalog.load(catalog.DEFAULT_RECIPE, [*FORCED, *ODD_SHAPES], tiny=True)
    names = ("own accumulation", "pp3", "tp2")
    shares = {case.name: case_plan(recipe, case, MACHINE).layout for case in CASES if case.name in names}
    assert (shares["own accumulation"].micro, shares["own accumulation"].accumulation) == (3, 5)
    assert (shares["pp3"].micro, shares["pp3"].accumulation) == (3, 5)
    assert (shares["tp2"].micro, shares["tp2"].accumulation) == (15, 1)


# The comparison itself


TP2 = LayoutCase("tp2", 2, 1, 1, "zero0")


def made_up(**changes) -> RunOutcome:
    weights = {
        "word.weight": torch.ones(4, 2),
        "layers.0.mlp.expand.weight": torch.ones(3),
        "final_norm.bias": torch.ones(2),
    }
    curves = dict(losses=[3.0, 2.0], validations=[3.1, 2.1], norms=[1.0, 0.5])
    return replace(RunOutcome(TP2, **curves, gradients=weights, weights=dict(weights)), **changes)


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
        {"validations": [3.1, 2.1002]},
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


def test_what_failed_or_was_left_out_is_said_below_the_table():
    failed = compare(made_up(), made_up(failure="killed"))
    left_out = {"tp3": [Problem("model.heads", "heads=4", "not divisible by tp=3")]}
    table = comparison.table(made_up(), [failed], left_out)
    assert rows_of(table) == {"tp2": "FAILED", "tp3": "not run"}
    assert table.endswith("tp2: killed\n\ntp3 is not run: heads=4: not divisible by tp=3")


def test_a_failing_reference_is_said():
    failed = made_up(case=REFERENCE, failure="no such file")
    assert not compare(failed, made_up()).agrees
    assert comparison.table(failed, [], {}) == "one process: no such file"


def test_outcome_of_a_failed_layout_is_the_traceback_of_its_rank(tmp_path):
    (tmp_path / "error-rank-1.txt").write_text(
        "Traceback (most recent call last):\nZeroDivisionError: here\n"
    )
    log = tmp_path / "log.txt"
    log.write_text("ChildFailedError")
    failure = read_outcome(TP2, tmp_path, log).failure
    assert failure == "did not finish: Traceback (most recent call last):\nZeroDivisionError: here"


def test_outcome_of_a_killed_layout_is_what_its_log_says_of_it(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "its last words\nE1122 api.py:882] failed (exitcode: -9) local_rank: 1 (pid: 7) of x\nmore\n"
    )
    failure = read_outcome(TP2, tmp_path / "never made", log).failure
    assert failure == "did not finish: its last words\nrank 1 ended with exit code -9"


def test_a_failing_layout_keeps_no_other_from_running(tmp_path):
    """The first launch ends in the second of three cases; another takes the third."""
    launches = []

    def start(processes: int, jobs: Path, log: Path) -> None:
        names = [case["name"] for case in json.loads(jobs.read_text())]
        launches.append(names)
        for name in names[: 2 if len(launches) == 1 else None]:
            (tmp_path / folder(name)).mkdir()

    names = ["tp2", "pp2", "dp2 zero1"]
    cases = [case for case in CASES if case.name in names]
    found = list(run_cases(catalog.load(tiny=True), cases, tmp_path, start=start))
    assert launches == [names, names[2:]] and [outcome.name for outcome in found] == names


# The command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--only", "tp2", "tp5"],
            "--only tp5: no such layout; there are: accumulation 4; own accumulation; ",
        ),
        (["--processes", "0"], "--processes: 0: give a whole number from 1"),
        (["--processes", "1", "--only", "tp2"], "tp2 is not run: it has 2 processes: there are 1 at most"),
        (["--steps", "0"], "--steps: 0: give a whole number from 1"),
        (["--set", "batch.global=7", "--only", "dp2 zero1"], "batch.global=7 is not divisible by dp=2"),
        (["--set", "parallel.tp=2"], "--set parallel.tp=2: every layout decides it"),
        (["--set", "data.source=text", "--set", "data.name=nowhere.txt"], "nowhere.txt"),
        (["--out", "README.md"], "--out README.md is a file"),
        (["--out", "README.md/below"], "--out README.md/below cannot be made"),
        (["--out", "tests"], "--out tests is not empty"),
        (["--plot", "curves.txt"], "--plot curves.txt has another ending"),
        (["--plot", "nowhere/curves.png"], "--plot nowhere/curves.png lies in nowhere, which is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_refused_before_training(flags, said, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [*COMMAND[1:], *flags])
    monkeypatch.setattr(compare_layouts.terminal, "quiet_libraries", lambda: None)
    with pytest.raises(SystemExit) as ended:
        ends.run(compare_layouts.main)
    printed = "".join(capfd.readouterr())
    assert ended.value.code == 2 and said in printed
    assert "1 process: one process" not in printed


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], 20),
        (["--steps", "3"], 3),
        (["--set", "steps=30"], 30),
        (["--set", "steps=30", "--steps", "4"], 4),
    ],
)
def test_steps_are_those_asked_for_on_a_schedule_that_fits(flags, steps, tmp_path):
    """Of the default recipe at its full size, whose warm-up alone is 20 steps."""
    recipe = compare_layouts.chosen_recipe(compare_layouts.build_parser().parse_args(flags))
    assert recipe.steps == steps and recipe.decay_steps == (300 if "--set" not in flags else 30)
    kept = tmp_path / "recipe.yaml"
    kept.write_text(catalog.dump(recipe))
    assert catalog.load_resolved(kept) == recipe, "the ranks read it"


def test_layouts_are_listed_by_processes():
    done = run([*COMMAND[:-1], "--list", "--processes", "2"], timeout=60)
    listed = done.stdout.splitlines()
    fitting = [case.name for case in CASES if case.processes <= 2]
    assert done.returncode == 0
    assert [re.split(r"\s{2,}", line)[0] for line in listed[-len(fitting) :]] == fitting


def test_plans_keep_the_global_batch():
    """Whatever the layout, a step sees the same samples."""
    recipe = catalog.load(catalog.DEFAULT_RECIPE, list(FORCED), tiny=True)
    for case in (case for case in CASES if case.name != "tp3"):  # which four heads cannot have
        plan = case_plan(recipe, case, MACHINE)
        assert plan.layout.micro * plan.layout.accumulation * plan.layout.dp == recipe.batch.global_, (
            case.name
        )
        assert case.accumulation in (None, plan.layout.accumulation) and plan.precision == case.states, (
            case.name
        )
        assert plan.padded_vocab % (128 * case.tp) == 0 and plan.padded_vocab > recipe.model.vocab_size
