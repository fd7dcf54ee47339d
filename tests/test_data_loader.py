"""Samples and micro-batches: the batch of a step is a function of (seed, step), whatever the layout."""

from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch

from data.entropy import unigram_cross_entropy
from data.loader import StepBatches, validation_batches
from data.samples import Samples, epoch_order, spread, window_count

Layout = namedtuple("Layout", "micro accumulation dp global_batch")
T, GLOBAL = 7, 8
SHARES = [(micro, dp) for dp in (1, 2, 4) for micro in (1, 2, 4, 8) if micro * dp <= GLOBAL]
LAYOUTS = [Layout(micro, GLOBAL // (micro * dp), dp, GLOBAL) for micro, dp in SHARES]


def make_samples(windows: int = 21) -> Samples:
    """Windows of tokens that tell where they come from; the rest after the last window is not used."""
    return Samples(np.arange(windows * T + 1 + 3, dtype=np.uint16), T)


def global_batch(layout: Layout, step: int, seed: int = 5) -> torch.Tensor:
    """(GLOBAL, T) tokens of a step, put together from all ranks."""
    ranks = [next(StepBatches(make_samples(), seed, layout, rank, start_step=step)) for rank in range(layout.dp)]
    micro_batches = [rank[a]["tokens"] for a in range(layout.accumulation) for rank in ranks]
    return torch.cat(micro_batches)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step", [0, 2, 40])
def test_batch_of_a_step_is_the_same_for_every_layout(layout, step):
    samples = make_samples()
    expected = []
    for position in range(step * GLOBAL, (step + 1) * GLOBAL):
        epoch, within = divmod(position, len(samples))
        expected.append(samples[epoch_order(len(samples), 5, epoch)[within]][:-1])
    assert torch.equal(global_batch(layout, step), torch.from_numpy(np.stack(expected)))


def test_micro_batches_have_labels_one_token_on_and_the_documented_types():
    layout = Layout(2, 2, 2, 8)
    batch = next(StepBatches(make_samples(), 1, layout, 1))
    assert len(batch) == 2
    for micro in batch:
        assert micro["tokens"].shape == micro["labels"].shape == micro["weights"].shape == (2, T)
        assert (micro["tokens"].dtype, micro["labels"].dtype) == (torch.int64, torch.int64)
        assert micro["weights"].dtype == torch.float32
        assert torch.equal(micro["labels"], micro["tokens"] + 1), "make_samples counts upwards"
        assert all(tensor.is_contiguous() for tensor in micro.values()), "pipeline stages send them"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mean_of_micro_batch_losses_is_the_mean_over_tokens(layout):
    losses = torch.rand(200)  # by token: every token has its own loss
    parts = [micro for rank in range(layout.dp) for micro in next(StepBatches(make_samples(), 5, layout, rank))]
    mean = torch.stack([(losses[micro["labels"]] * micro["weights"]).sum() for micro in parts]).mean()
    labels = global_batch(layout, 0) + 1
    torch.testing.assert_close(mean, losses[labels].mean())


@pytest.mark.parametrize("layout", [Layout(1, 1, 1, 1), Layout(2, 3, 2, 12), Layout(4, 1, 4, 16), Layout(8, 2, 2, 32)])
def test_mean_of_validation_losses_is_the_mean_over_real_samples(layout):
    samples = make_samples(13)
    losses = torch.rand(200)
    ranks = [validation_batches(samples, *layout[:3], rank) for rank in range(layout.dp)]
    assert len({len(steps) for steps in ranks}) == 1, "every rank takes part in every step"
    parts = [micro for steps in ranks for step in steps for micro in step]
    mean = torch.stack([(losses[micro["labels"]] * micro["weights"]).sum() for micro in parts]).mean()
    labels = torch.from_numpy(np.stack([samples[i][1:] for i in range(len(samples))]))
    torch.testing.assert_close(mean, losses[labels].mean())
    counted = torch.cat([micro["labels"][micro["weights"] > 0] for micro in parts]).sort().values
    assert torch.equal(counted, labels.flatten().sort().values), "each real label counts once"


def test_resuming_continues_with_the_same_batches_under_another_layout():
    whole, half = Layout(8, 1, 1, 8), Layout(2, 2, 2, 8)
    running = StepBatches(make_samples(), 3, whole, 0)
    list(islice(running, 4))
    state = running.state()
    ranks = [StepBatches(make_samples(), 3, half, rank, 4, state) for rank in (0, 1)]
    for _ in range(3):
        (expected,) = next(running)
        parts = [next(rank) for rank in ranks]
        found = torch.cat([part[a]["tokens"] for a in (0, 1) for part in parts])
        assert torch.equal(expected["tokens"], found)
    assert ranks[0].state() == running.state()


def test_a_state_of_another_step_or_batch_is_refused():
    with pytest.raises(ValueError, match=r"position 8 .* step 2 .* batch.global"):
        StepBatches(make_samples(), 3, Layout(8, 1, 1, 8), 0, start_step=2, start_state={"position": 8})


def test_digest_depends_on_step_and_seed_and_not_on_layout_or_progress():
    def digest(layout, step, seed=1):
        return StepBatches(make_samples(), seed, layout, layout.dp - 1, start_step=3).digest(step)

    assert {digest(layout, 2) for layout in LAYOUTS} == {digest(LAYOUTS[0], 2)}
    assert len({digest(LAYOUTS[0], 2), digest(LAYOUTS[0], 3), digest(LAYOUTS[0], 2, seed=2)}) == 3


def test_an_impossible_layout_is_refused():
    with pytest.raises(ValueError, match="micro 2 x accumulation 1 x dp 2 = 4, but the global batch is 8"):
        StepBatches(make_samples(), 1, Layout(2, 1, 2, 8), 0)
    with pytest.raises(ValueError, match="rank 2 is not in 0..1"):
        StepBatches(make_samples(), 1, Layout(2, 2, 2, 8), 2)


def test_epochs_are_different_permutations_and_go_round():
    samples = make_samples()
    size = len(samples)
    taken = samples.take(range(3 * size), seed=9)[:, 0] // T  # window of every position
    epochs = taken.reshape(3, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert not np.array_equal(epoch_order(size, 9, 0), epoch_order(size, 10, 0))


def test_every_token_but_the_first_is_a_label_once():
    tokens = np.arange(5 * T + 1, dtype=np.uint16)
    samples = Samples(tokens, T)
    assert len(samples) == 5
    assert np.array_equal(np.concatenate([samples[i][1:] for i in range(5)]), tokens[1:])
    assert np.array_equal(np.concatenate([samples[i][:-1] for i in range(5)]), tokens[:-1])


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (T, 0), (T + 1, 1), (2 * T, 1), (2 * T + 1, 2)])
def test_a_window_needs_one_token_more_than_its_length(tokens, count):
    assert window_count(tokens, T) == len(Samples(np.zeros(tokens, np.uint16), T)) == count


def test_spread_is_even_and_never_asks_for_what_is_not_there():
    assert spread(100, 5).tolist() == [0, 20, 40, 60, 80]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert spread(0, 5).tolist() == []


def test_unigram_cross_entropy_against_its_definition():
    train, labels, vocabulary = [0, 0, 1, 3, 3, 3], np.array([[0, 2], [3, 1]]), 4
    expected = 0.0
    for label in labels.flatten():
        expected -= np.log((train.count(label) + 1) / (len(train) + vocabulary)) / labels.size
    assert unigram_cross_entropy(np.bincount(train, minlength=vocabulary), labels) == pytest.approx(expected, rel=1e-12)
