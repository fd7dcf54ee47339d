"""Borders of documents in windows: where they are, the same in stores, streams, blends and micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from texted import jsonl, quiet, small_recipe

from data.corpus import Corpus, build
from data.loader import StepBatches, micro_batch
from data.samples.documents import described, places_in_documents
from data.samples.fields import Fields
from launch.show_data import show_samples
from recipes.families import PLACES
from recipes.layout import Layout

T, GPT2_END = 16, 50256


def test_places_begin_anew_at_the_token_between_documents_and_with_a_window():
    tokens = np.array([[5, 6, 0, 7, 8, 0, 0, 9], [0, 5, 6, 7, 8, 9, 5, 0], [5, 6, 7, 8, 9, 5, 6, 7]])
    assert places_in_documents(tokens, 0).tolist() == [
        [0, 1, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Forty documents, shorter and longer than a window; one of them spells the end token out."""
    texts = [" ".join(f"word{number}" for number in range(1 + index * 7 % 23)) for index in range(40)]
    texts[7] = "before <|endoftext|> after"
    return jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", texts)


@pytest.fixture(scope="module")
def corpus_of(text, tmp_path_factory) -> Callable[..., Corpus]:
    """Builds the corpus of the text once for each (streaming, attend)."""
    cache = tmp_path_factory.mktemp("cache")

    @functools.cache
    def make(streaming: bool = False, attend: str = "document") -> Corpus:
        given = {"source": "jsonl", "name": str(text), "streaming": streaming, "attend": attend}
        given |= {"tokenizer": {"kind": "gpt2"}, "validation_every": 5}
        return build(small_recipe({"vocab_size": 50257}, given), cache, quiet)

    return make


def in_order(samples, count: int) -> Fields:
    """The first windows of an epoch in the order of the text; a store's come shuffled."""
    if samples.random_access:
        return samples.fixed(len(samples)).fields.rows(slice(count))
    return samples.fresh().take(range(count), seed=1)


def test_streams_have_the_borders_of_stores(corpus_of):
    stored, streamed = corpus_of(), corpus_of(True)
    for one, other in (
        (in_order(stored.train, 20), in_order(streamed.train, 20)),
        (stored.validation.fields, streamed.validation.fields),
    ):
        assert one.keys() == other.keys() == {"window", PLACES}
        assert len(one["window"]) > 2 and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("streaming", [False, True])
def test_borders_are_where_documents_end_in_the_text(corpus_of, streaming):
    """And nowhere else: a document that spells the token out has none inside."""
    corpus = corpus_of(streaming)
    found = in_order(corpus.train, 20)
    tokens = [*found["window"][0], *found["window"][1:, 1:].flat]
    begun = [0] + [place for place in range(1, 20 * T) if tokens[place] == GPT2_END]
    expected = np.union1d(begun, np.arange(0, 20 * T, T))
    assert np.flatnonzero(found[PLACES].ravel() == 0).tolist() == expected.tolist()
    shown = corpus.tokenizer.decode(tokens[: 20 * T])
    assert "before <|endoftext|> after" in shown and shown.count("<|endoftext|>") == len(begun) > 10


def test_a_micro_batch_has_the_places_of_its_own_samples(corpus_of):
    """Whatever the layout; without borders it has none."""
    corpus, seed = corpus_of(), 3
    layouts = (Layout(1, 1, 1, 4, 1, 4), Layout(1, 1, 2, 1, 2, 4))
    steps = []
    for layout in layouts:
        ranks = [StepBatches(corpus.train, seed, layout, rank) for rank in range(layout.dp)]
        steps.append([batch for rank in ranks for batch in next(rank)])
        assert ranks[0].digest(0) == StepBatches(corpus.train, seed, layouts[0], 0).digest(0)
    for batches in steps:
        tokens, places = (np.concatenate([b[name].numpy() for b in batches]) for name in ("tokens", PLACES))
        assert places.dtype == np.int64 and np.array_equal(places, places_in_documents(tokens, GPT2_END))
        assert len({tuple(row) for row in places.tolist()}) > 1, "samples have different borders"
    plain = corpus_of(attend="window")
    assert PLACES not in micro_batch(plain.validation.take([0]), np.ones(1))
    assert np.array_equal(plain.validation.fields["window"], corpus.validation.fields["window"])


def test_a_blend_keeps_the_borders_of_its_samples(text, tmp_path):
    part = {"source": "jsonl", "name": str(text)}
    parts = [{"weight": 1.0, **part}, {"weight": 2.0, "streaming": True, **part}]
    given = {"tokenizer": {"kind": "gpt2"}, "positions": "document", "validation_every": 5, "blend": parts}
    corpus = build(small_recipe({"vocab_size": 50257}, given), tmp_path, quiet)
    fields = corpus.train.fresh().take(range(12), seed=2)
    assert np.array_equal(fields[PLACES], places_in_documents(fields["window"][:, :-1], GPT2_END))


def test_a_stream_is_known_by_its_text_whatever_the_borders(corpus_of):
    """So that a branch with other borders goes on in it."""
    with_borders, without = (corpus_of(True, attend).summary for attend in ("document", "window"))
    assert with_borders["train_tokens_crc32"] == without["train_tokens_crc32"]


def test_documents_are_shown_behind_the_number_of_their_first_token(corpus_of):
    corpus = corpus_of()
    fields = in_order(corpus.train, 1)
    window, places = fields["window"][0], fields[PLACES][0]
    facts, *documents = described(window, places, corpus.tokenizer).splitlines()
    begins = np.flatnonzero(places == 0).tolist()
    assert facts.startswith(
        f"16 input tokens in {len(begins)} documents, from tokens {str(begins)[1:-1]} on; "
    )
    assert [line.split("]")[0] for line in documents] == [f"[{begin}" for begin in begins]
    assert documents[1].startswith(f"[{begins[1]}] <|endoftext|>word0")


def test_show_data_shows_the_borders(corpus_of, capsys):
    made = small_recipe({"vocab_size": 50257}, {"tokenizer": {"kind": "gpt2"}, "attend": "document"})
    show_samples(made, corpus_of(), SimpleNamespace(step=0, samples=1, split="validation"))
    shown = capsys.readouterr().out
    assert "--- validation sample 0 of " in shown and "16 input tokens in " in shown and "\n[0] " in shown
