"""Documents that do not see each other: one curve under every layout, and broken borders are noticed."""

from __future__ import annotations

import random
from pathlib import Path

import documents_layouts
import pytest
from compared import check_compiled_layouts, check_noticed, outcome, rows_of, train_and_compare
from launching import WORKERS, run_ranks
from texted import jsonl

from launch.experiments.parity.comparison import RunOutcome, compare
from launch.experiments.parity.layout_cases import REFERENCE
from recipes import catalog

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
def layouts(settings, tmp_path_factory) -> Path:
    """Run directories of one process and of tests/workers/documents_layouts.py."""
    out = tmp_path_factory.mktemp("layouts")
    train_and_compare(out, [], catalog.DEFAULT_RECIPE, settings, STEPS)
    done = run_ranks(documents_layouts.PROCESSES, WORKERS / "documents_layouts.py", out, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


@pytest.fixture(scope="module")
def reference(layouts) -> RunOutcome:
    found = outcome(layouts, REFERENCE.name)
    assert found.failure is None and found.losses[-1] < found.losses[0] - 0.05
    return found


@pytest.mark.ci
@pytest.mark.parametrize("case", documents_layouts.CASES, ids=lambda case: case.name)
def test_layout_agrees(layouts, reference, case):
    difference = compare(reference, outcome(layouts, case))
    assert difference.agrees and difference.loss <= 2e-6, f"{difference}"


@pytest.mark.ci
@pytest.mark.parametrize("breakage", documents_layouts.BROKEN, ids=lambda broken: broken.case.name)
def test_broken_borders_are_noticed(layouts, reference, breakage):
    difference = check_noticed(reference, outcome(layouts, breakage.case), breakage)
    assert difference.loss > 1e-5, "in the losses, far above rounding"


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("more", [[], ["dropout.hidden=0.1"]], ids=["", "dropout"])
def test_every_kind_of_layout_agrees(settings, tmp_path, more):
    printed = train_and_compare(tmp_path, EVERY_LAYOUT, catalog.DEFAULT_RECIPE, [*settings, *more], 6)
    assert rows_of(printed) == dict.fromkeys(EVERY_LAYOUT, "yes")
    reference = outcome(tmp_path, REFERENCE.name)
    differences = [compare(reference, outcome(tmp_path, name)).loss for name in EVERY_LAYOUT]
    assert max(differences) <= 2e-6


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_layouts_agree(settings, tmp_path):
    flags = [word for setting in settings for word in ("--set", setting)]
    check_compiled_layouts(tmp_path, ["tp2", "pp2", "recomputed"], STEPS, *flags)
