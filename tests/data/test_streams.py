"""Streams: batches do not depend on ranks, workers or resumes, and each rank reads its own files.

Most tests read a made-up source, whose "text" is the tokens themselves, so that what comes out can be traced
back. The hub's
code path is run on local files: `load_dataset("json", streaming=True)` gives the same kind of object.
"""

import json
from collections import namedtuple
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pytest
from texted import jsonl, quiet, small_recipe

from data.corpus import build
from data.keyed_random import generator
from data.loader import StepBatches, batch_digest, merge_states, micro_batch
from data.samples import streamed_splits
from data.samples.bert import BertFamily
from data.samples.gpt import GptFamily
from data.samples.gpt_lane import GptLane
from data.samples.lanes import REMEMBERED, LaneReader, StreamedSamples, lane_count
from data.samples.masking import BertVocabulary
from data.text.documents import Document
from data.text.encoder import Encoder
from data.text.held_out import part_of
from data.text.hub import HubSource
from data.text.ready_made_vocabulary import gpt2_tokenizer
from recipes.files import FileError
from recipes.layout import batch_schedule
from recipes.schema import Masking, Recipe

Layout = namedtuple("Layout", "micro accumulation dp global_batch")
T, EVERY, GLOBAL, VOCABULARY = 16, 5, 8, 50_000
LAYOUTS = [Layout(8, 1, 1, 8), Layout(1, 8, 1, 8), Layout(2, 2, 2, 8), Layout(4, 1, 2, 8), Layout(1, 2, 4, 8)]
HEADS = ("gpt", "none", "sop", "nsp")


class Made:
    """Files with these numbers of documents. Every document's tokens are a run of numbers of its own."""

    finite = False

    def __init__(self, sizes, longest=60):
        self.name, self.sizes, self.shards = "made", sizes, len(sizes)
        self.opened = []  # (file, first record)
        self._longest = longest

    def tokens(self, shard, index):
        begin = 10 + (shard * 50 + index) * 100
        return np.arange(begin, begin + (shard * 31 + index * 17) % self._longest, dtype=np.uint32)

    def shard_documents(self, shard, start=0):
        self.opened.append((shard, start))
        for index in range(start, self.sizes[shard]):
            if (tokens := self.tokens(shard, index)).size:
                yield Document(index, " ".join(map(str, tokens)))

    def train_tokens(self, shard):
        every = (self.tokens(shard, index) for index in range(self.sizes[shard]) if is_training(index))
        return [tokens for tokens in every if tokens.size]


def is_training(index):
    return part_of(index, EVERY) == "train"


def encode(documents):
    """Tokens, and 1 in place of the end-of-document token."""
    return ((each, np.array([*map(int, each.text.split()), 1], dtype=np.uint32)) for each in documents)


def encode_sentences(documents):
    """Seven tokens are a sentence."""
    for document in documents:
        tokens = np.array([*map(int, document.text.split())], dtype=np.uint32)
        yield document, np.split(tokens, range(7, len(tokens), 7))


WORDS = BertVocabulary(2, 3, 4, 0, np.zeros(VOCABULARY, dtype=bool), np.arange(10, VOCABULARY))


def streamed(source, kind="gpt", global_batch=GLOBAL, lanes=None, say=print, buffer=0):
    """Samples of a source as GPT windows, or as BERT samples with a sentence objective.

    `buffer`: documents to shuffle among, of each lane.
    """
    count = lanes or lane_count(global_batch, source.shards)
    encoder, family = encode, GptFamily(None, T)
    if kind != "gpt":
        encoder, family = encode_sentences, BertFamily(None, WORDS, T, 3, kind, Masking(whole_words=False), 3)

    def open_lane(number):
        return family.lane(LaneReader(source, number, count, encoder, is_training, seed=3, buffer=buffer))

    return StreamedSamples(source, count, open_lane, family.stack, global_batch, buffer, say)


