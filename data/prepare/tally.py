"""What went into each step and what came out: counts that chunks add up to."""

from __future__ import annotations

import dataclasses
from typing import Any

_EACH_DOCUMENT = "read repair language sentences tokenize decontaminate signatures"
STEPS = (*_EACH_DOCUMENT.split(), "deduplicate", "write")
BROKEN = "broken: "  # reasons of `read` that begin so count against --max_broken


@dataclasses.dataclass
class Step:
    """Counts; bytes are of UTF-8 text (read: of records), seconds of processor time, over processes."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    changed: int = 0  # documents that the step altered
    seconds: float = 0.0
    dropped: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # reason: [documents, bytes]

    def enter(self, documents: int, size: int) -> None:
        self.documents_in += documents
        self.bytes_in += size

    def leave(self, documents: int, size: int) -> None:
        self.documents_out += documents
        self.bytes_out += size

    def drop(self, reason: str, size: int, documents: int = 1) -> None:
        counts = self.dropped.setdefault(reason, [0, 0])
        counts[0] += documents
        counts[1] += size

    def add(self, other: Step) -> None:
        self.enter(other.documents_in, other.bytes_in)
        self.leave(other.documents_out, other.bytes_out)
        self.changed += other.changed
        self.seconds += other.seconds
        for reason, (documents, size) in other.dropped.items():
            self.drop(reason, size, documents)


class Tally(dict[str, Step]):
    """Steps by name, in the order of STEPS; a step that did not run is absent."""

    def step(self, name: str) -> Step:
        return self.setdefault(name, Step())

    def add(self, other: Tally) -> None:
        for name, step in other.items():
            self.step(name).add(step)

    def json(self) -> dict[str, Any]:
        return {name: dataclasses.asdict(self[name]) for name in STEPS if name in self}

    @property
    def broken(self) -> int:
        """Records that could not be used."""
        dropped = self.step("read").dropped
        return sum(count for reason, (count, _) in dropped.items() if reason.startswith(BROKEN))

    @property
    def records(self) -> int:
        return self.step("read").documents_in
