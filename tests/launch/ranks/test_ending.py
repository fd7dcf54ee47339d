"""How a rank ends: by a failure that is kept before it cleans up, or by a signal that asks for it."""

import errno
import os
import resource
import signal
import threading
import time

import pytest
import torch.distributed as dist

from launch.ranks import ending
from launch.training import early_ends


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


ASKING = "SIGTERM SIGINT SIGUSR1 SIGUSR2 SIGXCPU SIGHUP"


@pytest.mark.parametrize("number", [getattr(signal, name) for name in ASKING.split()])
def test_a_signal_asks_for_a_stop(tmp_path, number):
    with early_ends.StopRequest(tmp_path / "STOP") as stop:
        assert stop.look() == ""
        os.kill(os.getpid(), number)
        assert stop.look() == signal.Signals(number).name and stop.reason in early_ends.REASONS


def test_a_signal_after_an_error_does_not_end_a_rank_before_its_results(tmp_path):
    """A launcher sends it to rank 0, which has lost another rank and writes why."""
    before = signal.getsignal(signal.SIGTERM)
    error = RuntimeError("Connection closed by peer")
    try:
        with pytest.raises(RuntimeError), early_ends.StopRequest(tmp_path / "STOP"):
            raise error
        os.kill(os.getpid(), signal.SIGTERM)
        assert getattr(error, ending.STOP_REQUEST).reason == "SIGTERM"
    finally:
        for name in ASKING.split():
            signal.signal(getattr(signal, name), before if name != "SIGINT" else signal.default_int_handler)


def test_nohup_is_heard(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with early_ends.StopRequest(tmp_path / "STOP") as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.look() == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_file_system_that_does_not_answer_asks_for_nothing(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "stat", stale)
    assert early_ends.StopRequest(tmp_path / "STOP").look() == ""


@pytest.mark.parametrize("quits", [True, False])
def test_a_rank_that_quits_leaves_the_stacks_of_all_threads(tmp_path, quits):
    """Also one that hangs in a call of the system; one that ends leaves no file."""
    left = tmp_path / "stacks-rank-0.txt"
    if (child := os.fork()) == 0:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background job begins by ignoring it
        with early_ends.stacks_at_quit(left):
            if quits:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.kill(os.getpid(), signal.SIGQUIT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGQUIT if quits else 0)
    assert left.exists() == quits
    if quits:
        assert left.read_text().count("hread 0x") == 2 and "test_a_rank_that_quits" in left.read_text()


def test_a_rank_that_fails_leaves_no_empty_file_of_stacks(tmp_path):
    left = tmp_path / "stacks-rank-0.txt"
    with pytest.raises(RuntimeError), early_ends.stacks_at_quit(left):
        raise RuntimeError
    assert not left.exists()


def test_the_stop_file_asks_once(tmp_path):
    (tmp_path / "STOP").touch()
    assert early_ends.StopRequest(tmp_path / "STOP").look() == "STOP file"
    assert early_ends.StopRequest(tmp_path / "STOP").look() == ""


def test_a_directory_in_its_place_asks_as_well(tmp_path):
    (tmp_path / "STOP").mkdir()
    assert early_ends.StopRequest(tmp_path / "STOP").look() == "STOP file"


def test_torchrun_ends_its_own_traceback_with_the_first_line_of_a_refusal(tmp_path, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    ending.explain("batch.micro=3 is refused: no\nsecond line")
    assert "second line" in capsys.readouterr().err
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=2, error_file=str(file))
    last = str(ChildFailedError("pretrain.py", {0: failure})).splitlines()[-2:]
    assert last[0].strip() == "traceback : batch.micro=3 is refused: no", last


def test_without_torchrun_nothing_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    ending.explain("no")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_nothing_ends_says_its_refusal_itself(monkeypatch, capsys):
    """Its launcher ends it, once another rank has said it and ended, unless that one is slow to begin."""
    waited = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(SystemExit) as ended:
        ending.refuse("MASTER_PORT='0': a launcher sets a whole number")
    assert ended.value.code == 2 and sum(waited) > 2
    assert "MASTER_PORT='0'" in capsys.readouterr().err
