"""Errors that list everything wrong at once, and near matches for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


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
    """The question "did you mean heads?", or the list of what there is."""
    options = sorted(options)
    near = nearest(word, options)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is: {', '.join(options)}" if options else "there is none"
