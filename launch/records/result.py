"""The result of a run (`result.json`): measured and published quantities, and every deviation.

`launch/records/result_text.py` prints it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from data.durable_files import write_atomically
from ds_configs.plan import Plan
from launch.console.text_table import duration, gigabytes, number
from launch.records import metrics
from launch.records.deviations import (
    Deviation,
    Incomparable,
    deviations,
    not_comparable,
)
from launch.records.facts import (
    OURS,
    Ending,
    Entropies,
    Finite,
    Judgement,
    Parts,
    Peaks,
    RunFacts,
    StepRecord,
    TaskScore,
)
from launch.records.metrics import Records, rates
from launch.records.titles import title_of
from modeling import cost
from recipes import files
from recipes.families import MINIMISED, LossFigure
from recipes.layout import Layout
from recipes.problems import counted
from recipes.schema import Branch, Published

# TFLOPS definition of a source -> (unit, field of the measured number by the same definition).
TFLOPS_BY: dict[str, tuple[str, Literal["tflops", "exact_tflops"]]] = {
    "formula": ("TFLOPS per GPU, formula", "tflops"),
    "exact": ("TFLOPS per GPU, exact count", "exact_tflops"),
}
NOT_RECORDED = "what was not recorded"
UNNAMED = LossFigure(MINIMISED, "loss", "nats")  # of an older result without its recipe
# Steps of a launch left out of its throughput: allocation, compilation and caches make them slower.
WARMUP_STEPS = 5
LEAST_OF_QUARTILES = 8  # steps
# the final training loss is a mean over this many steps: one batch alone is noise
LAST_STEPS = 10


@dataclass(frozen=True)
class TrainingLoss:
    """The mean over the last `steps` steps; None: no step, or a loss was not finite."""

    loss: Finite | None = None
    parts: Parts | None = None
    steps: int = 0


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out text after `step` steps; None: not finite."""

    loss: Finite | None = None
    parts: Parts | None = None
    step: int | None = None
    judgement: Judgement | None = None


@dataclass(frozen=True)
class Losses:
    """The final losses; None: the split was not read."""

    training: TrainingLoss = TrainingLoss()
    validation: HeldOutLoss | None = None
    test: HeldOutLoss | None = None


@dataclass(frozen=True)
class Speed:
    """Rates at the median time per step, over all ranks; TFLOPS per rank. None: no step was made."""

    seconds_per_step: Finite | None = None  # the median of `steps` steps
    steps: int = 0
    left_out: int = 0  # first steps of each launch
    # half of the steps lie between them; None: too few
    quartiles_s: tuple[Finite, Finite] | None = None
    data_wait_share: Finite | None = None  # of the time of steps, 0 to 1
    samples_per_s: Finite | None = None
    tokens_per_s: Finite | None = None
    tflops: Finite | None = None
    exact_tflops: Finite | None = None

    @property
    def measured_over(self) -> str:
        """The steps behind the median, in words."""
        half = ""
        if self.quartiles_s:
            low, high = map(number, self.quartiles_s)
            half = f", half of them {low} to {high} s"
        left_out = (
            f", the first {self.left_out} of each launch left out"
            if self.left_out
            else ""
        )
        return f"median of {counted(self.steps, 'step')}{half}{left_out}"

    def spread_of(self, rate: float | None) -> tuple[float, float] | None:
        """Return between which values of a rate half of the steps lie; None: too few steps."""
        if rate is None or self.quartiles_s is None or not self.seconds_per_step:
            return None
        quick, slow = self.quartiles_s
        return rate * self.seconds_per_step / slow, rate * self.seconds_per_step / quick


@dataclass(frozen=True)
class MemoryUse:
    """The largest memory use of any rank; `kind`: of the peak's memory; `cached_bytes`: reserved on GPUs."""

    peak_bytes: int | None = None
    kind: str | None = None
    cached_bytes: int | None = None


@dataclass(frozen=True)
class ComparedQuantity:
    """A published quantity, the measured one (None: missing) and the ratio measured / published.

    The ratio is None if one is missing or the run cannot be compared with the row.
    """

    quantity: str
    unit: str
    published: bool | int | float | None
    measured: bool | int | float | None
    ratio: Finite | None = None


