"""What a trained model makes of a prompt: GPT-2 continues it, BERT fills in its masks.

The model is whole on one rank, or cut over a tensor group, whose ranks all get the same logits and so choose
the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modeling.layer_list import Stack
from modeling.past import Past


@dataclass(frozen=True)
class Sampling:
    """Draws from the distribution that `transformers`' processors of the same names leave.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: tokens that can be drawn, the most likely; None: all.
        top_p: the least likely go as long as what is left sums up to it (Holtzman et al., arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def filtered(self, logits: Tensor) -> Tensor:
        """(B, V) -> the same divided by the temperature, in float32, -inf for tokens that are not drawn."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[..., -1] = False  # the most likely always stays
            scores = scores.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
        return scores

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """logits (B, V), uniform (B,) float64 in [0, 1) -> tokens (B,): where summed probabilities pass it.

        By the number and not by a generator of the device, so that a CPU and a GPU draw alike.
        """
        sums = self.filtered(logits).softmax(-1).double().cumsum(-1)
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


def uniform_numbers(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """What one sample's tokens are drawn by: a function of seed, prompt and the sample's number alone.

    So a text does not depend on the batch or the file that its prompt stands in.
    """
    digest = hashlib.sha256(f"{seed}:{sample}:{list(prompt)}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


CONTINUED_TOKENS = 80
DEFAULT_SAMPLING = Sampling(temperature=0.8, top_k=40)
# "length": as many tokens as were asked for; "end": the end token came; "positions": the model has no more.
Ended = Literal["length", "end", "positions"]
Heard = Callable[[int, int], None]  # (number of the request, token), as soon as it is chosen


@dataclass(frozen=True)
class Request:
    """One sample to write: a prompt's tokens, and the sample's number among those of this prompt."""

    prompt: tuple[int, ...]
    sample: int = 0


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt, without the end token, and why it ends there."""

    tokens: tuple[int, ...]
    ended: Ended


def continue_prompt(model: Stack, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """The prompt and what a GPT-2 writes after it, a function of the seed.

    Of a long prompt the model sees the end, so that there are positions left to write in.
    """
    # A WordPiece vocabulary would add [CLS] and [SEP].
    tokens = tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id]
    positions = model.shape.positions
    seen = max(positions - CONTINUED_TOKENS, positions // 2, 1)
    (more,) = continue_all(
        model, [Request(tuple(tokens[-seen:]))], CONTINUED_TOKENS, sampling=DEFAULT_SAMPLING, seed=seed,
        end=tokenizer.eos_token_id,
    )  # fmt: skip
    return str(tokenizer.decode([*tokens, *more.tokens]))


def fill_prompt(model: Stack, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """The prompt with each [MASK] filled in by a BERT; nothing is drawn, so `seed` is not used."""
    tokens = tokenizer.encode(prompt)[: model.shape.positions]
    filled = fill_masks(model, tokens, mask=tokenizer.mask_token_id)
    return str(tokenizer.decode(filled, skip_special_tokens=True))


@torch.no_grad()
def continue_all(
    model: Any, requests: Sequence[Request], length: int, *, sampling: Sampling | None, seed: int = 0,
    end: int | None = None, cached: bool = True, heard: Heard = lambda request, token: None,
) -> list[Continuation]:  # fmt: skip
    """At most `length` tokens after each prompt, all in one batch. Collective over the model's tensor group.

    Args:
        model: a GPT-2. Prompts have from 1 token to as many as it has positions.
        sampling: None takes the most likely token.
        seed: of what is drawn; with a request's prompt and number it decides all of its text.
        end: the token that ends a text.
        cached: keep keys and values; otherwise every token computes all those before it again.

    A text ends at the model's last position, after the token that is predicted there: learned positions have
    none beyond, and a context that slid would compute every token anew.
    """
    prompts, positions = [request.prompt for request in requests], model.shape.positions
    assert all(0 < len(prompt) <= positions for prompt in prompts), "a prompt is empty, or too long"
    model.eval()
    device, longest = next(model.parameters()).device, max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    columns = max(min(len(prompt) + length - 1, positions) + longest - len(prompt) for prompt in prompts)
    text = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    numbers = [uniform_numbers(seed, request.prompt, request.sample) for request in requests]
    made: list[list[int]] = [[] for _ in requests]
    ended: dict[int, Ended] = {}
    rows = [*range(len(requests))]  # requests that go on, in the order of `text`
    past, new = Past(padding, columns, model.shape.layers), text
    while rows:
        logits = decode(model, new, past)
        chosen = _chosen(logits, sampling, [numbers[row].random() for row in rows] if sampling else [])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if token == end:
                ended[row] = "end"
                continue
            made[row].append(token)
            heard(row, token)
            if len(made[row]) == length:
                ended[row] = "length"
            elif len(prompts[row]) + len(made[row]) > positions:
                ended[row] = "positions"
        text = torch.cat([text, chosen[:, None]], 1)
        left = [at for at, row in enumerate(rows) if row not in ended]
        if 0 < len(left) < len(rows):
            kept = torch.tensor(left, device=device)
            text = text[kept]
            past.keep(kept)
        rows = [rows[at] for at in left]
        if not cached:
            past = Past(past.padding, columns, model.shape.layers)
        new = text[:, past.length :]
    return [Continuation(tuple(made[row]), ended[row]) for row in range(len(requests))]


def decode(model: Any, tokens: Tensor, past: Past) -> Tensor:
    """tokens (B, S) that follow those in `past` -> a GPT-2's logits (B, V) of the next one, on every rank.

    `past` then has them, too. Collective over the tensor group.
    """
    assert model.position_ranks == 1, "decoding does not cut positions over ranks"
    new = tokens.shape[1]
    x = model.position(model.word(tokens), places=past.places(new))
    for layer, kept in zip(model.layers, past.layers, strict=True):
        x = layer(x, kept)
    past.advance(new)
    logits: Tensor = model.whole_logits(model.word(model.final_norm(x[:, -1]), project=True))
    return logits


def _chosen(logits: Tensor, sampling: Sampling | None, uniform: Sequence[float]) -> Tensor:
    """logits (B, V) -> tokens (B,)."""
    if sampling is None:
        return logits.argmax(-1)
    return sampling.draw(logits, torch.tensor(uniform, dtype=torch.float64, device=logits.device))


@torch.no_grad()
def fill_masks(model: Stack, tokens: Sequence[int], *, mask: int) -> list[int]:
    """`tokens` ([CLS] ... [SEP]) with each `mask` replaced by its most likely token, the surest first.

    Collective over the model's tensor group.
    """
    model.eval()
    filled = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    while (masked := (filled == mask).nonzero()[:, 1]).numel():
        logits, _ = model(filled, torch.zeros_like(filled), None, masked[None])
        scores = model.whole_logits(logits)[0]  # (masks, V)
        scores[:, mask] = float("-inf")
        surest = scores.float().softmax(-1).amax(-1).argmax()
        filled[0, masked[surest]] = scores[surest].argmax()
    return filled[0].tolist()
