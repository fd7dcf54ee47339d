"""Schedules that the trained steps do not do: refused with a line that works, whatever set them."""

from __future__ import annotations

from itertools import product

import pytest

from launch.records.plan_text import describe_schedule
from launch.training.schedule import learning_rate
from recipes.catalog import dump, load
from recipes.consistency import schedule_problems, untrained
from recipes.problems import Problem, RecipeError, Setting
from recipes.schema import Branch, Recipe

WSD = ["schedule.kind=wsd", "schedule.wsd_decay_steps=20"]
JSON = {"schedule.kind": "WarmupLR", "schedule.warmup_steps": 1000}  # as --follow lays DeepSpeed's default


def given(problem: Problem, settings: list[str], steps: int | None) -> tuple[list[str], int | None]:
    """What a user types who follows the advice: --set's in place of those of the same keys, and --steps."""
    typed = dict(text.partition("=")[::2] for text in settings)
    before = ""
    for piece in problem.fix:
        if isinstance(piece, Setting) and before.endswith("--set "):
            typed[piece.key] = str(piece.value)
        elif isinstance(piece, Setting):
            assert str(piece).startswith("steps=") and before.endswith(" --")
            steps = piece.value
        before = str(piece)
    return [f"{key}={value}" for key, value in typed.items()], steps


@pytest.mark.parametrize(
    ("settings", "steps", "laid", "said"),
    [
        (WSD, 100, {}, "stable"),
        (WSD, 5, {}, "give --set schedule.decay_steps=22 --steps=22 --set schedule.wsd_decay_steps=2"),
        ([*WSD, "schedule.decay_steps=400"], None, {}, "give --set schedule.decay_steps=300"),
        (["schedule.kind=wsd", "schedule.wsd_decay_steps=1"], None, {}, "--set schedule.wsd_decay_steps=2"),
        (["schedule.kind=linear"], 10, {}, "the warm-up ends after step 20, and training after step 10"),
        (["schedule={kind: constant, warmup_steps: 301}"], None, {}, "give --set steps=301"),
        (["steps=50", "schedule={kind: cosine, warmup_steps: 60, decay_steps: 99}"], None, {}, "set steps=62"),
        (["steps=21"], None, {}, ", or --steps=21 to train the beginning of its schedule"),
        ([], None, JSON, "give --set steps=1000, or --steps=300 to train the beginning"),
    ],
)  # fmt: skip
def test_what_is_said_is_trained_or_refused_with_a_line_that_works(settings, steps, laid, said):
    with pytest.raises(RecipeError) as error:
        load(overrides=settings, steps=steps, settings=laid)
    (problem,) = error.value.problems
    assert said.replace("stable", "the decay takes steps 281 to 300, and training 1 to 100") in str(problem)
    settings, steps = given(problem, settings, steps)
    recipe = load(overrides=settings, steps=steps, settings=laid)
    assert recipe.steps == steps or not [*untrained(recipe)]


def test_a_warm_up_that_is_too_long_for_its_steps_has_a_line_that_works():
    with pytest.raises(RecipeError, match=r"set schedule\.warmup_steps to 13 or less"):
        load(overrides=["steps=15"])
    assert load(overrides=["steps=15", "schedule.warmup_steps=13"]).decay_steps == 15


def test_a_row_that_times_iterations_and_a_beginning_stand_and_say_what_they_lack():
    timed, tried = load("hpe1270_v100_pcie/gpt2-b32-ckpt"), load(steps=5)
    lacks = "; the warm-up ends after step 3000, and training after step 100"
    assert (timed.schedule.warmup_steps, timed.steps) == (3000, 100)
    assert describe_schedule(timed).endswith(lacks)
    assert describe_schedule(tried).endswith("; the warm-up ends after step 20, and training after step 5")
    assert ";" not in describe_schedule(load()) + describe_schedule(load(steps=100))


def test_a_run_stands_as_it_was_and_other_steps_of_it_are_checked(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump(load(steps=5)))
    assert load(tmp_path).steps == 5 and load(tmp_path, steps=6).steps == 6
    for name in (tmp_path, "hpe1270_v100_pcie/gpt2-b32-ckpt"):
        with pytest.raises(RecipeError, match="or --steps=9 to train the beginning of its schedule"):
            load(name, ["steps=9"])
        assert load(name, ["steps=9"], steps=9).steps == 9


def begun(recipe: Recipe, after: int) -> Recipe:
    branch = Branch(run="runs/other", step=after, stretches=()) if after else None
    return recipe.model_copy(update={"branch": branch})


def trains_its_kind(recipe: Recipe) -> bool:
    """By the rates: it falls, and is not at the bottom all the time; a constant one has warmed up."""
    rates = [learning_rate(recipe, step) for step in range(recipe.begins_after, recipe.steps)]
    if recipe.schedule.kind == "constant":
        return recipe.schedule.warmup_steps <= recipe.steps
    warm = max(0, recipe.schedule.warmup_steps - recipe.begins_after)
    flat = recipe.decay_steps is not None and recipe.begins_after >= recipe.decay_steps
    return not flat and any(rate < recipe.optimizer.lr for rate in rates[warm:])


@pytest.mark.parametrize("kind", ["cosine", "linear", "polynomial", "inverse_sqrt", "constant", "wsd"])
def test_the_rates_of_every_schedule_are_as_it_is_judged_and_its_line_mends_it(kind):
    own = {"wsd": ["schedule.wsd_decay_steps=4"], "polynomial": ["schedule.power=2"]}.get(kind, [])
    judged = set()
    for warm, end, last, after in product(
        (1, 3, 9), (None, 6, 14, 40), (1, 2, 5, 10, 11, 15), (0, 4, 10, 14)
    ):
        settings = [f"schedule.kind={kind}", *own, f"schedule.warmup_steps={warm}", f"steps={last}"]
        settings += [] if end is None else [f"schedule.decay_steps={end}"]
        try:
            recipe = begun(load(overrides=settings, trained=False), after)
        except RecipeError:
            continue
        problems = [*schedule_problems(recipe, "here")]
        right = last > after and trains_its_kind(recipe)
        assert right is not bool(problems), (settings, after)
        judged.add(right)
        for problem in problems:
            settings, _ = given(problem, settings, None)
        mended = begun(load(overrides=settings, trained=False), after)
        assert mended.steps > after and trains_its_kind(mended), (settings, after)
    assert judged == {True, False}
