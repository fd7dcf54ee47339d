"""Errors that list everything wrong at once, and near matches for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MOST = 10  # options that a message lists


class Key(str):
    """A dotted key of the recipe inside a text, which a command may show as a flag of its own."""


@dataclass(frozen=True)
class Setting:
    """A key of the recipe with a value inside a text: `batch.micro=4`, or a command's own flag with it."""

    key: str
    value: object

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


Words = str | Key | Setting
Text = Words | tuple[Words, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user gave.

    Attributes:
        key: what has to change: a dotted key of the recipe or of the JSON, a flag or a file.
        came: what was given.
        rule: what it breaks; "" where `came` says it all.
        fix: what to do.
        where: what holds it: a recipe by its name, a file or a flag; "" where the rest says so.
        place: where the key is written: file:line, or the flag.
    """

    key: str
    came: Text
    rule: Text = ""
    fix: Text = ""
    where: str = ""
    place: str = ""

    def __str__(self) -> str:
        return self.render()

    def render(self, show: Callable[[Words], str] = str) -> str:
        """The sentence "where: came: rule; fix (place)".

        `show` turns each piece of the texts into what this command's user types.
        """
        came, rule, fix = ("".join(map(show, pieces(text))) for text in (self.came, self.rule, self.fix))
        sentence = ": ".join(part for part in (self.where, came, rule) if part)
        sentence = "; ".join(part for part in (sentence, fix) if part)
        return f"{sentence} ({self.place})" if self.place else sentence

    @property
    def keys(self) -> tuple[str, ...]:
        """What it is about: its own key, and those in what was given."""
        named = [piece for piece in pieces(self.came) if isinstance(piece, (Key, Setting))]
        return (self.key, *(piece.key if isinstance(piece, Setting) else piece for piece in named))


def pieces(text: Text) -> tuple[Words, ...]:
    """The pieces that a text is made of."""
    return text if isinstance(text, tuple) else (text,)


class ProblemsError(ValueError):
    """Several problems of one input, each once and in a line of its own: what came, the rule, the fix."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        by_line = {str(problem): problem for problem in problems}
        assert by_line, "an error without a problem"
        self.problems = tuple(by_line.values())
        super().__init__("\n".join(by_line))


class RecipeError(ProblemsError):
    """No such recipe, or one that cannot be used."""


def nearest(word: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The options spelt most like `word`, best first; empty if none is close."""
    return difflib.get_close_matches(word, list(options), n=count, cutoff=0.6)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """The question "did you mean heads?", or what there is, at most `MOST` of it."""
    options = sorted(options)
    near = nearest(word, options)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is: {some(options)}" if options else "there is none"


def some(options: Sequence[str], most: int = MOST) -> str:
    """The first `most` of them, and how many more there are."""
    more = len(options) - most
    return ", ".join(options[:most]) + (f" and {more} more" if more > 0 else "")


def either(words: Iterable[object]) -> str:
    """The words as "a, b or c"."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} or {last}" if first else last


ES = ("s", "x", "ch", "sh")


def counted(number: int, thing: str) -> str:
    """The count as "1 process", "2 processes", "1,024 warm-up steps"."""
    plural = "" if number == 1 else "es" if thing.endswith(ES) else "s"
    return f"{number:,} {thing}{plural}"
