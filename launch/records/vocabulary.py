"""The tokenizer in a run's directory, which makes its checkpoints usable without the corpus."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.text.vocabulary import save_tokenizer, vocabulary_digest
from launch.records.directory import RunDirectory
from recipes.files import FileError, read_json_object, read_text, refuse
from recipes.problems import ProblemsError

FOLDER = "tokenizer"
# next to weights; the first one counts
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
MOST_VOCABULARY = 64 * 2**20  # bytes; a quarter of a million tokens take 17 MB
RESTORE = "restore it from a copy of the run"


def keep(run: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save the tokenizer in the run directory in `transformers`' form; in a resumed run compare it.

    Raises ProblemsError if the run started with another vocabulary, or if its files are broken.
    """
    if (run / FOLDER).is_dir():
        if vocabulary_digest(load(run)) != vocabulary_digest(tokenizer):
            came = "is not the vocabulary that the recipe's data yields now"
            changed = "the corpus or the version of tokenizers has changed"
            refuse(
                run / FOLDER,
                came,
                f"{changed}, and the weights know only the old tokens",
                "restore them, or start again with --out",
            )
        return
    temporary = run / f".{FOLDER}.{os.getpid()}.tmp"
    try:
        save_tokenizer(tokenizer, temporary)
    # tokenizers has no type of its own for refusals of the system
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        number = re.search(r"\(os error (\d+)\)", str(error))
        if not number:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(temporary)) from error
    os.replace(temporary, run / FOLDER)


def load(run: Path) -> PreTrainedTokenizerFast:
    """Load a run's tokenizer. Raises FileError if there is none, or a broken one."""
    if not (run / FOLDER).is_dir():
        why = "it is no run of this project, or its files were not copied whole"
        refuse(run, f"holds no {FOLDER}/", why, RESTORE)
    file = run / FOLDER / "tokenizer.json"
    read_json_object(file, MOST_VOCABULARY)
    from data.text.vocabulary_files import read_tokenizer

    try:
        return read_tokenizer(file.parent)
    except ProblemsError as error:
        refuse(
            file.parent,
            f"cannot be read ({str(error.__cause__ or error)[:300]})",
            fix=RESTORE,
        )


def foreign_tokens(weights: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return a warning if the vocabulary next to `weights` numbers tokens in another way, or None."""
    places = [weights / name for name in VOCABULARY_FILES]
    run = RunDirectory.around(weights)
    if run:
        places.append(run.tokenizer / "tokenizer.json")
    file = next((place for place in places if place.exists()), None)
    if file is None:
        return None
    try:
        vocabulary = _token_numbers(file)
    except FileError as error:
        return f"{error}; whether the given weights know this run's tokens is not known"
    known = tokenizer.get_vocab()
    other = sum(known.get(token) != number for token, number in vocabulary.items())
    if not other:
        return None
    return (
        f"{file} is not the vocabulary of this run ({other:,} of {len(vocabulary):,} tokens differ): the "
        "given weights know other tokens, so the loss starts high"
    )


def _token_numbers(file: Path) -> dict[str, int]:
    """Read a map from token to number from a file next to weights. Raises FileError."""
    if file.suffix == ".txt":
        lines = read_text(file, MOST_VOCABULARY).removesuffix("\n").split("\n")
        return {token: number for number, token in enumerate(lines)}
    vocabulary: Any = read_json_object(file, MOST_VOCABULARY)
    if file.name == "tokenizer.json":
        model = vocabulary.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of a Unigram: [token, score]
        pairs = (each for each in vocabulary if isinstance(each, list) and each)
        tokens = [token for token, *_ in pairs if isinstance(token, str)]
        vocabulary = {token: number for number, token in enumerate(tokens)}
    if not isinstance(vocabulary, dict) or not all(
        type(number) is int for number in vocabulary.values()
    ):
        refuse(file, "numbers no tokens", "a vocabulary maps each token to its number")
    return vocabulary
