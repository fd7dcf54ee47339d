"""From a recipe to samples: source, vocabulary, tokens, and the two reference entropies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data import cache
from data.cache import Say
from data.entropy import unigram_cross_entropy
from data.prepared import prepared_parts
from data.samples import Samples, TrainingSamples
from data.sources import Source, open_source
from data.streaming import stream_parts
from data.vocabulary import build_vocabulary, vocabulary_digest
from recipes.schema import Recipe


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and validates with. Entropies are in nats per token, on the validation labels."""

    tokenizer: PreTrainedTokenizerFast
    train: TrainingSamples
    validation: Samples
    uniform_entropy: float
    unigram_entropy: float
    summary: dict[str, Any]


def build(recipe: Recipe, cache_directory: Path | None = None, say: Say = print, source: Source | None = None) -> Corpus:
    """Makes or opens everything a run reads. Called by every rank; ranks that share a directory share the work.

    Args:
        cache_directory: where vocabularies and tokens are kept; by default `data.cache.default_directory()`.
        say: gets the lines that tell what is going on, for one process to print.
        source: read instead of what `recipe.data` names.

    Raises:
        ValueError: the source cannot be read, or is too small for the recipe.
    """
    directory = cache_directory or cache.default_directory()
    source = source or open_source(recipe.data)
    _check_split(recipe.data.validation_every)
    tokenizer = build_vocabulary(recipe, source, directory, say)
    parts = prepared_parts(recipe, source, tokenizer, directory, say) if source.finite else stream_parts(recipe, source, tokenizer, say)
    labels = np.stack([parts.validation[i][1:] for i in range(len(parts.validation))])
    return Corpus(
        tokenizer=tokenizer,
        train=parts.train,
        validation=parts.validation,
        uniform_entropy=math.log(recipe.model.vocab_size),
        unigram_entropy=unigram_cross_entropy(parts.train_counts, labels),
        summary={
            "source": source.name,
            "vocabulary": recipe.data.tokenizer.kind,
            "vocabulary_size": len(tokenizer),
            "vocabulary_digest": vocabulary_digest(tokenizer),
            **parts.summary,
            "validation_samples": len(parts.validation),
        },
    )


def _check_split(every: int) -> None:
    if every < 2:
        raise ValueError(f"data.validation_every={every} holds out every document and leaves none to train on: set it to 2 or more")
