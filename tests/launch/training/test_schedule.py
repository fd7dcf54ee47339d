"""Schedules at the points that define them, beside transformers', and the object that DeepSpeed steps."""

import json
import math

import pytest
import torch
from deepspeed.runtime import lr_schedules
from transformers import optimization

from ds_configs.resolver import followed
from launch.training.schedule import LearningRateSchedule, learning_rate
from recipes import catalog

PEAK, LOW, WARMUP, END = 1e-3, 1e-4, 20, 120
MIDDLE = (WARMUP + END) // 2


OWN = {  # keys that a kind needs, or that it alone has
    "polynomial": {"schedule.power": 2},
    "wsd": {"schedule.wsd_decay_steps": 40, "schedule.wsd_decay_style": "linear"},
    "inverse_sqrt": {"schedule.decay_steps": "null"},
}
KINDS = ["cosine", "linear", "constant", *OWN]


def recipe(kind: str, **changes):
    usual = {"optimizer.lr": PEAK, "schedule.min_lr": LOW, "schedule.warmup_steps": WARMUP}
    settings = {**usual, "schedule.decay_steps": END, **OWN.get(kind, {}), **changes}
    overrides = [f"schedule.kind={kind}", *(f"{key}={value}" for key, value in settings.items())]
    return catalog.load(catalog.DEFAULT_RECIPE, overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_may_count_samples(kind):
    """While 20 steps read 2 samples each, and later ones 8, it goes a quarter as fast; edges stay steps."""
    ramp = {"batch.rampup": "{start: 2, increment: 6, samples: 40}", "schedule.warmup_steps": 25}
    steps, samples = recipe(kind, **ramp), recipe(kind, **ramp, **{"schedule.counts": "samples"})
    rates = [learning_rate(samples, step) for step in (0, 10, 20, 25)]
    assert rates == pytest.approx([0, PEAK * 20 / 80, PEAK * 40 / 80, PEAK])
    for step in (0, 25, END, END + 1, 10**6):
        if kind != "inverse_sqrt" or step <= 25:
            assert learning_rate(samples, step) == pytest.approx(learning_rate(steps, step)), step
    plain, same = recipe(kind), recipe(kind, **{"schedule.counts": "samples"})
    for step in range(0, 150, 7):
        assert learning_rate(same, step) == pytest.approx(learning_rate(plain, step), rel=1e-12)


QUARTER = WARMUP + (END - WARMUP) // 4
COSINE_QUARTER = LOW + (PEAK - LOW) * (1 + math.sqrt(0.5)) / 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {QUARTER: COSINE_QUARTER, MIDDLE: (PEAK + LOW) / 2, END: LOW, END + 1: LOW, 10**6: LOW}),
        ("linear", {QUARTER: PEAK - (PEAK - LOW) / 4, MIDDLE: (PEAK + LOW) / 2, END: LOW, 10**6: LOW}),
        ("constant", {QUARTER: PEAK, MIDDLE: PEAK, END: PEAK, END + 1: PEAK, 10**6: PEAK}),
        ("polynomial", {QUARTER: LOW + (PEAK - LOW) * 9 / 16, MIDDLE: LOW + (PEAK - LOW) / 4, END: LOW}),
        ("wsd", {MIDDLE: PEAK, END - 40: PEAK, END - 30: PEAK - (PEAK - LOW) / 4, END: LOW, END + 1: LOW}),
        ("inverse_sqrt", {4 * WARMUP: PEAK / 2, 16 * WARMUP: PEAK / 4, 10**6: LOW}),
    ],
)
def test_values(kind, expected):
    warming = {0: 0.0, 1: PEAK / WARMUP, WARMUP // 2: PEAK / 2, WARMUP: PEAK}
    chosen = recipe(kind)
    for step, lr in {**warming, **expected}.items():
        assert learning_rate(chosen, step) == pytest.approx(lr, rel=1e-12), step


@pytest.mark.parametrize("kind", KINDS)
def test_rises_then_never_rises_again(kind):
    chosen = recipe(kind)
    rates = [learning_rate(chosen, step) for step in range(END + 20)]
    assert all(a < b for a, b in zip(rates[:WARMUP], rates[1 : WARMUP + 1], strict=True))
    assert all(a >= b for a, b in zip(rates[WARMUP:-1], rates[WARMUP + 1 :], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup_the_first_step_takes_the_peak(kind):
    assert learning_rate(recipe(kind, **{"schedule.warmup_steps": 0}), 0) == PEAK


@pytest.mark.parametrize(
    ("style", "halfway"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", math.sqrt(2) - 1), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_decay_after_the_stable_part(style, halfway):
    chosen = recipe("wsd", **{"schedule.wsd_decay_style": style})
    share = (learning_rate(chosen, END - 20) - LOW) / (PEAK - LOW)
    assert share == pytest.approx(halfway) and learning_rate(chosen, END) == pytest.approx(LOW)
    if style == "exponential":
        unnamed = recipe("wsd", **{"schedule.wsd_decay_style": "null"})
        assert learning_rate(unnamed, END - 20) == learning_rate(chosen, END - 20)


def theirs(kind: str, style: str = ""):
    """The schedule of the same name in transformers, which has no least rate where it is 0 here."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    if kind == "wsd":
        how = {"num_decay_steps": 40, "num_training_steps": END, "decay_type": style.replace("minus_", "1-")}
        return optimization.get_wsd_schedule(optimizer, WARMUP, **how)
    if kind == "polynomial":
        make = optimization.get_polynomial_decay_schedule_with_warmup
        return make(optimizer, WARMUP, END, lr_end=LOW, power=2)
    return optimization.get_inverse_sqrt_schedule(optimizer, WARMUP)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("wsd", {"schedule.wsd_decay_style": style}) for style in ("linear", "cosine", "minus_sqrt")),
        ("polynomial", {"schedule.min_lr": LOW}),
        ("inverse_sqrt", {}),
    ],
)
def test_transformers_has_the_same(kind, changes):
    chosen = recipe(kind, **{"schedule.min_lr": 0.0, **changes})
    other = theirs(kind, changes.get("schedule.wsd_decay_style", ""))
    for step in range(END + 1):
        assert learning_rate(chosen, step) == pytest.approx(other.get_last_lr()[0], rel=1e-9, abs=1e-15), step
        other.optimizer.step()
        other.step()


def test_inverse_square_root_goes_on_in_a_longer_run():
    chosen, other = (
        recipe("inverse_sqrt", steps=100),
        ["schedule.kind=inverse_sqrt", "schedule.warmup_steps=20"],
    )
    longer = catalog.load(catalog.DEFAULT_RECIPE, other, steps=700)
    assert chosen.decay_steps is None and longer.schedule.decay_steps is None
    assert learning_rate(chosen, 400) == learning_rate(recipe("inverse_sqrt", steps=5000), 400)


def test_decay_ends_with_the_run_where_nothing_else_is_said():
    open_ended = recipe("cosine", **{"schedule.decay_steps": "null", "steps": 200})
    assert learning_rate(open_ended, 200) == LOW < learning_rate(open_ended, 199)


@pytest.mark.parametrize("kind", ["linear", "wsd", "inverse_sqrt"])
def test_schedule_sets_every_group_and_goes_on_where_it_was(kind):
    decayed, plain = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [decayed]}, {"params": [plain]}], lr=7.0)
    chosen = recipe(kind)
    schedule = LearningRateSchedule(optimizer, chosen)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0], "it stands before the first step"
    for completed in range(1, 31):
        schedule.step()
        expected = [learning_rate(chosen, completed)] * 2
        assert [group["lr"] for group in optimizer.param_groups] == expected
        assert schedule.get_last_lr() == schedule.get_lr() == expected
    resumed = LearningRateSchedule(optimizer, chosen)
    resumed.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [learning_rate(chosen, 30)] * 2
    resumed.step()
    assert resumed.get_last_lr() == [learning_rate(chosen, 31)] * 2


SHAPES = [
    {"warmup_type": "log"},
    {"warmup_type": "linear"},
    {"warmup_num_steps": 1},
    {"warmup_num_steps": 50},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_deepspeed_has_the_same(kind, shape, tmp_path):
    """Its own scheduler, as its engine steps it, and the recipe that follows the JSON."""
    own = {
        "WarmupLR": {"warmup_min_lr": LOW, "warmup_max_lr": 2 * PEAK},
        "WarmupDecayLR": {"warmup_min_lr": LOW, "total_num_steps": 30},
        "WarmupCosineLR": {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.02, "total_num_steps": 30},
    }
    params = {"warmup_num_steps": 10, **own[kind], **shape}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    path = tmp_path / "mine.json"
    optimizer_section = {"type": "AdamW", "params": {"lr": PEAK}}
    path.write_text(
        json.dumps({"optimizer": optimizer_section, "scheduler": {"type": kind, "params": params}})
    )
    taken = followed(catalog.load(), path, 1)
    chosen = catalog.load(settings={each.key: each.value for each in taken})
    for step in range(60):
        rate = optimizer.param_groups[0]["lr"]
        assert learning_rate(chosen, step) == pytest.approx(rate, rel=1e-12, abs=1e-18), step
        scheduler.step()
