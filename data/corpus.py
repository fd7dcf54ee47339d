"""The data of a recipe: sources, vocabulary, tokens, samples, and two reference entropies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data import durable_files
from data.durable_files import Say, quiet
from data.samples.fields import HeldOut, Parts, TrainingSamples
from data.samples.splits import Family, family_of, store_parts
from data.text.documents import SkippedRecords, Source
from data.text.held_out import END, EndHeldOut, with_held_out_text
from data.text.sources import open_source
from data.text.vocabulary import build_vocabulary, unknown_share, vocabulary_digest
from data.tokens.opened import (
    check_ready_made,
    opened_store,
    sequences_of,
    store_prefix,
)
from recipes.families import TRAINED
from recipes.schema import BlendPart, Origin, Recipe

if TYPE_CHECKING:
    from data.samples.streamed_splits import MakeOnce

OPENING = 32  # tokens
OPENING_WORDS = 4
SHORT_TEXT = 16 << 20  # bytes of files; a vocabulary of that much is trained in seconds


@dataclass(frozen=True)
class Corpus:
    """The data of a run: vocabulary, samples of every split, and entropies in nats per token."""

    tokenizer: PreTrainedTokenizerFast
    train: TrainingSamples
    validation: HeldOut
    test: HeldOut | None
    uniform_entropy: float
    unigram_entropy: float
    summary: dict[str, Any]
    # broken records that streams have left out on this rank, so far
    skipped: tuple[SkippedRecords, ...] = ()

    def opening(self) -> str:
        """Return the first words of the held-out text, and a mask behind them where the vocabulary has one."""
        named = self.tokenizer.special_tokens_map
        batch = self.validation.take([0]).micro_batch(np.ones(1))
        tokens = batch["tokens"][0].copy()
        first = 0
        if "positions" in batch:  # of masked tokens, which are put back
            masked = batch["weights"][0] > 0
            tokens[batch["positions"][0][masked]] = batch["labels"][0][masked]
            first = 1  # a segment may begin within a word
        text = str(self.tokenizer.decode(tokens[:OPENING]))
        words = text.removeprefix(named.get("cls_token", "")).split()[first:-1]
        return " ".join([*words[:OPENING_WORDS], named.get("mask_token", "")]).rstrip()


def build(
    recipe: Recipe,
    cache_directory: Path | None = None,
    say: Say = print,
    once: MakeOnce = lambda make, form: make(),
) -> Corpus:
    """Make or open the data of a run.

    Every rank calls it; ranks with one cache directory share the work.

    Args:
        cache_directory: of vocabularies and tokens; by default `data.durable_files.cache_directory()`.
        say: prints a line of progress.
        once: has one rank make the head of a stream for all ranks.

    Raises ValueError: a source cannot be read, or is too small for the recipe.
    """
    directory = cache_directory or durable_files.cache_directory()
    origins = recipe.data.origins
    # first: a missing store is reported, not its missing vocabulary
    for origin in origins:
        if origin.source == "store":
            check_origin(origin, recipe.model.family)
    sources = [open_origin(recipe, origin, say) for origin in origins]
    tokenizer = build_vocabulary(recipe, [*filter(None, sources)], directory, say)
    parts = _all_parts(
        recipe, family_of(recipe, tokenizer), sources, directory, say, once
    )
    summary = {
        "source": parts.summary["source"],
        "vocabulary": recipe.data.tokenizer.kind,
        "vocabulary_size": len(tokenizer),
        "vocabulary_digest": vocabulary_digest(tokenizer),
        **parts.summary,
        "validation_samples": len(parts.validation),
    }
    if parts.test:
        summary["test_samples"] = len(parts.test)
    if any(isinstance(each, EndHeldOut) for each in sources):
        summary["held_out"] = END
    return Corpus(
        tokenizer=tokenizer,
        train=parts.train,
        validation=parts.validation,
        test=parts.test,
        uniform_entropy=math.log(recipe.model.vocab_size),
        unigram_entropy=unigram_cross_entropy(
            parts.train_counts, parts.validation.labels
        ),
        summary=summary,
        skipped=tuple(
            each.skipped
            for each in sources
            if each and each.skipped and not each.finite
        ),
    )


def open_origin(recipe: Recipe, origin: Origin, say: Say) -> Source | None:
    """Open the source of an origin; None: it is a store."""
    if origin.source == "store":
        return None
    skipped = SkippedRecords() if recipe.data.broken_records == "skip" else None
    return with_held_out_text(recipe, open_source(origin, say, skipped))


def check_sources(recipe: Recipe, say: Say = quiet) -> list[str]:
    """Check that a recipe's sources and vocabulary exist and fit it, without reading them whole.

    `say`: gets what is told of many files. Return remarks for the user.

    Raises ValueError: files or packages are missing, or a store is damaged or of another vocabulary.
    """
    data = recipe.data
    family = recipe.model.family
    said: list[str] = []
    for origin in data.origins:
        check_origin(origin, family, say)
    # the others are published, or trained
    known = data.tokenizer.kind in ("file", "store")
    sources = [] if known else _short_texts(recipe)
    tokenizer = None
    if known or sources:
        tokenizer = build_vocabulary(
            recipe, sources, durable_files.cache_directory(), quiet
        )
    for origin in data.origins:
        if origin.source == "store":
            check_ready_made(
                data.tokenizer.kind,
                sequences_of(family),
                origin,
                recipe.model.vocab_size,
                tokenizer,
            )
        elif tokenizer and origin.source not in ("packaged", "hub"):
            share = unknown_share(
                tokenizer, open_source(origin, quiet, SkippedRecords())
            )
            if share:
                unknown = tokenizer.unk_token
                said.append(f"{share:.2%} of the first tokens are {unknown}")
    return said


def _short_texts(recipe: Recipe) -> list[Source]:
    """Open the sources whose text may be too short for the vocabulary that is trained on them; [] else."""
    data = recipe.data
    if data.tokenizer.kind not in TRAINED or any(
        origin.source == "packaged" for origin in data.origins
    ):
        return []
    from data.text.local_files import files_of

    size = 0
    for origin in data.origins:
        size += sum(file.size for file in files_of(origin))
    if size > SHORT_TEXT:
        return []
    sources = (open_origin(recipe, origin, quiet) for origin in data.origins)
    return [source for source in sources if source]


def check_origin(origin: Origin, family: str = "gpt2", say: Say = quiet) -> None:
    """Open the source of an origin. Raises ValueError: its files or packages are missing."""
    if origin.source == "store":
        store_prefix(origin, sequences_of(family))
    else:
        open_source(origin, say)


def _all_parts(
    recipe: Recipe,
    family: Family,
    sources: Sequence[Source | None],
    directory: Path,
    say: Say,
    once: MakeOnce,
) -> Parts:
    origins = recipe.data.origins
    weights = [
        origin.weight if isinstance(origin, BlendPart) else 1.0 for origin in origins
    ]
    wanted = [recipe.run.validation_samples]
    if len(origins) > 1:
        from data.samples.blend import blended, largest_remainder

        wanted = largest_remainder(weights, recipe.run.validation_samples).tolist()
    parts = []
    for origin, source, count in zip(origins, sources, wanted, strict=True):
        opened = opened_store(recipe, origin, source, family.tokenizer, directory, say)
        if opened:
            parts.append(store_parts(recipe, family, opened, max(count, 1)))
        else:
            from data.samples.streamed_splits import stream_parts

            assert source
            parts.append(
                stream_parts(recipe, family, origin, source, max(count, 1), say, once)
            )
    if len(parts) == 1:
        return parts[0]
    return blended(parts, weights, recipe.seed)


def unigram_cross_entropy(counts: np.ndarray, labels: np.ndarray) -> float:
    """Return the nats per token of `labels` under add-one-smoothed frequencies, (count(t) + 1) / (N + V).

    Args:
        counts: (V,) occurrences in the training tokens.
        labels: any shape, token ids below V.
    """
    frequencies = np.asarray(counts, np.float64) + 1.0
    logarithms = np.log(frequencies) - np.log(frequencies.sum())
    return float(-logarithms[np.asarray(labels)].mean())
