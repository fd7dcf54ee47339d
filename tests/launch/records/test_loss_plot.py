"""The curve of a run stands where its losses are, and its words stand where no curve is."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.records.loss_plot import average_label, mark_branch, moving_average, step_ticks, write_in_margin
from launch.reports.plots import log_axis
from recipes.schema import Branch, Change


@pytest.fixture
def axes():
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def test_a_moving_average_does_not_lag():
    falling = [9 - 0.01 * step for step in range(300)]
    assert moving_average(falling) == pytest.approx(falling)
    assert "mean of the 21 steps around" in average_label(300)
    noisy = [5 + (-1) ** step for step in range(300)]
    assert max(abs(value - 5) for value in moving_average(noisy)[10:-10]) < 0.06
    assert moving_average([]) == [] and moving_average([1e308] * 60)[30] == pytest.approx(1e308)


@pytest.mark.parametrize("steps", (3, 20, 40, 60, 300, 1000, 12345))
def test_ticks_are_round_numbers_of_steps(axes, steps):
    axes.plot([0, steps], [1, 2])
    axes.xaxis.set_major_locator(step_ticks())
    apart = {round(b - a) for a, b in zip(axes.get_xticks(), axes.get_xticks()[1:], strict=False)}
    assert len(apart) == 1 and str(apart.pop()).strip("0") in ("1", "2", "5")


@pytest.mark.parametrize("low, high", ((1.1, 99), (3, 260), (0.02, 30), (7e-4, 6000), (1e-9, 1.0)))
def test_a_logarithmic_axis_has_numbers_wherever_its_values_lie(axes, low, high):
    axes.plot([low, high], [0, 1])
    log_axis(axes, low, high)
    axes.figure.canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert 3 <= len([text for text in shown if text]) <= 10 and all(float(text) > 0 for text in shown)


def test_references_are_named_beside_the_axes_and_not_one_over_another(axes):
    axes.plot([0, 300], [9.0, 5.0])
    labels = [(6.672, "a"), (6.67, "b"), (6.668, "c"), (4.81, "d"), (40.0, "above"), (0.1, "below")]
    write_in_margin(axes, labels, "gray")
    axes.figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(box.x0 >= axes.get_window_extent().x1 for box in boxes)
    assert all(low.y1 <= high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    assert {text.get_text() for text in axes.texts} >= {"above ↑", "below ↓", "a"}


def test_a_branch_is_a_line_with_its_run_and_what_it_changes(axes):
    changed = [Change(key=f"optimizer.key_{n}", was=None, now=n) for n in range(20)]
    axes.plot([0, 2000], [1, 2])
    mark_branch(axes, Branch(run="/runs/stable", step=1000, changed=changed, stretches=[(0, 0, 8)]))
    assert list(axes.lines[-1].get_xdata()) == [1000, 1000]
    lines = axes.texts[-1].get_text().splitlines()
    assert lines[0].startswith("branch of stable from step 1,000 on:") and "key_0: None -> 0;" in lines[1]
    assert len(lines) == 3 and lines[-1].rstrip().endswith("…")
