"""The pictures of a run: curves where its losses are, their names beside them, and words where no curve is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from launch.records.card import draw_card
from launch.records.facts import Entropies, Parts, StepRecord
from launch.records.loss_plot import (
    CurveName,
    draw_entropies,
    moving_average,
    plot_loss,
    step_ticks,
    write_in_margin,
)
from launch.records.metrics import BranchRecord, LaunchRecord, Records, SpeedSettings, ValidationRecord
from launch.records.result import HeldOutLoss, Losses, Result, Speed, TrainingLoss
from recipes.families import MASKED_FIGURES, TOKEN_FIGURES
from recipes.layout import Layout
from recipes.schema import Branch, Change


@pytest.fixture
def axes():
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def test_a_moving_average_does_not_lag():
    falling = [9 - 0.01 * step for step in range(300)]
    assert moving_average(falling)[:-10] == pytest.approx(falling[:-10])
    assert moving_average([*[5.0] * 299, 16.0])[-1] == pytest.approx(6), (
        "a last odd step is no end of a curve"
    )
    noisy = [5 + (-1) ** step for step in range(300)]
    assert max(abs(value - 5) for value in moving_average(noisy)[10:-10]) < 0.06
    assert moving_average([]) == [] and moving_average([1e308] * 60)[30] == pytest.approx(1e308)


@pytest.mark.parametrize("steps", (3, 20, 40, 60, 300, 1000, 12345))
def test_ticks_are_round_numbers_of_steps(axes, steps):
    axes.plot([0, steps], [1, 2])
    axes.xaxis.set_major_locator(step_ticks())
    apart = {round(b - a) for a, b in zip(axes.get_xticks(), axes.get_xticks()[1:], strict=False)}
    assert len(apart) == 1 and str(apart.pop()).strip("0") in ("1", "2", "5")


def test_references_are_named_beside_the_axes_and_not_one_over_another(axes):
    axes.plot([0, 300], [9.0, 5.0])
    labels = [(6.672, "a"), (6.67, "b"), (6.668, "c"), (4.81, "d"), (40.0, "above"), (0.1, "below")]
    write_in_margin(axes, [CurveName(y, text, "gray") for y, text in labels])
    axes.figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(box.x0 >= axes.get_window_extent().x1 for box in boxes)
    assert all(low.y1 <= high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    assert {text.get_text() for text in axes.texts} >= {"above ↑", "below ↓", "a"}


def test_entropies_far_from_the_curves_take_nothing_of_the_axis(axes):
    axes.plot([1, 2], [4.0, 3.5])
    names = draw_entropies(axes, Entropies(10.8, 3.9))
    assert axes.get_ylim()[1] < 4.1 and len(axes.lines) == 2
    assert [name.text for name in names] == ["uniform 10.800", "unigram 3.900"]


def run_of(figures=TOKEN_FIGURES, **facts) -> tuple[Records, Result]:
    """A run of 60 steps, and its result."""
    parts: Parts = {each.key: 0.5 for each in figures if each.key != "loss"}
    steps = [StepRecord(n, 6 - n / 60, False, 0.5, n, 1, "resident set", parts=parts) for n in range(1, 61)]
    held_out = HeldOutLoss(5.1234, parts, 60)
    result = Result(
        "default/sotu",
        "ok",
        title="GPT-2 of 14M parameters on my $file$.txt",
        figures=figures,
        losses=Losses(TrainingLoss(5.0872, parts, 10), held_out),
        entropies=Entropies(5.5, 2.0),
        layout=Layout(2, 1, 4, 2, 1, 8),
        **{"zero_stage": 1, "offload": "none", "precision": "bf16", "hardware": "4 x Abacus 9", **facts},
    )
    return Records(tuple(steps), (ValidationRecord(60, 5.1234, parts),)), result


@pytest.fixture
def drawn(monkeypatch) -> list[list[str]]:
    """The words of each panel, and of a picture outside its panels last, of every picture that is saved."""
    words: list[list[str]] = []
    save = Figure.savefig

    def saved(figure, *given, **how):
        inside = [[text.get_text() for text in axes.findobj(Text)] for axes in figure.axes]
        known = {text for panel in inside for text in panel}
        words.extend(
            [*inside, [text.get_text() for text in figure.findobj(Text) if text.get_text() not in known]]
        )
        assert figure.legends == [] and all(axes.get_legend() is None for axes in figure.axes)
        save(figure, *given, **how)

    monkeypatch.setattr(Figure, "savefig", saved)
    return words


def test_curves_are_named_with_their_last_values_and_the_title_says_what_was_trained(drawn, tmp_path):
    records, result = run_of(tokens=61440, seconds=90.0)
    plot_loss(records, result, tmp_path / "loss.png")
    panel, outside = drawn
    assert {"training 5.0872", "validation 5.1234", "uniform 5.500", "unigram 2.000 ↓"} <= {*panel}
    assert outside == [result.title]
    about = "tp 2 x pp 1 x dp 4, ZeRO-1, offload none, bf16  ·  4 x Abacus 9  ·  61,440 tokens in 1.5 minutes"
    assert about in panel


def test_objectives_of_a_bert_have_panels_of_their_own(drawn, tmp_path):
    plot_loss(*run_of(MASKED_FIGURES["sop"]), tmp_path / "loss.png")
    masked, sentences, _ = drawn
    assert "masked-token loss (nats per masked token)" in masked and "uniform 5.500 ↑" in masked
    assert {"sentence-order loss (nats per sample)", "validation 0.5000"} <= {*sentences}
    assert not any("uniform" in text for text in sentences)


def test_a_branch_is_a_numbered_line_with_its_words_below_the_axis(drawn, tmp_path):
    records, result = run_of()
    changed = [Change(key=f"optimizer.key_{n}", was=None, now=n) for n in range(20)]
    left = [Branch(run=f"/runs/{n}", step=20 * n, changed=changed, stretches=[(0, 0, 8)]) for n in (1, 2)]
    records = replace(records, branches=tuple(BranchRecord(each.step, each) for each in left))
    plot_loss(records, result, tmp_path / "loss.png")
    panel, (_, below) = drawn
    assert {" 1", " 2"} <= {*panel} and not any("branch" in text for text in panel)
    assert "2: branch of 2 from step 40 on: optimizer.key_0: None -> 0;" in below
    assert "None -> 19" in below


def test_a_card_has_what_was_trained_and_what_came_out(drawn, tmp_path):
    speed = Speed(0.5, 55, tokens_per_s=2048.0)
    sample = "My fellow\n\n\ncitizens " + "word " * 200
    records, result = run_of(tokens=61440, seconds=1800.0, steps=60, speed=speed, sample=sample)
    how = partial(SpeedSettings, "zero1", zero_stage=1, offload="none", precision="bf16")
    how = partial(how, activation_checkpointing="none", implementation="megarecipes", hardware="")
    layouts = (0, Layout(1, 1, 2, 4, 1, 8)), (40, Layout(2, 1, 4, 2, 1, 8))
    launches = tuple(LaunchRecord(step, how(layout=layout)) for step, layout in layouts)
    records = replace(records, launches=launches)
    draw_card(records, result, tmp_path / "card.png", usd_per_gpu_hour=250.0)
    panel, outside = drawn
    assert Image.open(tmp_path / "card.png").size == (1200, 630)
    assert {"training 5.0872", "validation 5.1234"} <= {*panel}
    for said in (
        result.title,
        "5.1234 nats per token",
        "tp 2 x pp 1 x dp 4, ZeRO-1, offload none, bf16",
        "2,048 tokens/s, 0.5 s per step",
        "60 steps, 61,440 tokens in 30 minutes",
        "$8.33 at $250 an hour of a process",  # 40 steps of half a second on 2, 20 on 8
    ):
        assert said in outside
    (written,) = (text for text in outside if text.startswith("My fellow citizens"))
    assert written.count("\n") == 2 and written.endswith("word …")
    drawn.clear()
    interrupted = replace(result, status="interrupted", sample="日本", losses=Losses())
    draw_card(records, interrupted, tmp_path / "card.png")
    outside = drawn[-1]
    assert "interrupted" in outside, "and neither a cost nor boxes in place of letters"
    assert not {"cost", "sample"} & {*outside}
