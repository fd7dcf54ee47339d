"""The tokenizer of a run, kept in its directory, so that its checkpoints can be used where the corpus is not."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.vocabulary import vocabulary_digest

FOLDER = "tokenizer"


def keep(run: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save the tokenizer in the run directory, in `transformers`' form; on a later launch check that it is still the same.

    Raises:
        ValueError: the run was begun with another vocabulary.
    """
    if (run / FOLDER).is_dir():
        if vocabulary_digest(load(run)) != vocabulary_digest(tokenizer):
            raise ValueError(
                f"{run / FOLDER} is not the vocabulary that the recipe's data yields now: the corpus or the version of tokenizers "
                "has changed, and the weights know only the old tokens; restore them, or start again with --out"
            )
        return
    temporary = run / f".{FOLDER}.{os.getpid()}.tmp"
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, run / FOLDER)


def load(run: Path) -> PreTrainedTokenizerFast:
    """Raises ValueError where the run has no tokenizer."""
    if not (run / FOLDER).is_dir():
        raise ValueError(f"{run} holds no {FOLDER}/: it is no run of this project, or its files were not copied whole")
    tokenizer = AutoTokenizer.from_pretrained(run / FOLDER, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)
    return tokenizer
