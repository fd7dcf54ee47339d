"""Finite sources: tokenized once into files that all later runs map into memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data import cache
from data.cache import SAY_EVERY_S, Say
from data.samples import Parts, Samples, spread, window_count
from data.sources import Source, held_out
from data.store import FORMAT_VERSION, TokenFile, TokenWriter, open_tokens
from data.vocabulary import Encoder, vocabulary_digest
from recipes.schema import Recipe


def prepared_parts(recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerFast, directory: Path, say: Say) -> Parts:
    """The parts of a finite source.

    Raises:
        ValueError: a part is shorter than one sample.
    """
    train, validation = stored_tokens(source, tokenizer, recipe.data.validation_every, directory, say)
    length = recipe.sequence_length
    samples = Samples(train.tokens, length)
    available = window_count(len(validation.tokens), length)
    for part, count, found in (("training", len(samples), train), ("held-out", available, validation)):
        if count == 0:
            raise ValueError(
                f"{source.name}: the {part} part has {found.documents} documents with {len(found.tokens)} tokens, and "
                f"one sample of sequence_length={length} needs {length + 1}: give more text, or set sequence_length or "
                "data.validation_every lower"
            )
    return Parts(
        samples,
        # Spread over the whole held-out part: its first windows alone would all come from the oldest documents.
        Samples(validation.tokens, length, spread(available, recipe.run.validation_samples)),
        train.counts,
        {
            "documents": train.documents + validation.documents,
            "text_bytes": train.text_bytes + validation.text_bytes,
            "train_documents": train.documents,
            "train_tokens": len(train.tokens),
            "train_tokens_crc32": f"{train.checksum:08x}",
            "held_out_documents": validation.documents,
            "held_out_tokens": len(validation.tokens),
            "samples_per_epoch": len(samples),
            "unigram_tokens": len(train.tokens),
        },
    )


def stored_tokens(source: Source, tokenizer: PreTrainedTokenizerFast, every: int, directory: Path, say: Say) -> tuple[TokenFile, TokenFile]:
    """Token files of the training and the held-out documents, made where the cache lacks them."""
    decided_by = [FORMAT_VERSION, source.fingerprint(), vocabulary_digest(tokenizer), every]
    key = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()[:20]
    train, validation = directory / f"{key}.train.tokens", directory / f"{key}.validation.tokens"
    what = f"tokens of {source.name}"
    return cache.fetch(
        (train, validation),
        lambda: (open_tokens(train), open_tokens(validation)),
        lambda: _tokenize(source, tokenizer, every, (train, validation), _progress(what, say)),
        what,
        say,
    )


def _tokenize(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    every: int,
    paths: tuple[Path, Path],
    progress: Callable[[int, int, bool], None],
) -> None:
    with cache.replacing(paths[0]) as train_file, cache.replacing(paths[1]) as validation_file:
        train, validation = (TokenWriter(file, len(tokenizer)) for file in (train_file, validation_file))
        for document, ids in Encoder(tokenizer)(source.documents()):
            writer = validation if held_out(document.index, every) else train
            writer.add(ids, len(document.text.encode()))
            progress(train.documents + validation.documents, train.tokens + validation.tokens, False)
        train.finish()
        validation.finish()
    progress(train.documents + validation.documents, train.tokens + validation.tokens, True)


def _progress(what: str, say: Say) -> Callable[[int, int, bool], None]:
    """Says how far tokenizing is, every few seconds and at the end."""
    started = last = time.monotonic()

    def report(documents: int, tokens: int, done: bool) -> None:
        nonlocal last
        now = time.monotonic()
        if done or now - last >= SAY_EVERY_S:
            last = now
            say(f"{what}: {documents:,} documents, {tokens:,} tokens {'in' if done else 'after'} {now - started:.1f} s")

    return report
