"""Sentences of a document, for BERT's segments."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Literal

import sentencex

LANGUAGE = "en"
LONG_SENTENCE = 1000  # characters; a longer one over several lines is a list or a table


def split(text: str, how: Literal["split", "lines"]) -> list[str]:
    """Sentences in order, none of them empty. Joined they give the text back but for whitespace.

    Args:
        how: split: at the ends of sentences, by sentencex's rules for English; lines: every line is a
            sentence already.
    """
    if how == "lines":
        pieces: Iterable[str] = text.split("\n")
    else:
        assert how == "split", how
        pieces = chain.from_iterable(map(_list_items, sentencex.segment(LANGUAGE, text)))
    return [sentence for piece in pieces if (sentence := _one_line(piece))]


def _list_items(sentence: str) -> list[str]:
    """Lines of what is too long for a sentence: sentencex takes a list without full stops for one."""
    return sentence.split("\n") if len(sentence) > LONG_SENTENCE else [sentence]


def _one_line(sentence: str) -> str:
    """The sentence on one line, as the one-sentence-per-line form needs it."""
    sentence = sentence.strip()
    return " ".join(sentence.split()) if "\n" in sentence else sentence
