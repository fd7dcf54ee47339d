"""Layouts by name: `tp2-dp2-zero3` is tensor and data parallelism of two each, under ZeRO-3."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.problems import ProblemsError

DEGREES = {
    "tp": "tensor parallel degree",
    "pp": "pipeline parallel degree",
    "dp": "data parallel degree",
    "cp": "context parallel degree",
}
ACCUMULATION = "accumulation"  # micro-batches of a rank in one optimizer step
SAME = "same"  # layout of a resume: that of the run which is resumed
WORD = re.compile(r"([a-z_]+)(\d*)")


@dataclass(frozen=True)
class Layout:
    """The words of a layout's name with their numbers; a word without one has 1.

    A degree or an accumulation that is not named is 1, any other word 0.

    Attributes:
        asked: words that were asked for.
    """

    name: str
    words: Mapping[str, int]
    asked: set[str] = field(default_factory=set)

    def __getitem__(self, word: str) -> int:
        self.asked.add(word)
        return self.words.get(word, int(word in DEGREES or word == ACCUMULATION))

    @property
    def ranks(self) -> int:
        return math.prod(self[each] for each in DEGREES)

    @property
    def shares(self) -> int:
        """Count the parts of a global batch that are summed by the layout."""
        return self["dp"] * self[ACCUMULATION]


def layout_of(name: str, accumulation: int = 1) -> Layout:
    """Read a layout's name. Raises ProblemsError. `accumulation`: where the name has none."""
    words = {ACCUMULATION: accumulation} if accumulation > 1 else {}
    for word in name.split("-"):
        parts = WORD.fullmatch(word)
        number = int(parts[2] or 1) if parts else 0
        if not parts or (not number and parts[1] in DEGREES):
            raise ProblemsError.of(
                "--layouts",
                name,
                "a layout is words with numbers, joined by -, such as tp2-dp2-zero3",
                f"put another word in place of {word!r}",
            )
        words[parts[1]] = number
    return Layout(name, words)
