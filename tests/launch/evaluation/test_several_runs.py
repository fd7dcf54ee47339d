"""Runs side by side: their order, what is said, what a failure or Ctrl-C leaves out; what was asked for."""

from __future__ import annotations

import threading

import pytest

from launch.evaluation import several_runs
from launch.evaluation.several_runs import keep_asked, side_by_side
from recipes.problems import ProblemsError


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
    event, shutdown = threading.Event(), several_runs.ThreadPoolExecutor.shutdown

    def told(self, wait=True, *, cancel_futures=False):
        shutdown(self, wait=False, cancel_futures=cancel_futures)
        if cancel_futures:
            event.set()
        shutdown(self, wait=wait)

    monkeypatch.setattr(several_runs.ThreadPoolExecutor, "shutdown", told)
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

    monkeypatch.setattr(several_runs, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(make, range(9), 1, str, lambda line: None)
    assert begun == ended == [0], "what is under way is waited for, and no other is started"


def test_the_time_left_is_that_of_what_took_time(monkeypatch):
    """Two of six were made before; each of the others takes 30 s."""
    now, said = [0.0], []
    monkeypatch.setattr(several_runs, "clock", lambda: now[0])

    def make(number: int) -> None:
        now[0] += 0.01 if number < 2 else 30.0

    side_by_side(make, range(6), 1, str, said.append)
    assert [line.split("; ")[1] for line in said][:3] == ["1 of 6", "2 of 6", "3 of 6, about 01:30 left"]
    assert said[-1].endswith("6 of 6, about 00:00 left")


def test_another_question_in_the_same_directory_is_refused(tmp_path):
    keep_asked(tmp_path / "out", {"arguments": ["--task", "rte"]})
    keep_asked(tmp_path / "out", {"arguments": ["--task", "rte"]})
    with pytest.raises(ProblemsError, match="holds runs of other arguments"):
        keep_asked(tmp_path / "out", {"arguments": ["--task", "mrpc"]})
