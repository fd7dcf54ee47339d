"""Samples as text that a person can check."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import Fields

SENTENCE_LABELS = {
    "nsp": ("B follows A", "B is of another document"),
    "sop": ("A and B in order", "A and B swapped"),
    "none": ("", ""),
}


def describe(
    fields: Fields, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str = "none"
) -> str:
    """One sample: its facts in a line, then its text, a BERT's with [was->now] in place of every predicted token."""
    if "window" in fields:
        return _gpt(fields["window"][row], tokenizer)
    return _bert({key: values[row] for key, values in fields.items()}, tokenizer, sentence_head)


def _gpt(window: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> str:
    ends = int((window[:-1] == tokenizer.eos_token_id).sum())
    return (
        f"{len(window) - 1} input tokens, {ends} ends of documents among them; the label of the last one is "
        + (f"{tokenizer.decode(window[-1:])!r}\n{tokenizer.decode(window[:-1])}")
    )


def _bert(sample: dict[str, Any], tokenizer: PreTrainedTokenizerFast, sentence_head: str) -> str:
    length, predicted = int(sample["lengths"]), int(sample["predicted"])
    tokens, types = sample["tokens"][:length], sample["token_types"][:length]
    in_b = int(types.sum())
    padding, most = len(sample["tokens"]) - length, len(sample["positions"])
    lines = [
        f"{length} tokens ({length - in_b} in A, {in_b} in B), {padding} of padding; {predicted} predicted of at most {most}"
    ]
    if sentence_head != "none":
        label = int(sample["sentence_labels"])
        lines.append(f"{sentence_head} label {label}: {SENTENCE_LABELS[sentence_head][label]}")
    was = dict(
        zip(sample["positions"][:predicted].tolist(), sample["labels"][:predicted].tolist(), strict=True)
    )
    names = list(tokenizer.convert_ids_to_tokens(tokens.tolist()))
    pieces = [
        f"[{tokenizer.convert_ids_to_tokens(was[at])}->{name}]" if at in was else name
        for at, name in enumerate(names)
    ]
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
