"""The splits of a token store as samples, and the token counts of its training documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.bert import BertSamples, BertSettings, fixed_samples
from data.samples.fields import HeldOut, Parts, spread
from data.samples.gpt import GptSamples, Stream
from data.samples.masking import BertVocabulary
from data.split_rule import Part, documents_of
from data.stores.cached import OpenedStore
from data.vocabularies.vocabulary import end_of_document
from recipes.schema import Recipe

COUNTED_TOKENS = (
    5_000_000  # of the training tokens, for their frequencies; of larger stores this many, spread over all
)
_COUNTED_AT_ONCE = 10_000


def store_parts(
    recipe: Recipe, opened: OpenedStore, tokenizer: PreTrainedTokenizerFast, wanted: int
) -> Parts:
    """
    Args:
        wanted: samples of each held-out split, spread evenly over its documents.

    Raises:
        ValueError: a split is shorter than one sample, or a token lies outside the vocabulary.
    """
    data, store = recipe.data, opened.store
    splits: tuple[Part, ...] = ("train", "validation", "test") if data.test_every else ("train", "validation")
    documents = {
        name: documents_of(name, store.documents, data.validation_every, data.test_every) for name in splits
    }
    train_stream = Stream(store, documents["train"], end_of_document(tokenizer))
    counts = token_counts(train_stream.read, len(train_stream), recipe.model.vocab_size, opened.name)
    make = (
        _gpt(recipe, opened, tokenizer) if recipe.model.family == "gpt2" else _bert(recipe, opened, tokenizer)
    )
    if recipe.model.family == "bert":
        counts[tokenizer.all_special_ids] = 0  # [SEP] ends documents in a `Stream`
    train = _of_split(make, "train", documents["train"], None, opened.name, recipe)
    held_out = {
        name: _of_split(make, name, documents[name], wanted, opened.name, recipe)
        for name in splits
        if name != "train"
    }
    _check_tokens(list(held_out.values()), recipe.model.vocab_size, opened.name)
    return Parts(
        train,
        held_out["validation"],
        held_out.get("test"),
        counts,
        _summary(opened, documents, len(train), counts),
    )


Make = Callable[[np.ndarray, "int | None"], Any]
"""Of the samples of some documents, a fixed choice of so many; None: all of them, to train on."""


def _gpt(recipe: Recipe, opened: OpenedStore, tokenizer: PreTrainedTokenizerFast) -> Make:
    end = end_of_document(tokenizer)

    def make(documents: np.ndarray, wanted: int | None) -> Any:
        samples = GptSamples(Stream(opened.store, documents, end), recipe.sequence_length)
        return samples if wanted is None else samples.fixed(wanted)

    return make


def _bert(recipe: Recipe, opened: OpenedStore, tokenizer: PreTrainedTokenizerFast) -> Make:
    vocabulary, settings = BertVocabulary.of(tokenizer), BertSettings.of(recipe)

    def make(documents: np.ndarray, wanted: int | None) -> Any:
        if wanted is None:
            return BertSamples(opened.store, documents, settings, vocabulary)
        return fixed_samples(opened.store, documents, settings, vocabulary, wanted)

    return make


def _of_split(
    make: Make, name: str, documents: np.ndarray, wanted: int | None, source: str, recipe: Recipe
) -> Any:
    """The samples of a split; a refusal says which split of what it is."""
    try:
        return make(documents, wanted)
    except ValueError as error:
        key = "test_every" if name == "test" else "validation_every"
        part = "training part" if name == "train" else f"part held out for {name}"
        rule = f"data.{key}={getattr(recipe.data, key)} decides how much is held out"
        raise ValueError(f"{source}: the {part}: {error} ({rule})") from error


def token_counts(
    read: Callable[[int, int], np.ndarray], tokens: int, vocab_size: int, name: str
) -> np.ndarray:
    """(V,) int64: occurrences in a run of tokens: in all of it, or in COUNTED_TOKENS that are spread over it.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    pieces = -(-tokens // _COUNTED_AT_ONCE)
    for piece in spread(pieces, COUNTED_TOKENS // _COUNTED_AT_ONCE).tolist():
        start = piece * _COUNTED_AT_ONCE
        found = np.bincount(read(start, min(start + _COUNTED_AT_ONCE, tokens)), minlength=vocab_size)
        if found.size > vocab_size:
            raise ValueError(_outside(name, found.size - 1, vocab_size))
        counts += found
    return counts


def _check_tokens(held_out: Sequence[HeldOut], vocab_size: int, name: str) -> None:
    largest = max(int(samples.labels.max(initial=0)) for samples in held_out)
    if largest >= vocab_size:
        raise ValueError(_outside(name, largest, vocab_size))


def _outside(name: str, token: int, vocab_size: int) -> str:
    return (
        f"{name}: token {token} is outside the vocabulary of model.vocab_size={vocab_size}: set data.tokenizer.kind and model.vocab_size "
        "to the vocabulary that the store was made with"
    )


def _summary(
    opened: OpenedStore, documents: Mapping[Part, np.ndarray], epoch: int, counts: np.ndarray
) -> dict[str, Any]:
    store, prefix = opened.store, {"train": "train", "validation": "held_out", "test": "test"}
    found: dict[str, Any] = {
        "source": opened.name,
        "documents": store.documents,
        "train_tokens_crc32": opened.checksum,
    }
    if opened.text_bytes is not None:
        found["text_bytes"] = opened.text_bytes
    for name, chosen in documents.items():
        found[f"{prefix[name]}_documents"] = len(chosen)
        found[f"{prefix[name]}_tokens"] = stored_tokens(opened, chosen)
    return {**found, "samples_per_epoch": epoch, "unigram_tokens": int(counts.sum())}


def stored_tokens(opened: OpenedStore, documents: np.ndarray) -> int:
    """Tokens of some documents of a store."""
    store = opened.store
    first, last = (store.sequence_starts(store.document_index[documents + i]) for i in (0, 1))
    return int((last - first).sum())
