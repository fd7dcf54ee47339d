"""Errors that list everything wrong at once, and near matches for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST = 10  # options that a message lists


class Key(str):
    """A dotted key of the recipe inside a text, which a command may show as a flag of its own."""


class Setting(NamedTuple):
    """A value for a key of the recipe inside a text: `batch.micro=4`, or a command's own flag with the value."""

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
        key: what has to change, as a dotted key of the recipe or of the JSON, a flag or a file; "" where nothing has a name.
        came: what was given.
        rule: what it breaks; "" where `came` says it all.
        fix: what to do.
    """

    key: str
    came: Text
    rule: Text = ""
    fix: Text = ""

    def __str__(self) -> str:
        return self.render()

    def render(self, show: Callable[[Words], str] = str) -> str:
        """The sentence "came: rule; fix". `show` turns each piece of the texts into what this command's user types."""
        came, rule, fix = ("".join(map(show, _pieces(text))) for text in (self.came, self.rule, self.fix))
        return "; ".join(part for part in (": ".join(part for part in (came, rule) if part), fix) if part)


def _pieces(text: Text) -> tuple[Words, ...]:
    return text if isinstance(text, tuple) and not isinstance(text, Setting) else (text,)


class ProblemsError(ValueError):
    """Several problems of one input, one line each: what came, the rule, the fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "an error without a problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


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


def some(options: Sequence[str]) -> str:
    """The first `MOST` of them, and how many more there are."""
    more = len(options) - MOST
    return ", ".join(options[:MOST]) + (f" and {more} more" if more > 0 else "")
