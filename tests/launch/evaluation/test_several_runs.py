"""Runs side by side: their order, what is said, what a failure or Ctrl-C leaves out; what was asked for."""

from __future__ import annotations

import threading
import time

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
    assert [line.split("; ")[1].split(",")[0] for line in said] == ["1 of 3", "2 of 3", "3 of 3"]


def test_what_has_not_begun_is_left_out_where_one_fails():
    begun = []

    def make(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise RuntimeError("no room")
        time.sleep(0.05)

    with pytest.raises(RuntimeError, match="no room"):
        side_by_side(make, range(50), 1, str, lambda line: None)
    assert len(begun) < 5


def test_what_has_not_begun_is_left_out_on_control_c(monkeypatch):
    begun, ended, first = [], [], threading.Event()

    def make(number: int) -> None:
        begun.append(number)
        first.set()
        time.sleep(0.3)
        ended.append(number)

    def interrupted(*_, **__):
        first.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(several_runs, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(make, range(9), 1, str, lambda line: None)
    assert begun == ended == [0], "what is under way is waited for, and no other is started"


def test_another_question_in_the_same_directory_is_refused(tmp_path):
    keep_asked(tmp_path / "out", {"arguments": ["--task", "rte"]})
    keep_asked(tmp_path / "out", {"arguments": ["--task", "rte"]})
    with pytest.raises(ProblemsError, match="holds runs of other arguments"):
        keep_asked(tmp_path / "out", {"arguments": ["--task", "mrpc"]})
