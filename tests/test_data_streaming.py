"""Streams give the same samples as prepared tokens of the same documents, and continue exactly where they stopped.

The hub's code path is run on local files: `load_dataset("json", streaming=True)` gives the same kind of object.
"""

import json
from collections import namedtuple
from itertools import islice

import datasets
import numpy as np
import pytest
import torch

import data
from data.hub import HubSource
from data.loader import StepBatches
from data.samples import Samples, window_count
from data.sources import JsonlSource
from data.streaming import StreamedSamples, read_head
from data.vocabulary import Encoder, gpt2_tokenizer
from recipes.schema import Recipe

Layout = namedtuple("Layout", "micro accumulation dp global_batch")
T, EVERY, DOCUMENTS = 16, 5, 60
LAYOUT = Layout(4, 1, 1, 4)


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    """`load_dataset` reports its use to the hub, for local files too, and waits for an answer."""
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of documents from 1 to 60 words, some of them empty."""
    directory = tmp_path_factory.mktemp("stream")
    draw = np.random.default_rng(0)
    words = ["union", "state", "of", "the", "people", "congress", "peace", "commerce", "law"]
    for part in range(2):
        texts = [" ".join(draw.choice(words, draw.integers(0, 60))) for _ in range(DOCUMENTS // 2)]
        (directory / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sorted(map(str, directory.glob("*.jsonl")))


@pytest.fixture(scope="module")
def encode():
    # One document at a time: the position must not depend on how far the tokenizer has read ahead.
    return Encoder(gpt2_tokenizer(), batch_characters=200)


class Opened(HubSource):
    """Counts how often the stream is opened, and where."""

    def __init__(self, files):
        settings = {"data_files": files, "split": "train", "streaming": True}
        super().__init__("local", open_stream=lambda: datasets.load_dataset("json", **settings))
        self.starts = []

    def documents(self, start=0):
        self.starts.append(start)
        return super().documents(start)


def part_tokens(files, encode, held_out) -> np.ndarray:
    """All tokens of the held-out or the training documents."""
    documents = JsonlSource(files[0].replace("0.jsonl", "*.jsonl"), "text").documents()
    chosen = [d for d in documents if (d.index % EVERY == EVERY - 1) == held_out]
    return np.concatenate([ids for _, ids in encode(chosen)])


def test_stream_yields_the_windows_of_prepared_tokens_epoch_after_epoch(files, encode):
    prepared = Samples(part_tokens(files, encode, held_out=False), T)
    streamed = StreamedSamples(Opened(files), encode, T, EVERY)
    size = len(prepared)
    assert size > 50
    found = streamed.take(range(2 * size + 3), seed=1)
    expected = np.stack([prepared[i % size] for i in range(2 * size + 3)])
    assert np.array_equal(found, expected)


def test_stream_skips_forward_and_goes_back(files, encode):
    whole = StreamedSamples(Opened(files), encode, T, EVERY).take(range(80), seed=1)
    streamed = StreamedSamples(Opened(files), encode, T, EVERY)
    for positions in ([3, 4], [40, 70], [10], [11, 79]):
        assert np.array_equal(streamed.take(positions, seed=1), whole[positions])


@pytest.mark.parametrize("step", [0, 1, 7, 16, 17, 25])
def test_resuming_gives_the_same_batches_without_reading_what_was_used(files, encode, step):
    running = StepBatches(StreamedSamples(Opened(files), encode, T, EVERY), 1, LAYOUT, 0)
    list(islice(running, step))
    state = json.loads(json.dumps(running.state()))
    source = Opened(files)
    layout = Layout(1, 2, 2, 4)
    ranks = [StepBatches(StreamedSamples(source, encode, T, EVERY), 1, layout, rank, step, state) for rank in (0, 1)]
    slow = StepBatches(StreamedSamples(Opened(files), encode, T, EVERY), 1, LAYOUT, 0, start_step=step)
    for _ in range(5):
        expected = next(running)[0]["tokens"]
        parts = [next(rank) for rank in ranks]
        found = torch.cat([part[a]["tokens"] for a in (0, 1) for part in parts])
        assert torch.equal(expected, found)
        assert torch.equal(expected, next(slow)[0]["tokens"])
    assert all(rank.state() == running.state() == slow.state() for rank in ranks)
    assert state["documents"] in source.starts


def test_state_names_the_first_document_that_is_not_used_up(files, encode):
    streamed = StreamedSamples(Opened(files), encode, T, EVERY)
    documents = encode(JsonlSource(files[0], "text").documents())
    train = [(d.index, ids.size) for d, ids in documents if (d.index + 1) % EVERY]
    for position in range(20):
        state = streamed.state(position)
        before = sum(size for index, size in train if index < state["documents"])
        assert before + state["token_offset"] == position * T
        sizes = dict(train)
        assert position == 0 or state["token_offset"] < sizes[state["documents"]]


def test_digest_does_not_disturb_the_running_stream(files, encode):
    one, two = (StepBatches(StreamedSamples(Opened(files), encode, T, EVERY), 1, LAYOUT, 0) for _ in range(2))
    next(one), next(two)
    assert one.digest(0) != one.digest(5)
    assert torch.equal(next(one)[0]["tokens"], next(two)[0]["tokens"])


def test_head_holds_out_the_first_documents_and_counts_the_first_training_tokens(files, encode):
    tokenizer = gpt2_tokenizer()
    head = read_head(Opened(files), tokenizer, EVERY, 100, 150, say=print)
    held_out = part_tokens(files, encode, held_out=True)
    assert head.held_out_tokens.size >= 100
    assert np.array_equal(head.held_out_tokens, held_out[: head.held_out_tokens.size])
    train = part_tokens(files, encode, held_out=False)[:150]
    assert np.array_equal(head.train_counts, np.bincount(train, minlength=len(tokenizer)))


def make_recipe(**data_settings) -> Recipe:
    return Recipe.model_validate(
        {
            "title": "test",
            "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 50257},
            "sequence_length": T,
            "batch": {"micro": 2, "global": 4},
            "steps": 3,
            "optimizer": {"lr": 1e-3},
            "data": {
                "source": "hub",
                "name": "no/such",
                "validation_every": EVERY,
                "tokenizer": {"kind": "gpt2"},
                **data_settings,
            },
            "run": {"validation_samples": 8},
        }
    )


def test_build_of_a_stream_and_of_the_same_files_agree(files, encode, tmp_path):
    streamed = data.build(make_recipe(), tmp_path, lambda line: None, Opened(files))
    glob = files[0].replace("0.jsonl", "*.jsonl")
    prepared = data.build(make_recipe(source="jsonl", name=glob), tmp_path, lambda line: None)
    size = len(prepared.train)
    assert np.array_equal(streamed.train.take(range(size), 1), np.stack([prepared.train[i] for i in range(size)]))
    assert len(streamed.validation) == len(prepared.validation) == 8
    held_out = Samples(part_tokens(files, encode, held_out=True), T)
    assert all(np.array_equal(streamed.validation[i], held_out[i]) for i in range(8)), "its first windows"
    # All training tokens are counted here, so only the choice of validation windows differs.
    assert streamed.summary["unigram_tokens"] == prepared.summary["train_tokens"]
    assert streamed.unigram_entropy == pytest.approx(prepared.unigram_entropy, rel=0.02)
    json.dumps(streamed.summary)


def test_a_stream_that_is_too_short_is_refused(files, encode):
    with pytest.raises(ValueError, match="held-out documents have .* one sample of sequence_length=16 needs 17"):
        data.build(make_recipe(validation_every=1000), say=lambda line: None, source=Opened(files))
    tokens = part_tokens(files, encode, held_out=False).size
    assert window_count(tokens, tokens) == 0
    with pytest.raises(ValueError, match=f"training documents have {tokens} tokens, .* needs {tokens + 1}"):
        StreamedSamples(Opened(files), encode, tokens, EVERY).take([0], seed=1)


def test_unreachable_hub_says_what_was_tried_and_how_to_go_on():
    def no_network():
        raise ConnectionError("Couldn't reach 'no/such' on the Hub")

    source = HubSource("no/such", "20231101.en", open_stream=no_network)
    with pytest.raises(ValueError) as refused:
        data.build(make_recipe(), say=lambda line: None, source=source)
    tried = "load_dataset('no/such', '20231101.en', split='train'"
    for part in (tried, "Couldn't reach", "data.source=jsonl", "data.source=packaged"):
        assert part in str(refused.value)


def test_a_stream_without_the_text_field_is_refused(files):
    source = HubSource("local", text_column="body", open_stream=Opened(files)._open_stream)
    with pytest.raises(ValueError, match="local/train, document 0: no field 'body': set data.text_column to one of"):
        data.build(make_recipe(), say=lambda line: None, source=source)
