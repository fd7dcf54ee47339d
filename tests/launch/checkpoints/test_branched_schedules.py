"""The schedule of a branch: its cool-down ends with it, and one that would be flat or late is refused."""

from __future__ import annotations

import re

import pytest
from launching import ROOT

from launch.checkpoints.branching import BranchPoint
from launch.records.recorded_run import RecordedRun
from launch.training.schedule import learning_rate
from recipes.catalog import dump, find, load
from recipes.problems import ProblemsError
from recipes.schema import Recipe

COOL = ["schedule.kind=wsd", "schedule.wsd_decay_steps=20"]
STABLE = [*COOL, "schedule.decay_steps=4200"]
OVER = ["schedule.decay_steps=80"]
LONG = ["schedule.warmup_steps=150", "steps=140"]
WSD = "schedule={kind: wsd, wsd_decay_steps: 20}"


@pytest.fixture
def branch(tmp_path):
    """Makes the recipe of a branch of a run of `recipe` from a step of it on."""

    def make(recipe: Recipe, step: int, settings: list[str], steps: int | None = None) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(dump(recipe))
        run = RecordedRun(tmp_path, find(tmp_path), recipe, "default/sotu", False, "zero1", None)
        return BranchPoint(run, step).recipe(settings, {}, steps)

    return make


@pytest.mark.parametrize(
    ("started", "settings", "steps", "end"),
    [
        (load(steps=200), [*COOL, "steps=120"], None, 120),
        (load(steps=200), COOL, 120, 120),
        (load(steps=200), COOL, None, 200),
        (load(steps=200), [WSD], 120, 120),
        (load(overrides=["schedule.kind=constant"], steps=200), COOL, 120, 120),
        (load(overrides=[*COOL, "steps=4200"]), ["steps=120"], None, 120),
        (load(steps=200), [*COOL, "steps=130", "schedule.decay_steps=120"], None, 120),
        (load(steps=200), [*COOL, "schedule.decay_steps=120"], 130, 120),
        (load(steps=200), ["schedule.kind=linear"], 120, 300),
    ],
)
def test_a_cool_down_ends_with_its_branch_unless_an_end_is_given(branch, started, settings, steps, end):
    recipe = branch(started, 100, settings, steps)
    assert recipe.decay_steps == end
    assert recipe.steps == steps or steps is None


def test_the_readme_branches_off_a_step_that_its_run_keeps(branch):
    step, setting = re.search(
        r"--branch RUN@(\d+) --out NEW --set (\S+)", (ROOT / "README.md").read_text()
    ).groups()
    run = load()
    saved = range(run.run.save_every, run.steps + 1, run.run.save_every)
    assert int(step) in saved[-run.run.keep_checkpoints :]
    recipe = branch(run, int(step), [setting])
    assert learning_rate(recipe, recipe.steps - 1) < learning_rate(recipe, int(step))


@pytest.mark.parametrize(
    ("started", "settings", "steps", "line"),
    [
        # a decay long after the branch, whose end the run was given or kept
        (load(overrides=[*STABLE, "steps=4200"]), ["steps=120"], None, "schedule.decay_steps=120"),
        (load(overrides=[*STABLE, "steps=4200"]), [], 120, "schedule.decay_steps=120"),
        # a decay that was over
        (load(overrides=OVER), [], None, "schedule.decay_steps=300"),
        (load(overrides=OVER), ["schedule.kind=linear"], 120, "schedule.decay_steps=120"),
        (load(steps=100), [*COOL, "schedule.decay_steps=90", "steps=140"], None, "schedule.decay_steps=140"),
        # a warm-up that goes on
        (load(overrides=["schedule.kind=constant"]), LONG, None, "steps=150"),
        # no step
        (load(steps=100), [], None, "steps=101"),
        (load(steps=200), ["schedule.kind=linear"], 100, "steps=101"),
        (load(overrides=["steps=100"]), [], None, "steps=101"),
        (load(overrides=[*OVER, "steps=100"]), [], None, "steps=101 schedule.decay_steps=101"),
    ],
)  # fmt: skip
def test_a_branch_that_would_not_do_what_its_schedule_says_has_a_line_that_works(
    branch, started, settings, steps, line
):
    with pytest.raises(ProblemsError) as error:
        branch(started, 100, settings, steps)
    (problem,) = error.value.problems
    flag = "--" if steps and line.startswith("steps=") else "--set "
    assert str(problem).endswith(f"; give {flag}{' --set '.join(line.split())}"), problem
    for setting in line.split():
        key, _, value = setting.partition("=")
        if flag == "--":
            steps = int(value)
        else:
            settings = [*(text for text in settings if not text.startswith(f"{key}=")), setting]
    assert branch(started, 100, settings, steps).branch.step == 100
