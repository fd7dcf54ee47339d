"""Errors that list everything wrong at once, and near matches for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MOST = 10  # options that a message lists


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
