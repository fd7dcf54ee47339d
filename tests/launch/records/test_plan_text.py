"""A plan on the screen: how long it trains, and remarks on what is as asked apart from what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded import plan

from ds_configs.findings import Notice
from launch.console.text_table import flops, short
from launch.records.plan_text import Surroundings, about, describe_plan
from recipes.problems import amount

DATA = {"source": "words", "train_tokens": 5, "validation_samples": 2}


@pytest.mark.parametrize(
    ("epoch", "said"), [(8, "epochs"), (10**9, "less than 0.01 epochs"), (None, "streamed")]
)
def test_a_plan_says_how_long_it_trains(epoch, said):
    used = plan()
    samples = used.recipe.sizes.samples(used.recipe.steps)
    around = Surroundings("a CPU", data={**DATA, "samples_per_epoch": epoch}, seconds=250.0)
    (line,) = [line for line in describe_plan(used, "x", around).splitlines() if "training  " in line]
    read = samples * used.recipe.sequence_length
    if said == "epochs":
        said = f"{samples / epoch:.2f} epochs"
    assert (
        line.split(maxsplit=1)[1]
        == f"{used.recipe.steps} steps, {read:,} tokens, {said}; about 4 minutes by rough rates"
    )


def test_what_is_as_asked_stands_apart_from_what_differs():
    notices = (
        Notice("a", "as asked", differs=False),
        Notice("b", "other"),
        Notice("c", "so too", differs=False),
    )
    text = describe_plan(replace(plan(), notices=notices), "x", Surroundings("a CPU"))
    assert text.endswith("\n\n  as asked\n  so too\n\n  ! other")


def test_sizes_rates_and_times_are_written_in_a_unit_that_fits():
    assert [about(seconds) for seconds in (20, 60, 5400, 10**6)] == [
        "less than a minute", "about 1 minute", "about 2 hours", "about 12 days"
    ]  # fmt: skip
    assert [flops(rate) for rate in (None, 0.001397, 36.184)] == ["–", "1.397 GFLOPS", "36.18 TFLOPS"]
    assert [short(number) for number in (13_891_584, 8.3e9)] == ["13.9M", "8.3B"]
    assert [amount(size) for size in (4.74e6, 999.4e9, 999.6e9, 2e15)] == [
        "4.74 MB", "999 GB", "1 TB", "2,000 TB"
    ]  # fmt: skip
