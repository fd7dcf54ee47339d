"""Rank 0's records of a run, on the screen and in files, from its plan to its result."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from torch.utils.tensorboard import SummaryWriter

from launch.console import terminal
from launch.console.progress import Silent, screen
from launch.console.text_table import flops, short
from launch.machine import description
from launch.machine.memory import peak_cached_bytes, peak_memory
from launch.ranks.joining import StartClock
from launch.records import facts, metrics
from launch.records.directory import RunDirectory
from launch.records.facts import (
    Ending,
    RunFacts,
    SaveOutcome,
    SilentRecorder,
    StepRecord,
    finite,
)
from launch.records.metrics import ValidationRecord, rates
from launch.records.plan_text import NO_CURVE, Surroundings, describe_plan
from recipes.families import LossFigure
from recipes.problems import amount, counted, system_error, system_problem, visible

if TYPE_CHECKING:
    from launch.records.curves import ReferenceWatch
    from launch.records.result import Result

RANK_TIMES = (
    "rank_seconds_min",
    "rank_seconds_median",
    "rank_seconds_max",
    "slowest_rank",
)
SPEEDS = (
    "seconds",
    "data_seconds",
    "samples_per_s",
    "tokens_per_s",
    "tflops",
    "exact_tflops",
)
ELSEWHERE = "move the run directory to another disk and --resume there"
AGAIN = (
    "once that is mended, the same command with --resume writes curve and result again"
)


class Recorder(SilentRecorder):
    """Rank 0's recorder, which writes metrics.jsonl, TensorBoard events and results, and shows them.

    No failure of it ends the training: it warns, and `finish` returns that not all was recorded.
    """

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
        self.directory = directory
        self._run = run
        self._start_step = start_step
        self._clock = clock
        self._stream = stream
        self._recipe = recipe = run.plan.recipe
        self._figures = recipe.model.figures
        self._memory_kind = peak_memory().kind
        self._step = start_step
        problems: list[str] = []
        self._missing: list[int] = []
        if start_step or directory.metrics_jsonl.exists():
            self._missing = metrics.truncate(
                directory.metrics_jsonl, start_step, problems, recipe.begins_after
            )
        if self._missing:
            problems.append(_lacking(directory.metrics_jsonl, self._missing))
        watch = directory.watch(run)
        self._watch = watch if watch and not watch.why_not else None
        self._show_plan(watch)
        # Unbuffered: after a full disk, Python would write the rest of its buffer again at the end.
        self._file = open(directory.metrics_jsonl, "ab", buffering=0)  # noqa: SIM115 (closed by _close)
        # leads to the file, wherever it is moved
        self._link = Path(f"/proc/self/fd/{self._file.fileno()}")
        self._place = os.readlink(self._link)
        self._unwritten = b""  # lines that the disk did not take
        self._lost: dict[str, str] = {}  # what is not whole -> the reason and the fix
        threading.excepthook = _ignore_event_writer
        folder = str(directory.tensorboard)
        purged = start_step + 1 if start_step else 0
        self._events = SummaryWriter(folder, purge_step=purged, flush_secs=10)
        self._screen: Silent = Silent()
        if stream:
            self._screen = screen(
                stream, start_step, recipe.steps, recipe.sizes.samples
            )
        self._write(
            metrics.LaunchRecord(start_step, metrics.SpeedSettings.of(run), time.time())
        )
        for notice in directory.notices:
            self.say(notice)
        for each in problems:
            self.warn(each)
        self.mark("records")

    def __exit__(self, *error: object) -> None:
        self._close()
        self.directory.close()

    @contextlib.contextmanager
    def keeping(self, what: object) -> Iterator[None]:
        """Warn where the block fails, the first time for each `what`."""
        try:
            yield
        except Exception as error:
            self._lose(what, _failure(what, error))

    def _lose(self, what: object, said: str) -> None:
        """Note that `what` is not whole, and warn of it the first time."""
        if str(what) in self._lost:
            return
        self._lost[str(what)] = said
        with contextlib.suppress(Exception):  # the screen may be what fails
            said = f"WARNING: {said}; training continues"
            self._screen.line(said, terminal.YELLOW)

    def say(self, text: str, colour: int | None = None) -> None:
        with self.keeping("the record of a say"):
            self._write(metrics.Note(self._step, text, time.time()))
            self._screen.line(text, colour)

    def warn(self, text: str) -> None:
        self.say(f"WARNING: {text}", terminal.YELLOW)

    def mark(self, part: str) -> None:
        with self.keeping("the record of a mark"):
            if self._clock:
                self._clock.mark(part)

    def step(self, record: StepRecord) -> None:
        with self.keeping("the record of a step"):
            step = record.step
            assert step == self._step + 1, (
                f"step {step} follows step {self._step}: the first completed step is 1"
            )
            self._step = step
            sizes = self._recipe.sizes
            record = replace(
                record,
                launch_step=step - self._start_step,
                peak_memory_bytes=peak_memory().bytes,
                memory_kind=self._memory_kind,
                samples=sizes.samples(step),
                **rates(self._run.plan, record.seconds, sizes.size(step - 1)),
                profiled=step in self._recipe.run.profiled,
                time=time.time(),
            )
            self._write(record)
            if self._watch:
                self._watch.figures.step(record)
            scale = ("loss_scale",) if self._run.plan.precision == "fp16" else ()
            self._event(
                "train", record, "loss", *record.parts, "lr", "grad_norm", *scale
            )
            self._event("speed", record, *SPEEDS)
            self._event("ranks", record, *RANK_TIMES)
            self._event("memory", record, "peak_memory_bytes")
            self._screen.step(
                step, shown_fields(record, self._figures, scale=bool(scale))
            )
            if self._clock and step == self._start_step + 1:
                self._clock.mark("first_step")
                parts: dict[str, Any] = self._clock.parts
                start = metrics.StartRecord(step, **parts, time=time.time())
                self._write(start)
                self._screen.line(str(start))

    def validation(
        self, step: int, outcome: facts.Validation, kind: str = "validation"
    ) -> None:
        with self.keeping("the record of a validation"):
            parts = {name: finite(value) for name, value in outcome.parts.items()}
            record = ValidationRecord(
                step,
                finite(outcome.loss),
                parts,
                time.time(),
                "test" if kind == "test" else "validation",
            )
            self._event(kind, record, "loss", *parts)
            shown = ", ".join(shown_figures(record, self._figures).values())
            colour = terminal.BOLD
            if self._watch and kind == "validation":
                judged = self._watch.judge(record)
                record = replace(record, judgement=judged)
                if judged:
                    shown += f", {judged}"
                    if judged.since is not None:
                        colour = terminal.YELLOW
            self._write(record)
            self._screen.line(f"step {step}: {kind} {shown}", colour)

    def save(self, saved: SaveOutcome) -> None:
        with self.keeping("the record of a save"):
            self._follow()
            self._write(replace(saved, time=time.time()))
            per_second = saved.bytes / saved.seconds
            self._scalar("save/blocking_seconds", saved.blocking_seconds, saved.step)
            self._scalar("save/bytes_per_second", per_second, saved.step)
            if saved.problem:
                lost = f"WARNING: no checkpoint of step {saved.step}: {saved.problem}"
                self._screen.line(lost, terminal.YELLOW)
                return
            rate = f"{amount(saved.bytes)} at {amount(per_second)}/s"
            waited = f"training waited {saved.blocking_seconds:.2g} s"
            self._screen.line(f"step {saved.step}: checkpoint, {rate}; {waited}")

    def finish(self, ending: Ending, stopped: str | None = None) -> bool:
        """Write curve and result, and show the result; after an early stop, say how to resume.

        Return whether all was recorded.
        """
        # it may become whole after all
        self._lost.pop(str(self.directory.metrics_jsonl), None)
        self._write_rest()
        self._close_screen()
        records = metrics.Records()
        with self.keeping(self.directory.metrics_jsonl):
            self._follow()
            records = self._read_records()
        with self.keeping("the peak of memory"):
            peaks = ending.peaks or facts.Peaks(cached_bytes=peak_cached_bytes())
            ending = replace(ending, peaks=peaks)
        # Before the plot: after a failure of another rank this one is soon ended.
        result = self._write_result(ending, records)
        if result:
            self._draw(records, result)
        self._close()
        if self._lost and ending.status == "ok":
            ending = replace(
                ending, status=facts.RECORDS_LOST, reason=", ".join(self._lost)
            )
            result = self._write_result(ending, records)
        with self.keeping("the screen"):
            self._show_end(ending, result, stopped)
        return not self._lost

    def _show_end(
        self, ending: Ending, result: Result | None, stopped: str | None
    ) -> None:
        if self._stream is None:
            return
        from launch.records.result_text import result_text

        width = terminal.columns(self._stream)
        text = []
        if result:
            loss, _, rest = result_text(result, width).partition("\n")
            terminal.say(f"\n{loss}", self._stream, terminal.BOLD)
            text.append(rest)
        written = ending.sample or ending.no_sample
        if written:
            # a young model writes many empty lines; result.json has them all
            sample = re.sub(r"\n{3,}", "\n\n", visible(written))
            sample = textwrap.indent(sample, "  ")
            text += ["\nsample", terminal.wrapped(sample, width, hang=0)]
        text.append(
            f"\n{self.directory.path}: result.json, loss.png, card.png, metrics.jsonl{self._checkpoints()}"
        )
        if stopped:
            text.append(f"{stopped}; resume with the same command and --resume")
        terminal.say("\n".join(text), self._stream)
        if self._lost:
            lost = "\n".join(self._lost.values())
            said = f"not all was recorded, which changes no weight:\n{lost}"
            terminal.warn(said, self._stream)

    def _follow(self) -> None:
        """Follow a run directory that was renamed, and say where its checkpoints go."""
        place = os.readlink(self._link)
        before = self.directory
        if place == self._place and os.path.exists(place):
            return
        self._place = place
        if not os.path.exists(place) or Path(place).name != before.metrics_jsonl.name:
            gone = f"{before.metrics_jsonl} was removed or renamed while the run trains"
            fix = "curve and result are written all the same; restore it from a copy"
            self._lose(before.metrics_jsonl, f"{gone}: {fix}")
            return
        now = replace(before, path=Path(place).parent)
        self.directory = now
        came = f"{before.path} was renamed while the run trains: its records are in {now.path}"
        fix = f"move {before.checkpoints}/* to {now.checkpoints}, and --resume with --out {now.path}"
        self._lose(
            before.path, f"{came}, later checkpoints in {before.checkpoints}; {fix}"
        )

    def _show_plan(self, watch: ReferenceWatch | None) -> None:
        if self._stream is None:
            return
        run = self._run
        surroundings = Surroundings(
            description.summary(run.machine),
            run.band_kernel,
            self.directory.path,
            run.data,
            recipe_of=run.recipe_of,
            seconds=run.seconds,
            reference=watch or NO_CURVE,
        )
        width = terminal.columns(self._stream)
        text = describe_plan(run.plan, run.name, surroundings, width)
        terminal.say(f"\n{text}\n", self._stream)
        if self._watch:
            return
        beat = ", ".join(
            f"{kind} {nats:.4f}" for kind, nats in vars(run.entropies).items()
        )
        to_beat = f"to beat on the validation text by the {self._figures[0]}: {beat}"
        terminal.say(f"{to_beat}\n", self._stream)

    def _checkpoints(self) -> str:
        if any(self.directory.checkpoints.glob("*/manifest.json")):
            return ", checkpoints/"
        if self._recipe.run.save_last:
            return ""
        return "; no checkpoint (--set run.save_last=true keeps one)"

    def _read_records(self) -> metrics.Records:
        """Read the records so far; those that are broken or missing are lost."""
        place = self.directory.metrics_jsonl
        problems: list[str] = []
        source = place if os.path.exists(place) else self._link
        records = metrics.read_metrics(source, problems)
        lacking = metrics.missing(records.steps, self._step, self._recipe.begins_after)
        missing = {*lacking} - {*self._missing}
        if missing:
            problems.append(_lacking(place, sorted(missing)))
        if problems:
            self._lose(place, "\n".join(problems))
        return records

    def _write_result(self, ending: Ending, records: metrics.Records) -> Result | None:
        """Write result.json; return the result, or None where none can be made."""
        result = None
        # with deviations, which only the end needs
        from launch.records.result import make_result, write_result

        with self.keeping(self.directory.result_json):
            result = make_result(self._run, records, ending)
            write_result(self.directory.result_json, result)
        return result

    def _draw(self, records: metrics.Records, result: Result) -> None:
        """Draw loss.png and card.png."""
        # a notebook's, which fails outside of it, and nothing is shown
        os.environ.pop("MPLBACKEND", None)
        reference = self._watch.reference if self._watch else None
        with self.keeping(self.directory.loss_png):
            # with matplotlib, which no first step needs
            from launch.records.loss_plot import plot_loss

            plot_loss(records, result, self.directory.loss_png, reference)
        with self.keeping(self.directory.card_png):
            from launch.records.card import draw_card

            draw_card(records, result, self.directory.card_png, reference=reference)

    def _close(self) -> None:
        """Close screen and files; a second call does nothing."""
        self._close_screen()
        with self.keeping(self.directory.tensorboard):
            self._events.close()
        with self.keeping(self.directory.metrics_jsonl):
            self._file.close()

    def _close_screen(self) -> None:
        with self.keeping("the screen"):
            self._screen.close()
        self._screen = Silent()

    def _write(self, record: metrics.Record) -> None:
        """Write one line at once: a killed process loses only the line that it was writing.

        After a full disk the rest is tried again with the next line.
        """
        self._unwritten += metrics.to_line(record).encode()
        self._write_rest()

    def _write_rest(self) -> None:
        with self.keeping(self.directory.metrics_jsonl):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _event(
        self, group: str, record: StepRecord | ValidationRecord, *names: str
    ) -> None:
        for name in names:
            value = record.parts.get(name, getattr(record, name, None))
            if value is not None:
                self._scalar(f"{group}/{name}", value, record.step)

    def _scalar(self, name: str, value: float, step: int) -> None:
        with self.keeping(self.directory.tensorboard):
            self._events.add_scalar(name, value, step)


def _failure(what: object, error: Exception) -> str:
    """Word what failed, with the fix."""
    told = system_error(error)
    if told:
        return str(system_problem(told, Path(str(what)), ELSEWHERE))
    return f"{what}: {type(error).__name__}: {error}; {AGAIN}"


def _lacking(path: Path, missing: list[int]) -> str:
    """Word which steps have no record."""
    lost = f"{path} has no record of {counted(len(missing), 'step')}, the first {missing[0]}"
    return f"{lost}, and no checkpoint holds one: curve and means go without them; restore it from a copy"


def shown_figures(
    record: StepRecord | ValidationRecord, figures: Sequence[LossFigure]
) -> dict[str, str]:
    """Return losses and accuracies with their names, by key."""
    shown = {}
    for figure in figures:
        value = figure.of(record)
        text = "not finite" if value is None else f"{value:.4f}"
        shown[figure.key] = f"{figure.name} {text}"
    return shown


def shown_fields(
    record: StepRecord, figures: Sequence[LossFigure], *, scale: bool
) -> dict[str, str]:
    """Return the numbers of a step for the screen, in their order; `scale`: with the loss scale."""
    norm = record.grad_norm
    shown = {
        "skipped": "SKIPPED (overflow)" if record.skipped else "",
        **shown_figures(record, figures),
        "lr": f"lr {record.lr:.1e}",
        "norm": f"grad norm {'-' if norm is None else f'{norm:.3g}'}",
        "scale": f"scale {short(record.loss_scale)}" if scale else "",
        "samples": f"{short(record.samples_per_s)} samples/s",
        "tokens": f"{short(record.tokens_per_s)} tokens/s",
        "tflops": flops(record.exact_tflops),
    }
    return {name: text for name, text in shown.items() if text}


def _ignore_event_writer(args: threading.ExceptHookArgs) -> None:
    """Ignore the end of the event writer's thread: the next event raises its error again."""
    if not isinstance(args.thread, _AsyncWriterThread):
        threading.__excepthook__(args)
