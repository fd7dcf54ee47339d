"""Megatron-LM's schedules at the points that define them, and the object that DeepSpeed steps."""

import math

import pytest
import torch

from launch.training.schedule import Schedule, learning_rate
from recipes import catalog

PEAK, LOW, WARMUP, END = 1e-3, 1e-4, 20, 120
MIDDLE = (WARMUP + END) // 2


def recipe(kind: str, **changes):
    settings = {
        "optimizer.lr": PEAK,
        "schedule.min_lr": LOW,
        "schedule.warmup_steps": WARMUP,
        "schedule.decay_steps": END,
        **changes,
    }
    overrides = [f"schedule.kind={kind}", *(f"{key}={value}" for key, value in settings.items())]
    return catalog.load(catalog.DEFAULT_RECIPE, overrides)


QUARTER = WARMUP + (END - WARMUP) // 4
COSINE_QUARTER = LOW + (PEAK - LOW) * (1 + math.sqrt(0.5)) / 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {QUARTER: COSINE_QUARTER, MIDDLE: (PEAK + LOW) / 2, END: LOW, END + 1: LOW, 10**6: LOW}),
        (
            "linear",
            {QUARTER: PEAK - (PEAK - LOW) / 4, MIDDLE: (PEAK + LOW) / 2, END: LOW, END + 1: LOW, 10**6: LOW},
        ),
        ("constant", {QUARTER: PEAK, MIDDLE: PEAK, END: PEAK, END + 1: PEAK, 10**6: PEAK}),
    ],
)
def test_values(kind, expected):
    warming = {0: 0.0, 1: PEAK / WARMUP, WARMUP // 2: PEAK / 2, WARMUP: PEAK}
    chosen = recipe(kind)
    for step, lr in {**warming, **expected}.items():
        assert learning_rate(chosen, step) == pytest.approx(lr, rel=1e-12), step


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rises_then_never_rises_again(kind):
    chosen = recipe(kind)
    rates = [learning_rate(chosen, step) for step in range(END + 20)]
    assert all(a < b for a, b in zip(rates[:WARMUP], rates[1 : WARMUP + 1], strict=True))
    assert all(a >= b for a, b in zip(rates[WARMUP:-1], rates[WARMUP + 1 :], strict=True))


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_without_warmup_the_first_step_takes_the_peak(kind):
    assert learning_rate(recipe(kind, **{"schedule.warmup_steps": 0}), 0) == PEAK


def test_decay_ends_with_the_run_where_nothing_else_is_said():
    open_ended = recipe("cosine", **{"schedule.decay_steps": "null", "steps": 200})
    assert learning_rate(open_ended, 200) == LOW < learning_rate(open_ended, 199)


def test_schedule_sets_every_group_and_goes_on_where_it_was():
    decayed, plain = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [decayed]}, {"params": [plain]}], lr=7.0)
    chosen = recipe("linear")
    schedule = Schedule(optimizer, chosen)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0], (
        "the rate of step 0 must stand before the first step"
    )
    for completed in range(1, 31):
        schedule.step()
        expected = [learning_rate(chosen, completed)] * 2
        assert (
            [group["lr"] for group in optimizer.param_groups]
            == expected
            == schedule.get_last_lr()
            == schedule.get_lr()
        )

    resumed = Schedule(optimizer, chosen)
    resumed.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [learning_rate(chosen, 30)] * 2
    resumed.step()
    assert resumed.get_last_lr() == [learning_rate(chosen, 31)] * 2
