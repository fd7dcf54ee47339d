"""The family of samples of a recipe; training, validation and test samples of a token store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import Parts, spread
from data.samples.gpt import GptFamily, TokenStream
from data.text.documents import end_of_document
from data.text.held_out import Part, documents_of
from data.tokens.opened import OpenedStore
from recipes.problems import ProblemsError, Setting, pieces
from recipes.schema import Recipe

if TYPE_CHECKING:
    from data.samples.bert import BertFamily

# Training tokens to count for frequencies; in larger stores they are spread over all.
COUNTED_TOKENS = 5_000_000
_COUNTED_AT_ONCE = 10_000
Family: TypeAlias = "GptFamily | BertFamily"


def family_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Family:
    """Make the recipe's family, once per corpus. Raises ProblemsError: the vocabulary does not fit it."""
    if recipe.model.facts.masked:
        from data.samples.bert import BertFamily

        return BertFamily.of(recipe, tokenizer)
    return GptFamily.of(recipe, tokenizer)


def store_parts(
    recipe: Recipe, family: Family, opened: OpenedStore, wanted: int
) -> Parts:
    """Make the samples of every split of a store.

    Args:
        wanted: samples of each held-out split, spread evenly over its documents.

    Raises ProblemsError: a split is shorter than one sample.
    """
    data = recipe.data
    store = opened.store
    name = opened.name
    splits: tuple[Part, ...] = (
        ("train", "validation", "test") if data.test_every else ("train", "validation")
    )
    documents = {}
    for split in splits:
        documents[split] = documents_of(
            split, store.documents, data.validation_every, data.test_every
        )
    train_stream = TokenStream(
        store, documents["train"], end_of_document(family.tokenizer)
    )
    counts = token_counts(train_stream.read, len(train_stream), recipe.model.vocab_size)
    counts[family.never_predicted()] = 0
    with _naming(recipe, name, "train"):
        train = family.stored_samples(store, documents["train"])
    held_out = {}
    for split in splits[1:]:
        with _naming(recipe, name, split):
            samples = family.for_held_out().stored_samples(store, documents[split])
            held_out[split] = samples.fixed(wanted)
    summary: dict[str, Any] = {
        "source": name,
        "documents": store.documents,
        "train_tokens_crc32": opened.checksum,
    }
    if opened.text_bytes is not None:
        summary["text_bytes"] = opened.text_bytes
    for split, chosen in documents.items():
        prefix = "held_out" if split == "validation" else split
        first, last = (
            store.sequence_starts(store.document_index[chosen + i]) for i in (0, 1)
        )
        summary |= {
            f"{prefix}_documents": len(chosen),
            f"{prefix}_tokens": int((last - first).sum()),
        }
    summary |= {"samples_per_epoch": len(train), "unigram_tokens": int(counts.sum())}
    return Parts(train, held_out["validation"], held_out.get("test"), counts, summary)


@contextmanager
def _naming(recipe: Recipe, source: str, split: Part) -> Iterator[None]:
    """Name source and split in a refusal."""
    try:
        yield
    except ProblemsError as error:
        key = "test_every" if split == "test" else "validation_every"
        part = "training part" if split == "train" else f"part held out for {split}"
        rule = (
            " (",
            Setting(f"data.{key}", getattr(recipe.data, key)),
            " decides how much is held out)",
        )
        problems = []
        for problem in error.problems:
            came = (f"{source}: the {part}: ", *pieces(problem.came))
            problems.append(
                replace(problem, came=came, fix=(*pieces(problem.fix), *rule))
            )
        raise ProblemsError(problems) from error


def token_counts(
    read: Callable[[int, int], np.ndarray], tokens: int, vocab_size: int
) -> np.ndarray:
    """Count each token in a run of tokens, or in COUNTED_TOKENS spread over it: (V,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    blocks = -(-tokens // _COUNTED_AT_ONCE)
    for start in (
        spread(blocks, COUNTED_TOKENS // _COUNTED_AT_ONCE) * _COUNTED_AT_ONCE
    ).tolist():
        part = read(start, min(start + _COUNTED_AT_ONCE, tokens))
        counts += np.bincount(part, minlength=vocab_size)
    return counts
