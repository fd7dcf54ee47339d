"""GPT samples of a stream: windows of a fixed length over the documents of a lane."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from data.samples.fields import too_short
from data.samples.lanes import Lane, LanePlace, LaneReader, refuse_state
from recipes.problems import counted


class GptLane(Lane):
    """Windows of T + 1 tokens over the lane's documents; each begins with the last label of the one before.

    A rest shorter than a window is left out at the end of an epoch, as at the end of a store.
    """

    def __init__(self, reader: LaneReader, sequence_length: int):
        self._length = sequence_length
        super().__init__(reader)

    def take(self, item: int, seed: int) -> np.ndarray:
        """Return the next window (T + 1,) int64, without use of the seed."""
        self._fill()
        parts = []
        start = self._offset
        for _, ids in self._pending:
            parts.append(ids[max(start, 0) : max(start + self._length + 1, 0)])
            start -= ids.size
        self._use()
        return np.concatenate(parts).astype(np.int64)

    def skip(self) -> None:
        self._fill()
        self._use()

    def state(self) -> dict[str, Any]:
        place = self._pending[0][0] if self._pending else self._place
        return {**place.state(), "token_offset": self._offset}

    def restore(self, state: dict[str, Any]) -> None:
        size = len(self._resume(state))
        if state["token_offset"] >= max(size, 1):
            refuse_state(
                self.reader.source,
                state,
                f"the document there has {counted(size, 'token')}",
            )
        self._offset = state["token_offset"]
        self._fruitful = self._offset > 0

    def _open(self, place: LanePlace) -> None:
        super()._open(place)
        self._offset = 0  # tokens used of the first pending document
        # documents not wholly used
        self._pending: deque[tuple[LanePlace, np.ndarray]] = deque()
        self._buffered = 0  # tokens in `_pending`, those before the offset included

    def _fill(self) -> None:
        while self._buffered < self._offset + self._length + 1:
            encoded = next(self._encoded, None)
            if encoded is None:
                self._open_next_epoch("have ", *too_short(self._buffered, self._length))
                continue
            document, ids = encoded
            self._pending.append((document.place, ids))
            self._buffered += ids.size

    def _use(self) -> None:
        self._fruitful = True
        self._offset += self._length
        while self._pending and self._offset >= self._pending[0][1].size:
            used = self._pending.popleft()[1].size
            self._offset -= used
            self._buffered -= used
