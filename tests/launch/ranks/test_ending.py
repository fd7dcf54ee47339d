"""How a rank ends: by a failure that is kept before it cleans up, or by a signal that asks for it."""

import os
import signal

import pytest
import torch.distributed as dist

from launch.ranks import ending, stop_request


def test_a_failure_is_kept_before_what_surrounds_it_is_released(tmp_path):
    """An engine's release may hang behind ranks that wait for this one."""
    kept = tmp_path / "error-rank-0.txt"
    seen = []
    with pytest.raises(OSError):
        try:
            with ending.keep_error_of_block(tmp_path, but=(KeyError,)):
                raise OSError("planted")
        finally:
            seen.append(kept.read_text())
    assert "OSError: planted" in seen[0]
    kept.unlink()
    with pytest.raises(KeyError), ending.keep_error_of_block(tmp_path, but=(KeyError,)):
        raise KeyError
    assert not kept.exists()


class Ended(BaseException):
    """In the place of the process's end."""


@pytest.mark.parametrize(
    ("said", "code"), [("", 0), ("Connection reset by peer", 0), ("Timed out waiting 30 s", 1), ("other", 1)]
)
def test_a_rank_that_is_done_fails_for_none_that_left_the_last_barrier_first(said, code, monkeypatch):
    def barrier():
        if said:
            raise RuntimeError(said)

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as ended, ending.clean_exit():
        pass
    assert ended.value.args == (code,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop(tmp_path, number):
    with stop_request.StopRequest(tmp_path / "STOP") as stop:
        assert stop.look() == ""
        os.kill(os.getpid(), number)
        assert stop.look() == signal.Signals(number).name and stop.reason in stop_request.REASONS


def test_the_stop_file_asks_once(tmp_path):
    (tmp_path / "STOP").touch()
    assert stop_request.StopRequest(tmp_path / "STOP").look() == "STOP file"
    assert stop_request.StopRequest(tmp_path / "STOP").look() == ""


def test_a_directory_in_its_place_asks_as_well(tmp_path):
    (tmp_path / "STOP").mkdir()
    assert stop_request.StopRequest(tmp_path / "STOP").look() == "STOP file"
