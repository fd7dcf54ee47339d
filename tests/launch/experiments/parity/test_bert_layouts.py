"""BERT gives the same numbers under every layout, in both placements of LayerNorm; breakages are noticed."""

from __future__ import annotations

from pathlib import Path

import broken_layouts
import pytest
from compared import (
    check_all_layouts,
    check_compiled_layouts,
    check_noticed,
    folder,
    outcome,
    rows_of,
    train_and_compare,
    train_broken,
)

from launch.experiments.parity.comparison import Outcome, compare
from launch.experiments.parity.layout_cases import REFERENCE
from launch.records.metrics import read_metrics
from modeling.bert import LOSS_PARTS

STEPS = 6
# The others are in the long test of all.
RUNS = {
    "pre-LN, SOP": (
        [],
        ["accumulation 4", "tp2", "tp2 zero3", "sequence tp2", "selective tp2",
         "pp2 accumulation 4, recomputed", "dp2 zero3 offload"],
    ),
    "post-LN, NSP": (
        ["model.layer_norm=post", "model.sentence_head=nsp", "model.positions=64", "sequence_length=32"],
        ["tp2", "sequence tp2 zero3", "sequence tp2 pp2", "pp2 accumulation 4, recomputed", "dp2 zero2"],
    ),
}  # fmt: skip
WITHOUT_HEAD = ["model.sentence_head=none"], ["tp2", "pp2"]
EVERY_LAYOUT = [(kind, name) for kind, (_, names) in RUNS.items() for name in names]


def train(out: Path, settings: list[str], names: list[str]) -> str:
    return train_and_compare(out, names, "bert/sotu", settings, STEPS)


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Of every kind of BERT: its run directories, and what the command printed."""
    done = {}
    for kind, (settings, names) in RUNS.items():
        out = tmp_path_factory.mktemp("bert")
        done[kind] = out, train(out, settings, names)
    return done


@pytest.fixture(scope="module")
def reference(compared) -> Outcome:
    return outcome(compared["pre-LN, SOP"][0], REFERENCE.name)


def test_reference_trains(reference):
    assert reference.failure is None
    assert reference.losses[-1] < reference.losses[0] - 0.05, (
        "six steps must show learning, or equal losses say little"
    )
    assert max(reference.norms) > 1.0, "clipping at 1 must be active, or a wrong norm hides"
    assert {
        "decoder_bias.bias",
        "head.pooler.weight",
        "embedding.token_type",
        "final_norm.bias",
    } < reference.weights.keys()


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_layout_agrees(compared, kind, name):
    out, printed = compared[kind]
    assert rows_of(printed)[name] == "yes"
    first, found = outcome(out, REFERENCE.name), outcome(out, name)
    difference = compare(first, found)
    assert difference.agrees and difference.loss <= 1e-4 and difference.norm <= 1e-4, f"{difference}"
    assert found.weights.keys() == first.weights.keys() == found.gradients.keys()


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_the_parts_of_the_loss_agree(compared, kind, name):
    """Of every step and validation; accuracy counts samples, and a rounding may turn none of so few."""
    out, _ = compared[kind]
    first, found = (read_metrics(out / folder(each) / "metrics.jsonl") for each in (REFERENCE.name, name))
    records = [*first.steps, *first.validations]
    for expected, record in zip(records, [*found.steps, *found.validations], strict=True):
        assert set(expected.parts) == set(LOSS_PARTS) and record.parts == pytest.approx(
            expected.parts, abs=1e-5
        )


def test_the_objectives_are_other_ones(compared):
    """Their losses differ from the first step on: sentence objective and placement reach the loss."""
    first = {outcome(out, REFERENCE.name).losses[0] for out, _ in compared.values()}
    assert len(first) == len(RUNS)


@pytest.fixture(scope="module")
def broken(compared, tmp_path_factory) -> Path:
    """Run directories of the broken layouts, all trained by one launch of two ranks."""
    return train_broken(compared["pre-LN, SOP"][0] / "recipe.yaml", tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("breakage", broken_layouts.BERT_BREAKAGES, ids=lambda b: b.case.name)
def test_breakage_is_noticed(broken, reference, breakage):
    check_noticed(reference, outcome(broken, breakage.case.name), breakage)


def test_unbroken_layout_agrees(broken, reference):
    difference = compare(reference, outcome(broken, broken_layouts.CONTROL.case.name))
    assert difference.agrees, f"{difference}"


@pytest.mark.long
def test_without_a_sentence_head_layouts_agree(tmp_path, reference):
    settings, names = WITHOUT_HEAD
    rows = rows_of(train(tmp_path, settings, names))
    assert rows == dict.fromkeys(names, "yes")
    assert outcome(tmp_path, REFERENCE.name).losses[0] != reference.losses[0], "no sentence objective"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_all_layouts_agree_over_twenty_steps(tmp_path, placement):
    check_all_layouts(tmp_path, "--recipe", "bert/sotu", "--set", f"model.layer_norm={placement}")


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_layouts_agree(tmp_path):
    check_compiled_layouts(tmp_path, ["tp2", "dp2 zero3", "pp2"], STEPS, "--recipe", "bert/sotu")
