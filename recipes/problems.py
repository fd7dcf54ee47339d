"""Problems of inputs, errors that list all of them at once, and near matches for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MOST = 10  # options in a message


class Key(str):
    """A dotted key of the recipe inside a text; a command may show it as its own flag."""


@dataclass(frozen=True)
class Setting:
    """A key of the recipe with its value inside a text: `batch.micro=4`, or a command's own flag."""

    key: str
    value: object

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


Words = str | Key | Setting
Text = Words | tuple[Words, ...]


@dataclass(frozen=True)
class Problem:
    """One fault of a user's input.

    Attributes:
        key: a dotted key of the recipe or of the JSON, a flag or a file, which has to change.
        came: the input.
        rule: the broken rule; "" if `came` says it all.
        fix: advice for the user.
        where: recipe, file or flag of the fault; "" if the other texts name it.
        place: file:line of the key, or its flag.
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
        """Write the sentence "where: came: rule; fix (place)".

        `show` turns each piece of the texts into the form that this command's user types.
        """
        came, rule, fix = (
            "".join(map(show, pieces(text)))
            for text in (self.came, self.rule, self.fix)
        )
        sentence = ": ".join(part for part in (self.where, came, rule) if part)
        sentence = "; ".join(part for part in (sentence, fix) if part)
        return f"{sentence} ({self.place})" if self.place else sentence

    @property
    def keys(self) -> tuple[str, ...]:
        """The problem's key, and the keys in `came`."""
        named = [
            piece for piece in pieces(self.came) if isinstance(piece, (Key, Setting))
        ]
        return (
            self.key,
            *(piece.key if isinstance(piece, Setting) else piece for piece in named),
        )


def pieces(text: Text) -> tuple[Words, ...]:
    """Split a text into its pieces."""
    return text if isinstance(text, tuple) else (text,)


class ProblemsError(ValueError):
    """Several problems of one input, each once and in a line of its own."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        by_line = {str(problem): problem for problem in problems}
        assert by_line, "an error without a problem"
        self.problems = tuple(by_line.values())
        super().__init__("\n".join(by_line))


class RecipeError(ProblemsError):
    """An unknown or unusable recipe."""


def nearest(
    word: str, options: Iterable[str], count: int = 3, cutoff: float = 0.6
) -> list[str]:
    """Return the options spelt most like `word`, best first; empty if none is close."""
    return difflib.get_close_matches(word, list(options), n=count, cutoff=cutoff)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Ask "did you mean heads?", or list at most `MOST` of the options."""
    options = sorted(options)
    near = nearest(word, options)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is: {some(options)}" if options else "there is none"


def some(options: Sequence[str], most: int = MOST) -> str:
    """List the first `most` options, and the number of the others."""
    more = len(options) - most
    return ", ".join(options[:most]) + (f" and {more} more" if more > 0 else "")


def either(words: Iterable[object]) -> str:
    """Join the words as "a, b or c"."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} or {last}" if first else last


ES = ("s", "x", "ch", "sh")


def counted(number: int, thing: str) -> str:
    """Write a count as "1 process", "2 processes", "1,024 warm-up steps"."""
    plural = "" if number == 1 else "es" if thing.endswith(ES) else "s"
    return f"{number:,} {thing}{plural}"
