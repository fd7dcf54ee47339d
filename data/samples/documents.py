"""Documents within a window: their borders, and how a window with borders is shown.

A document begins with the end-of-document token before its text, as a text does where it is scored or
written: from that token alone its first word is predicted. A window that begins inside a document holds the
rest of it as a document of its own.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerFast

from recipes.problems import counted


def places_in_documents(tokens: np.ndarray, border: int) -> np.ndarray:
    """Return the place of each token in its document, from 0 on: (n, T) -> (n, T) int64.

    `border`: the token that begins a document; so does the beginning of a window.
    """
    places = np.arange(tokens.shape[1])
    begins = np.where(tokens == border, places, 0)
    return places - np.maximum.accumulate(begins, axis=1)


def described(
    window: np.ndarray, places: np.ndarray, tokenizer: PreTrainedTokenizerFast
) -> str:
    """Show the documents of a window (T + 1,), each behind the number of its first token.

    places (T,): of its input tokens.
    """
    begins = np.flatnonzero(places == 0)
    numbers = ", ".join(map(str, begins))
    documents = f"{counted(len(begins), 'document')}, from tokens {numbers} on"
    shown = [
        f"{len(places)} input tokens in {documents}; "
        f"the label of the last one is {tokenizer.decode(window[-1:])!r}"
    ]
    parts = np.split(window[:-1], begins[1:])
    for begin, part in zip(begins, parts, strict=True):
        shown.append(f"[{begin}] {tokenizer.decode(part)}")
    return "\n".join(shown)
