"""Parsers and common flags of the commands, and checks of the places at which they write.

Nothing of the user's is ever overwritten.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from recipes import catalog
from recipes.files import check_names, path_of
from recipes.problems import Problem, ProblemsError, either, existing, nearest

AddArgument = Callable[
    ..., argparse.Action
]  # `add_argument` of a parser or of a group of it
HELP_WIDTH = 78  # columns of a description, as argparse fills 80
# descriptions and examples keep their lines
HELP = argparse.RawDescriptionHelpFormatter


class _Given(argparse.Action):
    """Store the value of a flag; refuse an empty one, and a second one: a given value is never ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        names: argparse.Namespace,
        values: Any,
        option: Any = None,
    ) -> None:
        earlier = vars(names).setdefault("given", set())
        words = values if isinstance(values, list) else [values]
        if any(isinstance(word, str) and not word.strip() for word in words):
            raise argparse.ArgumentError(
                self, "is empty: give a value, or leave it out"
            )
        if self.option_strings and self.dest in earlier:
            fix = (
                "name all after one"
                if self.nargs == "+"
                else "it takes one value: leave one out"
            )
            raise argparse.ArgumentError(self, f"is given twice; {fix}")
        earlier.add(self.dest)
        setattr(names, self.dest, values)


# words that argparse takes for flags
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_ALIKE = 0.75  # share of letters from which a flag is named as one that may be meant


# A flag; what it excludes ("*": all) or, after "+", needs one of: flags, "--flag value", "--set key"; why.
Rule = tuple[str, str, str]


RULES: tuple[Rule, ...] = (("--ds_config", "--set ds_config", "the flag decides it"),)


