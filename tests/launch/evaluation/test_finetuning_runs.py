"""Grid, seeds and median: which runs are made, and what is taken from them; runs side by side."""

from __future__ import annotations

import json
import signal
import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose

from launch.evaluation import finetuning_runs
from launch.evaluation.finetuning_runs import Runs, averaged, devices_of_runs, keep_arguments, procedure
from launch.evaluation.finetuning_summary import Trial, TrialOutcome, read, summary_text
from launch.finetune import common_arguments
from launch.ranks.ending import Failed
from launch.records.facts import TaskScore
from recipes.problems import ProblemsError
from recipes.tasks import TASKS


class Made:
    """Stands in for the runs' processes: an accuracy by batch, rate and seed; 1236 fails."""

    def __init__(self, monkeypatch):
        self.trials, self.devices, self.lock = [], [], threading.Lock()
        self.done = {}
        monkeypatch.setattr(Runs, "_made", lambda runs, trial, devices: self.make(trial, devices))
        monkeypatch.setattr(Runs, "finished", lambda runs, trial: self.done.get(trial))

    def make(self, trial, devices):
        with self.lock:
            self.trials.append(trial)
            self.devices.append(devices)
        if trial.seed == 1236:
            return TrialOutcome(**vars(trial), problem="ended with code 3")
        accuracy = 0.5 + (trial.batch == 16) * 0.1 + (trial.lr == 2e-5) * 0.2 + (trial.seed - 1234) / 100
        self.done[trial] = TrialOutcome(**vars(trial), scores=(TaskScore("dev", {"accuracy": accuracy}, 9),))
        return self.done[trial]


def runs(out, devices=((),), say=lambda text: None):
    return Runs(out, "finetune.py", ("--task", "sst2"), 1, devices, TASKS["sst2"], say)


def test_the_best_of_the_grid_gets_the_seeds(monkeypatch, tmp_path):
    made = Made(monkeypatch)
    summary = procedure(runs(tmp_path), Trial(32, 1e-5, 1234), search=True, seeds=5, average=False)
    assert len(summary.grid) == 6 and {row.batch for row in summary.grid} == {16, 32}
    assert {(row.batch, row.lr) for row in summary.seeds} == {(16, 2e-5)}
    assert len(made.trials) == 10  # the grid's best is the first seed, and is not made again
    # Of seeds 1234, 1235, 1237 and 1238.
    assert summary.median["dev"]["accuracy"] == pytest.approx(0.8 + (0.01 + 0.03) / 2)
    assert [row.seed for row in summary.seeds if row.problem] == [1236]
    assert read(tmp_path) == summary and summary.ensemble is None


def test_runs_side_by_side_have_devices_of_their_own(monkeypatch, tmp_path):
    made, said = Made(monkeypatch), []
    devices = (("0", "1"), ("2", "3"))
    trials = [Trial(32, 1e-5, seed) for seed in range(8)]
    assert [each.trial for each in runs(tmp_path, devices, say=said.append).make(trials)] == trials
    assert set(made.devices) <= set(devices)
    assert [line.partition("; ")[2] for line in said] == [f"{n} of 8" for n in range(1, 9)]


def test_no_score_at_all_is_told(monkeypatch, tmp_path):
    Made(monkeypatch)
    with pytest.raises(Failed, match="batch32-lr1e-05-seed1236: ended with code 3"):
        procedure(runs(tmp_path), Trial(32, 1e-5, 1236), search=False, seeds=1, average=False)


def test_too_few_seeds_for_an_ensemble_are_told(monkeypatch, tmp_path):
    Made(monkeypatch)
    summary = procedure(runs(tmp_path), Trial(32, 1e-5, 1235), search=False, seeds=2, average=True)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["ensemble"] == [] and written["ensemble_of"] == 1
    monkeypatch.setenv("COLUMNS", "200")
    assert "none: 1 seed of 2 with scores, and an ensemble takes 2" in summary_text(summary, TASKS["sst2"])


def test_devices_are_shared_out(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of_runs(0, 2, None) == ((),) and devices_of_runs(0, 1, 3) == ((), (), ())
    assert devices_of_runs(5, 2, None) == (("0", "1"), ("2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert devices_of_runs(2, 1, None) == (("4",), ("6",))
    with pytest.raises(ProblemsError, match=r"this machine has 2 accelerators; lower --ranks"):
        devices_of_runs(2, 4, None)


def test_every_run_gets_what_was_typed_but_what_tells_runs_apart():
    typed = "--task sst2 --seeds 5 --grid --out=x --seed 3 --init DIR --lr=1e-5 --set a=b --resume --ranks 2"
    assert common_arguments(typed.split()) == ("--task", "sst2", "--init", "DIR", "--set", "a=b")


def test_an_ensemble_is_the_mean_of_probabilities():
    one, two = np.array([[0.0, 2.0], [1.0, 0.0]]), np.array([[5.0, 0.0], [0.0, 0.1]])
    expected = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (one, two)]
    assert_allclose(np.exp(averaged([one, two])), np.mean(expected, axis=0))
    spans = np.log(np.array([[[0.5, 0.1], [0.5, 0.9], [0.0, 0.0]]]) + 1e-300)
    spans[0, 2] = -np.inf  # padding
    assert_allclose(np.exp(averaged([spans, spans]))[0, :2], [[0.5, 0.1], [0.5, 0.9]])
    assert finetuning_runs.averaged([spans])[0, 2, 0] == -np.inf


@pytest.mark.parametrize("control_c", [False, True])
def test_what_has_not_begun_is_left_out_where_one_fails_or_is_interrupted(control_c, monkeypatch, tmp_path):
    """What is under way is waited for."""
    begun, cancelled, shutdown = [], threading.Event(), finetuning_runs.ThreadPoolExecutor.shutdown

    def ending(pool, *how, **more):
        cancelled.set()
        shutdown(pool, *how, **more)

    def make(self, trial, devices):
        begun.append(trial.seed)
        if len(begun) == 1 and not control_c:
            raise OSError("no room")
        if control_c:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert cancelled.wait(20)
        return TrialOutcome(**vars(trial), problem="ended with code 3")

    monkeypatch.setattr(finetuning_runs.ThreadPoolExecutor, "shutdown", ending)
    monkeypatch.setattr(Runs, "_made", make)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt if control_c else OSError):
            runs(tmp_path).make([Trial(32, 1e-5, seed) for seed in range(50)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun in ([0], [0, 1]), "the next one may have begun meanwhile"


def test_another_question_in_the_same_directory_is_refused(tmp_path):
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    with pytest.raises(ProblemsError, match="holds runs of other arguments"):
        keep_arguments(tmp_path / "out", ("--task", "mrpc"))
