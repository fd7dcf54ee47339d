"""The watchdog names the rank that hangs, ends the run, and is not fooled by ranks that take their time."""

import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from launching import WORKERS, run_ranks

from launch.ranks import ending
from launch.ranks.ranks_meeting import RankPlace, RanksMeeting
from launch.ranks.watchdog import HANGING, LONG, STATUS, USUAL_STEPS, Phase, Status, Watchdog


def watched(tmp_path, what, rank, hang_after=1, ranks=3):
    how = (tmp_path, hang_after, what, rank)
    return run_ranks(ranks, WORKERS / "watched.py", *how, timeout=60, kill_after=0.1)


@pytest.mark.parametrize("stopped", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_a_stopped_rank_is_named_and_the_others_end(tmp_path, stopped):
    """Also where it is rank 0, whose process serves the store of the process group, and asks the others."""
    done = watched(tmp_path, "stopped", stopped)
    assert done.returncode == HANGING, done.stdout
    assert "the run hangs in step 5" in done.stdout and "Traceback" not in done.stdout
    assert done.stdout.count("does not answer: its process is stopped") == 1
    report = (tmp_path / "hang.txt").read_text()
    assert f"rank {stopped} on " in report and report.count("does not answer") == 1
    others = [rank for rank in range(3) if rank != stopped]
    heard = f"ranks {others[0]}, {others[1]}" if stopped else "rank "  # nobody asks the others without rank 0
    assert f"{heard}" in report and ": step 5, computing" in report and "all_reduce" in report
    left = sorted(path.name for path in tmp_path.glob("hang-rank-*.txt"))
    assert left == [f"hang-rank-{rank}.txt" for rank in others]
    assert "dist.all_reduce" in done.stdout and "watched.py" in (tmp_path / left[0]).read_text()
    kept = pickle.loads((tmp_path / f"hang-collectives-rank-{others[0]}").read_bytes())
    assert "all_reduce" in kept["entries"][-1]["profiling_name"], "torch's Flight Recorder"
    ending.forget_errors(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_answers_and_does_not_get_on_is_named(tmp_path):
    done = watched(tmp_path, "asleep", 1)
    assert done.returncode == HANGING, done.stdout
    assert "rank 1 on " in done.stdout and done.stdout.count("is behind the others") == 1, done.stdout
    assert "signal.pause()" in done.stdout and (tmp_path / "hang-rank-1.txt").exists()


def test_a_rank_that_waits_for_its_data_is_waited_for(tmp_path):
    done = watched(tmp_path, "waits", 1, hang_after=0.5)
    assert done.returncode == 0 and "all steps done" in done.stdout, done.stdout
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_silent_rank_is_named_when_the_step_is_overdue(stopped, tmp_path, monkeypatch, capsys):
    """Waiting for its answers, twice, is part of run.hang_after and not added to it."""
    now = [0.0]
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1" if stopped == 0 else "0")
    monkeypatch.setattr("launch.ranks.watchdog.time.monotonic", lambda: now[0])
    meeting = RanksMeeting()
    meeting.places = {rank: RankPlace(rank, "here", 7) for rank in range(3)}
    watchdog = Watchdog(tmp_path, 20, meeting)
    ended = Mock(wait=lambda seconds: now.__setitem__(0, now[0] + seconds), is_set=lambda: False)

    def ask(ranks, patience):
        status = STATUS.dump_python(Status(1, 5, Phase.COMPUTED, 1, now[0], False, ()), mode="json")
        now[0] += patience if stopped in ranks else 0
        return {rank: status for rank in ranks if rank != stopped}

    monkeypatch.setattr(watchdog, "_ended", ended)
    monkeypatch.setattr(meeting, "ask", ask)
    monkeypatch.setattr(meeting, "tell_hanging", lambda ranks: None)
    monkeypatch.setattr(watchdog, "_await_stacks", lambda ranks: None)  # the clock stands still
    monkeypatch.setattr("os._exit", Mock(side_effect=KeyboardInterrupt))
    watchdog._usual.append(1.0)
    watchdog.enter(Phase.COMPUTING, 5)
    with pytest.raises(KeyboardInterrupt):
        watchdog._watch()
    assert f"rank {stopped} on here" in capsys.readouterr().err
    assert 20 <= now[0] <= 20 + 2 * 2, "at most two looks later"


def test_a_phase_aside_ends_with_its_block(tmp_path):
    watchdog = Watchdog(tmp_path, 60)
    watchdog.enter(Phase.COMPUTING, 3)
    with pytest.raises(OSError), watchdog.aside(Phase.RECORDING):
        raise OSError("the disk is full")
    assert watchdog.status().phase is Phase.COMPUTING


def test_a_step_has_a_multiple_of_its_usual_time_and_other_phases_have_long(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("launch.ranks.watchdog.time.monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, 60)

    def step(number, seconds):
        watchdog.enter(Phase.DATA, number)
        assert watchdog.limit() == LONG * 60
        watchdog.enter(Phase.COMPUTING)
        limit = watchdog.limit()
        now[0] += seconds
        watchdog.enter(Phase.COMPUTED)
        watchdog.enter(Phase.VALIDATING)
        return limit

    assert step(1, 600) == LONG * 60, "it compiles"
    assert step(2, 1) == LONG * 60
    assert step(3, 1) == 60, "at least hang_after"
    for number in range(4, 8):
        step(number, 40)
    assert step(8, 40) == USUAL_STEPS * 40
    now[0] += LONG * 60
    watchdog.advance()
    assert watchdog.status().seconds == 0, "a validation is bounded by its passes"


def test_a_step_that_compiles_again_is_no_usual_one():
    """To run what was compiled is no compiling."""
    compiling, running = [], []

    def backend(graph, inputs):
        compiling.append(watchdog_of_a_usual_step().limit())
        return graph.forward

    @torch.compile(backend=backend)
    def twice(x):
        return 2 * look(x)

    @torch._dynamo.disable
    def look(x):
        running.append(watchdog_of_a_usual_step().limit())
        return x

    twice(torch.ones(2))
    assert {*compiling} == {LONG * 60} and running == [60]


def watchdog_of_a_usual_step() -> Watchdog:
    watchdog = Watchdog(Path("of-no-run"), 60)
    watchdog._usual.append(1.0)
    watchdog.enter(Phase.COMPUTING, 3)
    return watchdog
