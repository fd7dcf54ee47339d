"""What a branch takes from its run, without training: places in the data, counts, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from launch.checkpoints import branching
from launch.checkpoints.branching import BranchPoint
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.records.recorded_run import RecordedRun
from recipes import catalog
from recipes.schema import Branch

STREAM = (
    "data={source: jsonl, name: x/*.jsonl, streaming: true, validation_every: 5, tokenizer: {kind: gpt2}}"
)


@pytest.fixture
def point(tmp_path):
    """Make the point after step 4 of a run with these settings; `branch`: it is one itself, from step 2 on."""

    def made(*settings, **branch):
        recipe = catalog.load("default/sotu", [*settings, "batch.micro=null"], tiny=True)
        if branch:
            recipe = recipe.model_copy(update={"branch": Branch(run="first", step=2, **branch)})
        (tmp_path / "recipe.yaml").write_text(catalog.dump(recipe))
        return BranchPoint(RecordedRun.read(tmp_path, branching.FLAG), 4)

    return made


def test_a_branch_of_a_branch_keeps_its_place_in_the_data_and_the_updates_of_its_optimizer(point):
    before = ((0, 0, 16),)
    there = point(data_from=32, more_updates=1, stretches=before)
    full = there.run.recipe.batch.global_
    now = there.recipe(["schedule.kind=constant", f"batch.global={2 * full}"], {}, None)
    assert (now.branch.step, now.branch.data_from, now.branch.more_updates) == (4, 32, 1)
    assert now.branch.stretches == ((0, 0, 16), (2, 32, full))
    assert [now.sizes.samples(step) for step in (2, 4, 5)] == [32, 32 + 2 * full, 32 + 4 * full]
    assert now.sizes_in_data.samples(4) == 2 * full
    anew = there.recipe(["seed=77"], {}, None)
    assert anew.branch.data_from == 32 + 2 * full and anew.branch.more_updates == 1


def test_a_stream_keeps_its_batch_unless_it_is_read_anew(point):
    there = point(STREAM, "model.vocab_size=50257", "model.vocab_divisible_by=128")
    full = there.run.recipe.batch.global_
    now = there.run.recipe.model_copy(
        update={"batch": there.run.recipe.batch.model_copy(update={"global_": 2 * full}), "steps": 9}
    )
    (problem,) = there._misfits(there.run.recipe, now, anew=False)
    assert "a stream is shared out by it" in str(problem)
    assert list(there._misfits(there.run.recipe, now, anew=True)) == []


@pytest.mark.parametrize(("settings", "refused"), [([], True), (["seed=77"], False)])
def test_a_branch_goes_on_with_the_tokens_of_its_run_or_reads_its_data_anew(
    point, monkeypatch, settings, refused
):
    recipe = point().recipe([*settings, "schedule.kind=constant"], {}, None)
    held = SimpleNamespace(corpus="trained", step=4)
    monkeypatch.setattr(branching.reading, "of_rank_0", lambda own, *_: own)
    monkeypatch.setattr(branching.reading, "problem_of", lambda *_: None)
    monkeypatch.setattr(branching.run_checkpoints, "read", lambda directory: Checkpoint(directory, held))
    grid = SimpleNamespace(rank=0, control_group=None)
    assert branching.choose(recipe, grid, "trained").checkpoint.manifest is held
    if refused:
        with pytest.raises(
            ValueError, match="tokens with CRC-32 trained, and the recipe's data now have other"
        ):
            branching.choose(recipe, grid, "other")
    else:
        assert branching.choose(recipe, grid, "other").checkpoint.manifest is held
