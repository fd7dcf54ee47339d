"""Dropout of the residual stream: what its masks are a function of, and how random they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from data.keyed_random import mix
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.hidden_dropout import HiddenDropout, dropout_seeds_of, mixed
from modeling.initialization import Init

B, S, H, P = 16, 128, 256, 0.1
SAMPLES = torch.arange(B)
INIT = Init(seed=5, std=0.02, layers=2)


def site(name: str = "one", probability: float = P) -> HiddenDropout:
    return HiddenDropout(H, probability, init=INIT.child(name))


def dropped(
    name: str = "one", step: int = 3, seed: int = 5, samples: Tensor = SAMPLES, probability: float = P
) -> Tensor:
    """(B, S, H): 1 where an element is dropped, else 0."""
    dropout_seeds = dropout_seeds_of(seed, step, samples, S)
    return (site(name, probability)(torch.ones(len(samples), S, H), dropout_seeds) == 0).double()


# What a mask is a function of


def test_a_mask_knows_neither_the_micro_batch_nor_the_padding():
    whole = dropped()
    assert torch.equal(torch.cat([dropped(samples=SAMPLES[at : at + 4]) for at in range(0, B, 4)]), whole)
    cut = site()(torch.ones(B, 24, H), dropout_seeds_of(5, 3, SAMPLES, S)[:, :24])
    assert torch.equal(cut == 0, whole[:, :24] == 1)
    assert torch.equal(dropout_seeds_of(5, 3, SAMPLES, 24), dropout_seeds_of(5, 3, SAMPLES, S)[:, :24])
    by_micro_batch = dropout_seeds_of(5, 3, SAMPLES.view(4, 4), S)
    assert torch.equal(by_micro_batch.view(B, S, 2), dropout_seeds_of(5, 3, SAMPLES, S))


def test_dropout_seeds_come_of_splitmix64():
    """As numpy's unsigned arithmetic has it."""
    counters, start = np.arange(1000, dtype=np.uint64) << np.uint64(20), 0xFEDCBA9876543210
    expected = mix(np.uint64(start) + counters * np.uint64(0x9E3779B97F4A7C15))
    found = mixed(torch.from_numpy(counters.view(np.int64)), start)
    assert (found.numpy().view(np.uint64) == expected).all()


def test_an_element_is_dropped_by_both_seeds_of_its_position_and_the_factor_of_its_feature():
    """Where a c + b, from the least signed word on, is below the share; by numpy's unsigned arithmetic."""
    dropout_seeds, columns = (
        dropout_seeds_of(5, 3, SAMPLES, S).numpy(),
        site().columns.numpy().astype(np.uint32),
    )
    a, b = (dropout_seeds[..., i : i + 1].astype(np.uint32) for i in range(2))
    expected = a * columns + b + np.uint32(2**31) < round(P * 2**32)
    assert (dropped().numpy() == expected).all()


def test_what_is_kept_is_scaled_and_gradients_pass_there_alone():
    x = torch.randn(B, S, H, requires_grad=True)
    out = site()(x, dropout_seeds_of(5, 3, SAMPLES, S))
    out.backward(torch.ones_like(out))
    kept = 1 - dropped().float()
    torch.testing.assert_close(out, x * kept / 0.9)
    torch.testing.assert_close(x.grad, kept / 0.9)


def test_nothing_is_dropped_in_evaluation_and_training_wants_seeds():
    x = torch.randn(2, S, H)
    assert site().eval()(x, None) is x and site(probability=0.0)(x, None) is x
    with pytest.raises(AssertionError, match="needs the seeds"):
        site()(x, None)
    assert not site().state_dict(), "nothing to save: columns are a function of the name"


def test_layers_share_one_graph_without_breaks_whatever_the_step():
    """Compiled layer by layer; `error_on_recompile` makes the second layer or step fail if either counts."""
    torch._dynamo.reset()
    shape = GPT2Shape(layers=3, hidden=16, heads=2, vocab=10, padded_vocab=10, positions=8, hidden_dropout=P)
    model = FAMILY.plain(shape, group=None, init=Init(seed=2, std=0.3, layers=3)).train()
    tokens = torch.arange(16).view(2, 8) % 10

    def logits() -> list[Tensor]:
        return [
            model(tokens, dropout_seeds=dropout_seeds_of(0, step, torch.arange(2), 8)).detach()
            for step in (0, 1)
        ]

    eager = logits()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = logits()
    torch._dynamo.reset()
    assert not torch.allclose(*eager)
    torch.testing.assert_close(compiled, eager)


# How random it is: of fixed seeds, so that a bound is met always or never


def z_of_product(first: Tensor, second: Tensor) -> float:
    """How many standard deviations the number of elements dropped in both is from independence."""
    count, n = float((first * second).sum()), first.numel()
    return abs(count - n * P**2) / (n * P**2 * (1 - P**2)) ** 0.5


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations of its own, about its mean."""
    degrees = counts.numel()
    return (float(((counts - expected) ** 2 / expected).sum()) - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("probability", [0.01, P, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for(probability):
    found = dropped(probability=probability)
    deviation = (probability * (1 - probability) / found.numel()) ** 0.5
    assert abs(float(found.mean()) - probability) < 4 * deviation
    for kept in ([0, 1], [2], [0, 2], [1, 2]):  # by feature, by position and sample, by position, by sample
        counts = found.sum(dim=kept)
        n = found.numel() / counts.numel()
        spread = ((counts - n * probability) ** 2 / (n * probability * (1 - probability))).sum()
        assert abs(float(spread) - counts.numel()) < 5 * (2 * counts.numel()) ** 0.5, kept


def test_neighbours_layers_steps_and_seeds_are_independent():
    one = dropped()
    pairs = {
        "features": (one[..., 1:], one[..., :-1]),
        "positions": (one[:, 1:], one[:, :-1]),
        "samples": (one[1:], one[:-1]),
        "layers": (one, dropped("two")),
        "steps": (one, dropped(step=4)),
        "seeds": (one, dropped(seed=6)),
        "a position and the next sample's": (one[1:, :-1], one[:-1, 1:]),
        "a feature and the next one's in another layer": (one[..., 1:], dropped("two")[..., :-1]),
    }
    assert {name: z_of_product(*pair) for name, pair in pairs.items() if z_of_product(*pair) > 4} == {}


def test_no_two_features_of_one_layer_or_of_two_are_related():
    found = torch.cat([dropped("one"), dropped("two")], -1).view(B * S, 2 * H)
    z = ((found - P).T @ (found - P)) / (P * (1 - P) * (B * S) ** 0.5)
    assert float(z.fill_diagonal_(0).abs().max()) < 6, "of 130816 pairs"


def test_sixteen_features_of_a_position_are_independent_together():
    """How many of them are dropped is binomially distributed: from 0 to 6 and more."""
    for start in range(0, H, 16):
        numbers = dropped()[..., start : start + 16].sum(-1).clamp(max=6).long()
        binomial = torch.distributions.Binomial(16, torch.tensor(P, dtype=torch.float64))
        chances = binomial.log_prob(torch.arange(6, dtype=torch.float64)).exp()
        expected = torch.cat([chances, 1 - chances.sum(0, keepdim=True)]) * numbers.numel()
        assert chi_square(torch.bincount(numbers.view(-1), minlength=7), expected) < 5, start
