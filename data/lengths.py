"""Lengths of documents and sentences in tokens, for launch/show_data.py --summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data import cache
from data.cache import Say
from data.corpus import opened_store
from data.samples.families import family_of
from data.samples.splits import interleave_files
from data.text.encoder import BATCH_CHARACTERS
from data.text.records import SkippedRecords
from data.text.sources import open_source
from recipes.schema import Recipe


@dataclass(frozen=True)
class TextLengths:
    """Lengths in tokens of one source's documents; empty documents are left out."""

    name: str
    documents: np.ndarray  # (D,)
    pairs: np.ndarray  # (P,) of two consecutive sentences of a document; none for a GPT
    whole: bool  # all documents; else the first of a stream

    @classmethod
    def of(
        cls, name: str, sizes: np.ndarray, borders: np.ndarray, sentences: bool, whole: bool
    ) -> TextLengths:
        """Measure documents.

        Args:
            sizes: (S,) of sentences, or of documents.
            borders: (D + 1,) document d has the sizes from borders[d] up to, not with, borders[d + 1].
        """
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        documents = np.diff(ends[borders])
        within = np.ones(max(len(sizes) - 1, 0), dtype=bool)
        inner = borders[(borders > 0) & (borders < len(sizes))]
        within[inner - 1] = False
        pairs = (sizes[:-1] + sizes[1:])[within] if sentences else sizes[:0]
        return cls(name, documents[documents > 0], pairs, whole)


def text_lengths(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    most: int,
    say: Say,
    watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Iterator[TextLengths]:
    """Measure each source of a recipe: all documents of a store, the first `most` of a stream.

    `watch` wraps the documents of a stream, for a progress bar.
    """
    family, directory = family_of(recipe, tokenizer), cache.default_directory()
    sentences = family.sequences == "sentences"
    for origin in recipe.data.origins:
        skipped = SkippedRecords() if recipe.data.broken_records == "skip" else None
        source = None if origin.source == "store" else open_source(origin, say, skipped)
        if opened := opened_store(recipe, family, origin, source, skipped, directory, say):
            store = opened.store
            sizes, borders = np.array(store.sizes), np.array(store.document_index)
            yield TextLengths.of(opened.name, sizes, borders, sentences, whole=True)
            continue
        assert source is not None
        documents = watch(islice(interleave_files(source), most))
        found = [
            [len(part) for part in encoded] if sentences else [len(encoded)]
            for _, encoded in family.encoder(origin, BATCH_CHARACTERS)(documents)
        ]
        borders = np.cumsum([0, *map(len, found)])
        sizes = np.array([size for document in found for size in document], dtype=np.int64)
        yield TextLengths.of(source.name, sizes, borders, sentences, whole=len(found) < most)
