"""Exact match and F1 of answers, and the threshold for no answer, as SQuAD's official script has them.

Texts are compared in lower case, without punctuation, articles and superfluous spaces; F1 is that of their
words, the best over the answers that annotators gave. A question without an answer is answered by "".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


@dataclass(frozen=True)
class Judged:
    """What one answer is worth. `answerable`: whether the question has an answer; `empty`: "" was said."""

    exact: float
    f1: float
    answerable: bool
    empty: bool


def normalised(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def judged(text: str, answers: Sequence[str]) -> Judged:
    """`answers`: of the annotators; those of which nothing is left when normalised do not count."""
    right = [each for each in map(normalised, answers) if each] or [""]
    said = normalised(text)
    exact = float(said in right)
    return Judged(exact, max(_f1(said.split(), each.split()) for each in right), bool(answers), not text)


def _f1(said: Sequence[str], right: Sequence[str]) -> float:
    if not said or not right:
        return float(said == right)
    common = (Counter(said) & Counter(right)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def means(every: Sequence[Judged]) -> dict[str, float]:
    """Over all questions, and where both kinds are there over those with and without an answer."""
    found = _means("", every)
    parts = {
        "has_answer_": [e for e in every if e.answerable],
        "no_answer_": [e for e in every if not e.answerable],
    }
    if all(parts.values()):
        for prefix, part in parts.items():
            found |= _means(prefix, part)
    return found


def _means(prefix: str, every: Sequence[Judged]) -> dict[str, float]:
    return {
        f"{prefix}exact": sum(each.exact for each in every) / len(every),
        f"{prefix}f1": sum(each.f1 for each in every) / len(every),
    }


def best_threshold(answered: Sequence[Judged], odds: Sequence[float]) -> float:
    """The odds above which no answer is the best choice for F1, one of `odds` or below all of them.

    answered: what the best spans are worth; odds: of no answer, for each.
    """
    best, threshold = float(sum(not each.answerable for each in answered)), min(odds) - 1.0
    value = best
    order = sorted(range(len(odds)), key=lambda i: odds[i])
    for place, i in enumerate(order):
        # Answered rather than not: its F1 is won, or one question without an answer is lost.
        value += answered[i].f1 if answered[i].answerable else float(answered[i].empty) - 1.0
        last_of_equals = place + 1 == len(order) or odds[order[place + 1]] > odds[i]
        if last_of_equals and value > best:
            best, threshold = value, odds[i]
    return threshold
