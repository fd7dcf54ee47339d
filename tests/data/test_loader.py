"""Micro-batches, prefetching and blends.

The batch of a step is a function of (seed, step), whatever the layout.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch
from launching import ROOT

from data.corpus import unigram_cross_entropy
from data.loader import (
    Prefetcher,
    StepBatches,
    batch_digest,
    merge_states,
    micro_batch,
    rank_rows,
    samples_sum,
    validation_batches,
)
from data.samples.bert import BertFields
from data.samples.blend import BLOCK, BlendedSamples, blended_held_out, largest_remainder
from data.samples.fields import EpochOrders, HeldOut, shuffled, spread, window_count
from data.samples.gpt import GptFields

Layout = namedtuple("Layout", "micro accumulation dp global_batch")
T, GLOBAL, P = 7, 8, 3
SHARES = [(micro, dp) for dp in (1, 2, 4) for micro in (1, 2, 4, 8) if micro * dp <= GLOBAL]
LAYOUTS = [Layout(micro, GLOBAL // (micro * dp), dp, GLOBAL) for micro, dp in SHARES]
FAMILIES = ("gpt", "bert")
WHOLE = Layout(GLOBAL, 1, 1, GLOBAL)


class Counted:
    """Samples that tell their position and seed, of either family."""

    random_access = True

    def __init__(self, family="gpt", delay=None):
        self.family, self._delay = family, delay or (lambda positions: None)

    def take(self, positions, seed):
        self._delay(positions)
        position = np.asarray(positions, dtype=np.int64)[:, None] * 100 + seed
        if self.family == "gpt":
            return GptFields(window=position + np.arange(T + 1))
        predicted = position[:, 0] // 100 % (P + 1)
        return BertFields(
            tokens=position + np.arange(T),
            token_types=np.tile(np.arange(T) % 2, (len(position), 1)),
            lengths=np.full(len(position), T),
            positions=np.tile(np.arange(P), (len(position), 1)),
            labels=position + np.arange(P),
            predicted=predicted,
            sentence_labels=position[:, 0] // 100 % 2,
        )

    def state(self, position):
        return {"position": position}

    def restore(self, state):
        pass

    def fresh(self):
        return self


def held_out(count, family="gpt"):
    return HeldOut(Counted(family).take(range(count), 0))


def all_ranks(layout, step, samples=None, seed=5):
    """Micro-batches of a step in the order of their rows in the global batch."""
    source = samples or Counted()
    ranks = [next(StepBatches(source, seed, layout, rank, start_step=step)) for rank in range(layout.dp)]
    return [micro for rank in ranks for micro in rank]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batch_of_a_step_is_the_same_for_every_layout(layout, family):
    for step in (0, 3):
        (expected,) = all_ranks(WHOLE, step, Counted(family))
        found = all_ranks(layout, step, Counted(family))
        assert expected["tokens"][:, 0].tolist() == [(step * GLOBAL + j) * 100 + 5 for j in range(GLOBAL)]
        for key in expected.keys() - {"weights", "sentence_weights"}:
            assert torch.equal(expected[key], torch.cat([micro[key] for micro in found])), key


def test_a_rank_reads_consecutive_rows():
    for layout in LAYOUTS:
        rows = [rank_rows(layout, rank) for rank in range(layout.dp)]
        assert all(own.shape == (layout.accumulation, layout.micro) for own in rows)
        assert [own.ravel().tolist() for own in rows] == np.arange(GLOBAL).reshape(layout.dp, -1).tolist()


def test_gpt_micro_batches_have_labels_one_token_on_and_the_documented_types():
    batch = next(StepBatches(Counted(), 1, Layout(2, 2, 2, 8), 1))
    assert len(batch) == 2
    for micro in batch:
        assert micro["tokens"].shape == micro["labels"].shape == micro["weights"].shape == (2, T)
        types = {name: tensor.dtype for name, tensor in micro.items()}
        assert types == {"tokens": torch.int64, "labels": torch.int64, "weights": torch.float32}
        assert torch.equal(micro["labels"], micro["tokens"] + 1), "Counted counts upwards"
        assert all(tensor.is_contiguous() for tensor in micro.values()), "pipeline stages send them"


def test_bert_micro_batches_have_the_documented_shapes_and_weigh_only_real_predictions():
    for micro in next(StepBatches(Counted("bert"), 1, Layout(4, 2, 1, 8), 0)):
        shapes = {key: tuple(tensor.shape) for key, tensor in micro.items()}
        rows = dict.fromkeys(("lengths", "sentence_labels", "sentence_weights"), (4,))
        predictions = dict.fromkeys(("positions", "labels", "weights"), (4, P))
        assert shapes == {"tokens": (4, T), "token_types": (4, T), **predictions, **rows}
        floats = {key for key, tensor in micro.items() if tensor.dtype == torch.float32}
        assert floats == {"weights", "sentence_weights"} and all(t.is_contiguous() for t in micro.values())
        predicted = micro["labels"][:, 0] // 100 % (P + 1)
        assert torch.equal(micro["weights"], (torch.arange(P) < predicted[:, None]).float())
        assert torch.equal(micro["sentence_weights"], torch.full((4,), 0.25))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mean_of_micro_batch_losses_is_the_mean_over_tokens(layout):
    losses = torch.rand(2000)  # by token: every token has its own loss
    parts = all_ranks(layout, 0)
    mean = torch.stack([(losses[micro["labels"]] * micro["weights"]).sum() for micro in parts]).mean()
    torch.testing.assert_close(mean, losses[torch.cat([micro["labels"] for micro in parts])].mean())


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 1, 1), Layout(2, 3, 2, 12), Layout(4, 1, 4, 16), Layout(8, 2, 2, 32)]
)
def test_mean_of_validation_losses_is_the_mean_over_real_samples(layout):
    samples = held_out(13)
    losses = torch.rand(2000)
    ranks = [validation_batches(samples, *layout[:3], rank) for rank in range(layout.dp)]
    assert len({len(steps) for steps in ranks}) == 1, "every rank takes part in every step"
    parts = [micro for steps in ranks for step in steps for micro in step]
    mean = torch.stack([(losses[micro["labels"]] * micro["weights"]).sum() for micro in parts]).mean()
    labels = torch.from_numpy(samples.labels)
    torch.testing.assert_close(mean, losses[labels].mean())
    counted = torch.cat([micro["labels"][micro["weights"] > 0] for micro in parts]).sort().values
    assert torch.equal(counted, labels.sort().values), "each real label counts once"


@pytest.mark.parametrize("layout", [Layout(1, 1, 1, 1), Layout(2, 3, 2, 12), Layout(4, 1, 4, 16)])
def test_validation_of_a_bert_counts_each_prediction_and_sentence_once(layout):
    samples = held_out(14, "bert")  # the last one, which is copied, has predictions
    ranks = [validation_batches(samples, *layout[:3], rank) for rank in range(layout.dp)]
    parts = [micro for steps in ranks for step in steps for micro in step]
    counted = torch.cat([micro["labels"][micro["weights"] > 0] for micro in parts]).sort().values
    assert torch.equal(counted, torch.from_numpy(samples.labels).sort().values)
    assert len(counted) == samples.fields["predicted"].sum()
    losses = torch.rand(2000)
    means = [(losses[micro["tokens"][:, 0]] * micro["sentence_weights"]).sum() for micro in parts]
    first = torch.from_numpy(samples.fields["tokens"][:, 0])
    torch.testing.assert_close(torch.stack(means).mean(), losses[first].mean())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_nothing_and_the_state_is_of_what_was_handed_out(family, workers):
    def uneven(positions):  # later steps are ready first
        time.sleep(0.004 * (positions[0] // GLOBAL % 3 == 0))

    layout = Layout(2, 2, 2, 8)
    expected = StepBatches(Counted(family), 3, layout, 1)
    found = StepBatches(Counted(family, uneven), 3, layout, 1, workers=workers)
    assert found.state() == {"position": 0}
    for step in range(12):
        assert batch_digest(next(expected)) == batch_digest(next(found))
        assert found.state() == expected.state() == {"position": (step + 1) * GLOBAL}
    found.close()


def test_prefetching_reads_one_result_further_ahead_than_it_has_threads():
    made = []
    ready = Prefetcher(lambda n: made.append(n) or n, 5, threads=2)
    deadline = time.monotonic() + 5
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert sorted(made) == [5, 6, 7]
    assert [ready.next() for _ in range(4)] == [5, 6, 7, 8]
    ready.close()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        ready.next()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_reaches_the_consumer_at_its_step_as_it_is(workers):
    error = ValueError("corpus.jsonl:7: broken")

    def fail(positions):
        if positions[0] == 3 * GLOBAL:
            raise error

    batches = StepBatches(Counted(delay=fail), 1, WHOLE, 0, workers=workers)
    assert len(list(islice(batches, 3))) == 3
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            next(batches)
        assert raised.value is error
    assert batches.state() == {"position": 3 * GLOBAL}
    batches.close()


def test_closing_and_dropping_end_the_threads():
    def loader_threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]

    assert not loader_threads()
    batches = StepBatches(Counted(), 1, WHOLE, 0, workers=3)
    next(batches)
    assert 1 <= len(loader_threads()) <= 3, "as many as there is work for"
    batches.close()
    batches.close()
    assert not loader_threads()
    batches = StepBatches(Counted(), 1, WHOLE, 0, workers=2)
    dropped = weakref.ref(batches)
    del batches
    gc.collect()
    assert dropped() is None and not loader_threads()


def test_the_interpreter_ends_with_a_running_loader():
    script = (
        "import time\nfrom data.loader import Prefetcher\n"
        "ready = Prefetcher(lambda n: time.sleep(0.01) or n, 0, threads=2)\nprint(ready.next())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")


def test_resuming_continues_with_the_same_batches_under_another_layout():
    half = Layout(2, 2, 2, 8)
    running = StepBatches(Counted(), 3, WHOLE, 0)
    list(islice(running, 4))
    ranks = [StepBatches(Counted(), 3, half, rank, 4, running.state(), workers=rank) for rank in (0, 1)]
    for _ in range(3):
        (expected,) = next(running)
        found = torch.cat([micro["tokens"] for rank in ranks for micro in next(rank)])
        assert torch.equal(expected["tokens"], found)
    assert merge_states([rank.state() for rank in ranks]) == running.state()
    ranks[1].close()


REFUSED = {
    r"position 8 .* step 2 .* batch.global": lambda: StepBatches(
        Counted(), 3, WHOLE, 0, start_step=2, start_state={"position": 8}
    ),
    "rank 2 is not in 0..1": lambda: StepBatches(Counted(), 1, Layout(2, 2, 2, 8), 2),
    "part 2 has weight 0.0001 .* less than one sample in 1000": lambda: BlendedSamples(
        [Counted(), Counted()], [1, 0.0001], seed=4
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_read_is_refused(said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


def test_states_of_ranks_are_united_and_disagreement_is_noticed():
    lanes = ({"0": {"record": 1}}, {"1": {"record": 2}, "0": {"record": 1}})
    states = [{"position": 8, "lanes": each} for each in lanes]
    assert merge_states(states) == {"position": 8, "lanes": {"0": {"record": 1}, "1": {"record": 2}}}
    nested = [{"position": 8, "parts": [{"position": 3}, state]} for state in states]
    assert merge_states(nested)["parts"][1]["lanes"].keys() == {"0", "1"}
    assert states[0]["lanes"].keys() == {"0"}, "what came is not changed"
    with pytest.raises(AssertionError, match="disagree"):
        merge_states([{"lanes": {"0": {"record": 1}}}, {"lanes": {"0": {"record": 2}}}])


@pytest.mark.parametrize("family", FAMILIES)
def test_digest_is_of_the_whole_batch_and_does_not_depend_on_how_it_is_cut(family):
    def digest(layout, step, seed=1):
        return StepBatches(Counted(family), seed, layout, layout.dp - 1, start_step=3).digest(step)

    assert {digest(layout, 2) for layout in LAYOUTS} == {digest(LAYOUTS[0], 2)}
    assert len({digest(LAYOUTS[0], 2), digest(LAYOUTS[0], 3), digest(LAYOUTS[0], 2, seed=2)}) == 3
    for layout in LAYOUTS:
        assert batch_digest(all_ranks(layout, 2, Counted(family), seed=1)) == digest(layout, 2)


def test_digest_sees_every_field():
    fields = Counted("bert").take(range(4), 0)
    digests = {batch_digest([micro_batch(fields, np.ones(4))])}
    for key in fields:
        changed = BertFields({**fields, key: fields[key].copy()})
        changed[key][3 if changed[key].ndim == 1 else (3, 0)] -= 1
        digests.add(batch_digest([micro_batch(changed, np.ones(4))]))
    assert len(digests) == 1 + len(fields)


def test_largest_remainder_keeps_the_total_and_the_shares():
    assert largest_remainder([1, 1, 1], 1000).tolist() == [334, 333, 333]
    assert largest_remainder([0.7, 0.2, 0.1], 10).tolist() == [7, 2, 1]
    assert largest_remainder([5], 3).tolist() == [3]
    for seed in range(20):
        weights = np.random.default_rng(seed).random(5)
        counts = largest_remainder(weights, 64)
        assert counts.sum() == 64 and np.all(np.abs(counts - weights / weights.sum() * 64) < 1)


def test_a_blend_has_its_shares_in_every_block_and_reads_each_part_in_order():
    blend = BlendedSamples([Counted(), Counted(), Counted()], [6, 3, 1], seed=4)
    part_of, local = blend.places(np.arange(3 * BLOCK))
    assert [np.bincount(block).tolist() for block in part_of.reshape(3, BLOCK)] == [[600, 300, 100]] * 3
    for part in range(3):
        mine = local[part_of == part]
        assert np.array_equal(mine, np.arange(len(mine))), "every sample of a part once, in its order"
    assert not np.array_equal(part_of[:BLOCK], part_of[BLOCK : 2 * BLOCK])
    some = np.array([2500, 3, 999, 1000])
    assert np.array_equal(blend.places(some)[1], local[some]), "a place needs no other"
    other = BlendedSamples([Counted(), Counted(), Counted()], [6, 3, 1], seed=5)
    assert not np.array_equal(other.places(np.arange(BLOCK))[0], part_of[:BLOCK])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_blend_stand_where_their_positions_say(family):
    blend = BlendedSamples([Counted(family), Counted(family)], [2, 1], seed=4)
    key = "window" if family == "gpt" else "tokens"
    positions = [1, 2, 5, 998, 1001, 1002]
    part_of, local = blend.places(np.array(positions))
    assert len(set(part_of.tolist())) == 2
    found = blend.take(positions, seed=1)[key][:, 0]
    assert found.tolist() == (local * 100 + 1 + (part_of << 32)).tolist()


def test_the_state_of_a_blend_is_how_far_each_part_is():
    blend = BlendedSamples([Counted(), Counted()], [2, 1], seed=4)
    part_of, _ = blend.places(np.arange(5000))
    for position in (0, 1, 999, 1000, 2345):
        expected = np.bincount(part_of[:position], minlength=2).tolist()
        assert [part["position"] for part in blend.state(position)["parts"]] == expected
    with pytest.raises(ValueError, match=r"of 0 parts, at \[\], and data.blend has 2, at \[0, 0\]"):
        blend.restore({"position": 0})
    for parts in 3, [1, 2], [{}, {}], [{"position": 4}] * 2, [{"position": True}, {"position": -1}]:
        with pytest.raises(ValueError, match="data.blend has 2, at"):
            blend.restore({"position": 5, "parts": parts})


def test_held_out_parts_of_a_blend_stand_one_after_another():
    blended = blended_held_out([held_out(3), held_out(2)])
    assert len(blended) == 5 and np.array_equal(blended.fields["window"][3], held_out(2).fields["window"][0])


def test_epochs_are_different_permutations():
    orders = [shuffled(21, 9, epoch).tolist() for epoch in range(3)] + [shuffled(21, 10, 0).tolist()]
    assert all(sorted(order) == list(range(21)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_positions_are_looked_up_in_the_order_of_their_epoch():
    orders = EpochOrders(7)
    # A step can straddle two epochs; the third order takes the first one's place.
    for epoch in (0, 1, 0, 2, 1):
        found = [orders.locate(7 * epoch + within, seed=3) for within in range(7)]
        assert found == [(epoch, sample) for sample in shuffled(7, 3, epoch).tolist()]
        assert len(orders._orders) <= 2


def test_a_window_needs_one_token_more_than_its_length():
    counts = [window_count(tokens, T) for tokens in (0, 1, T, T + 1, 2 * T, 2 * T + 1)]
    assert counts == [0, 0, 0, 1, 1, 2]


def test_spread_is_even_and_never_asks_for_what_is_not_there():
    assert spread(100, 5).tolist() == [0, 20, 40, 60, 80]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert spread(0, 5).tolist() == []


def test_unigram_cross_entropy_against_its_definition():
    train, labels, vocabulary = [0, 0, 1, 3, 3, 3], np.array([[0, 2], [3, 1]]), 4
    shares = [(train.count(label) + 1) / (len(train) + vocabulary) for label in labels.flatten()]
    found = unigram_cross_entropy(np.bincount(train, minlength=vocabulary), labels)
    assert found == pytest.approx(-np.mean(np.log(shares)), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_of_a_steps_samples_is_that_of_every_layout_and_of_no_other_step(family):
    factors = [3 + 2 * row for row in range(GLOBAL)]

    def sum_under(layout, step, factors=factors):
        total = 0
        for rank in range(layout.dp):
            (made, *_) = StepBatches(Counted(family), 1, layout, rank, start_step=step).peek()
            of_rows = [[factors[row] for row in rows] for rows in rank_rows(layout, rank)]
            total += samples_sum(made, of_rows)
        return total

    assert len({sum_under(layout, 2) for layout in LAYOUTS}) == 1
    swapped = [factors[1], factors[0], *factors[2:]]
    assert len({sum_under(WHOLE, 2), sum_under(WHOLE, 3), sum_under(WHOLE, 2, swapped)}) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_to_peek_at_a_step_does_not_move_on(workers):
    batches = StepBatches(Counted(), 1, WHOLE, 0, workers=workers)
    next(batches)
    for step in (1, 2):
        state = batches.state()
        peeked = batch_digest(batches.peek()[0])
        assert batch_digest(batches.peek()[0]) == peeked and batches.state() == state and batches.step == step
        assert batch_digest(next(batches)) == peeked
    batches.close()
