"""The facts of a run before its start and its reports from training, each defined once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_configs.plan import Plan
from launch.machine import description
from recipes.schema import Recipe

Finite = Annotated[float, Field(allow_inf_nan=False)]
# figures next to a loss, by their keys (`recipes.families.LossFigure`)
Parts = dict[str, Finite | None]
OURS = "megarecipes"  # as model.implementation names it
# status of a run that is trained and saved, but not recorded as a whole
RECORDS_LOST = "records lost"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed optimizer step, as a line of metrics.jsonl holds it.

    The engine reports its figures, the run adds the times, and rank 0's recorder the rates and the memory.
    Figures that are not finite are None.
    """

    step: int
    # What is minimised, a mean over the global batch in nats: per token or example, or of a BERT per masked
    # token, plus its sentence loss per sample.
    loss: Finite | None
    skipped: bool  # gradients were not finite, and no weight changed
    seconds: Finite = 0.0  # wall time, with the wait for the batch
    launch_step: int = 0  # the step's number within its launch, from 1
    peak_memory_bytes: int = 0  # rank 0's so far (`launch.machine.memory.peak_memory`)
    memory_kind: str = ""
    lr: Finite | None = None
    grad_norm: Finite | None = None  # L2, of the whole model before clipping
    loss_scale: Finite | None = None  # in fp16; 1 in other precisions
    data_seconds: Finite = 0.0
    samples: int | None = None  # read so far
    samples_per_s: Finite | None = None  # over all ranks, as the tokens
    tokens_per_s: Finite | None = None
    tflops: Finite | None = None  # per rank
    exact_tflops: Finite | None = None
    # Busy seconds of the ranks, before they wait for each other; None in a run of one rank. A rank's busy
    # time is its wait for data plus its forward passes. Backward passes are left out: gradients are averaged
    # during them, so that all ranks wait for the slowest. Ranks also wait in forward passes that exchange
    # tensors: within a tensor group under tensor parallelism, all data-parallel ranks under ZeRO-3. A slow
    # rank then makes its whole group look slow.
    rank_seconds_min: Finite | None = None
    rank_seconds_median: Finite | None = None
    rank_seconds_max: Finite | None = None
    slowest_rank: int | None = None
    parts: Parts = field(default_factory=dict)
    profiled: bool = False  # torch's profiler made it slower
    time: float = 0.0
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class Corruption:
    """Numbers of one rank that changed by themselves."""

    rank: int
    host: str
    kind: str  # of `launch.checkpoints.engine_state.Buffer`, or "batch"
    # canonical names; where blocks of bits are shared, neighbours too
    tensors: tuple[str, ...]
    # they differ from other ranks' copies, and may have been wrong from the start
    among_copies: bool


@dataclass(frozen=True)
class Validation:
    """Means over held-out samples, in the units of `StepRecord`."""

    loss: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOutcome:
    """A checkpoint after `step` optimizer steps, or a failed one, as a line of metrics.jsonl holds it."""

    step: int
    bytes: int  # of all ranks' files
    blocking_seconds: Finite  # in which rank 0 could not train
    seconds: Finite  # from the beginning until the checkpoint has its final name
    background: bool  # training went on while rank 0 wrote
    problem: str | None = None  # None: the checkpoint is complete
    time: float = 0.0
    kind: Literal["save"] = "save"


@dataclass(frozen=True)
class Judgement:
    """A run at a validation next to the reference curve of its recipe."""

    step: int
    difference: Finite  # `compared` minus what the curve has there, nats
    spread: Finite  # half of the width of the seeds' band there
    # the first step outside of what the curve has; None: the run is as expected
    since: int | None = None
    # "training loss", "gradient norm" or "validation loss", which is outside
    figure: str = ""
    apart: Finite = 0.0  # by so many nats; of a norm the factor
    causes: tuple[str, ...] = ()  # of the measured misuses, the likeliest first
    # or "training loss", at a step of which the curve has no validation
    compared: str = "validation loss"

    def __str__(self) -> str:
        of = f"{self.compared} ".removeprefix("validation loss ")
        numbers = f"({of}{self.difference:+.3f}; seeds ±{self.spread:.2g})"
        if self.since is None:
            return f"as expected {numbers}"
        side = "above" if self.apart > 0 else "below"
        by = f"{abs(self.apart):.2g} {side}"
        if self.figure == "gradient norm":
            by = f"{self.apart:.2g} times"
        likely = ""
        if self.causes:
            likely = f"; likely: {', '.join(self.causes)}"
        since = f"what this recipe gives since step {self.since}"
        outside = f"{self.figure} {by}".removeprefix("validation loss ")
        return f"{outside} {since} {numbers}{likely}"


