"""One recipe, the same numbers under every layout, on real processes; breakages are noticed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import broken_layouts
import pytest
from compared import (
    COMMAND,
    ODD_SHAPES,
    check_all_layouts,
    check_compiled_layouts,
    check_noticed,
    folder,
    outcome,
    rows_of,
    train_and_compare,
    train_broken,
)
from launching import run
from stored import layers_of_files

from launch.experiments.parity import comparison
from launch.experiments.parity.comparison import RunOutcome, compare
from launch.experiments.parity.layout_cases import CASES, REFERENCE
from launch.records.metrics import read_metrics
from recipes import catalog
from recipes.families import MASKED_FIGURES, parts_of

GPT2, BERT = catalog.DEFAULT_RECIPE, "bert/sotu"
DROPPED = "dropout.hidden=0.1"
POST_LN = ["model.layer_norm=post", "model.sentence_head=nsp", "model.positions=64", "sequence_length=32"]


@dataclass(frozen=True)
class Kind:
    """A recipe, and the layouts in which it shows each kind of layout; the long tests take all of them."""

    recipe: str
    settings: list[str]
    steps: int
    names: list[str]
    breakages: list[broken_layouts.Breakage]


KINDS = {
    "gpt2": Kind(
        GPT2,
        [],
        4,
        [
            *("accumulation 4", "recomputed by 2", "tp2 zero3", "pp2 accumulation 4, recomputed"),
            *("dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3 offload"),
            *("sequence tp2 zero1, recomputed", "sequence tp2 pp2", "selective tp2"),
        ],
        broken_layouts.BREAKAGES,
    ),
    "bert": Kind(
        BERT,
        [],
        4,
        ["accumulation 4", "tp2 zero3", "selective tp2", "pp2 accumulation 4, recomputed", "dp2 zero1"],
        broken_layouts.BERT_BREAKAGES,
    ),
    "bert, post-LN": Kind(
        BERT, POST_LN, 6, ["sequence tp2 zero3", "sequence tp2 pp2", "dp2 zero2", "dp2 zero3 offload"], []
    ),
    # One step of 4 samples, three of 8: no number of micro-batches divides those before it.
    "gpt2, dropout, ramp-up": Kind(
        GPT2,
        [DROPPED, "batch.rampup={start: 4, increment: 4, samples: 4}"],
        4,
        ["accumulation 4", "pp2 accumulation 4, recomputed", "dp2 zero1", "sequence tp2"],
        broken_layouts.DROPOUT_BREAKAGES,
    ),
    # A BERT's padding is cut by micro-batch, and not in the pipeline.
    "bert, dropout": Kind(BERT, [DROPPED], 4, ["tp2", "pp2 accumulation 4, recomputed"], []),
}
SECOND_TIER = ("bert, post-LN", "bert, dropout")


def tier(kind: str, broken: bool = False) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of tests of a kind, or of its `broken` layouts."""
    if kind in SECOND_TIER or (broken and kind != "gpt2"):
        return (pytest.mark.long,)
    return (pytest.mark.ci,) if broken else ()


EVERY_LAYOUT = [
    pytest.param(kind, name, marks=tier(kind)) for kind, each in KINDS.items() for name in each.names
]
EVERY_BREAKAGE = [
    pytest.param(kind, breakage, id=f"{kind}: {breakage.case.name}", marks=tier(kind, broken=True))
    for kind, each in KINDS.items()
    for breakage in each.breakages
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Callable[[str], tuple[Path, str]]:
    """Trains a kind once: its run directories, and the table of their comparison."""

    @functools.cache
    def train(name: str) -> tuple[Path, str]:
        kind, out = KINDS[name], tmp_path_factory.mktemp("layouts")
        return out, train_and_compare(out, kind.names, kind.recipe, kind.settings, kind.steps)

    return train


@pytest.fixture(scope="module")
def reference(compared) -> Callable[[str], RunOutcome]:
    return lambda kind: outcome(compared(kind)[0], REFERENCE.name)


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_layout_agrees(compared, reference, kind, name):
    out, printed = compared(kind)
    assert rows_of(printed)[name] == "yes"
    first, found = reference(kind), outcome(out, name)
    difference = compare(first, found)
    assert difference.agrees and difference.loss <= 1e-4 and difference.norm <= 1e-4, f"{difference}"
    assert found.weights.keys() == first.weights.keys() == found.gradients.keys()


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_the_parts_of_the_loss_agree(compared, kind, name):
    """Of every step and validation; accuracy counts samples, and a rounding may turn none of so few."""
    out, _ = compared(kind)
    first, found = (read_metrics(out / folder(each) / "metrics.jsonl") for each in (REFERENCE.name, name))
    records = [*first.steps, *first.validations]
    parts = set(parts_of(MASKED_FIGURES["sop"])) if KINDS[kind].recipe == BERT else set()
    for expected, record in zip(records, [*found.steps, *found.validations], strict=True):
        assert set(expected.parts) == parts and record.parts == pytest.approx(expected.parts, abs=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_reference_trains(reference, kind):
    first = reference(kind)
    assert first.failure is None and len(first.losses) == len(first.norms) == KINDS[kind].steps
    assert first.losses[-1] < first.losses[0] - 0.05, "it must show learning, or equal losses say little"
    assert max(first.norms) > 1.0, "clipping at 1 must be active, or a wrong norm hides"


@pytest.mark.long
def test_the_references_are_what_the_comparison_needs(reference):
    gpt2, bert = reference("gpt2"), reference("bert")
    assert min(gpt2.norms) < 1.0, "clipping is not active in every step"
    assert gpt2.weights["word.weight"].shape == (509, 64), "prime: tensor parallelism has to pad it"
    of_bert = {"decoder_bias.bias", "head.pooler.weight", "embedding.token_type", "final_norm.bias"}
    assert of_bert < bert.weights.keys()
    # Dropout, sentence objective and placement reach the loss of the first step.
    assert len({reference(kind).losses[0] for kind in KINDS}) == len(KINDS)


@pytest.fixture(scope="module")
def broken(compared, tmp_path_factory) -> Callable[[str], Path]:
    """Run directories of a kind's broken layouts, all trained by one launch of two ranks."""
    return functools.cache(
        lambda kind: train_broken(compared(kind)[0] / "recipe.yaml", tmp_path_factory.mktemp("broken"))
    )


@pytest.mark.parametrize(("kind", "breakage"), EVERY_BREAKAGE)
def test_breakage_is_noticed(broken, reference, kind, breakage):
    difference = check_noticed(reference(kind), outcome(broken(kind), breakage.case), breakage)
    assert "NO, first: " in comparison.table(reference(kind), [difference], {})


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=tier(kind, broken=True)) for kind, each in KINDS.items() if each.breakages],
)
def test_unbroken_layout_agrees(broken, reference, kind):
    difference = compare(reference(kind), outcome(broken(kind), broken_layouts.CONTROL.case.name))
    assert difference.agrees, f"{difference}"


