"""The facts of a run, each defined once: those known beforehand, and those that training reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ds_configs.plan import Plan
from launch.machine import description
from recipes.schema import Recipe

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one optimizer step.

    Attributes:
        loss: mean over the global batch, in nats per token (per predicted token of a BERT, plus its sentence
            loss per sample).
        grad_norm: L2 norm of the whole model's gradient before clipping; None where DeepSpeed computes none.
        loss_scale: in fp16; 1 in other precisions.
        skipped: gradients were not finite, and nothing was updated.
        parts: of the loss, named by `modeling.bert.LOSS_PARTS`.
    """

    loss: float
    lr: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """Means over held-out samples, in the units of `StepOutcome`."""

    loss: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSeconds:
    """How long ranks were busy in a step before others made them wait, in seconds.

    Each rank's time is what it waited for its data plus its forward passes. Backward passes are left out:
    gradients are averaged during them, so that all ranks wait there for the slowest. Within forward passes,
    too, ranks wait for each other where tensors are exchanged: those of a tensor group under tensor
    parallelism, all data-parallel ones under ZeRO-3. There a slow rank shows as a slow group.
    """

    least: float
    median: float
    most: float
    slowest: int  # the rank of `most`


@dataclass(frozen=True)
class SaveOutcome:
    """A checkpoint after `step` optimizer steps, or why there is none.

    Attributes:
        bytes: of all ranks' files.
        blocking_seconds: for which rank 0 could not train.
        seconds: from the beginning to the name of the checkpoint.
        background: whether training went on while rank 0 wrote.
        problem: why there is no checkpoint; None: there is.
    """

    step: int
    bytes: int
    blocking_seconds: Finite
    seconds: Finite
    background: bool
    problem: str | None = None


@dataclass(frozen=True)
class Peaks:
    """The largest peak of memory of any rank, and of what torch reserved on its GPU; None: not known."""

    bytes: int | None = None
    cached_bytes: int | None = None


@dataclass(frozen=True)
class Entropies:
    """The losses of a uniform and a unigram model on the validation text, nats per token."""

    uniform: Finite | None = None
    unigram: Finite | None = None


@dataclass(frozen=True)
class TaskScore:
    """The score of a fine-tuned model on one split.

    Attributes:
        metrics: by name, in shares of 1; none where labels are hidden.
        examples: that were predicted; `broken` ones could not be.
        files: of the submission, in RUN/predictions/SPLIT.
    """

    split: str
    metrics: dict[str, Finite]
    examples: int
    broken: int = 0
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.items()]
        broken = f", {self.broken} broken ones left out" if self.broken else ""
        return f"{', '.join(shown) or 'labels are hidden'} ({self.examples:,} examples{broken})"


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run before its first step.

    Attributes:
        name: the recipe's, table/row as the user names it.
        machine: `description.describe()`.
        original: the recipe before --tiny, --set and --steps; None: as the plan has it.
        data: the corpus' summary.
        band_kernel: what computes banded layers; None: all layers are dense.
    """

    plan: Plan
    name: str
    machine: Mapping[str, Any]
    original: Recipe | None = None
    tiny: bool = False
    emulated_fp16: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)
    entropies: Entropies = Entropies()
    band_kernel: str | None = None

    @property
    def hardware(self) -> str:
        """The machine in one line, with as many accelerators as the layout uses."""
        used = self.machine["accelerators"] and self.plan.layout.world
        return description.summary({**self.machine, "accelerators": used})


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        status: "ok", or what ended it ("interrupted", "OOM", "diverged", "not saved": its last checkpoint
            could not be written); "saving": it is at its last checkpoint.
        reason: of the status, for the result.
        peaks: None: rank 0's own, where the others can no longer be asked.
        sample: what the trained model says.
        task_scores: of a fine-tuned model.
    """

    status: str = "ok"
    reason: str | None = None
    peaks: Peaks | None = None
    sample: str | None = None
    task_scores: tuple[TaskScore, ...] = ()


class SilentRecorder:
    """The recorder of all ranks but 0: keeps nothing. Rank 0 has a `Recorder`, which writes and shows."""

    def __enter__(self) -> SilentRecorder:
        return self

    def __exit__(self, *error: object) -> None: ...

    def say(self, text: str) -> None:
        """One line of text."""

    def mark(self, part: str) -> None:
        """The start of the run has come to the end of this part of it."""

    def step(
        self, step: int, outcome: StepOutcome, seconds: float, waited: float, ranks: RankSeconds | None = None
    ) -> None:
        """A completed optimizer step; `waited` of its `seconds` were spent on the batch."""

    def validation(self, step: int, outcome: Validation, kind: str = "validation") -> None:
        """The loss on held-out text after `step` completed steps; `kind` "test": on the test split."""

    def last_save(self, peaks: Peaks) -> None:
        """The last checkpoint is next; a host that runs out of memory may not survive it."""

    def save(self, saved: SaveOutcome) -> None:
        """A checkpoint, or why there is none."""

    def finish(self, ending: Ending, stopped: str | None = None) -> None:
        """The end; `stopped`: why it came early, in a run that can be resumed."""
