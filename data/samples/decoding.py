"""A BERT's samples as text that a person can check."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerFast

SENTENCE_LABELS = {
    "nsp": ("B follows A", "B is of another document"),
    "sop": ("A and B in order", "A and B swapped"),
}


def describe(sample: Mapping[str, np.ndarray], tokenizer: PreTrainedTokenizerFast, sentence_head: str) -> str:
    """The facts of a sample in a line, then its text with [was->now] in place of every predicted token."""
    length, predicted = int(sample["lengths"]), int(sample["predicted"])
    tokens, types = sample["tokens"][:length], sample["token_types"][:length]
    in_b, padding, most = int(types.sum()), len(sample["tokens"]) - length, len(sample["positions"])
    segments = f"{length} tokens ({length - in_b} in A, {in_b} in B), {padding} of padding"
    lines = [f"{segments}; {predicted} predicted of at most {most}"]
    if sentence_head != "none":
        label = int(sample["sentence_labels"])
        lines.append(f"{sentence_head} label {label}: {SENTENCE_LABELS[sentence_head][label]}")
    positions, labels = (sample[key][:predicted].tolist() for key in ("positions", "labels"))
    was = dict(zip(positions, labels, strict=True))
    pieces = tokenizer.convert_ids_to_tokens(tokens.tolist())
    for at, label in was.items():
        pieces[at] = f"[{tokenizer.convert_ids_to_tokens(label)}->{pieces[at]}]"
    for segment, name in enumerate("AB"):
        if shown := [piece for piece, kind in zip(pieces, types.tolist(), strict=True) if kind == segment]:
            lines.append(f"{name}: {_joined(shown)}")
    return "\n".join(lines)


def _joined(pieces: list[str]) -> str:
    """Pieces of words put together again; predicted and special tokens stand apart."""
    text = pieces[0]
    for before, piece in pairwise(pieces):
        joined = piece.startswith("##") and not before.endswith("]")
        text += piece[2:] if joined else f" {piece}"
    return text
