"""One recipe, the same numbers under every layout, on real processes; breakages are noticed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import broken_layouts
import pytest
import torch
from compared import (
    COMMAND,
    ODD_SHAPES,
    check_all_layouts,
    check_compiled_layouts,
    check_noticed,
    folder,
    layouts_of,
    rows_by_name,
    rows_of,
)
from launching import WORKERS, run
from safetensors.torch import load_file
from stored import layers_of_files

from launch.experiments.parity.layout_cases import CASES, REFERENCE
from launch.experiments.parity.layout_runs import Layouts
from launch.experiments.proving.proving import Reference
from launch.experiments.proving.task import tensors_of
from launch.experiments.proving.verdict import Row
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
def layouts(tmp_path_factory) -> Callable[[str], Layouts]:
    """A kind's layouts, next to the same runs in one process."""

    @functools.cache
    def of(name: str) -> Layouts:
        kind, out = KINDS[name], tmp_path_factory.mktemp("layouts")
        return layouts_of(out, kind.settings, kind.recipe, kind.steps)

    return of


@pytest.fixture(scope="module")
def compared(layouts) -> Callable[[str], dict[str, Row]]:
    """Trains a kind's layouts once."""

    @functools.cache
    def rows(name: str) -> dict[str, Row]:
        return rows_by_name(layouts(name), [case for case in CASES if case.name in KINDS[name].names])

    return rows


@pytest.fixture
def reference(layouts, compared) -> Callable[[str], Reference]:
    def of(kind: str) -> Reference:
        compared(kind)
        return layouts(kind).reference()

    return of


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_layout_agrees(compared, kind, name):
    row = compared(kind)[name]
    assert row.agrees and row.loss <= 2e-6 and row.norm <= 1e-4 and row.gradient <= 1e-4, row


@pytest.mark.parametrize(("kind", "name"), EVERY_LAYOUT)
def test_the_parts_of_the_loss_agree(compared, layouts, kind, name):
    """Of every step and validation; accuracy counts samples, and a rounding may turn none of so few."""
    compared(kind)
    out = layouts(kind).out
    first, found = (read_metrics(out / folder(each) / "metrics.jsonl") for each in (REFERENCE.name, name))
    records = [*first.steps, *first.validations]
    parts = set(parts_of(MASKED_FIGURES["sop"])) if KINDS[kind].recipe == BERT else set()
    for expected, record in zip(records, [*found.steps, *found.validations], strict=True):
        assert set(expected.parts) == parts and record.parts == pytest.approx(expected.parts, abs=2e-6)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_reference_trains(reference, kind):
    losses, norms = (reference(kind).found.losses, reference(kind).found.norms)
    assert len(losses) == len(norms) == KINDS[kind].steps
    assert losses[len(losses)] < losses[1] - 0.05, "it must show learning, or equal losses say little"
    assert max(norms.values()) > 1.0, "clipping at 1 must be active, or a wrong norm hides"
    assert reference(kind).found.validations.keys() == {0, len(losses)}


def tensors(reference: Reference, kind: str, step: int) -> dict[str, torch.Tensor]:
    """Whole tensors of one process after a step."""
    kept = load_file(tensors_of(reference.task.out, step))
    return {name.split("/", 1)[1]: each for name, each in kept.items() if name.startswith(f"{kind}/")}


@pytest.mark.long
def test_the_references_are_what_the_comparison_needs(reference):
    gpt2, bert = reference("gpt2"), reference("bert")
    assert min(gpt2.found.norms.values()) < 1.0, "clipping is not active in every step"
    weights = tensors(gpt2, "weight", 1)
    assert weights["word.weight"].shape == (509, 64), "prime: tensor parallelism has to pad it"
    of_bert = {"decoder_bias.bias", "head.pooler.weight", "embedding.token_type", "final_norm.bias"}
    assert of_bert < tensors(bert, "gradient", 1).keys()
    # Dropout, sentence objective and placement reach the loss of the first step.
    assert len({reference(kind).found.losses[1] for kind in KINDS}) == len(KINDS)


@pytest.fixture(scope="module")
def broken(layouts) -> Callable[[str], dict[str, Row]]:
    """A kind's broken layouts, all trained by one launch of two ranks; the last shows that all were undone."""

    @functools.cache
    def rows(kind: str) -> dict[str, Row]:
        cases = [breakage.case for breakage in KINDS[kind].breakages]
        worker = WORKERS / "broken_layouts.py"
        return rows_by_name(layouts(kind), [*cases, broken_layouts.CONTROL.case], worker)

    return rows


@pytest.mark.parametrize(("kind", "breakage"), EVERY_BREAKAGE)
def test_breakage_is_noticed(broken, reference, kind, breakage):
    check_noticed(reference(kind), broken(kind)[breakage.case.name], breakage)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=tier(kind, broken=True)) for kind, each in KINDS.items() if each.breakages],
)
def test_unbroken_layout_agrees(broken, kind):
    assert broken(kind)[broken_layouts.CONTROL.case.name].agrees


# Shapes that divide by nothing, and an embedding large enough for a norm in float32 to be wrong


ODD_FAST = ["tp3", "pp2 own accumulation"]
ODD_LONG = ["own accumulation", "tp2", "pp2", "pp3", "tp3"]


@pytest.mark.long
def test_odd_shapes_agree(tmp_path):
    """Positions that no sample reaches among them, and a pipeline with unequal stages."""
    odd = layouts_of(tmp_path, ODD_SHAPES)
    rows = rows_by_name(odd, [case for case in CASES if case.name in ODD_FAST])
    assert [row.agrees for row in rows.values()] == [True, True]
    gradients = tensors(odd.reference(), "gradient", 1)
    places = gradients["position.weight"]
    assert places.shape == (101, 96) and not places[77:].any() and places[76].any()
    assert max(gradient.numel() for gradient in gradients.values()) == 8191 * 96
    # The others' stages are equal; the large embedding takes a layer from the last stage of this one.
    layers = layers_of_files(tmp_path / folder("pp2 own accumulation") / "checkpoints")
    assert [*layers.values()] == [[0, 1, 2, 3], [4]]


# All of them


@pytest.mark.long
def test_all_odd_layouts_agree(tmp_path):
    set_flags = [f"--set={setting}" for setting in ODD_SHAPES]
    done = run([*COMMAND, *set_flags, "--steps", "6", "--only", *ODD_LONG, "tp4"], timeout=500)
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == dict.fromkeys(ODD_LONG, "yes") and "tp4 is not run" in done.stdout


@pytest.mark.long
def test_without_a_sentence_head_layouts_agree(tmp_path, reference):
    headless = layouts_of(tmp_path, ["model.sentence_head=none"], BERT, 6)
    rows = rows_by_name(headless, [case for case in CASES if case.name in ("tp2", "pp2")])
    assert all(row.agrees for row in rows.values())
    assert headless.reference().found.losses[1] != reference("bert").found.losses[1], "no sentence objective"


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
    run_ones = [case.name for case in CASES if case.name != "tp3" and "offload" not in case.name]
    assert rows_of(done.stdout) == dict.fromkeys(run_ones, "yes")


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
