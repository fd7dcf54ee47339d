"""Decoding with kept keys and values against the whole model, `transformers`, and itself in other batches.

Over tensor ranks it is checked in tests/launch/test_generate.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling.formats.huggingface.gpt2 import CONVERSION, config
from modeling.generation import (
    Continuation,
    Request,
    Sampling,
    continue_all,
    continue_prompt,
    decode,
    uniform_numbers,
)
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.initialization import Init
from modeling.layer_list import Stack
from modeling.past import Past
from recipes.attention_patterns import Fixed
from recipes.schema import Model

POSITIONS, VOCAB, LAYERS = 40, 300, 4
MODEL = Model(layers=LAYERS, hidden=32, heads=4, vocab_size=VOCAB)
KINDS = {
    "dense": (),
    "banded": (6,) * LAYERS,
    "alternating": (None, 6, None, 1),
    "fixed": (Fixed(6, 2), None, Fixed(5, 1, 3), Fixed(7, 1)),
}
PROMPTS = [
    tuple(i * k % VOCAB for i in range(1, length)) for k, length in ((37, 8), (11, 20), (5, 2), (7, 15))
]


def gpt2(windows: Sequence[int | None] = (), given=None, std: float = 0.3) -> Stack:
    shape = GPT2Shape(
        layers=LAYERS, hidden=32, heads=4, vocab=VOCAB, padded_vocab=384, positions=POSITIONS,
        windows=tuple(windows),
    )  # fmt: skip
    return FAMILY.plain(shape, group=None, init=Init(seed=0, std=std, layers=LAYERS, given=given)).eval()


@pytest.fixture(scope="module", params=KINDS)
def model(request) -> Stack:
    return gpt2(KINDS[request.param])


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    """A `transformers` GPT-2 whose attention is far from uniform."""
    torch.manual_seed(0)
    made = GPT2LMHeadModel(config(MODEL, positions=POSITIONS, end=7)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def texts(
    model: Stack, prompts, length: int = 12, sampling: Sampling | None = None, **how
) -> list[Continuation]:
    return continue_all(model, [Request(p) for p in prompts], length, sampling=sampling, **how)


@torch.no_grad()
def whole(model: Stack, tokens: Sequence[int]) -> torch.Tensor:
    """Logits (S, V) without anything kept."""
    return model(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("chunks", [[1] * POSITIONS, [POSITIONS], [1, 17, 1, 1, 13, 7], [9] + [1] * 31])
def test_logits_are_those_of_the_whole_text(model, chunks):
    """At every position, in whatever pieces the tokens come."""
    tokens = torch.arange(2 * POSITIONS).view(2, -1) * 37 % VOCAB
    past = Past(torch.zeros(2, dtype=torch.int64), POSITIONS, LAYERS)
    with torch.no_grad():
        expected = model(tokens)
        for chunk in chunks:
            found = decode(model, tokens[:, past.length : past.length + chunk], past)
            torch.testing.assert_close(found, expected[:, past.length - 1], rtol=1e-4, atol=1e-4)
    assert past.length == POSITIONS


def test_padding_before_shorter_samples_changes_nothing(model):
    padding = torch.tensor([0, 5, 13, 1])
    columns, tokens = 20, torch.arange(4 * POSITIONS).view(4, -1) * 11 % VOCAB
    text = torch.full((4, columns), 299)
    for row, before in enumerate(padding.tolist()):
        text[row, before:] = tokens[row, : columns - before]
    past = Past(padding, columns, LAYERS)
    with torch.no_grad():
        for end in (14, 15, 16, 18, 20):  # the third has a single token at first
            found = decode(model, text[:, past.length : end], past)
            for row, before in enumerate(padding.tolist()):
                expected = whole(model, text[row, before:end].tolist())[-1]
                torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)
            if end == 16:  # and without two of them
                kept = torch.tensor([1, 3])
                past.keep(kept)
                text, padding = text[kept], padding[kept]


def test_every_column_sees_something():
    """Padding too: not every kernel of attention weighs nothing by 0."""
    past = Past(torch.tensor([0, 3]), 8, LAYERS)
    for window in (None, 2, Fixed(4, 1)):
        seen = past.mask(5, window)
        assert seen.shape == (2, 1, 5, 5) and seen.any(-1).all()
        assert not seen[1, 0, 4, :3].any() and seen[0, 0, 4, 3:].all()


def test_the_most_likely_are_taken(model):
    (found,) = texts(model, PROMPTS[:1], 6)
    logits = whole(model, [*PROMPTS[0], *found.tokens])
    assert list(found.tokens) == logits.argmax(-1)[len(PROMPTS[0]) - 1 : -1].tolist()
    assert found.ended == "length"


@pytest.mark.parametrize("sampling", [None, Sampling(1.5, 20, 0.9)])
def test_a_text_does_not_depend_on_its_batch(model, sampling):
    """Nor on what is kept, though the samples end at different times."""
    ends = texts(model, PROMPTS, 12, sampling, seed=3)[1].tokens[4]
    together = texts(model, PROMPTS, 30, sampling, seed=3, end=ends)
    alone = [texts(model, [prompt], 30, sampling, seed=3, end=ends)[0] for prompt in reversed(PROMPTS)]
    assert together == alone[::-1]
    assert together == texts(model, PROMPTS, 30, sampling, seed=3, end=ends, cached=False)
    assert together[1].ended == "end" and len(together[1].tokens) <= 4
    assert len({len(one.tokens) for one in together}) > 1


def test_why_a_text_ends():
    model = gpt2()
    full = tuple(range(POSITIONS))
    assert [len(each.tokens) for each in texts(model, [full, full[:-3], full[:5]], 9)] == [1, 4, 9]
    assert [each.ended for each in texts(model, [full, full[:-3], full[:5]], 9)] == [
        "positions", "positions", "length",
    ]  # fmt: skip
    assert texts(model, [full[:-2]], 3)[0].ended == "length", "as many as asked for, and the last there is"
    first = texts(model, [full[:5]], 1)[0].tokens[0]
    assert texts(model, [full[:5]], 9, end=first) == [Continuation((), "end")]


@pytest.mark.parametrize("sampling", [None, Sampling()])
def test_no_token_follows_from_logits_that_are_not_finite(sampling):
    model = gpt2()
    with torch.no_grad():
        model.word.weight.fill_(4e35)
    with pytest.raises(FloatingPointError, match=r"logits are not finite in torch.float32"):
        texts(model, PROMPTS[:2], 3, sampling=sampling)


def test_tokens_are_heard_as_they_come():
    heard: list[tuple[int, int]] = []
    found = texts(gpt2(), PROMPTS[:2], 3, heard=lambda row, token: heard.append((row, token)))
    assert heard == [(row, found[row].tokens[at]) for at in range(3) for row in range(2)]


def test_samples_are_functions_of_seed_prompt_and_number():
    def drawn(seed: int, prompt: Sequence[int], sample: int) -> tuple[int, ...]:
        (one,) = continue_all(gpt2(), [Request(tuple(prompt), sample)], 12, sampling=Sampling(2.0), seed=seed)
        return one.tokens

    texts = [drawn(5, [1, 2, 3], 0), drawn(5, [1, 2, 3], 1), drawn(6, [1, 2, 3], 0), drawn(5, [1, 2, 4], 0)]
    assert len(set(texts)) == 4 and drawn(5, [1, 2, 3], 0) == texts[0]
    numbers = [uniform_numbers(1, [2], sample).random() for sample in range(500)]
    assert abs(np.mean(numbers) - 0.5) < 0.05 and len(set(numbers)) == 500


class Words:
    """A tokenizer of numbers, whose text they are."""

    eos_token_id = 299

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def test_a_long_prompt_leaves_positions_to_write_in(model):
    """The model sees the end of it, and the text holds all of it."""
    short, long = (" ".join(str(i) for i in range(first, 60)) for first in (40, 0))
    found = [continue_prompt(model, Words(), prompt, 5) for prompt in (short, long)]
    assert [text.split()[60 - first :] for text, first in zip(found, (40, 0), strict=True)] == [
        found[0].split()[20:]
    ] * 2
    assert found[1].startswith(long) and len(found[0].split()) > 20
    assert continue_prompt(model, Words(), "", 5), "no prompt is one of the end token alone"


# Against transformers


@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(0.7), Sampling(1.3, 20), Sampling(0.8, None, 0.9), Sampling(0.9, 40, 0.5),
    Sampling(1.0, 1), Sampling(1.0, VOCAB + 5), Sampling(1.0, None, 1e-6),
])  # fmt: skip
def test_the_distribution_is_that_of_transformers(sampling):
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 5:9] = logits[0].max()  # a tie
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    assert torch.equal(sampling.filtered(logits), processors(torch.zeros(6, 1, dtype=torch.int64), logits))


def test_draws_follow_the_distribution():
    sampling, count = Sampling(1.2, 6, 0.95), 40_000
    logits = 2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    uniform = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1]
    drawn = sampling.draw(logits.expand(count, -1), uniform)
    found = torch.bincount(drawn, minlength=30) / count
    torch.testing.assert_close(found, sampling.filtered(logits)[0].softmax(-1), rtol=0, atol=1e-3)
    assert not found[sampling.filtered(logits)[0] == -torch.inf].any()


def test_greedy_texts_are_those_of_transformers(theirs):
    """Token by token, in a batch of different lengths, with an end token that comes for one of them."""
    ours = gpt2(given=CONVERSION.to_canonical(theirs.state_dict(), MODEL))
    longest = max(map(len, PROMPTS))
    given = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    end = texts(ours, PROMPTS, 12)[2].tokens[5]
    for model_end in (None, end):
        how = dict(attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=0, bos_token_id=None)
        expected = theirs.generate(given, **how, eos_token_id=model_end)[:, longest:].tolist()
        found = texts(ours, PROMPTS, 12, end=model_end)
        for one, tokens in zip(found, expected, strict=True):
            stop = tokens.index(model_end) if model_end in tokens else None
            assert list(one.tokens) == tokens[:stop]
            assert one.ended == ("length" if stop is None else "end")
    assert found[2].ended == "end"
