"""Sentences of a document, for BERT's segments."""

from __future__ import annotations

from typing import Literal

import sentencex

LANGUAGE = "en"
Ends = Literal["split", "lines"]  # how it is told where a sentence ends
# Characters; a longer one over several lines is a list or a table, which sentencex takes for a sentence.
LONG_SENTENCE = 1000


def split(text: str, how: Ends) -> list[str]:
    """Sentences in order, none of them empty. Joined they give the text back but for whitespace.

    split: at the ends of sentences, by sentencex's rules for English; lines: every line is one already.
    """
    if how == "lines":
        pieces = text.split("\n")
    else:
        assert how == "split", how
        found = sentencex.segment(LANGUAGE, text)
        pieces = [line for s in found for line in (s.split("\n") if len(s) > LONG_SENTENCE else [s])]
    stripped = (
        piece.strip() for piece in pieces
    )  # and on one line, as the one-sentence-per-line form needs it
    return [" ".join(piece.split()) if "\n" in piece else piece for piece in stripped if piece]
