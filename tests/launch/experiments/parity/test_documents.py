"""Documents that do not see each other: one curve under every layout, and broken borders are noticed."""

from __future__ import annotations

import random

import documents_layouts
import pytest
from compared import check_compiled_layouts, check_noticed, layouts_of, rows_by_name
from launching import WORKERS
from texted import jsonl

from launch.experiments.parity.layout_cases import CASES
from launch.experiments.parity.layout_runs import Layouts
from launch.experiments.proving.verdict import Row

STEPS = 3
EVERY_LAYOUT = [
    *("accumulation 4", "recomputed by 2", "tp2", "tp2 zero3", "pp2", "pp2 accumulation 4, recomputed"),
    *("dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp2 zero3 offload", "tp2 pp2 recomputed"),
    *("sequence tp2 zero1, recomputed", "sequence tp2 zero3", "sequence tp2 pp2", "sequence tp2 dp2 zero2"),
    *("selective tp2", "selective pp2 accumulation 4"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    """A recipe with borders, on documents of some ten tokens each."""
    draw = random.Random(1)
    words = [f"{draw.choice('bdfgk')}{draw.choice('aeiou')}{draw.choice('lmnr')}" for _ in range(200)]
    texts = [" ".join(draw.choices(words, k=draw.randrange(2, 12))) for _ in range(2000)]
    file = jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", texts)
    borders = ["data.attend=document", "data.positions=document", "model.vocab_size=389"]
    return [*borders, "data.source=jsonl", f"data.name={file}"]


@pytest.fixture(scope="module")
def layouts(settings, tmp_path_factory) -> Layouts:
    return layouts_of(tmp_path_factory.mktemp("layouts"), settings, steps=STEPS)


@pytest.fixture(scope="module")
def rows(layouts) -> dict[str, Row]:
    """Sound layouts and broken ones, by name."""
    broken = [breakage.case for breakage in documents_layouts.BROKEN]
    return rows_by_name(layouts, [*documents_layouts.CASES, *broken], WORKERS / "documents_layouts.py")


@pytest.mark.ci
@pytest.mark.parametrize("case", documents_layouts.CASES, ids=lambda case: case.name)
def test_layout_agrees(rows, case):
    assert rows[case.name].agrees and rows[case.name].loss <= 2e-6, rows[case.name]


@pytest.mark.ci
@pytest.mark.parametrize("breakage", documents_layouts.BROKEN, ids=lambda broken: broken.case.name)
def test_broken_borders_are_noticed(layouts, rows, breakage):
    losses = layouts.reference().found.losses
    assert losses[STEPS] < losses[1] - 0.05
    check_noticed(layouts.reference(), rows[breakage.case.name], breakage)
    assert rows[breakage.case.name].loss > 1e-5, "in the losses, far above rounding"


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("more", [[], ["dropout.hidden=0.1"]], ids=["", "dropout"])
def test_every_kind_of_layout_agrees(settings, tmp_path, more):
    chosen = [case for case in CASES if case.name in EVERY_LAYOUT]
    rows = rows_by_name(layouts_of(tmp_path, [*settings, *more], steps=6), chosen)
    assert rows.keys() == {*EVERY_LAYOUT}
    for row in rows.values():
        assert row.agrees and row.loss <= 2e-6, row


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_layouts_agree(settings, tmp_path):
    flags = [word for setting in settings for word in ("--set", setting)]
    check_compiled_layouts(tmp_path, ["tp2", "pp2", "recomputed"], STEPS, *flags)