@dataclass(frozen=True)
class Result:
    """One row of a results table."""

    recipe: str  # table/row as the user names it
    status: str  # as in `Ending`, like reason, sample and task_scores
    title: str = ""
    tiny: bool = False
    # source of modules and loop: ours, or "transformers" with its version
    implementation: str | None = None
    reason: str | None = None
    ds_config: str | None = None
    layout: Layout | None = None
    precision: str | None = None
    emulated_fp16: bool = False  # fp16 on a CPU, whose speed means nothing
    zero_stage: int | None = None
    offload: str | None = None
    activation_checkpointing: str | int | None = None
    sequence_parallel: bool = False
    parameters: int | None = None
    # as Megatron-LM prints it: duplicates and padding too
    parameters_summed_over_tp_ranks: int | None = None
    steps: int = 0  # including `skipped_steps` that the loss scaler skipped
    skipped_steps: int = 0
    # read by the run's own steps, and the seconds of these steps; None: an older result
    tokens: int | None = None
    seconds: Finite | None = None
    losses: Losses = Losses()
    entropies: Entropies = Entropies()
    speed: Speed = Speed()
    memory: MemoryUse = MemoryUse()
    hardware: str | None = None
    deviations: tuple[Deviation, ...] = ()
    # the reason for no ratios; None also if nothing was published
    not_comparable: Incomparable | None = None
    comparison: tuple[ComparedQuantity, ...] = ()
    published_source: str | None = None
    banded_attention_kernel: str | None = None  # None: all layers are dense
    sample: str | None = None
    start: metrics.StartRecord | None = None  # of the last launch with a step
    task_scores: tuple[TaskScore, ...] = ()
    # names and units of the losses and their parts, that of predicted tokens or examples first
    figures: tuple[LossFigure, ...] = (UNNAMED,)
    # the run that it goes on from; None: it began by itself
    branch: Branch | None = None
    version: Literal[2] = 2

    @property
    def way(self) -> str:
        """The layout, ZeRO stage, offload and precision in words."""
        degrees = "layout not recorded"
        if self.layout:
            degrees = self.layout.degrees(self.sequence_parallel)
        sharding = f"ZeRO-{self.zero_stage}, offload {self.offload}"
        return f"{degrees}, {sharding}, {self.precision_text}"

    @property
    def judgement(self) -> Judgement | None:
        """The run at its last validation next to the reference curve of its recipe; None: it has none."""
        held_out = self.losses.validation
        return held_out.judgement if held_out else None

    def told(self, split: str, figure: LossFigure) -> float | None:
        """Return a figure of a split; None: not finite, or the run does not have it."""
        losses = getattr(self.losses, split)
        return figure.of(losses) if losses and figure in self.figures else None

    @property
    def amount(self) -> str:
        """The tokens of the run's own steps and their time in words; "" for an older result."""
        if self.tokens is None or self.seconds is None:
            return ""
        return f"{self.tokens:,} tokens in {duration(self.seconds)}"

    @property
    def precision_text(self) -> str | None:
        """The precision, with a remark if it was emulated."""
        return f"{self.precision} (emulated)" if self.emulated_fp16 else self.precision


_ADAPTER = TypeAdapter(Result)


def make_result(run: RunFacts, records: Records, ending: Ending) -> Result:
    """Make the result of a run from its records and end. The reason of a failure is its first deviation."""
    plan = run.plan
    recipe = run.plan.recipe
    steps = records.steps
    last = steps[-1].step if steps else 0
    *others, measured_over = metrics.stretches(records) or [metrics.Stretch(None, ())]
    # A finished run may be resumed with other settings, without a further step.
    how = metrics.SpeedSettings.of(run)
    version = (
        "" if how.implementation == OURS else f" {metadata.version(how.implementation)}"
    )
    elsewhere = bool(measured_over.how) and measured_over.how != how
    recorded = [record.peak_memory_bytes for record in measured_over.steps]
    peaks = ending.peaks or Peaks()
    peak = max(recorded if elsewhere else [peaks.bytes or 0, *recorded])
    stated = deviations(run, last)
    if ending.reason:
        stated.insert(0, Deviation("status", ending.status, is_=ending.reason))
    for each in others:
        used = str(each.how or NOT_RECORDED)
        stated.append(Deviation("otherwise", str(each), is_=used))
    if elsewhere:
        used = str(measured_over.how)
        stated.append(Deviation("measured", str(measured_over), is_=used))
    other = not_comparable(
        run.original or recipe, plan, tiny=run.tiny, emulated_fp16=run.emulated_fp16
    )
    samples = recipe.sizes.samples(last) - recipe.sizes.samples(recipe.begins_after)
    tp = plan.layout.tp
    per_rank = cost.parameters_per_rank(
        recipe.model, recipe.positions, plan.padded_vocab, tp
    )
    measured = Result(
        recipe=run.name,
        status=ending.status,
        title=title_of(recipe),
        tiny=run.tiny,
        reason=ending.reason,
        emulated_fp16=run.emulated_fp16 and plan.precision == "fp16",
        parameters=cost.parameters(recipe.model, recipe.positions),
        parameters_summed_over_tp_ranks=tp * per_rank,
        steps=last,
        skipped_steps=sum(record.skipped for record in steps),
        tokens=max(0, samples) * recipe.model.sequences * recipe.sequence_length,
        seconds=math.fsum(record.seconds for record in records.own_steps),
        losses=Losses(
            _training_loss(records.own_steps),
            _last(records.validations),
            _last(records.tests),
        ),
        entropies=run.entropies,
        speed=_speed(plan, measured_over.steps, elsewhere),
        memory=MemoryUse(
            peak or None, steps[-1].memory_kind if steps else None, peaks.cached_bytes
        ),
        deviations=tuple(stated),
        not_comparable=other if recipe.published else None,
        published_source=recipe.published.source if recipe.published else None,
        banded_attention_kernel=run.band_kernel,
        sample=ending.sample,
        start=records.starts[-1] if records.starts else None,
        task_scores=ending.task_scores,
        figures=recipe.model.figures,
        branch=recipe.branch,
        **{**vars(how), "implementation": how.implementation + version},
    )
    comparable = not other and not elsewhere
    return replace(
        measured,
        comparison=compare_with(recipe.published, measured, comparable=comparable),
    )


