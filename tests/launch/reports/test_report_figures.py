"""Plots of a report: curves, what stands next to them, and their axes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from reported import Page, make_run, plots, read_of, step

from launch import report
from launch.records.facts import Entropies
from launch.reports.comparison import result_rows
from launch.reports.entries import COLUMNS
from launch.reports.plots import MOST_POINTS, PALETTE, losses, thin


def test_curves_that_coincide_are_told_apart_and_validations_named(tables, tmp_path):
    runs = [read_of(make_run(tmp_path / name, tables, "widgets/fast"), tables, name) for name in "ab"]
    (figure,) = losses(runs)
    plot = ElementTree.fromstring(figure.svg)
    styles = [path.get("style", "") for path in plot.iter("{http://www.w3.org/2000/svg}path")]
    patterns = {
        re.search(r"stroke-dasharray: ([^;]+)", style)[1]
        for style in styles
        if PALETTE[1] in style and "dasharray" in style
    }
    assert len(patterns) == 2, "of the second run's training and of its validations"
    assert any(
        PALETTE[0] in style and "dasharray" not in style and "stroke-width: 1.6" in style for style in styles
    )
    labels = [label.text for label in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss of a, b", "a 5.0000", "b 5.0000"} <= {*labels}, (
        "no legend: names with their last validation"
    )
    assert "joined by dots" in figure.caption


def test_losses_of_other_units_are_in_other_figures(tables, tmp_path):
    """A fine-tuning has the same part of a loss as a GPT-2, and another unit."""
    run = read_of(make_run(tmp_path / "a", tables, "widgets/fast"), tables, "pretrained")
    assert run.plan is not None
    tuned = run.recipe.model.model_copy(update={"family": "bert", "task_head": "classification"})
    recipe = run.plan.recipe.model_copy(update={"model": tuned})
    result = replace(run.result, figures=tuned.figures)
    other = replace(run, label="tuned", plan=replace(run.plan, recipe=recipe), result=result)
    found = [figure.svg for figure in losses([run, other])]
    shown = ("pretrained", "tuned", "nats per token", "nats per example")
    held = [[word for word in shown if word in svg] for svg in found]
    assert held == [["pretrained", "nats per token"], ["tuned", "nats per example"]]


def test_the_step_axis_has_whole_numbers(tables, tmp_path):
    run = read_of(
        make_run(tmp_path / "r", tables, "widgets/fast", records=[step(1), step(2), step(3)]), tables
    )
    (figure,) = losses([run])
    plot = ElementTree.fromstring(figure.svg)
    (axis,) = [
        group
        for group in plot.iter("{http://www.w3.org/2000/svg}g")
        if group.get("id", "").endswith("matplotlib.axis_1")
    ]
    ticks = [
        label.text
        for label in axis.iter("{http://www.w3.org/2000/svg}text")
        if label.text != "optimizer step"
    ]
    assert ticks and all(re.fullmatch(r"\d+", tick) for tick in ticks), ticks


def test_thousands_of_steps_stay_a_small_page(tables, tmp_path):
    make_run(
        tmp_path / "long", tables, "widgets/fast", records=[step(n, 6 + math.sin(n)) for n in range(1, 6001)]
    )
    assert report.main([str(tmp_path / "long"), "--out", str(tmp_path / "out")], tables) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page) < 250_000 and "drawn as means of neighbouring steps" in page
    points = thin([(float(n), float(n % 2)) for n in range(10_001)])
    assert (
        len(points) <= MOST_POINTS
        and points[0][1] == pytest.approx(0.5, abs=0.06)
        and points[-1][0] <= 10_000
    )
    assert thin([(1.0, 2.0)]) == [(1.0, 2.0)]


def test_a_comparison_on_the_page(tables, tmp_path, capsys):
    make_run(
        tmp_path / "_a", tables, "widgets/fast"
    )  # matplotlib leaves names out that begin with an underscore
    make_run(
        tmp_path / "b$x$",
        tables,
        "widgets/fast",
        precision="bf16",
        records=[step(n, 5.9) for n in range(1, 30)],
    )
    assert (
        report.main([str(tmp_path / "_a"), str(tmp_path / "b$x$"), "--out", str(tmp_path / "out")], tables)
        == 0
    )
    html = (tmp_path / "out" / "report.html").read_text()
    page = Page()
    page.feed(html)
    text = "".join(page.text)
    assert "What differs in how they were made" in text
    drawn = [[label.text for label in plot.iter("{http://www.w3.org/2000/svg}text")] for plot in plots(html)]
    assert any({"_a 5.0000", "b$x$ 5.9000"} <= set(labels) for labels in drawn)
    assert "first differ by more than rounding (3.9e-03 of the loss)" in capsys.readouterr().out


def test_losses_that_cannot_be_compared_are_not_in_one_figure(tables, tmp_path):
    run = read_of(make_run(tmp_path / "a", tables, "widgets/fast"), tables, "mine")
    same = read_of(make_run(tmp_path / "b", tables, "widgets/fast"), tables, "same")
    elsewhere = run.recipe.model_copy(update={"data": run.recipe.data.model_copy(update={"name": "x"})})
    result = replace(run.result, entropies=Entropies(5.7, 5.0))
    other = replace(run, label="other", plan=replace(run.plan, recipe=elsewhere), result=result)
    mixed = [run, other, same]
    held = [
        [name for name in ("mine", "other", "same") if f">{name} 5.0000<" in f.svg] for f in losses(mixed)
    ]
    assert held == [["mine", "same"], ["other"]]


def test_curves_over_tokens_and_hours(tables, tmp_path):
    """A sample has 64 tokens, a batch 8 samples; a step takes half a second."""
    run = read_of(make_run(tmp_path / "r", tables, "widgets/fast"), tables)
    points = [(0.0, 6.0), (2.0, 5.0), (40.0, 4.0)]
    assert run.along(points, "steps") == points
    assert run.along(points, "tokens") == [(0.0, 6.0), (1024.0, 5.0), (20480.0, 4.0)]
    assert run.along(points, "hours") == [(0.0, 6.0), (1 / 3600, 5.0), (20 / 3600, 4.0)]
    for over, named in (("tokens", "tokens read"), ("hours", "hours of optimizer steps")):
        (figure,) = losses([run], over)
        assert named in figure.svg and "optimizer step<" not in figure.svg
    unread = replace(run, plan=None)
    assert unread.along(points, "tokens") == []


def test_speeds_whose_spreads_overlap_are_not_ranked(tables, tmp_path):
    def run(name, seconds):
        records = [step(number, seconds=seconds[number % len(seconds)]) for number in range(1, 41)]
        return read_of(make_run(tmp_path / name, tables, "widgets/fast", records=records), tables, name)

    noisy = run("noisy", [0.4, 0.5, 0.6, 0.7])
    near = run("near", [0.45, 0.55, 0.65, 0.75])
    quick = run("quick", [0.1, 0.12])
    rows = {row[0]: row[1:] for row in result_rows([noisy, near, quick], [None, None])}
    for heading in ("time per iteration (s)", "samples/s", "TFLOPS per GPU, formula"):
        assert rows[heading][3] == "within the spread", heading
        assert rows[heading][4].endswith("x"), heading
    assert rows["half of the steps (s)"][2] == "0.1 to 0.12"
    assert COLUMNS["time_per_iteration_s"].text(quick) == "0.1"
