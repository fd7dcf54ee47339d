"""A run with its own recipe: resumed with one flag, begun anew, and branched off from a checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launching import ROOT, run

from launch import pretrain
from launch.records.admission import admit
from launch.records.directory import RunDirectory
from launch.records.metrics import read_metrics
from launch.records.plan_text import describe_branch
from launch.records.result import read_result
from launch.reports.runs import read_run
from launch.training.job import Job
from launch.training.schedule import learning_rate
from recipes.problems import ProblemsError

PRETRAIN = [sys.executable, str(ROOT / "launch" / "pretrain.py")]
SETTINGS = ["--set", "run.save_every=2", "--set", "optimizer.lr=5e-4"]
KEEP = ["--set", "run.keep_checkpoints=null", "--set", "run.prompt=null"]
# As the examples of --help have it: the run was started with --steps, and its own decay ends at step 20.
COOLED = ["--set", "schedule.kind=wsd", "--set", "schedule.wsd_decay_steps=2", "--set", "steps=8"]


def launched(*words: object) -> str:
    done = run([*PRETRAIN, *map(str, words)], timeout=200)
    assert done.returncode == 0, done.stdout[-3000:]
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of eight steps under a JSON of its own, and a cool-down from its step 4."""
    folder = tmp_path_factory.mktemp("runs")
    config = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    (folder / "mine.json").write_text(json.dumps({**config, "wall_clock_breakdown": False}))
    stable = folder / "stable"
    launched("--tiny", "--steps", 8, *SETTINGS, *KEEP, "--ds_config", folder / "mine.json", "--out", stable)
    (folder / "mine.json").unlink()
    before = contents(stable)
    launched("--branch", f"{stable}@4", "--out", folder / "cooled", *COOLED)
    assert contents(stable) == before, "the run is never written to"
    return folder


