"""The tokenizer of a run, kept in its directory: checkpoints can then be used without the corpus."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.vocabularies.vocabulary import vocabulary_digest

FOLDER = "tokenizer"


def keep(run: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save the tokenizer in the run directory, in `transformers`' form; later check that it is the same.

    Raises:
        ValueError: the run started with another vocabulary.
    """
    if (run / FOLDER).is_dir():
        if vocabulary_digest(load(run)) != vocabulary_digest(tokenizer):
            raise ValueError(
                f"{run / FOLDER} is not the vocabulary that the recipe's data yields now: the corpus or the "
                "version of tokenizers has changed, and the weights know only the old tokens; restore them, "
                "or start again with --out"
            )
        return
    temporary = run / f".{FOLDER}.{os.getpid()}.tmp"
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, run / FOLDER)


def load(run: Path) -> PreTrainedTokenizerFast:
    """Raises ValueError where the run has no tokenizer."""
    if not (run / FOLDER).is_dir():
        why = "it is no run of this project, or its files were not copied whole"
        raise ValueError(f"{run} holds no {FOLDER}/: {why}")
    tokenizer = AutoTokenizer.from_pretrained(run / FOLDER, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)
    return tokenizer


def foreign_tokens(weights: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """A warning where given weights number the tokens otherwise; None where they do not, or do not say."""
    for name in ("tokenizer.json", "vocab.json"):
        try:
            saved = json.loads((weights / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        vocabulary = saved["model"]["vocab"] if name == "tokenizer.json" else saved
        known = tokenizer.get_vocab()
        other = sum(known.get(token) != number for token, number in vocabulary.items())
        if other:
            return (
                f"{weights / name} is not the vocabulary of this run ({other:,} of {len(vocabulary):,} "
                "tokens differ): the given weights know other tokens, so the loss starts high"
            )
        return None
    return None
