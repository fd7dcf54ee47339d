"""What a run may tell of itself, and the ranks that keep nothing of it."""

from __future__ import annotations

from launch.records.facts import Ending, Peaks, RankSeconds, Saved, StepOutcome, Validation


class Silence:
    """Of the ranks other than 0; `launch.records.recorder.Recorder` writes and shows what it hears."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *error: object) -> None: ...

    def say(self, text: str) -> None:
        """One line of text."""

    def reached(self, part: str) -> None:
        """The start of the run has come to the end of this part of it."""

    def step(
        self, step: int, outcome: StepOutcome, seconds: float, waited: float, ranks: RankSeconds | None = None
    ) -> None:
        """A completed optimizer step; `waited` of its `seconds` were spent on the batch."""

    def validation(self, step: int, outcome: Validation, kind: str = "validation") -> None:
        """The loss on held-out text after `step` completed steps; `kind` "test": on the test split."""

    def saving(self, peaks: Peaks) -> None:
        """The last checkpoint is next, which a host may not survive."""

    def saved(self, saved: Saved) -> None:
        """A checkpoint, or why there is none."""

    def finish(self, ending: Ending, stopped: str | None = None) -> None:
        """The end; `stopped`: why it came early, in a run that can be resumed."""
