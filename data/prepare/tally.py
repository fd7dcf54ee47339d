"""What went into each step and what came out: counts that chunks add up to."""

from __future__ import annotations

import dataclasses
from typing import Any

_EACH_DOCUMENT = "read repair language sentences tokenize decontaminate signatures"
STEPS = (*_EACH_DOCUMENT.split(), "deduplicate", "write")


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

    def drop(self, reason: str, size: int) -> None:
        counts = self.dropped.setdefault(reason, [0, 0])
        counts[0] += 1
        counts[1] += size

    def add(self, other: Step) -> None:
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out", "changed", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, (documents, size) in other.dropped.items():
            counts = self.dropped.setdefault(reason, [0, 0])
            counts[0] += documents
            counts[1] += size


class Tally(dict[str, Step]):
    """Steps by name, in the order of STEPS; a step that did not run is absent."""

    def step(self, name: str) -> Step:
        assert name in STEPS, name
        return self.setdefault(name, Step())

    def add(self, other: Tally) -> None:
        for name, step in other.items():
            self.step(name).add(step)

    def json(self) -> dict[str, Any]:
        return {name: dataclasses.asdict(self[name]) for name in STEPS if name in self}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        return cls({name: Step(**step) for name, step in values.items()})

    @property
    def broken(self) -> int:
        """Records that could not be used."""
        return sum(count for reason, (count, _) in self.step("read").dropped.items() if is_broken(reason))

    @property
    def records(self) -> int:
        return self.step("read").documents_in


BROKEN = "broken: "  # reasons of `read` that begin so count against --max_broken


def is_broken(reason: str) -> bool:
    return reason.startswith(BROKEN)
