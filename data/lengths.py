"""Lengths of a recipe's texts in tokens, for show_data.py --summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data import durable_files
from data.corpus import open_origin
from data.durable_files import Say
from data.samples.splits import family_of
from data.samples.streamed_splits import interleave_files
from data.text.encoder import BATCH_CHARACTERS
from data.tokens.opened import opened_store
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
        cls,
        name: str,
        sizes: np.ndarray,
        borders: np.ndarray,
        sentences: bool,
        whole: bool,
    ) -> TextLengths:
        """Measure documents.

        Args:
            sizes: (S,) of sentences, or of documents.
            borders: (D + 1,) document d has the sizes from borders[d] up to, not with, borders[d + 1].
        """
        documents = np.diff(np.append(0, np.cumsum(sizes, dtype=np.int64))[borders])
        pairs = sizes[:0]
        if sentences:
            # whether a document goes on over a border of sizes
            within = np.ones(len(sizes) + 1, dtype=bool)
            within[borders] = False
            pairs = (sizes[:-1] + sizes[1:])[within[1:-1]]
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
    family = family_of(recipe, tokenizer)
    directory = durable_files.cache_directory()
    sentences = recipe.model.facts.masked
    for origin in recipe.data.origins:
        source = open_origin(recipe, origin, say)
        opened = opened_store(recipe, origin, source, tokenizer, directory, say)
        if opened:
            store = opened.store
            sizes = np.array(store.sizes)
            borders = np.array(store.document_index)
            yield TextLengths.of(opened.name, sizes, borders, sentences, whole=True)
            continue
        assert source is not None
        documents = watch(islice(interleave_files(source), most))
        lengths = list[int]()
        ends = [0]
        for _, encoded in family.encoder(origin, BATCH_CHARACTERS)(documents):
            lengths += map(len, encoded) if sentences else [len(encoded)]
            ends.append(len(lengths))
        sizes = np.array(lengths, dtype=np.int64)
        read = len(ends) - 1  # documents
        yield TextLengths.of(
            source.name, sizes, np.array(ends), sentences, whole=read < most
        )