@dataclass(frozen=True)
class Peaks:
    """The largest peaks of memory, and of memory reserved by torch on a GPU, of any rank; None: unknown."""

    bytes: int | None = None
    cached_bytes: int | None = None


@dataclass(frozen=True)
class Entropies:
    """The losses of a uniform and a unigram model on the validation text, nats per predicted token."""

    uniform: Finite | None = None
    unigram: Finite | None = None

    def same_text(self, other: Entropies) -> bool:
        """Check that both are known to be of one text and split in the tokens of one vocabulary.

        The unigram model's depends on the count of each token. Machines round it differently.
        """
        own = self.unigram
        return own is not None and math.isclose(own, other.unigram or 0, rel_tol=1e-9)


@dataclass(frozen=True)
class TaskScore:
    """The score of a fine-tuned model on one split."""

    split: str
    metrics: dict[str, Finite]  # in shares of 1; none if labels are hidden
    examples: int
    broken: int = 0  # examples that could not be predicted
    files: tuple[str, ...] = ()  # of the submission, in RUN/predictions/SPLIT

    def __str__(self) -> str:
        shown = [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in self.metrics.items()
        ]
        broken = f", {self.broken} broken ones left out" if self.broken else ""
        return f"{', '.join(shown) or 'labels are hidden'} ({self.examples:,} examples{broken})"


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run before its first step."""

    plan: Plan
    name: str  # of the recipe, table/row as the user names it
    # `description.describe()` on rank 0
    machine: Mapping[str, Any] = field(default_factory=dict)
    original: Recipe | None = None  # before --tiny, --set and --steps; None: the plan's
    tiny: bool = False
    emulated_fp16: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)
    entropies: Entropies = Entropies()
    # the kernel of banded layers; None: all layers are dense
    band_kernel: str | None = None
    ds_config: Path | None = None  # the DeepSpeed JSON as it was given
    # their directory, and what was said of them
    initial_weights: Mapping[str, Any] | None = None
    recipe_of: Path | None = None  # the run whose recipe was taken
    # of computing, by rough rates of cores and GPUs; None: not estimated
    seconds: float | None = None

    @property
    def hardware(self) -> str:
        """One line on the machine, with as many accelerators as the layout uses."""
        used = self.machine["accelerators"] and self.plan.layout.world
        return description.summary({**self.machine, "accelerators": used})


@dataclass(frozen=True)
class Ending:
    """The end of a run."""

    # "ok", or the cause of the end ("interrupted", "OOM", "diverged", "corrupted", "not saved": its last
    # checkpoint could not be written), or RECORDS_LOST.
    status: str = "ok"
    reason: str | None = None
    peaks: Peaks | None = None  # of all ranks; None: only rank 0's are known
    sample: str | None = None
    no_sample: str | None = None  # the reason
    task_scores: tuple[TaskScore, ...] = ()


def finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, since JSON has no infinity."""
    if value is not None and math.isfinite(value):
        return value
    return None


class SilentRecorder:
    """The recorder of all ranks but 0, which records nothing. Rank 0 has a `Recorder`."""

    def __enter__(self) -> SilentRecorder:
        return self

    def __exit__(self, *error: object) -> None: ...

    def say(self, text: str) -> None:
        """Take one line of text."""

    def warn(self, text: str) -> None:
        self.say(f"WARNING: {text}")

    def mark(self, part: str) -> None:
        """Mark the end of a part of the start."""

    def step(self, record: StepRecord) -> None:
        """Take a completed optimizer step, with its figures and times."""

    def validation(
        self, step: int, outcome: Validation, kind: str = "validation"
    ) -> None:
        """Take the loss on held-out text after `step` steps; `kind` "test": on the test split."""

    def save(self, saved: SaveOutcome) -> None:
        """Take a checkpoint, or a failed one."""

    @contextlib.contextmanager
    def keeping(self, what: object) -> Iterator[None]:
        """Guard work on the records: on rank 0 its failure ends no training."""
        yield

    def finish(self, ending: Ending, stopped: str | None = None) -> bool:
        """Take the end, and return whether all was recorded.

        `stopped`: the reason for an early stop of a run that can be resumed.
        """
        return True