class Parser(argparse.ArgumentParser):
    """A parser with rules of flags that make no sense together: none is ignored."""

    def __init__(self, rules: tuple[Rule, ...] = (), **how: Any) -> None:
        super().__init__(formatter_class=HELP, allow_abbrev=False, **how)
        self.rules = rules
        self.register("action", None, _Given)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Raises ProblemsError: unknown words, and flags that exclude each other."""
        self._typed = [*(sys.argv[1:] if args is None else args)]
        parsed, rest = super().parse_known_args(self._typed, namespace)
        problems = [*self._unknown(rest), *self._problems(parsed)]
        if problems:
            raise ProblemsError(problems)
        if rest:
            self.error(f"{' '.join(rest)} belongs to no flag")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Refuse the command line, with flags that are unknown."""
        # the flags of a subcommand are its own
        unknown = [] if self._subparsers else self._unknown(self._typed)
        came = message.removeprefix("argument ").removeprefix(": ")
        raise ProblemsError(
            [*unknown, Problem("", came, fix=f"see {self.prog} --help")]
        )

    def _unknown(self, words: Sequence[str]) -> Iterator[Problem]:
        """Yield a problem for each unknown flag among the words."""
        # each with the word after it, which may be its value
        for word, following in pairwise([*self._typed, "-"]):
            flag, _, value = word.partition("=")
            known = flag in self._option_string_actions or word not in words
            if known or not _FLAG.fullmatch(word):
                continue
            if not value and not following.startswith("-"):
                value = following
            came = f"{flag} {value}".rstrip()
            yield Problem(flag, came, "no such flag", self._meant(flag, value))

    def _meant(self, word: str, value: str) -> str:
        """Say what to write for an unknown flag."""
        from recipes import foreign_words

        own = list[str]()
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                own += action.option_strings or [str(action.metavar)]
        flag = f"--{word.lstrip('-').replace('-', '_')}"
        near = nearest(flag, own, 1, _ALIKE)
        other = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        return foreign_words.in_command(flag, value, own) or other

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, usage or an error; unlike argparse raise OSError where the output takes nothing."""
        print(message, file=file or sys.stderr, end="", flush=True)

    def _problems(self, parsed: argparse.Namespace) -> Iterator[Problem]:
        typed = [
            f"--set {text.partition('=')[0].strip()}"
            for text in getattr(parsed, "set", ())
        ]
        for word in sorted({word for word in typed if typed.count(word) > 1}):
            yield Problem(
                word, f"{word} twice", "a key has one value", "leave one of them out"
            )
        values = set[str]()
        flags = set[str]()
        for action in (
            each
            for each in self._actions
            if each.option_strings and each.dest != "local_rank"
        ):
            value = getattr(parsed, action.dest, action.default)
            flag = action.option_strings[0]
            values.add(f"{flag} {'none' if value is None else value}")
            if action.dest in getattr(parsed, "given", ()) or value != action.default:
                typed.append(flag)
                flags.add(flag)
        for flag, others, reason in (
            rule for rule in (*RULES, *self.rules) if rule[0] in flags
        ):
            listed = others.lstrip("+").split(", ")
            found_others = (
                flags - {flag} if others == "*" else {*typed, *values} & {*listed}
            )
            both = sorted(found_others)
            if others.startswith("+") != bool(both):
                came = (
                    f"{flag} with {', '.join(both)}"
                    if both
                    else f"{flag} without {either(listed)}"
                )
                fix = "leave one out" if both else f"leave it out, or add {listed[0]}"
                yield Problem(flag, came, reason, fix)


def command(
    doc: str | None, examples: str, rules: tuple[Rule, ...] = ()
) -> argparse.ArgumentParser:
    """Make a parser with the first paragraph of `doc`, and examples, in its --help.

    Raises ProblemsError for a command line, or a working directory, with bytes that are no UTF-8.
    """
    check_names("argument", sys.argv)
    check_names("working directory", [working_directory()])
    about = textwrap.fill(str(doc).split("\n\n")[0], HELP_WIDTH)
    parser = Parser(rules, description=about, epilog=examples)
    # The deepspeed launcher passes --local_rank=N; the environment says the same.
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS
    )
    return parser


def subcommand(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_line: str,
    about: str | None,
    examples: str = "",
    rules: tuple[Rule, ...] = (),
) -> argparse.ArgumentParser:
    """Make the parser of a subcommand, with description and examples in its --help."""
    parser = commands.add_parser(
        name, help=help_line, description=about, epilog=examples
    )
    parser.rules = rules  # type: ignore[attr-defined] # a Parser, as the parser of the subcommands
    return parser


TEXT = (
    "train on this text instead of the recipe's: a file, a directory or a glob of JSON lines, parquet or "
    "plain text, compressed or not"
)


TEXT_RULES: tuple[Rule, ...] = (
    (
        "--text",
        "--set data.source, --set data.name, --set data.blend, --set data",
        "both say what is read",
    ),
)


def add_recipe_arguments(
    parser: argparse.ArgumentParser, *, ends: bool = True, text: bool = False
) -> None:
    """Add the flags that choose a recipe and change it; `ends`: also its last step; `text`: also its text."""
    add = parser.add_argument_group("what to train").add_argument
    recipe = "a row of recipes/ or of your own YAML file, as file.yaml:row (default: %(default)s)"
    setting = "override one field of the recipe, e.g. --set batch.micro=4 --set optimizer.lr=3e-4; repeatable"
    steps = "end after N optimizer steps; the learning-rate schedule stays the recipe's"
    tiny = "shrink the recipe to what two CPU cores carry, keeping its code path"
    add("--recipe", default=catalog.DEFAULT_RECIPE, metavar="TABLE/ROW", help=recipe)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    if ends:
        add("--steps", type=whole(), metavar="N", help=steps)
    if text:
        add("--text", metavar="PATH", help=TEXT)
    add("--tiny", action="store_true", help=tiny)


def stated(settings: Sequence[str], key: str) -> str | None:
    """Return the text that --set gives to a key; None where it gives none."""
    values = (text.partition("=") for text in settings)
    return next(
        (value.strip() for name, _, value in values if name.strip() == key), None
    )


def add_weights_arguments(add: AddArgument) -> None:
    """Add the flag that says of weights what their files do not."""
    says = "what the files of foreign weights do not say, e.g. num_attention_heads=16; repeatable"
    add("--weights_args", action="append", default=[], metavar="KEY=VALUE", help=says)


def add_adoption_arguments(add: AddArgument, flag: str | None = "--adopt") -> None:
    """Add the flags of an adopted run; `flag` None: the directory is named otherwise."""
    adopt = (
        "go on from a run of transformers' GPT-2, BERT or MegatronBert by DeepSpeed's save_checkpoint, Trainer "
        "(checkpoint-N) or accelerate, of Megatron-DeepSpeed's or gpt-neox's GPT, or from a universal "
        "checkpoint: with weights, moments, step, loss scale, and the recipe as far as its files state it"
    )
    if flag:
        add(flag, metavar="DIR", help=adopt)
    places = (
        "with --adopt: read the text in our order from its first sample, or from the next one after as many "
        "samples as the run has read"
    )
    add("--data_from", choices=("first", "next"), help=places)
    kind = "with --adopt: the run's optimizer, where no file states it"
    add("--adopt_optimizer", choices=("adamw",), help=kind)
    groups = (
        "with --adopt: train on with one learning rate, and weight decay of matrices alone, where the run's "
        "groups of parameters have others"
    )
    add("--regroup", action="store_true", help=groups)


def whole(least: int = 1, most: int = 10**9) -> Callable[[str], int]:
    """Make a reader of whole numbers within bounds, for `add_argument(type=...)`."""

    def read(text: str) -> int:
        if (
            not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip())
            or not least <= int(text) <= most
        ):
            raise argparse.ArgumentTypeError(
                f"{text[:40]}: give a whole number from {least:,} to {most:,}"
            )
        return int(text)

    return read


def number(above: float, most: float = math.inf) -> Callable[[str], float]:
    """Make a reader of finite numbers in (above, most], for `add_argument(type=...)`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value <= most):
            bounds = f"above {above:g}" + (
                f", at most {most:,.0f}" if math.isfinite(most) else ""
            )
            raise argparse.ArgumentTypeError(f"{text[:40]}: give a number {bounds}")
        return value

    return read


