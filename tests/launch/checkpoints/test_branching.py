"""Branches: runs that go on from another run's checkpoint, under every layout and under a changed recipe."""

from __future__ import annotations

import json

import pytest
from launching import WORKERS, run_ranks
from stored import load_weights

from launch.checkpoints import manifest, run_checkpoints

pytestmark = pytest.mark.ci

LOSS = 2e-6  # nats, between layouts
# How each run is laid out, and the next one its branch under another layout.
LAYOUTS = {
    "dp2": ("zero1", ["parallel.tp=1", "parallel.pp=1"]),
    "tp2": ("zero1", ["parallel.tp=2", "parallel.pp=1"]),
    "pp2": ("pipeline", ["parallel.tp=1", "parallel.pp=2", "batch.accumulation=4"]),
    "zero3": ("zero3", ["parallel.tp=1", "parallel.pp=1"]),
}
FREE = ["batch.micro=null", "batch.accumulation=null"]
CHANGED = {
    "rate": ["optimizer.lr=5e-4", "schedule.kind=wsd", "schedule.wsd_decay_steps=2"],
    "batch": ["batch.global=4"],
    "borders": ["data.attend=document", "data.positions=document"],
    "long": ["sequence_length=96", "steps=5"],
    "text": ["data.validation_every=10", "steps=5"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("branches")
    names = [*LAYOUTS]
    cases = []
    for name, (config, settings) in LAYOUTS.items():
        other = names[names.index(name) - 1]
        other_config, other_settings = LAYOUTS[other]
        branches = [[f"{name}-same", config, []], [f"{name}-{other}", other_config, [*FREE, *other_settings]]]
        if name == "dp2":
            branches += [[change, config, changes] for change, changes in CHANGED.items()]
        cases.append({"name": name, "ds_config": config, "settings": settings, "branches": branches})
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(2, WORKERS / "branching.py", out, out / "cases.json", timeout=500)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return out


def told(runs, name, what="steps"):
    values = json.loads((runs / name / "losses.json").read_text())[what]
    return {int(step): value for step, value in values.items()}


def after_3(values):
    return {step: value for step, value in values.items() if step > 3}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_branch_in_which_nothing_changes_is_its_run_to_the_bit(runs, name):
    assert told(runs, f"{name}-same") == after_3(told(runs, name))
    newest = [run_checkpoints.newest(runs / each / "checkpoints") for each in (name, f"{name}-same")]
    sums = [{file: held.crc32 for file, held in each.manifest.files.items()} for each in newest]
    assert [each.step for each in newest] == [6, 6] and sums[0] == sums[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_branch_under_another_layout_follows_its_run(runs, name):
    names = [*LAYOUTS]
    other = names[names.index(name) - 1]
    assert told(runs, f"{name}-{other}") == pytest.approx(after_3(told(runs, name)), abs=LOSS)


def test_a_branch_with_another_rate_begins_as_its_run_and_leaves_it(runs):
    whole = told(runs, "dp2")
    branch = told(runs, "rate")
    assert branch[4] == whole[4] and branch[5] != whole[5]
    assert told(runs, "rate", "batches") == after_3(told(runs, "dp2", "batches"))


def test_a_branch_with_another_batch_reads_on_where_its_run_was(runs):
    branch = manifest.read(runs / "batch" / "checkpoints" / "step-000006")
    assert branch.data["position"] == 3 * 8 + 3 * 4
    assert told(runs, "batch", "batches").keys() == {4, 5, 6}
    assert branch.recipe["branch"]["stretches"] == [[0, 0, 8]]


def test_a_branch_with_borders_of_documents_reads_on_where_its_run_was(runs):
    branch = manifest.read(runs / "borders" / "checkpoints" / "step-000006")
    assert branch.data["position"] == 6 * 8 and branch.recipe["branch"]["data_from"] == 0
    assert branch.known_loss.batch.keys() == {"tokens", "labels", "weights", "places"}


def test_a_branch_with_longer_samples_or_other_text_reads_its_data_from_their_beginning(runs):
    for name in ("long", "text"):
        held = manifest.read(runs / name / "checkpoints" / "step-000005")
        assert held.data["position"] == 2 * 8 and held.recipe["branch"]["data_from"] == 3 * 8
    first = told(runs, "text", "validations")[3]
    assert first < told(runs, "text", "validations")[5] + 1, "the text is in the tokens of its weights"
    assert held.recipe["data"]["tokenizer"] == {"kind": "file", "path": str(runs / "dp2" / "tokenizer")}


def test_positions_grow_and_those_that_are_there_stay(runs):
    held = [manifest.read(runs / name / "checkpoints" / step) for name, step in (
        ("dp2", "step-000003"), ("long", "step-000005"))]  # fmt: skip
    shapes = [each.tensors["position.weight"].shape for each in held]
    assert shapes == [(64, 64), (96, 64)]
    before, after = (
        load_weights(runs / name / "checkpoints" / step)["position.weight"]
        for name, step in (("dp2", "step-000003"), ("long", "step-000005"))
    )
    assert (after[:64] - before).abs().max() < 0.01, "two steps of the optimizer"
    assert after[64:].std() == pytest.approx(0.02, rel=0.2)
