"""Progress of a run: a bar that redraws on a terminal, whole lines in a log, or nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from launch.console import terminal

LINE_EVERY_SECONDS = 30.0  # in a log, at least one line in this time ...
LINES_PER_RUN = 20  # ... and about this many in a short run
# Numbers of a step that a narrow terminal leaves out, in this order.
DROPPED = (
    "tflops",
    "tokens",
    "sentence_accuracy",
    "sentence_loss",
    "scale",
    "lr",
    "norm",
    "samples",
    "mlm_loss",
)
Samples = Callable[[int], int]


class Silent:
    """A screen that shows nothing. `fields` of a step: its numbers as text, by short names."""

    def step(self, step: int, fields: Mapping[str, str]) -> None: ...

    def line(self, text: str, colour: int | None = None) -> None: ...

    def close(self) -> None: ...


class Bar(Silent):
    """A screen of two lines on a terminal, redrawn: the numbers of the step above the progress."""

    def __init__(
        self, stream: TextIO, start_step: int, total_steps: int, samples: Samples
    ) -> None:
        self._numbers = tqdm(
            file=stream, bar_format="{desc}", dynamic_ncols=True, position=0
        )
        how = {"file": stream, "dynamic_ncols": True, "position": 1}
        how["bar_format"] = "{desc} {bar} {elapsed} done"
        self._bar = tqdm(
            total=samples(total_steps),
            initial=samples(start_step),
            unit="sample",
            **how,
        )
        self._stream = stream
        self._total_steps = total_steps
        self._samples = samples
        self._bar.set_description_str(f"step {start_step}/{total_steps}")

    def step(self, step: int, fields: Mapping[str, str]) -> None:
        self._numbers.set_description_str(
            fitting(fields, terminal.columns(self._stream)), refresh=False
        )
        self._bar.set_description_str(f"step {step}/{self._total_steps}", refresh=False)
        # not before there is a rate
        self._bar.bar_format = "{desc} {bar} {elapsed} done, {remaining} left"
        # Redraw both or none, at tqdm's pace; the last step always.
        if (
            self._bar.update(self._samples(step) - self._bar.n)
            or step == self._total_steps
        ):
            self._bar.refresh()
            self._numbers.refresh()

    def line(self, text: str, colour: int | None = None) -> None:
        lines = terminal.wrapped(text, terminal.columns(self._stream))
        shown = terminal.painted(lines, colour, self._stream)
        self._bar.write(shown, file=self._bar.fp)

    def close(self) -> None:
        self._numbers.close()
        self._bar.close()


class Lines(Silent):
    """A screen of whole lines without carriage returns, for a log file."""

    def __init__(
        self, stream: TextIO, start_step: int, total_steps: int, samples: Samples
    ) -> None:
        self._stream = stream
        self._start_step = start_step
        self._total_steps = total_steps
        self._samples = samples
        self._every = max(1, (total_steps - start_step) // LINES_PER_RUN)
        self._shown = time.monotonic()
        # End of the first step, which compiles and allocates: the rate is of later steps.
        self._first: float | None = None

    def step(self, step: int, fields: Mapping[str, str]) -> None:
        now = time.monotonic()
        self._first = self._first or now
        first_or_last = step in (self._start_step + 1, self._total_steps)
        if (
            first_or_last
            or step % self._every == 0
            or now - self._shown >= LINE_EVERY_SECONDS
        ):
            self._shown = now
            done = self._samples(step) - self._samples(self._start_step + 1)
            to_do = self._samples(self._total_steps) - self._samples(step)
            remaining = (now - self._first) / done * to_do if done else None
            left = (
                f" | {tqdm.format_interval(remaining)} left"
                if remaining is not None
                else ""
            )
            self.line(
                f"step {step}/{self._total_steps} | {' | '.join(fields.values())}{left}"
            )

    def line(self, text: str, colour: int | None = None) -> None:
        shown = terminal.painted(text, colour, self._stream)
        print(shown, file=self._stream, flush=True)


def fitting(fields: Mapping[str, str], width: int | None) -> str:
    """Join the numbers of a step into one line shorter than `width`, leaving out `DROPPED` ones."""
    left = dict(fields)
    for name in DROPPED:
        if width is None or len(" ".join(left.values())) < width:
            break
        left.pop(name, None)
    return " ".join(left.values())


def screen(
    stream: TextIO, start_step: int, total_steps: int, samples: Samples = int
) -> Silent:
    """Make a bar if `stream` is a terminal that can redraw two lines, else lines.

    `samples`: of the first so many steps, which tell the time that is left; by default steps are equal.
    """
    redraws = stream.isatty()
    # With 0 rows (a pseudo-terminal) tqdm draws nothing.
    with contextlib.suppress(OSError, ValueError):
        redraws = redraws and os.get_terminal_size(stream.fileno()).lines > 2
    kind = Bar if redraws else Lines
    return kind(stream, start_step, total_steps, samples)


def bar(stream: TextIO, **how: Any) -> Any:
    """Make a tqdm bar that vanishes at its end; it shows nothing in a log."""
    return tqdm(file=stream, disable=None, leave=False, dynamic_ncols=True, **how)
