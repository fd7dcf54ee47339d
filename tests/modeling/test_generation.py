"""Texts by `transformers`' form of a model, against our own model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from stored import model_tensors

from modeling.families import whole_model
from modeling.generation import (
    Continuation,
    Decoding,
    Draw,
    Sampling,
    continue_prompt,
    continued,
    fill_masks,
    in_transformers,
    uniform_numbers,
)
from recipes import catalog

POSITIONS, VOCAB = 64, 300
FIXED = ("model.attention=[fixed,dense]", "model.attention_window=6", "model.attention_columns=2")
KINDS = {
    "dense": (),
    "banded": ("model.attention=[dense,banded]", "model.attention_window=6"),
    "fixed": (*FIXED, "model.attention_patterns=3"),
    "shared": ("model.shared_layers=true",),
}
PROMPTS = [
    tuple(i * k % VOCAB for i in range(1, length)) for k, length in ((37, 8), (11, 20), (5, 2), (7, 8))
]


@cache
def models(kind: str = "dense") -> tuple[Any, Any]:
    """A GPT-2 whose attention is far from uniform: ours, and in the form of transformers."""
    settings = [*KINDS[kind], f"model.vocab_size={VOCAB}", "precision=fp32"]
    recipe = catalog.load("default/sotu", settings, tiny=True)
    weights = {name: 10 * tensor for name, tensor in model_tensors(recipe).items()}
    return whole_model(recipe, weights), in_transformers(recipe, weights)


def texts(prompts: Sequence[tuple[int, ...]], length: int, kind: str = "dense", **how) -> list[Continuation]:
    return [continued(models(kind)[1], prompt, Decoding(length, **how))[0] for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_likely_tokens_of_our_own_model_are_taken(kind):
    """Sparse layers see what they saw in training."""
    ours = models(kind)[0]
    for prompt, found in zip(PROMPTS, texts(PROMPTS, 30, kind), strict=True):
        with torch.no_grad():
            logits = ours(torch.tensor([[*prompt, *found.tokens]]))[0]
        assert list(found.tokens) == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        assert found.ended == "length" and len(found.tokens) == 30


@pytest.mark.parametrize("kind", ["dense", "fixed"])
def test_a_text_does_not_depend_on_the_samples_beside_it(kind):
    """Though the samples end at different times."""
    how = dict(sampling=Sampling(1.5, 20, 0.9), seed=3)
    model = models(kind)[1]
    how["end"] = continued(model, PROMPTS[1], Decoding(12, **how))[0].tokens[4]
    together = continued(model, PROMPTS[1], Decoding(60, **how), samples=6)
    assert together[:2] == continued(model, PROMPTS[1], Decoding(60, **how), samples=2)
    assert together[0].ended == "end" and len(together[0].tokens) <= 4
    assert len({len(one.tokens) for one in together}) > 1 and len({*together}) == 6


def test_why_a_text_ends():
    full = tuple(range(POSITIONS))
    found = texts([full, full[:-3], full[:5]], 9)
    assert [len(each.tokens) for each in found] == [1, 4, 9]
    assert [each.ended for each in found] == ["positions", "positions", "length"]
    assert texts([full[:-2]], 3)[0].ended == "length", "as many as asked for, and the last there is"
    first = texts([full[:5]], 1)[0].tokens[0]
    assert texts([full[:5]], 9, end=first) == [Continuation((), "end")]


def test_numbers_without_a_token_are_never_written():
    never = [*range(10, VOCAB)]
    for sampling in (None, Sampling(20.0), Sampling(20.0, None, 0.9)):
        found = texts(PROMPTS, 20, never=never, sampling=sampling)
        assert {token for text in found for token in text.tokens} <= {*range(10)}


@pytest.mark.parametrize("sampling", [None, Sampling()])
def test_no_token_follows_from_logits_that_are_not_finite(sampling):
    recipe = catalog.load("default/sotu", ["precision=fp32"], tiny=True)
    weights = {name: torch.full_like(each, 4e35) for name, each in model_tensors(recipe).items()}
    model = in_transformers(recipe, weights)
    with pytest.raises(FloatingPointError, match=r"logits are not finite in torch.float32"):
        continued(model, (1, 2), Decoding(3, sampling=sampling))
    recipe = catalog.load("bert/sotu", ["precision=fp32"], tiny=True)
    weights = {name: torch.full_like(each, torch.nan) for name, each in model_tensors(recipe).items()}
    with pytest.raises(FloatingPointError, match=r"logits are not finite in torch.bfloat16"):
        fill_masks(in_transformers(recipe, weights, torch.bfloat16), [2, 4, 3], mask=4)


def test_samples_are_functions_of_seed_prompt_and_number():
    def drawn(seed: int, prompt: tuple[int, ...], sample: int) -> tuple[int, ...]:
        how = Decoding(12, sampling=Sampling(2.0), seed=seed)
        return continued(models()[1], prompt, how, samples=2)[sample].tokens

    found = [drawn(5, (1, 2, 3), 0), drawn(5, (1, 2, 3), 1), drawn(6, (1, 2, 3), 0), drawn(5, (1, 2, 4), 0)]
    assert len(set(found)) == 4 and drawn(5, (1, 2, 3), 0) == found[0]
    numbers = [uniform_numbers(1, [2], sample).random() for sample in range(500)]
    assert abs(np.mean(numbers) - 0.5) < 0.05 and len(set(numbers)) == 500


def test_draws_follow_the_distribution():
    class Numbers:
        def __init__(self, value: float):
            self.random = lambda: value

    count = 40_000
    logits = 2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    kept = Sampling(1.2, 6, 0.95).warpers()(torch.zeros(1, 1, dtype=torch.int64), logits)
    draw = Draw([Numbers(number / count) for number in range(count)])
    drawn = draw(torch.empty(0), kept.expand(count, -1)).argmax(-1)
    found = torch.bincount(drawn, minlength=30) / count
    torch.testing.assert_close(found, kept[0].softmax(-1), rtol=0, atol=1e-3)
    assert (kept[0] == -torch.inf).sum() >= 24 and not found[kept[0] == -torch.inf].any()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("head", ["none", "sop"])
def test_masks_are_filled_with_the_most_likely_tokens(norm, head):
    """Of our own model, the surest first: the last one filled is the likeliest given all the others."""
    settings = [f"model.layer_norm={norm}", f"model.sentence_head={head}", "precision=fp32"]
    recipe = catalog.load("bert/sotu", settings, tiny=True)
    weights = {name: 10 * tensor for name, tensor in model_tensors(recipe).items()}
    ours, theirs = whole_model(recipe, weights), in_transformers(recipe, weights)
    tokens, holes = [2, 11, 4, 12, 4, 3], (2, 4)
    never = [*range(40, 90)]
    filled = fill_masks(theirs, tokens, 4, never)
    assert not {4, *never} & {*filled} and [filled[i] for i in (0, 1, 3, 5)] == [2, 11, 12, 3]
    likeliest = []
    for hole in holes:
        again = torch.tensor([filled])
        again[0, hole] = 4
        with torch.no_grad():
            logits = ours(again, torch.zeros_like(again), None, torch.tensor([[hole]]))[0][0, 0]
        logits[[4, *never]] = -torch.inf
        likeliest.append(int(logits.argmax()) == filled[hole])
    assert any(likeliest)


class Words:
    """A tokenizer of numbers, whose text they are."""

    eos_token_id = 299

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("kind", ["dense", "banded"])
def test_a_long_prompt_leaves_positions_to_write_in(kind):
    """The model sees the end of it, and the text holds all of it."""
    model = models(kind)[1]
    short, long = (" ".join(str(i) for i in range(first, 90)) for first in (58, 0))
    found = [continue_prompt(model, Words(), prompt, 5, ()) for prompt in (short, long)]
    written = [text.split()[90 - first :] for text, first in zip(found, (58, 0), strict=True)]
    assert written[0] == written[1] and len(written[0]) > 5
    assert found[1].startswith(long)
    assert continue_prompt(model, Words(), "", 5, ()), "no prompt is one of the end token alone"