def compare_with(
    published: Published | None, result: Result, *, comparable: bool
) -> tuple[ComparedQuantity, ...]:
    """Return every published quantity next to the measured one; ratios only if `comparable`."""
    if published is None:
        return ()
    unit, key = TFLOPS_BY[published.tflops_by]
    measured: dict[str, tuple[str, bool | int | float | None]] = {
        "time_per_iteration_s": ("s", result.speed.seconds_per_step),
        "samples_per_s": ("samples/s", result.speed.samples_per_s),
        "tflops": (unit, getattr(result.speed, key)),
        "cached_gb": ("GB per GPU", gigabytes(result.memory.cached_bytes)),
        "parameters": (
            "summed over tensor-parallel ranks",
            result.parameters_summed_over_tp_ranks,
        ),
        "oom": ("", result.status == "OOM"),
    }
    compared = []
    for quantity, (unit, value) in measured.items():
        printed = getattr(published, quantity)
        ratio = None
        known = None not in (printed, value)
        if comparable and known and quantity != "oom":
            ratio = value / printed
        compared.append(ComparedQuantity(quantity, unit, printed, value, ratio))
    return tuple(compared)


def _training_loss(steps: Sequence[StepRecord]) -> TrainingLoss:
    last = steps[-LAST_STEPS:]
    if not last:
        return TrainingLoss()
    parts = {}
    for name in last[-1].parts:
        parts[name] = _mean([record.parts.get(name) for record in last])
    return TrainingLoss(_mean([record.loss for record in last]), parts, len(last))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is None, since it was not finite: no mean hides that."""
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return math.fsum(known) / len(known)
    return None


def _last(records: Sequence[metrics.ValidationRecord]) -> HeldOutLoss | None:
    if not records:
        return None
    last = records[-1]
    return HeldOutLoss(last.loss, last.parts, last.step, last.judgement)


def steady_seconds(
    steps: Sequence[StepRecord],
) -> tuple[float, int, int, tuple[float, float] | None] | None:
    """Return the first fields of `Speed`, of the steps after each launch's first; None without a step.

    Profiled steps do not count. A run that is too short for WARMUP_STEPS leaves out its first step only.
    """
    for left_out in (WARMUP_STEPS, 1, 0):
        late = (record for record in steps if record.launch_step > left_out)
        steady = [record.seconds for record in late if not record.profiled]
        quartiles = None
        if len(steady) >= LEAST_OF_QUARTILES:
            low, _, high = statistics.quantiles(steady, method="inclusive")
            quartiles = (low, high)
        if steady:
            return statistics.median(steady), len(steady), left_out, quartiles
    return None


def _speed(plan: Plan, steps: Sequence[StepRecord], elsewhere: bool) -> Speed:
    """Return the rates of steps like the last; `elsewhere`: they had other settings, use their own rates."""
    sizes = [plan.recipe.sizes.size(record.step - 1) for record in steps]
    steps = [
        record for record, size in zip(steps, sizes, strict=True) if size == sizes[-1]
    ]
    steady = steady_seconds(steps)
    if steady is None:
        return Speed()
    speeds = rates(plan, steady[0], sizes[-1])
    if elsewhere:
        share = steps[-1].seconds / steady[0]
        for name in speeds:
            own = getattr(steps[-1], name)
            speeds[name] = None if own is None else own * share
    steps = [record for record in steps if not record.profiled]
    late = [record for record in steps if record.launch_step > WARMUP_STEPS] or steps
    total = math.fsum(record.seconds for record in late)
    waited = (
        math.fsum(record.data_seconds for record in late) / total if total else None
    )
    return Speed(*steady, waited, **speeds)


def write_result(path: Path, result: Result) -> None:
    """Write result.json, whole or not at all."""
    values = _ADAPTER.dump_python(result, mode="json", by_alias=True)
    ordered = {"version": values.pop("version"), **values}
    write_atomically(
        path, json.dumps(ordered, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    )


def read_result(path: Path) -> Result:
    """Read a result.json. Raises FileError with the first wrong field."""
    values = files.read_json_object(path)
    if "version" not in values:
        files.refuse(
            path, "says no version", "results of earlier versions are not read"
        )
    return files.checked(_ADAPTER, values, path)
