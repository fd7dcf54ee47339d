"""Grid, seeds and median: which runs are made, and what is taken from them; runs side by side."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose

from launch.evaluation import finetuning_runs
from launch.evaluation.finetuning_runs import (
    NoScores,
    Runs,
    averaged,
    devices_of_runs,
    keep_arguments,
    procedure,
    side_by_side,
)
from launch.evaluation.finetuning_summary import Trial, TrialOutcome, read, summary_text
from launch.finetune import common_arguments
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


def runs(out, devices=((),), arguments=("--task", "sst2")):
    return Runs(out, "finetune.py", arguments, 1, devices, TASKS["sst2"], lambda text: None)


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
    made = Made(monkeypatch)
    devices = (("0", "1"), ("2", "3"))
    trials = [Trial(32, 1e-5, seed) for seed in range(8)]
    assert [each.trial for each in runs(tmp_path, devices).make(trials)] == trials
    assert set(made.devices) <= set(devices)


def test_no_score_at_all_is_told(monkeypatch, tmp_path):
    Made(monkeypatch)
    with pytest.raises(NoScores, match="batch32-lr1e-05-seed1236: ended with code 3"):
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


def test_results_come_in_order_and_each_is_said_when_it_is_there():
    second, said = threading.Event(), []

    def make(number: int) -> int:
        if number == 0:
            assert second.wait(20), "both are under way at once"
        second.set()
        return 10 * number

    assert side_by_side(make, range(3), 2, lambda found: f"got {found}", said.append) == [0, 10, 20]
    assert sorted(line.split(";")[0] for line in said) == ["got 0", "got 10", "got 20"]
    assert [line.split("; ")[1] for line in said] == ["1 of 3", "2 of 3", "3 of 3"]


@pytest.fixture
def cancelled(monkeypatch):
    """Set once what has not begun is cancelled."""
    event, shutdown = threading.Event(), finetuning_runs.ThreadPoolExecutor.shutdown

    def told(self, wait=True, *, cancel_futures=False):
        shutdown(self, wait=False, cancel_futures=cancel_futures)
        if cancel_futures:
            event.set()
        shutdown(self, wait=wait)

    monkeypatch.setattr(finetuning_runs.ThreadPoolExecutor, "shutdown", told)
    return event


def test_what_has_not_begun_is_left_out_where_one_fails(cancelled):
    """The failure is said at once, and not when what is under way has ended."""
    begun, said = [], []

    def make(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise RuntimeError("no room")
        assert cancelled.wait(20)
        assert said == ["no room; no other begins, and what is under way is waited for"]

    with pytest.raises(RuntimeError, match="no room"):
        side_by_side(make, range(50), 1, str, said.append)
    assert begun in ([0], [0, 1]), "the next one may have begun meanwhile"


def test_what_has_not_begun_is_left_out_on_control_c(cancelled, monkeypatch):
    begun, ended, first = [], [], threading.Event()

    def make(number: int) -> None:
        begun.append(number)
        first.set()
        assert cancelled.wait(20)
        ended.append(number)

    def interrupted(*_, **__):
        assert first.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(finetuning_runs, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(make, range(9), 1, str, lambda line: None)
    assert begun == ended == [0], "what is under way is waited for, and no other is started"


def test_the_time_left_is_that_of_what_took_time(monkeypatch):
    """Two of six were made before; each of the others takes 30 s."""
    now, said = [0.0], []
    monkeypatch.setattr(finetuning_runs, "clock", lambda: now[0])

    def make(number: int) -> None:
        now[0] += 0.01 if number < 2 else 30.0

    side_by_side(make, range(6), 1, str, said.append)
    assert [line.split("; ")[1] for line in said][:3] == ["1 of 6", "2 of 6", "3 of 6, about 01:30 left"]
    assert said[-1].endswith("6 of 6, about 00:00 left")


def test_another_question_in_the_same_directory_is_refused(tmp_path):
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    keep_arguments(tmp_path / "out", ("--task", "rte"))
    with pytest.raises(ProblemsError, match="holds runs of other arguments"):
        keep_arguments(tmp_path / "out", ("--task", "mrpc"))