def contents(directory: Path) -> dict[Path, tuple[int, int]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def losses(directory: Path) -> dict[int, float]:
    return {step.step: step.loss for step in read_metrics(directory / "metrics.jsonl").steps}


def rates(directory: Path) -> list[float]:
    """Of a branch's own steps, 5 to 8."""
    return [step.lr for step in read_metrics(directory / "metrics.jsonl").steps if step.step > 4]


def planned(*words: object) -> Job:
    return pretrain.checked_job(pretrain.build_parser().parse_args([str(word) for word in words]))


def refused(*words: object) -> str:
    with pytest.raises(ProblemsError) as error:
        planned("--plan", *words)
    return str(error.value)


# --- --resume --out RUN


def test_a_run_is_resumed_with_its_own_recipe_and_json(runs):
    job = planned("--resume", "--out", runs / "stable")
    plan = job.plan
    assert plan.recipe == RunDirectory(runs / "stable").plan().recipe and plan.ds_name == "mine"
    assert plan.ds["wall_clock_breakdown"] is False and job.facts.tiny
    assert job.facts.name == "default/sotu-tiny" and job.facts.original.steps == 300


def test_what_is_given_to_a_resumed_run_is_laid_over_its_own(runs):
    words = ["--resume", "--out", runs / "stable", "--ds_config", "zero3", "--tiny"]
    plan = planned(*words, "--set", "parallel.dp=1", "--steps", 9).plan
    recipe = plan.recipe
    assert (recipe.optimizer.lr, recipe.parallel.dp, recipe.steps, plan.zero_stage) == (5e-4, 1, 9, 3)
    other = run([*PRETRAIN, *map(str, words), "--set", "optimizer.lr=1e-3"], timeout=100)
    assert other.returncode == 2 and "optimizer.lr: 0.0005 -> 0.001" in other.stdout, other.stdout[-2000:]


def test_a_plan_says_what_a_resume_would_change_and_changes_nothing(runs, tmp_path):
    there = RunDirectory(runs / "stable")
    before = sorted((path, path.stat().st_mtime_ns) for path in there.path.rglob("*"))
    words = ["--resume", "--out", there.path, "--ds_config", "zero2", "--set", "parallel.tp=2"]
    notices = [notice.text for notice in planned("--plan", *words).plan.notices]
    assert {"resumed with layout.tp: 1 -> 2", "resumed with zero_stage: 1 -> 2"} <= {*notices}
    assert notices[0] == f"{there.path} is done: all 8 steps are made, and --steps N trains on"
    more = planned("--plan", *words, "--steps", 20).plan.notices
    assert more[0].text == f"resumes {there.path} after step 8" and not more[0].differs
    with pytest.raises(ValueError, match="has 8 steps done"):
        planned("--plan", *words[:3], "--steps", 7)
    with pytest.raises(ValueError, match="optimizer.lr: 0.0005 -> 0.001"):
        planned("--plan", *words[:3], "--set", "optimizer.lr=1e-3")
    assert before == sorted((path, path.stat().st_mtime_ns) for path in there.path.rglob("*"))
    none = planned("--plan", "--resume", "--out", tmp_path / "none").plan
    assert "holds no checkpoint to resume" in str(none.notices)


def test_a_recipe_given_to_a_resumed_run_is_compared_as_a_whole(runs):
    job = planned("--resume", "--out", runs / "stable", "--recipe", "bert/sotu", "--tiny")
    assert job.plan.recipe.model.family == "bert"


def test_an_empty_directory_is_a_first_start(tmp_path):
    plan = planned("--resume", "--out", tmp_path, "--ds_config", "zero2", "--tiny").plan
    assert plan.ds_name == "zero2" and plan.recipe.optimizer.lr == 1e-3


def test_a_branch_that_was_interrupted_is_resumed_with_its_directory_alone(runs, tmp_path):
    branch = shutil.copytree(runs / "cooled", tmp_path / "branch")
    shutil.rmtree(branch / "checkpoints" / "step-000008")
    assert f"resumed from {branch}/checkpoints/step-000006" in launched("--resume", "--out", branch)
    assert losses(branch) == losses(runs / "cooled") and rates(branch) == rates(runs / "cooled")
    assert len(read_metrics(branch / "metrics.jsonl").branches) == 1


def test_a_branch_that_was_killed_before_its_first_save_begins_where_it_began(runs, tmp_path):
    branch = RunDirectory(shutil.copytree(runs / "cooled", tmp_path / "branch"))
    shutil.rmtree(branch.checkpoints)
    branch.result_json.unlink()
    lines = branch.metrics_jsonl.read_text().splitlines(keepends=True)
    branch.metrics_jsonl.write_text("".join(line for line in lines if '"kind": "save"' not in line))
    job = planned("--resume", "--out", branch.path)
    entered = admit(branch.path, job.facts, [], resume=True)
    entered.close()
    assert not entered.resumed and "starts again at step 4" in entered.notices[0]


# --- --recipe RUN


def test_a_new_run_takes_the_recipe_and_the_json_of_another(runs, tmp_path):
    job = planned("--recipe", runs / "stable", "--out", tmp_path / "new", "--set", "seed=5")
    recipe = job.plan.recipe
    assert (recipe.optimizer.lr, recipe.seed, recipe.steps, job.plan.ds_name) == (5e-4, 5, 8, "mine")
    assert job.facts.tiny and job.facts.recipe_of == runs / "stable"
    assert planned("--recipe", runs / "stable", "--ds_config", "zero2").plan.ds_name == "zero2"
    assert planned("--recipe", runs / "stable", "--set", "ds_config=zero2").plan.ds_name == "zero2"


def test_a_branch_is_no_recipe_of_a_new_run(runs):
    said = refused("--recipe", runs / "cooled")
    assert f"a branch of {runs / 'stable'} from step 4 on" in said
    assert f"--branch {runs / 'stable'}@4" in said


# --- --branch RUN@STEP --out NEW


def test_a_branch_keeps_what_it_is_of_and_what_it_changes(runs):
    result = read_result(runs / "cooled" / "result.json")
    branch = result.branch
    assert branch is not None and (branch.run, branch.step) == (str(runs / "stable"), 4)
    assert {change.key: (change.was, change.now) for change in branch.changed} == {
        "schedule.kind": ("cosine", "wsd"),
        "schedule.wsd_decay_steps": (None, 2),
        "schedule.decay_steps": (20, None),
    }
    (said,) = (str(each) for each in result.deviations if str(each).startswith("branch: of"))
    assert "schedule.kind: cosine -> wsd" in said
    assert result.speed.steps == 3 and result.losses.training.steps == 4, "of its own steps alone"
    lines = dict(describe_branch(branch))
    assert "schedule.kind: cosine -> wsd" in lines["  changed"] and "32 samples" in lines["  data"]
    validated = [each.step for each in read_metrics(runs / "cooled" / "metrics.jsonl").validations]
    assert validated == [0, 4, 8], "also where it begins"
    read = read_run(runs / "cooled", "cooled", lambda name: None)
    assert not read.problems and [step for step, _ in read.training] == [*range(1, 9)]


def test_a_branch_goes_on_to_the_bit_until_its_rate_differs(runs):
    whole, cooled = losses(runs / "stable"), losses(runs / "cooled")
    assert [step for step in whole if whole[step] != cooled[step]] == [6, 7, 8]


def test_a_cool_down_is_constant_and_then_falls_to_its_last_step(runs):
    """The last step takes the rate after seven steps; that after eight is schedule.min_lr."""
    recipe = RunDirectory(runs / "cooled").plan().recipe
    half = 1e-4 + 4e-4 * (2 * 0.5**0.5 - 1)
    assert rates(runs / "cooled") == pytest.approx([5e-4, 5e-4, 5e-4, half])
    assert rates(runs / "stable")[0] < 5e-4, "its cosine had begun to fall"
    assert (recipe.decay_steps, learning_rate(recipe, 8)) == (8, pytest.approx(1e-4))
    words = ["--branch", f"{runs / 'stable'}@4", "--out", runs / "new", *COOLED[:4], "--steps", 9]
    flagged = planned("--plan", *words).plan.recipe
    assert (flagged.steps, flagged.decay_steps, learning_rate(flagged, 7)) == (9, 9, 5e-4)


def test_every_problem_of_a_branch_is_refused_at_once(runs):
    words = ["--branch", f"{runs / 'stable'}@4", "--out", runs / "new"]
    for setting in (
        "model.hidden=32",
        "optimizer.name=lamb",
        "steps=4",
        "sequence_length=32",
        "a=1",
        "seed=x",
    ):
        words += ["--set", setting]
    said = refused(*words)
    for expected in (
        "model.hidden=32, and the run has 64",
        "optimizer.name=lamb, and the run has adamw",
        "steps=4: the branch begins after step 4; give --set steps=5",
        "add --set model.positions=64",
        "a: unknown key",
        "seed='x'",
    ):
        assert expected in said, said
    assert "data.tokenizer.kind=gpt2, and the run has" in refused(
        *words[:4], "--set", "data.tokenizer.kind=gpt2", "--set", "model.vocab_size=50257"
    )


def test_a_step_without_a_checkpoint_is_refused_with_those_that_are_there(runs):
    stable = runs / "stable"
    said = refused("--branch", f"{stable}@5", "--out", runs / "new")
    assert f"{stable}: holds no checkpoint of step 5: only of 2, 4, 6, 8" in said
    assert "a run keeps its newest run.keep_checkpoints" in said
    assert "holds no run" in refused("--branch", runs / "none@4", "--out", runs / "new")
    plan = planned("--branch", stable, "--out", runs / "new", "--set", "steps=9").plan
    assert plan.recipe.branch.step == 8, "the newest"


def test_a_damaged_checkpoint_is_no_beginning(runs, tmp_path):
    stable = shutil.copytree(runs / "stable", tmp_path / "stable")
    (stable / "checkpoints" / "step-000008" / "manifest.json").write_text("{}")
    said = refused("--branch", stable, "--out", tmp_path / "new", "--set", "steps=9")
    assert "step-000008: is damaged" in said and f"--branch {stable}@6 goes on from the one before" in said


def test_a_branch_resumed_by_its_first_command_is_the_same_branch(runs):
    words = ["--resume", "--out", runs / "cooled", *COOLED]
    assert planned("--branch", f"{runs / 'stable'}@4", *words).plan.recipe.branch.step == 4
    assert "a run began once" in refused_start("--branch", f"{runs / 'stable'}@2", *words)


def refused_start(*words: object) -> str:
    with pytest.raises(ProblemsError) as error:
        planned(*words)
    return str(error.value)


def test_other_text_is_read_in_the_tokens_of_the_weights(runs, tmp_path):
    (tmp_path / "mine.txt").write_text("some words of a text, and more. " * 2000)
    words = ["--branch", f"{runs / 'stable'}@4", "--out", tmp_path / "new", "--text", tmp_path / "mine.txt"]
    recipe = planned("--plan", *words).plan.recipe
    assert recipe.data.tokenizer.path == str(runs / "stable" / "tokenizer")
    assert recipe.branch.data_from == 32 and recipe.sizes_in_data.samples(4) == 0
    assert {change.key for change in recipe.branch.changed} == {"data.source", "data.name"}


def test_the_keys_of_a_branch_are_written_by_the_run_alone(runs):
    said = refused("--recipe", runs / "stable", "--set", "branch.step=3")
    assert "branch.step: is written by the run that it is of; --branch RUN[@STEP]" in said
