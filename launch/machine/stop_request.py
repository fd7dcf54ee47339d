"""A request to stop after the current step, by signal or by file."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from launch.machine.ending import AFTER_STOP_REQUEST
from launch.machine.processes import rank


class StopRequest:
    """SIGTERM, SIGINT or the appearance of `stop_file` ask for an orderly stop after the current step."""

    def __init__(self, stop_file: Path) -> None:
        self.reason: str | None = None
        self._stop_file = stop_file
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is not None and self.reason:  # the launcher is ending this rank because another one failed
            setattr(error, AFTER_STOP_REQUEST, True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def agreed(self, group: dist.ProcessGroup) -> str | None:
        """The reason if any rank of `group` was asked to stop: all leave at the same step. Collective."""
        codes = ["", "SIGTERM", "SIGINT", "STOP file"]
        if rank() == 0 and self._stop_file.exists():
            self._stop_file.unlink()  # so that a resumed run does not stop at once
            self.reason = "STOP file"
        flag = torch.tensor(codes.index(self.reason or ""))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return codes[int(flag)] or None