def working_directory() -> str:
    """Return the directory in which the command was started. Raises ProblemsError if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ProblemsError.of(
            "cd",
            "the working directory was removed",
            "paths are seen from there",
            "cd to one that is there",
        ) from None


def directory(flag: str, text: str | Path) -> Path:
    """Check that the directory exists or can be made. Raises ProblemsError."""
    path = path_of(text, flag)
    problem = place_problem(path)
    if not problem and path.exists() and not path.is_dir():
        problem = "is a file", "a directory is made here"
    if problem:
        raise refusal(flag, text, *problem, "name another directory")
    return path


def check_outside(flag: str, text: str | Path, parent: str | Path) -> None:
    """Check that a new run does not lie in the run that it comes from. Raises ProblemsError."""
    above = Path(os.path.realpath(parent))
    if Path(os.path.realpath(path_of(text, flag))).is_relative_to(above):
        raise refusal(
            flag,
            text,
            f"lies in {above}",
            "the new run is one of its own, and nothing is written there",
            "name another directory",
        )


def place_problem(path: Path) -> tuple[str, str] | None:
    """Try to make something at the path, as access rights mislead; return (what came, the rule) or None."""
    try:
        path = path.absolute()
        above = existing(path)
        if path.is_symlink() and above != path:
            return "is a link to nothing", "it has to be made"
        if above == path and not path.is_dir():
            return (
                None
                if os.access(path, os.W_OK)
                else ("is not writable", "it has to be written")
            )
        if not above.is_dir():
            return f"cannot be made ({above} is a file)", "it has to be made"
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        return f"cannot be made ({error.strerror})", "it has to be made"
    return None


def refusal(flag: str, text: object, came: str, rule: str, fix: str) -> ProblemsError:
    return ProblemsError.of(flag, f"{flag} {text} {came}", rule, fix)


def run_directory(recipe_name: str, ds_name: str) -> Path:
    """Name the run directory without --out: runs/default-sotu-zero3_offload for "default/sotu"."""
    return Path(
        "runs", re.sub(r"[^A-Za-z0-9._]+", "-", f"{recipe_name}-{ds_name}").strip("-")
    )
