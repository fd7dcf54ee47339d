"""The tokenizer in a run's directory, which makes its checkpoints usable without the corpus."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.text.vocabulary import read_tokenizer, vocabulary_digest
from recipes.files import refuse
from recipes.problems import ProblemsError

FOLDER = "tokenizer"
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")  # next to weights
RESTORE = "restore it from a copy of the run"


def keep(run: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save the tokenizer in the run directory in `transformers`' form; in a resumed run compare it.

    Raises ProblemsError if the run started with another vocabulary, or if its files are broken.
    """
    if (run / FOLDER).is_dir():
        if vocabulary_digest(load(run)) != vocabulary_digest(tokenizer):
            came = "is not the vocabulary that the recipe's data yields now"
            changed = "the corpus or the version of tokenizers has changed"
            rule = f"{changed}, and the weights know only the old tokens"
            refuse(run / FOLDER, came, rule, "restore them, or start again with --out")
        return
    temporary = run / f".{FOLDER}.{os.getpid()}.tmp"
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, run / FOLDER)


def load(run: Path) -> PreTrainedTokenizerFast:
    """Load a run's tokenizer. Raises FileError if there is none, or a broken one."""
    if not (run / FOLDER).is_dir():
        why = "it is no run of this project, or its files were not copied whole"
        refuse(run, f"holds no {FOLDER}/", why, RESTORE)
    try:
        return read_tokenizer(run / FOLDER)
    except ProblemsError as error:
        refuse(run / FOLDER, f"cannot be read ({error})", fix=RESTORE)


def foreign_tokens(weights: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return a warning if the vocabulary next to `weights` numbers tokens in another way, or None."""
    place = weights
    if not any((weights / name).is_file() for name in VOCABULARY_FILES):
        place = weights.parent.parent / FOLDER  # of RUN/checkpoints/step-NNNNNN
        if weights.parent.name != "checkpoints" or not place.is_dir():
            return None
    try:
        vocabulary = read_tokenizer(place).get_vocab()
    except ProblemsError as error:
        return f"{place}: {error}; whether the given weights know this run's tokens is not known"
    known = tokenizer.get_vocab()
    other = sum(known.get(token) != number for token, number in vocabulary.items())
    if not other:
        return None
    return (
        f"{place} is not the vocabulary of this run ({other:,} of {len(vocabulary):,} tokens differ): the "
        "given weights know other tokens, so the loss starts high"
    )
