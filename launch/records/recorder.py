"""Rank 0's records of a run, on the screen and in files, from its plan to its result."""

from __future__ import annotations

import contextlib
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from torch.utils.tensorboard import SummaryWriter

from launch.console import terminal
from launch.console.numbers import short
from launch.console.progress import Silent, screen
from launch.machine import description
from launch.machine.memory import peak_cached_bytes, peak_memory
from launch.ranks.start_up import StartClock
from launch.records import facts, metrics
from launch.records.directory import RunDirectory
from launch.records.facts import Ending, RankSeconds, RunFacts, SaveOutcome, SilentRecorder, StepOutcome
from launch.records.metrics import StepRecord, ValidationRecord, finite, finite_parts
from launch.records.plan_text import Surroundings, describe_plan
from launch.records.result import Result, make_result, rates, write_result
from launch.records.result_text import result_text
from recipes.problems import counted
from recipes.refused_by_system import problem

ELSEWHERE = "move the run directory to another disk and --resume there"


class Recorder(SilentRecorder):
    """Rank 0's recorder, which writes metrics.jsonl, TensorBoard events and results, and shows them."""

    def __init__(
        self,
        directory: RunDirectory,
        run: RunFacts,
        start_step: int = 0,
        clock: StartClock | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Show the plan, and open the records at `start_step`; records of later steps are dropped.

        `start_step`: steps of the checkpoint to resume; 0: a first start. `clock`: times the start. `stream`:
        shows plan, steps and result; None: nothing is shown.
        """
        self.directory, self._run, self._start_step = directory, run, start_step
        self._clock, self._stream = clock, stream
        self._sizes = run.plan.recipe.batch.schedule
        self._memory_kind, self._step = peak_memory().kind, start_step
        self._drawn: int | None = None  # records in loss.png
        self._show_plan()
        missing = metrics.truncate(directory.metrics_jsonl, start_step)
        # Unbuffered: after a full disk, Python would write the rest of its buffer again at the end.
        self._file = open(directory.metrics_jsonl, "ab", buffering=0)  # noqa: SIM115 (closed by _close)
        self._unwritten = b""  # lines that the disk did not take
        self._lost: OSError | None = None  # the reason
        threading.excepthook = _ignore_event_writer
        folder, purged = str(directory.tensorboard), start_step + 1 if start_step else 0
        self._events = SummaryWriter(folder, purge_step=purged, flush_secs=10)
        steps, samples = run.plan.recipe.steps, self._sizes.samples
        self._screen = screen(stream, start_step, steps, samples) if stream else Silent()
        self._write(metrics.LaunchRecord(start_step, metrics.SpeedSettings.of(run), time.time()))
        for notice in directory.notices:
            self.say(notice)
        if missing:
            lost = f"{directory.metrics_jsonl} has no record of {counted(len(missing), 'step')}"
            fix = "curve and means go without them; restore the file from a copy"
            self.say(f"WARNING: {lost}, the first {missing[0]}, and no checkpoint holds one: {fix}")
        self.mark("records")

    def __exit__(self, *error: object) -> None:
        self._close()
        self.directory.close()

    def say(self, text: str) -> None:
        self._write(metrics.Note(self._step, text, time.time()))
        self._screen.line(text)

    def mark(self, part: str) -> None:
        if self._clock:
            self._clock.mark(part)

    def step(
        self, step: int, outcome: StepOutcome, seconds: float, waited: float, ranks: RankSeconds | None = None
    ) -> None:
        assert step == self._step + 1, f"step {step} follows step {self._step}: the first completed step is 1"
        self._step = step
        compared: dict[str, Any] = vars(ranks) if ranks else {}
        record = StepRecord(
            step=step,
            loss=finite(outcome.loss),
            skipped=bool(outcome.skipped),
            seconds=seconds,
            launch_step=step - self._start_step,
            peak_memory_bytes=peak_memory().bytes,
            memory_kind=self._memory_kind,
            lr=outcome.lr,
            grad_norm=finite(outcome.grad_norm),
            loss_scale=finite(outcome.loss_scale),
            data_seconds=waited,
            samples=self._sizes.samples(step),
            **rates(self._run.plan, seconds, self._sizes.size(step - 1)),
            **compared,
            parts=finite_parts(outcome.parts),
            profiled=step in self._run.plan.recipe.run.profiled,
            time=time.time(),
        )
        self._write(record)
        scale = ("loss_scale",) if self._run.plan.precision == "fp16" else ()
        speed = ("seconds", "data_seconds", "samples_per_s", "tokens_per_s", "tflops", "exact_tflops")
        self._event("train", record, ("loss", *record.parts, "lr", "grad_norm", *scale))
        self._event("speed", record, speed)
        self._event("ranks", record, tuple(compared))
        self._event("memory", record, ("peak_memory_bytes",))
        self._screen.step(step, shown_fields(record, scale=bool(scale)))
        if self._clock and step == self._start_step + 1:
            self._clock.mark("first_step")
            parts: dict[str, Any] = self._clock.parts
            self._write(start := metrics.StartRecord(step, **parts, time=time.time()))
            self._screen.line(str(start))

    def profile(self, found: facts.StepProfile) -> None:
        self._write(metrics.ProfileRecord(**vars(found), step=found.last, time=time.time()))
        for each in found.problems:
            self.say(f"WARNING: no trace of a rank: {each}")

    def validation(self, step: int, outcome: facts.Validation, kind: str = "validation") -> None:
        parts, loss = finite_parts(outcome.parts), finite(outcome.loss)
        record = ValidationRecord(step, loss, parts, time.time(), "test" if kind == "test" else "validation")
        self._write(record)
        self._event(kind, record, ("loss", *parts))
        names = metrics.PART_NAMES
        shown = "".join(f", {names[name]} {value:.4f}" for name, value in outcome.parts.items())
        self._screen.line(f"step {step}: {kind} loss {outcome.loss:.4f}{shown}")

    def last_save(self, peaks: facts.Peaks) -> None:
        """Write curve and result before the last checkpoint."""
        reason = "its last checkpoint was not complete when this was written"
        self._write_result(Ending("saving", reason, peaks))

    def save(self, saved: SaveOutcome) -> None:
        self._write(metrics.SaveRecord(**vars(saved), time=time.time()))
        per_second = saved.bytes / saved.seconds
        for name, value in (("blocking_seconds", saved.blocking_seconds), ("bytes_per_second", per_second)):
            self._scalar(f"save/{name}", value, saved.step)
        if saved.problem:
            self._screen.line(f"WARNING: no checkpoint of step {saved.step}: {saved.problem}")
            return
        rate = f"{short(saved.bytes)}B at {short(per_second)}B/s"
        waited = f"training waited {saved.blocking_seconds:.2g} s"
        self._screen.line(f"step {saved.step}: checkpoint, {rate}; {waited}")

    def finish(self, ending: Ending, stopped: str | None = None) -> None:
        """Write curve and result, and show the result; after an early stop, say how to resume."""
        self._lost = None  # now the records may become whole after all
        self._write_rest()
        self._close()
        result = self._write_result(ending)
        if self._stream is not None:
            width = terminal.columns(self._stream)
            text = [f"\n{result_text(result, width)}"]
            if ending.sample:
                sample = textwrap.indent(ending.sample, "  ")
                text += ["\nsample", terminal.wrapped(sample, width, hang=0)]
            text.append(f"\n{self.directory.path}: result.json, loss.png, metrics.jsonl{self._checkpoints()}")
            if stopped:
                text.append(f"{stopped}; resume with the same command and --resume")
            terminal.say("\n".join(text), self._stream)
        if self._lost and (ending.status == "ok" or stopped):  # else the run has ended badly already
            raise self._lost

    def _show_plan(self) -> None:
        if self._stream is None:
            return
        run, hardware = self._run, description.summary(self._run.machine)
        surroundings = Surroundings(hardware, run.band_kernel, self.directory.path, run.data)
        text = describe_plan(run.plan, run.name, surroundings, terminal.columns(self._stream))
        token = run.plan.recipe.model.predicted
        beat = ", ".join(f"{kind} {nats:.4f}" for kind, nats in vars(run.entropies).items())
        to_beat = f"to beat on the validation text, in nats per {token}: {beat}"
        terminal.say(f"\n{text}\n\n{to_beat}\n", self._stream)

    def _checkpoints(self) -> str:
        if any(self.directory.checkpoints.glob("*/manifest.json")):
            return ", checkpoints/"
        kept = self._run.plan.recipe.run.save_last
        return "" if kept else "; no checkpoint (--set run.save_last=true keeps one)"

    def _write_result(self, ending: Ending) -> Result:
        """Write result.json and loss.png from the records so far."""
        run, records = self._run, metrics.read_metrics(self.directory.metrics_jsonl)
        if ending.peaks is None:
            ending = replace(ending, peaks=facts.Peaks(cached_bytes=peak_cached_bytes()))
        result = make_result(run, records, ending)
        # Before the plot: after a failure of another rank this one is soon ended.
        with self._survive_full_disk(self.directory.result_json):
            write_result(self.directory.result_json, result)
        if self._drawn != len(records):
            references = {kind: nats for kind, nats in vars(run.entropies).items() if nats is not None}
            with self._survive_full_disk(self.directory.loss_png):
                from launch.records.loss_plot import plot_loss  # with matplotlib, which no first step needs

                per = run.plan.recipe.model.predicted
                plot_loss(records, self.directory.loss_png, references, run.name, per)
            self._drawn = len(records)
        return result

    def _close(self) -> None:
        """Close screen and files; a second call does nothing."""
        self._screen.close()
        with contextlib.suppress(OSError):  # events that a full disk does not take
            self._events.close()
        self._file.close()

    def _write(self, record: metrics.Record) -> None:
        """Write one line at once: a killed process loses only the line that it was writing.

        After a full disk the rest is tried again with the next line.
        """
        self._unwritten += metrics.to_line(record).encode()
        self._write_rest()

    def _write_rest(self) -> None:
        with self._survive_full_disk(self.directory.metrics_jsonl):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _event(self, group: str, record: StepRecord | ValidationRecord, names: tuple[str, ...]) -> None:
        for name in names:
            value = record.parts[name] if name in record.parts else getattr(record, name)
            if value is not None:
                self._scalar(f"{group}/{name}", value, record.step)

    def _scalar(self, name: str, value: float, step: int) -> None:
        with self._survive_full_disk(self.directory.tensorboard):
            self._events.add_scalar(name, value, step)

    @contextlib.contextmanager
    def _survive_full_disk(self, path: Path) -> Iterator[None]:
        """Warn once of a disk that does not take the records; only the end of the run fails by it."""
        try:
            yield
        except OSError as error:
            known = self._lost is not None
            self._lost = OSError(error.errno, error.strerror or str(error), error.filename or str(path))
            if not known:
                said = problem(self._lost, path, ELSEWHERE)
                self._screen.line(f"WARNING: {said}; training continues")


def shown_fields(record: StepRecord, *, scale: bool) -> dict[str, str]:
    """Return the numbers of a step for the screen, in their order; `scale`: with the loss scale."""
    loss, masked, norm = record.loss, record.parts.get("mlm_loss"), record.grad_norm
    shown = {
        "skipped": "SKIPPED (overflow)" if record.skipped else "",
        "loss": f"loss {'not finite' if loss is None else f'{loss:.4f}'}",
        "mlm": "" if masked is None else f"mlm {masked:.4f}",
        "lr": f"lr {record.lr:.1e}",
        "norm": f"grad norm {'-' if norm is None else f'{norm:.3g}'}",
        "scale": f"scale {short(record.loss_scale)}" if scale else "",
        "samples": f"{short(record.samples_per_s)} samples/s",
        "tokens": f"{short(record.tokens_per_s)} tokens/s",
        "tflops": f"{record.exact_tflops:.3g} TFLOPS",
    }
    return {name: text for name, text in shown.items() if text}


def _ignore_event_writer(args: threading.ExceptHookArgs) -> None:
    """Ignore the end of the event writer's thread: the next event raises its error again."""
    if not isinstance(args.thread, _AsyncWriterThread):
        threading.__excepthook__(args)