# Shapes that divide by nothing, and an embedding large enough for a norm in float32 to be wrong


ODD_FAST = ["tp3", "pp2 own accumulation"]
ODD_LONG = ["own accumulation", "tp2", "pp2", "pp3", "tp3"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> tuple[Path, str]:
    """Run directories of layouts of an odd recipe, and the table of their comparison."""
    out = tmp_path_factory.mktemp("odd")
    return out, train_and_compare(out, ODD_FAST, catalog.DEFAULT_RECIPE, ODD_SHAPES, steps=3)


@pytest.mark.long
def test_odd_shapes_agree(odd):
    """Positions that no sample reaches among them."""
    assert rows_of(odd[1]) == dict.fromkeys(ODD_FAST, "yes")
    found = outcome(odd[0], REFERENCE.name)
    assert found.weights["position.weight"].shape == (101, 96)
    assert not found.gradients["position.weight"][77:].any() and found.gradients["position.weight"][76].any()


@pytest.mark.long
def test_a_pipeline_with_unequal_stages_is_among_them(odd):
    """The others' stages are equal; the large embedding takes a layer from the last stage of this one."""
    layers = layers_of_files(odd[0] / folder("pp2 own accumulation") / "checkpoints")
    assert [*layers.values()] == [[0, 1, 2, 3], [4]]


@pytest.mark.long
@pytest.mark.parametrize("name", [REFERENCE.name, *ODD_FAST])
def test_the_norm_of_a_run_is_that_of_its_gradients(odd, name):
    found = outcome(odd[0], name)
    squares = [float(gradient.double().square().sum()) for gradient in found.gradients.values()]
    assert found.norms[0] == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    assert max(gradient.numel() for gradient in found.gradients.values()) == 8191 * 96


# All of them


@pytest.mark.long
def test_all_odd_layouts_agree(tmp_path):
    set_flags = [f"--set={setting}" for setting in ODD_SHAPES]
    done = run([*COMMAND, *set_flags, "--steps", "6", "--only", *ODD_LONG, "tp4"], timeout=500)
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {**dict.fromkeys(ODD_LONG, "yes"), "tp4": "not run"}


@pytest.mark.long
def test_without_a_sentence_head_layouts_agree(tmp_path, reference):
    names = ["tp2", "pp2"]
    rows = rows_of(train_and_compare(tmp_path, names, BERT, ["model.sentence_head=none"], 6))
    assert rows == dict.fromkeys(names, "yes")
    assert outcome(tmp_path, REFERENCE.name).losses[0] != reference("bert").losses[0], "no sentence objective"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "setting"),
    [
        (GPT2, None),
        (BERT, "model.layer_norm=pre"),
        (BERT, "model.layer_norm=post"),
        (GPT2, DROPPED),
        (BERT, DROPPED),
    ],
)
def test_all_layouts_agree_over_twenty_steps(tmp_path, recipe, setting):
    check_all_layouts(tmp_path, "--recipe", recipe, *(["--set", setting] if setting else []))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", [GPT2, BERT])
def test_all_layouts_agree_by_muon(recipe):
    """All but those that it refuses."""
    flags = ["--recipe", recipe, "--set", "optimizer.name=muon", "--set", "optimizer.lr=0.004"]
    done = run([*COMMAND, *flags, "--steps", "8"], timeout=1700)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    apart = {name: verdict for name, verdict in rows_of(done.stdout).items() if verdict != "yes"}
    assert apart == {case.name: "not run" for case in CASES if case.name == "tp3" or "offload" in case.name}


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("names", "steps", "flags"),
    [
        (["tp2", "tp2 zero3", "pp2", "recomputed"], 6, []),
        (["tp2", "dp2 zero3", "pp2"], 6, ["--recipe", BERT]),
        (["tp2", "dp2 zero3", "pp2"], 4, ["--set", DROPPED]),
    ],
)
def test_compiled_layouts_agree(tmp_path, names, steps, flags):
    check_compiled_layouts(tmp_path, names, steps, *flags)