def windows(tokens):
    return [tokens[i * T : i * T + T + 1].tolist() for i in range((len(tokens) - 1) // T)]


SOURCES = {
    "one file": [30],
    "as many as rows": [9] * 8,
    "fewer than ranks": [20, 12, 9],
    "not dividing the batch": [12, 4, 9, 13, 8],
    "one without training documents": [30, 0, 12, 9],
    "one shorter than a sample": [30, 1, 12, 9],
    "epochs of very different length": [40, 2, 4, 30],
}


@pytest.mark.parametrize(
    ("files", "batch", "lanes"),
    [(1, 8, 1), (8, 8, 8), (3, 8, 2), (5, 8, 4), (41, 512, 32), (1000, 512, 64), (9, 7, 7)],
)
def test_lanes_divide_the_batch_and_are_no_more_than_files(files, batch, lanes):
    assert lane_count(batch, files) == lanes


def test_one_lane_gives_the_windows_of_stored_tokens_epoch_after_epoch():
    source = Made([30, 25])
    documents = [*source.train_tokens(0), *source.train_tokens(1)]
    stored = windows(np.concatenate([[*tokens, 1] for tokens in documents]))
    found = streamed(source, lanes=1).take(range(2 * len(stored) + 3), seed=1)["window"]
    assert len(stored) > 50
    assert found.tolist() == [*stored, *stored, *stored[:3]]


def test_rows_of_a_step_are_items_of_their_lanes():
    source = Made([30, 25, 28, 31])
    samples = streamed(source)
    for step in range(3):
        rows = samples.take(range(step * GLOBAL, (step + 1) * GLOBAL), seed=1)["window"].tolist()
        for lane in range(4):
            stored = windows(np.concatenate([[*tokens, 1] for tokens in source.train_tokens(lane)]))
            assert rows[2 * lane : 2 * lane + 2] == stored[2 * step : 2 * step + 2]


def test_a_stream_skips_forward_and_goes_back():
    for kind in HEADS:
        whole = streamed(Made([30, 25, 28, 31]), kind).take(range(80), seed=1)
        samples = streamed(Made([30, 25, 28, 31]), kind)
        for positions in ([3, 4], [40, 70], [10], [11, 79]):
            found = samples.take(positions, seed=1)
            assert all(np.array_equal(found[key], whole[key][positions]) for key in whole)


def run_with_resumes(sizes, kind, steps, plan, workers, buffer=0):
    """Digests of steps, the run being cut and continued under another layout after every count in `plan`.

    And the lanes' lines.
    """
    digests, said, state = [], [], None
    for number, (layout, count) in enumerate(plan):
        samples = streamed(Made(sizes), kind, say=said.append, buffer=buffer)
        where = (len(digests), state, workers)
        ranks = [StepBatches(samples, 3, layout, rank, *where) for rank in range(layout.dp)]
        for _ in range(count if number < len(plan) - 1 else steps - len(digests)):
            digests.append(batch_digest([micro for rank in ranks for micro in next(rank)]))
        state = json.loads(json.dumps(merge_states([rank.state() for rank in ranks])))
        for rank in ranks:
            rank.close()
    return digests, said


@pytest.mark.parametrize("kind", ["gpt", pytest.param("nsp", marks=pytest.mark.ci)])
@pytest.mark.parametrize("sizes", SOURCES.values(), ids=SOURCES)
def test_batches_depend_neither_on_ranks_nor_on_workers_nor_on_resumes(sizes, kind):
    steps = 40
    reader = StepBatches(streamed(Made(sizes), kind), 3, LAYOUTS[0], 0)
    expected = [batch_digest(next(reader)) for _ in range(steps)]
    assert len(set(expected)) == steps or sizes == [30] or kind == "gpt", "the reader goes forward"
    assert reader.digest(7) == expected[7]
    for layout in LAYOUTS:
        assert run_with_resumes(sizes, kind, steps, [(layout, 0)], workers=layout.dp % 2)[0] == expected
    cut = [(LAYOUTS[number], count) for number, count in ((0, 1), (2, 4), (4, 1), (1, 9), (3, 7), (4, 0))]
    for workers in (0, 1):
        digests, said = run_with_resumes(sizes, kind, steps, cut, workers)
        assert digests == expected and not said, "no lane was read again from its start"


@pytest.mark.parametrize("every", [1, 5, 30], ids="resumed every {} steps".format)
@pytest.mark.parametrize(("kind", "buffer"), [("gpt", 0), ("nsp", 0), ("gpt", 9)])
def test_a_growing_batch_reads_the_same_samples(kind, buffer, every):
    """Steps of 2, 4, 6 and 8 samples over four lanes, resumed under another layout."""
    ramp, steps, said = batch_schedule(GLOBAL, 2, 2, 45), 30, []
    state, ranks, layouts = None, [], [LAYOUTS[1], Layout(2, 4, 1, 8), Layout(1, 4, 2, 8)]
    whole = streamed(Made([30, 2, 12, 20, 9]), kind, buffer=buffer).take(range(ramp.samples(steps)), seed=3)
    for step in range(steps):
        if step % every == 0:
            layout = layouts[(step // every + (every == steps) * 2) % 3]
            samples = streamed(Made([30, 2, 12, 20, 9]), kind, say=said.append, buffer=buffer)
            how = dict(start_step=step, start_state=state, sizes=ramp)
            ranks = [StepBatches(samples, 3, layout, rank, **how) for rank in range(layout.dp)]
        rows = slice(ramp.samples(step), ramp.samples(step + 1))
        expected = batch_digest([micro_batch(whole.rows(rows), np.ones(ramp.size(step)))])
        assert ranks[0].digest(step) == expected
        found = [micro for rank in ranks for micro in next(rank)]
        assert batch_digest(found) == expected, step
        assert len(found) == ramp.size(step) // layout.micro
        state = json.loads(json.dumps(merge_states([rank.state() for rank in ranks])))
        assert state["position"] == rows.stop
    assert not said, "no lane was read again from its start"


@pytest.mark.parametrize(("kind", "buffer"), [*((kind, 0) for kind in HEADS), ("gpt", 9), ("nsp", 9)])
def test_a_run_resumed_after_every_step_is_the_same(kind, buffer):
    sizes, steps = [30, 2, 12, 20], 25
    expected = run_with_resumes(sizes, kind, steps, [(LAYOUTS[0], 0)], 0, buffer)[0]
    plan = [(LAYOUTS[step % len(LAYOUTS)], 1) for step in range(steps)]
    digests, said = run_with_resumes(sizes, kind, steps, plan, 0, buffer)
    assert digests == expected and not said


def test_a_rank_opens_only_files_of_its_own_lanes():
    for rank in range(4):
        source = Made([9] * 8)
        batches = StepBatches(streamed(source), 1, LAYOUTS[4], rank)
        list(islice(batches, 3))
        assert {file for file, _ in source.opened} == {2 * rank, 2 * rank + 1}
        assert batches.state()["lanes"].keys() == {str(2 * rank), str(2 * rank + 1)}


def test_a_resumed_gpt_opens_the_file_and_the_record_it_had_come_to():
    source = Made([40, 40, 40, 40])
    running = StepBatches(streamed(source, lanes=1), 1, LAYOUTS[0], 0)
    list(islice(running, 20))
    state = running.state()["lanes"]["0"]
    resumed = Made([40, 40, 40, 40])
    next(StepBatches(streamed(resumed, lanes=1), 1, LAYOUTS[0], 0, 20, running.state()))
    assert resumed.opened[0] == (state["turn"], state["record"]) and state["turn"] > 0 and state["record"] > 0
    documents = [tokens for shard in range(4) for tokens in source.train_tokens(shard)]
    first = source.tokens(state["turn"], state["record"])[0]
    before = sum(len(tokens) + 1 for tokens in documents if tokens[0] < first)
    assert before + state["token_offset"] == 20 * GLOBAL * T


def test_a_resumed_bert_reads_again_only_the_documents_it_remembers():
    source = Made([400], longest=40)
    running = StepBatches(streamed(source, "nsp"), 1, LAYOUTS[0], 0)
    list(islice(running, 40))
    place = running.state()["lanes"]["0"]
    assert place["remembered"] == REMEMBERED
    resumed = Made([400], longest=40)
    next(StepBatches(streamed(resumed, "nsp"), 1, LAYOUTS[0], 0, 40, running.state()))
    assert resumed.opened == [(0, place["record"])] and place["record"] > 50


# ---- shuffled


class Counted(Made):
    """Documents of one token, counted as they are read."""

    def shard_documents(self, shard, start=0):
        for index in range(start, self.sizes[shard]):
            self.read = index + 1
            yield Document(index, "10")


def reader_of(source, buffer, lane=0, lanes=1, seed=1, training=is_training):
    return LaneReader(source, lane, lanes, encode, training, seed, buffer)


def order_of(reader, start=None):
    """(turn, record) of the documents of an epoch, as they come."""
    return [document.place[1:3] for document, _ in reader.epoch_from(start or reader.beginning)]


def test_a_shuffled_epoch_has_every_training_document_once():
    source = Made([40, 0, 3, 25])
    in_order, reader = order_of(reader_of(source, 0)), reader_of(source, 12)
    orders = {
        "epoch 0": order_of(reader),
        "epoch 1": order_of(reader, reader.beginning._replace(epoch=1)),
        "another seed": order_of(reader_of(source, 12, seed=2)),
        "another buffer": order_of(reader_of(source, 13)),
        "one of the whole epoch": order_of(reader_of(source, 10**9)),
    }
    assert len(in_order) > 50 and all(sorted(order) == in_order for order in orders.values())
    assert len({str(order) for order in orders.values()} | {str(in_order)}) == 6, "no two are alike"
    assert order_of(reader_of(source, 1)) == in_order
    lanes = [order_of(reader_of(Made([40, 40]), 12, lane, 2)) for lane in range(2)]
    assert sorted(lanes[0]) != lanes[0] != lanes[1], "lanes draw apart"


def test_documents_move_evenly_by_half_the_buffer_which_holds_no_more_than_its_size():
    buffer, count, found, held = 500, 8000, [], []
    reader = reader_of(Counted([count]), buffer, training=lambda index: True)
    for come, (document, _) in enumerate(reader.epoch_from(reader.beginning)):
        found.append(document.index)
        held.append(reader.source.read - come)
    moved = (np.arange(count) - found)[buffer:-buffer]
    shares, _ = np.histogram(moved, bins=8, range=(-buffer / 2, buffer / 2))
    assert np.allclose(shares / len(moved), 1 / 8, atol=0.015) and abs(moved).max() < 0.6 * buffer
    assert max(held) <= buffer and abs(np.mean(held[buffer:-buffer]) / buffer - 0.5) < 0.05
    assert held[0] < 0.2 * buffer, "the first comes soon"


def test_a_resumed_shuffled_stream_reads_no_more_than_the_buffer_again():
    """And goes on in mid-epoch, at whichever document, with all that have not come."""
    buffer = 20
    whole = order_of(reader_of(Made([90, 60]), buffer))
    for come in range(0, len(whole), 7):
        running = reader_of(source := Made([90, 60]), buffer)
        documents = running.epoch_from(running.beginning)
        place = list(islice(documents, come + 1))[-1][0].place.start
        assert place.taken < buffer and come == place.before + place.taken
        resumed = reader_of(Made([90, 60]), buffer)
        assert order_of(resumed, place) == whole[come:]
        assert resumed.source.opened[0] == place[1:3] and running.source is source


def test_an_epoch_whose_last_document_is_the_first_of_its_file_has_given_items():
    """With too little left for another, a resumed lane still begins the next epoch of its own files."""

    class Sixteen(Made):
        def tokens(self, shard, index):
            return np.arange(10 + index, 25 + index)

    def lane(seed):
        return GptLane(reader_of(Sixteen([3, 9]), 9, 0, 2, seed), T)

    resumed_there = 0
    for seed in range(20):
        running = lane(seed)
        for item in range(2):
            running.take(item, 1)
        state, again = running.state(), lane(seed)
        resumed_there += state["turn"] == state["record"] == state["token_offset"] == 0
        again.restore(state)
        assert [again.take(n, 1).tolist() for n in range(6)] == [
            running.take(n, 1).tolist() for n in range(6)
        ]
        assert not again.state()["wide"]
    assert resumed_there > 2


@pytest.mark.parametrize(
    ("buffer", "said", "changes"),
    [
        (9, "no lane has taken=9", {"taken": 9}),
        (9, "no lane has taken=-1", {"taken": -1}),
        (9, "no lane has before=None", {"before": None}),
        (9, "no training document stands there", {"record": 10**9}),
        (0, "a lane's has epoch, turn, record, wide, token_offset", {}),
    ],
)
def test_a_forged_place_of_shuffled_documents_is_refused(buffer, said, changes):
    running = StepBatches(streamed(Made([400, 390]), buffer=9), 3, LAYOUTS[0], 0)
    list(islice(running, 40))
    state = json.loads(json.dumps(running.state()))
    next(StepBatches(streamed(Made([400, 390]), buffer=9), 3, LAYOUTS[0], 0, 40, state))
    state["lanes"]["1"] |= changes
    with pytest.raises(FileError, match=said):
        next(StepBatches(streamed(Made([400, 390]), buffer=buffer), 3, LAYOUTS[0], 0, 40, state))


def test_a_stream_that_was_not_read_since_the_restart_keeps_its_place():
    """As a part of a blend whose turn has not come."""
    for kind in ("gpt", "nsp"):
        running = StepBatches(streamed(Made([30, 25]), kind, lanes=1), 1, LAYOUTS[0], 0)
        list(islice(running, 5))
        restored = streamed(Made([30, 25]), kind, lanes=1)
        restored.restore(running.state())
        assert restored.state(5 * GLOBAL) == running.state()


def test_a_lane_without_a_state_is_read_from_its_start_and_says_so():
    running = StepBatches(streamed(Made([30] * 4)), 1, LAYOUTS[2], 0)
    list(islice(running, 5))
    said = []
    resumed = StepBatches(streamed(Made([30] * 4), say=said.append), 1, LAYOUTS[0], 0, 5, running.state())
    whole = StepBatches(streamed(Made([30] * 4)), 1, LAYOUTS[0], 0)
    assert batch_digest(next(resumed)) == batch_digest(list(islice(whole, 6))[5])
    assert len(said) == 2 and all("from the start, which is right and slow" in line for line in said)


@pytest.mark.parametrize(
    ("files", "batch", "said"),
    [
        (9, GLOBAL, "8 files in 8 lanes, and now there are 9 in 8: .* batch.global"),
        (8, 4, "read 8 files in 8 lanes, and now there are 8 in 4"),
    ],
)
def test_other_files_or_another_batch_are_refused(files, batch, said):
    state = StepBatches(streamed(Made([9] * 8)), 1, LAYOUTS[0], 0).state()
    with pytest.raises(ValueError, match=said):
        streamed(Made([9] * files), global_batch=batch).restore(state)
    with pytest.raises(ValueError, match="read none files"):
        streamed(Made([9] * 8)).restore({"position": 0})


FORGED = {  # changes of a lane's place -> what is said of it
    "no lane has turn=-1": {"turn": -1},
    "no lane has turn=1": {"turn": 1},
    "no lane has wide=1": {"wide": 1},
    "no lane has record=True": {"record": True},
    "no lane has record=3.0": {"record": 3.0},
    "no lane has epoch=None": {"epoch": None},
    "a lane's has epoch, turn": {"more": 1},
    "no training document stands there": {"record": 10**9},
    "no training document stands": {"record": next(i for i in range(9) if not is_training(i))},
}
FORGED_GPT = {
    "no lane has token_offset=-1": {"token_offset": -1},
    "no lane has token_offset=1000": {"token_offset": 10**30},
    "the document there has .* tokens": {"token_offset": 10**6},
    "no lane has token_offset=None": {"token_offset": None},
}
FORGED_BERT = {
    "no lane has remembered=17": {"remembered": 17},
    "no lane has chunk=": {"chunk": "1"},
    "the document there has .* chunk": {"chunk": 10**6},
}


@pytest.mark.parametrize(
    ("kind", "said", "changes"),
    [
        (kind, *case)
        for kind, own in (("gpt", FORGED_GPT), ("nsp", FORGED_BERT))
        for case in (FORGED | own).items()
    ],
)
def test_a_forged_place_is_refused(kind, said, changes):
    """Whatever a checkpoint says of the place in a file is checked before it is read there."""
    running = StepBatches(streamed(Made([400, 390], longest=40), kind), 1, LAYOUTS[0], 0)
    list(islice(running, 40))
    state = json.loads(json.dumps(running.state()))
    assert all(place["record"] for place in state["lanes"].values()), "in the middle of its file"
    list(islice(StepBatches(streamed(Made([400, 390], longest=40), kind), 1, LAYOUTS[0], 0, 40, state), 1))
    state["lanes"]["1"] |= changes
    with pytest.raises(FileError, match=f"made: the checkpoint's place in the data is .*: {said}"):
        next(StepBatches(streamed(Made([400, 390], longest=40), kind), 1, LAYOUTS[0], 0, 40, state))


def test_forged_lanes_are_refused():
    state = StepBatches(streamed(Made([9] * 8)), 1, LAYOUTS[0], 0).state()
    for lanes in None, [], {"8": {}}, {"-1": {}}, {"x": {}}, {" 1": {}}, {"0": []}, {"0": {"epoch": 0}}:
        with pytest.raises(FileError, match="lanes are numbered from 0 to 7|a lane's has epoch"):
            streamed(Made([9] * 8)).restore({**state, "lanes": lanes})


@pytest.mark.parametrize("buffer", [0, 8])
def test_a_lane_whose_files_are_too_short_reads_all_files(buffer):
    source = Made([30, 1, 0, 9])
    samples = streamed(source, buffer=buffer)
    rows = samples.take(range(3 * GLOBAL), seed=1)["window"]
    assert rows[2:4].tolist() != rows[:2].tolist(), "in another order"
    everything = np.concatenate([tokens for shard in range(4) for tokens in source.train_tokens(shard)])
    assert set(rows.ravel().tolist()) <= {1, *everything.tolist()}
    lanes = samples.state(3 * GLOBAL)["lanes"]
    assert lanes["2"]["wide"] and not lanes["0"]["wide"]
    in_order = streamed(Made([30, 1, 0, 9])).take(range(3 * GLOBAL), seed=1)["window"]
    assert (rows.tolist() == in_order.tolist()) == (buffer == 0)


def test_a_stream_shorter_than_a_sample_is_refused():
    with pytest.raises(ValueError, match="have 8 tokens, and .* sequence_length=16 needs 17; give more"):
        streamed(Made([2, 0], longest=10)).take([0], seed=1)
    with pytest.raises(ValueError, match="made: the training documents have no text"):
        streamed(Made([1, 0]), "sop").take([0], seed=1)


def unmasked(fields, row):
    """(A, B) as they were before masking."""
    tokens, count, length = fields["tokens"][row].copy(), fields["predicted"][row], fields["lengths"][row]
    tokens[fields["positions"][row][:count]] = fields["labels"][row][:count]
    text = tokens[:length]
    types = fields["token_types"][row][:length]
    return text[types == 0][1:-1].tolist(), text[types == 1][:-1].tolist()


def test_bert_samples_of_a_stream_lose_no_text():
    source = Made([30])
    samples = streamed(source, "sop").take(range(60), seed=1)
    found = []
    for row in range(60):
        first, second = unmasked(samples, row)
        found += second + first if samples["sentence_labels"][row] else first + second
    expected = np.concatenate(source.train_tokens(0)).tolist()
    # Segments longer than a sample lose tokens; chunks end at sentences of 7 tokens, so some are.
    kept = [token for token in found if token in set(expected)]
    assert kept == found and set(found) <= set(expected)
    assert len(set(found)) > 0.8 * len(expected)
    assert found[: len(set(found))] == sorted(set(found)), "in the order of the documents, epoch after epoch"


@pytest.mark.parametrize(("documents", "count"), [(300, 400), (6, 200)], ids=["one epoch", "many epochs"])
def test_random_segments_come_from_other_documents_for_half_of_the_samples(documents, count):
    samples = streamed(Made([documents], longest=97), "nsp").take(range(count), seed=1)
    labels = samples["sentence_labels"]
    assert 0.4 < labels.mean() < 0.7, "samples of one sentence take a random one, too"
    for row in range(count):
        first, second = unmasked(samples, row)
        same = (second[0] - 10) // 100 == (first[0] - 10) // 100 if first and second else True
        assert same != bool(labels[row]) or not second
    assert labels[0] == 0, "there is no other document yet"


def test_lanes_with_equal_files_mask_other_tokens():
    class Twins(Made):
        def tokens(self, shard, index):
            return super().tokens(0, index)

    fields = streamed(Twins([20, 20]), "none").take(range(GLOBAL), seed=1)
    pairs = [(row, row + GLOBAL // 2) for row in range(GLOBAL // 2)]
    equal = [(a, b) for a, b in pairs if unmasked(fields, a) == unmasked(fields, b)]
    assert equal and any(not np.array_equal(fields["positions"][a], fields["positions"][b]) for a, b in equal)


def test_items_of_a_lane_with_equal_text_mask_other_tokens():
    class Same(Made):
        def tokens(self, shard, index):
            return super().tokens(0, 3)

    fields = streamed(Same([20]), "none").take(range(GLOBAL), seed=1)
    equal = [(a, b) for b in range(GLOBAL) for a in range(b) if unmasked(fields, a) == unmasked(fields, b)]
    assert equal and any(not np.array_equal(fields["positions"][a], fields["positions"][b]) for a, b in equal)


def test_samples_of_a_bert_in_a_stream_are_a_function_of_the_seed():
    one, two, other = (streamed(Made([20, 20]), "sop").take(range(16), seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(one[key], two[key]) for key in one)
    assert not np.array_equal(one["positions"], other["positions"])


# ---- on the hub's code path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four files of documents from no to 60 words, in sentences."""
    directory = tmp_path_factory.mktemp("stream")
    draw = np.random.default_rng(0)
    words = ["union", "state", "of", "the", "people", "congress.", "peace", "commerce", "law."]
    for part in range(4):
        texts = [" ".join(draw.choice(words, draw.integers(0, 60))) for _ in range(30)]
        jsonl(directory / f"{part}.jsonl", texts)
    return sorted(map(str, directory.glob("*.jsonl")))


def read(file):
    return [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]


def hub(files):
    settings = {"data_files": files, "split": "train", "streaming": True}
    return HubSource("local", open_stream=lambda: datasets.load_dataset("json", **settings))


def make_recipe(family="gpt2", head="none", size=50257, **data_settings) -> Recipe:
    shape = {"family": family, "vocab_size": size, "sentence_head": head}
    data = {"source": "hub", "name": "no/such", "validation_every": EVERY, "tokenizer": {"kind": "gpt2"}}
    return small_recipe(shape, {**data, **data_settings}, run={"validation_samples": 8})


def build_from(source, recipe, directory):
    with mock.patch("data.corpus.open_source", return_value=source):
        return build(recipe, directory, quiet)


def test_build_of_a_stream_holds_out_the_first_documents_and_shuffles_the_others(files, tmp_path):
    recipe = make_recipe(test_every=4, shuffle_buffer=31)
    corpus = build_from(hub(files), recipe, tmp_path)
    assert (len(corpus.validation), len(corpus.test)) == (8, 8) and corpus.summary["lanes"] == 4
    texts = [read(file) for file in files]
    encoder = Encoder(gpt2_tokenizer())

    def all_tokens(texts):
        return np.concatenate([ids for _, ids in encoder(SimpleNamespace(text=t) for t in texts if t)])

    for name, samples in (("validation", corpus.validation), ("test", corpus.test)):
        held = [texts[file][i] for i in range(30) for file in range(4) if part_of(i, EVERY, 4) == name]
        tokens = all_tokens(held)
        assert samples.fields["window"].tolist() == windows(tokens)[:8], "from the files in turn"
    tokens = all_tokens(t for file in texts for i, t in enumerate(file) if part_of(i, EVERY, 4) == "train")
    assert corpus.summary["unigram_tokens"] == len(tokens)
    labels = corpus.validation.labels
    counts = np.bincount(tokens, minlength=50257)
    nats = -np.log((counts[labels] + 1) / (len(tokens) + 50257))
    assert corpus.unigram_entropy == pytest.approx(nats.mean())
    json.dumps(corpus.summary)
    own = [t for i, t in enumerate(texts[2]) if t and part_of(i, EVERY, 4) == "train"]
    draws = [int(generator(recipe.seed + (3 << 64), 0, k).integers(8)) for k in range(len(own))]
    order = sorted(range(len(own)), key=lambda k: (k + draws[k], k))
    expected = windows(all_tokens(own[k] for k in order))
    rows = corpus.train.take(range(4 * len(expected)), seed=1)["window"][2::4].tolist()
    assert rows == expected != windows(all_tokens(own)), "among 8 documents of each of four lanes"


def test_only_the_first_training_tokens_of_a_stream_are_counted(files, tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_splits, "UNIGRAM_TOKENS", 50)
    assert build_from(hub(files), make_recipe(), tmp_path).summary["unigram_tokens"] == 50


def test_build_of_a_streamed_bert(files, tmp_path):
    from data.text.trained_vocabulary import train_wordpiece

    texts = [text for file in files for text in read(file)] + ["abcdefghijklmnopqrstuvwxyz .,;"]
    size = 70
    train_wordpiece(texts, size).save(str(tmp_path / "tokenizer.json"))
    given = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
    settings = {"tokenizer": given, "source": "jsonl", "streaming": True}
    pattern = files[0].replace("0.jsonl", "*.jsonl")
    recipe = make_recipe("bert", "sop", size, **settings, name=pattern)
    corpus = build(recipe, tmp_path, quiet)
    assert not corpus.train.random_access and corpus.summary["lanes"] == 4
    assert len(corpus.validation) == 8 and 0 < corpus.unigram_entropy < corpus.uniform_entropy + 1
    special = set(corpus.tokenizer.all_special_ids) - {corpus.tokenizer.unk_token_id}
    fields = corpus.train.take(range(12), seed=1)
    assert not special & set(fields.labels.tolist())
    again = build(recipe.model_copy(update={"seed": 99}), tmp_path, quiet)
    one, other = again.validation.fields, corpus.validation.fields
    assert all(np.array_equal(one[key], other[key]) for key in fields), "whatever the seed"


def test_a_blend_of_a_stream_and_a_store_is_the_same_for_every_layout_and_after_resumes(files, tmp_path):
    values = make_recipe().model_dump(by_alias=True, exclude_unset=True)
    recipe = Recipe.model_validate({**values, "data": blend_data(files)})
    corpus = build(recipe, tmp_path, quiet)
    assert len(corpus.summary["parts"]) == 2 and len(corpus.validation) == 8
    whole, quarter = Layout(4, 1, 1, 4), Layout(1, 1, 4, 4)
    reader = StepBatches(corpus.train, 1, whole, 0)
    expected = [batch_digest(next(reader)) for _ in range(12)]
    found, state = [], None
    for steps in (3, 1, 1, 7):
        ranks = [StepBatches(corpus.train, 1, quarter, rank, len(found), state, 1) for rank in range(4)]
        for _ in range(steps):
            found.append(batch_digest([micro for rank in ranks for micro in next(rank)]))
        state = json.loads(json.dumps(merge_states([rank.state() for rank in ranks])))
        for rank in ranks:
            rank.close()
    assert found == expected


def blend_data(files):
    name = files[0].replace("0.jsonl", "[02].jsonl")
    stream = {"source": "jsonl", "name": name, "streaming": True, "weight": 2.0}
    blend = [stream, {"source": "jsonl", "name": files[1], "weight": 1.0}]
    return {"blend": blend, "validation_every": EVERY, "tokenizer": {"kind": "gpt2"}}


def test_a_stream_that_holds_out_too_little_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="every=1000 the held-out documents have 0 tokens, .* needs 17"):
        build_from(hub(files), make_recipe(validation_every=1000), tmp_path)


def test_an_unreachable_hub_says_what_was_tried_and_how_to_go_on(tmp_path):
    def no_network():
        raise ConnectionError("Couldn't reach 'no/such' on the Hub")

    source = HubSource("no/such", "20231101.en", open_stream=no_network, say=quiet)
    said = r"(?s)load_dataset\('no/such', '20231101.en', .*Couldn't reach.*data.source=packaged"
    with pytest.raises(ValueError, match=said):
        build_from(source, make_recipe(), tmp_path)
