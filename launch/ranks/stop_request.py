"""A request to stop after the current step, by signal or by file."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from launch.ranks.ending import AFTER_STOP_REQUEST
from launch.ranks.processes import rank

# Launchers act on SIGUSR1, SIGUSR2 and SIGXCPU nowhere. SIGHUP: the terminal is gone.
SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP,
)  # fmt: skip
STOP_FILE = "STOP file"
REASONS = ("", *(number.name for number in SIGNALS), STOP_FILE)  # the last one wins


class StopRequest:
    """A request for an orderly stop after the current step, by signal or by `stop_file`."""

    def __init__(self, stop_file: Path) -> None:
        self.reason = ""  # of REASONS
        self._stop_file = stop_file
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if (
                    number == signal.SIGHUP
                    and signal.getsignal(number) == signal.SIG_IGN
                ):
                    continue  # nohup
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        # the launcher is ending this rank because another one failed
        if error is not None and self.reason:
            setattr(error, AFTER_STOP_REQUEST, True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def look(self) -> str:
        """Return the reason to stop, of REASONS. Rank 0 looks for the file and removes it."""
        # False where a file system does not answer
        if rank() == 0 and os.path.exists(self._stop_file):
            # a directory, or another user's: a resumed run says so
            with contextlib.suppress(OSError):
                self._stop_file.unlink()  # so that a resumed run does not stop at once
            self.reason = STOP_FILE
        return self.reason


@contextlib.contextmanager
def stacks_at_quit(path: Path) -> Iterator[None]:
    """Have SIGQUIT, which ends this process, leave the stacks of all threads in `path`."""
    with open(path, "w") as file:
        faulthandler.register(signal.SIGQUIT, file, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)
    with contextlib.suppress(OSError):
        path.unlink()
