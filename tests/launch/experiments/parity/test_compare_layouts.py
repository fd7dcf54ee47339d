"""compare_layouts: what it compares, says and refuses; which layouts there are."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
from compared import COMMAND, ODD_SHAPES, folder, forked, layouts_of, rows_by_name, rows_of
from launching import ROOT, run
from matplotlib.figure import Figure

from ds_configs.plan import HOST, Machine
from launch import compare_layouts
from launch.console import ends
from launch.experiments.parity.curves import draw_curves
from launch.experiments.parity.layout_cases import CASES, FORCED, LayoutCase, case_plan
from launch.experiments.proving.layout import layout_of
from launch.experiments.proving.proving import Proven
from launch.experiments.proving.task import Found
from launch.experiments.proving.verdict import Row
from recipes import catalog

MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)


@pytest.mark.long
def test_the_command_compares_what_is_asked_for(tmp_path):
    flags = ["--out", str(tmp_path / "out"), "--plot", str(tmp_path / "curves.svg")]
    done = run([*COMMAND, "--steps", "2", "--only", "pp2", *flags])
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {"pp2": "yes"}
    assert (tmp_path / "out" / folder("pp2") / "result.json").is_file()
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_the_picture_says_how_many_layouts_differ_by_how_much_at_most(tmp_path, monkeypatch):
    """One line below: the largest difference of each step; layouts in bf16 and failed ones do not count."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes))
    layout = layout_of("tp2")
    rows = [
        Row(layout, losses={1: 6.0, 2: 5.0 + 2**-21}),
        Row(layout, losses={1: 6.0 - 2**-20, 2: 5.0}),
        Row(layout, failure="killed"),
        Row(layout, "bf16", {1: 6.1, 2: 5.1}),
    ]
    one = SimpleNamespace(found=Found(losses={1: 6.0, 2: 5.0}), task=SimpleNamespace(precision="fp32"))
    draw_curves(Proven(one, rows), tmp_path / "curves.png", "GPT-2 of 2M parameters")
    ((above, below),) = drawn
    assert above.get_title(loc="left") == "GPT-2 of 2M parameters"
    assert "2 layouts, largest difference 9.5e-7" in [text.get_text() for text in below.texts]
    (line,) = below.get_lines()
    assert list(line.get_ydata()) == [2**-20, 2**-21] and line.get_drawstyle() == "steps-mid"
    (band,) = below.collections
    top = band.get_paths()[0].get_extents().y1
    assert top == 4 * 2**-21, "units in the last place of fp32, of a loss from 4 to 8"


def test_where_one_process_fails_the_command_does(monkeypatch, capsys):
    """A loss that is lost."""
    flags = ["--only", "accumulation 4", "--steps", "2", "--set", "init_std=1e25"]
    monkeypatch.setattr(sys, "argv", [*COMMAND[1:], *flags])
    with pytest.raises(SystemExit) as ended, forked():
        compare_layouts.main()
    assert ended.value.code == 1 and "the loss is nan in fp32" in capsys.readouterr().out


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ["megarecipes", "transformers"])
def test_parameters_that_lie_in_another_order_are_read_as_they_lie(implementation, tmp_path):
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    config["zero_optimization"]["round_robin_gradients"] = True
    file = tmp_path / "in_turn.json"
    file.write_text(json.dumps(config))
    case = LayoutCase("in turn", 1, 1, 2, str(file))
    (row,) = rows_by_name(
        layouts_of(tmp_path / "out", [f"model.implementation={implementation}"], steps=2), [case]
    ).values()
    assert row.agrees, row


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
