"""Seeds, median and ensemble of a fine-tuning: which runs are made, and what is taken from them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from launch.evaluation import finetuning_seeds
from launch.evaluation.finetuning_seeds import averaged, keep_arguments, read, run_seed, summarize
from launch.finetune import common_arguments
from launch.records.facts import TaskScore
from launch.records.result import Result, write_result
from recipes.problems import ProblemsError


def finish(command, **streams):
    """Stand in for a run: seed 3 fails; the accuracy of the others is a tenth of their seed."""
    seed, out = (command[command.index(flag) + 1] for flag in ("--seed", "--out"))
    directory = finetuning_seeds.Path(out)
    directory.mkdir()
    if seed != "3":
        scores = (TaskScore("dev", {"accuracy": int(seed) / 10}, 9),)
        write_result(directory / "result.json", Result("a/b", "ok", task_scores=scores))
    return SimpleNamespace(returncode=3)


def test_the_median_is_of_the_seeds_with_scores_and_no_run_is_made_twice(monkeypatch, tmp_path):
    monkeypatch.setattr(finetuning_seeds.subprocess, "run", finish)
    made = [run_seed(tmp_path, seed, ["finetune.py"]) for seed in (1, 2, 3, 5, 7)]
    summary = summarize(tmp_path, made, average=False)
    assert summary.median == {"dev": {"accuracy": pytest.approx(0.35)}} and read(tmp_path) == summary
    assert [each.problem.partition(",")[0] for each in made if each.problem] == ["ended with code 3"]
    assert summary.ensemble == () and len(summary.sound) == 4
    monkeypatch.setattr(finetuning_seeds.subprocess, "run", lambda *_, **__: pytest.fail("run again"))
    assert run_seed(tmp_path, 7, ["finetune.py"]) == made[-1]


def test_an_ensemble_takes_two_seeds_with_scores(monkeypatch, tmp_path):
    monkeypatch.setattr(finetuning_seeds.subprocess, "run", finish)
    monkeypatch.setattr(finetuning_seeds, "ensemble", lambda out, members: tuple(members[0].scores))
    made = [run_seed(tmp_path, seed, ["finetune.py"]) for seed in (2, 3, 4)]
    assert summarize(tmp_path, made[:2], average=True).ensemble == ()
    assert summarize(tmp_path, made, average=True).ensemble == made[0].scores
    assert summarize(tmp_path, made[1:2], average=True).median == {}


def test_every_run_gets_what_was_typed_but_what_tells_runs_apart():
    typed = "--task sst2 --seeds 5 --out=x --seed 3 --init DIR --lr=1e-5 --set a=b --resume --ranks 2"
    assert common_arguments(typed.split()) == ("--task", "sst2", "--init", "DIR", "--lr=1e-5", "--set", "a=b")


def test_an_ensemble_is_the_mean_of_probabilities():
    one, two = np.array([[0.0, 2.0], [1.0, 0.0]]), np.array([[5.0, 0.0], [0.0, 0.1]])
    expected = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (one, two)]
    assert_allclose(np.exp(averaged([one, two])), np.mean(expected, axis=0))
    spans = np.log(np.array([[[0.5, 0.1], [0.5, 0.9], [0.0, 0.0]]]) + 1e-300)
    spans[0, 2] = -np.inf  # padding
    assert_allclose(np.exp(averaged([spans, spans]))[0, :2], [[0.5, 0.1], [0.5, 0.9]])
    assert averaged([spans])[0, 2, 0] == -np.inf


def test_another_question_in_the_same_directory_is_refused(tmp_path):
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    with pytest.raises(ProblemsError, match="holds runs of other arguments"):
        keep_arguments(tmp_path / "out", ("--task", "mrpc"))
