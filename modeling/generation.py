"""Text from a trained model: GPT-2 continues a prompt, BERT fills in its masks.

The model is whole on one rank, or cut over a tensor group. All ranks of a group get the same logits and so
choose the same tokens.
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
    """Filters of the next token's distribution, like `transformers`' processors of the same names.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: number of tokens to draw from, the most likely ones; None: all.
        top_p: least sum of the probabilities of the tokens to draw from (Holtzman et al., arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def filtered(self, logits: Tensor) -> Tensor:
        """Divide logits (B, V) by the temperature, in float32; -inf for excluded tokens."""
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
        """Draw tokens (B,) from logits (B, V) by numbers `uniform` (B,), float64 in [0, 1).

        Each is the first token whose cumulative probability passes its number. No generator of the device
        takes part, so that a CPU and a GPU draw alike.
        """
        sums = self.filtered(logits).softmax(-1).double().cumsum(-1)
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


def uniform_numbers(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """Return the generator for one sample's tokens, a function of seed, prompt and the sample's number alone.

    So a text depends neither on its batch nor on the file of its prompt.
    """
    digest = hashlib.sha256(f"{seed}:{sample}:{list(prompt)}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


CONTINUED_TOKENS = 80
DEFAULT_SAMPLING = Sampling(temperature=0.8, top_k=40)
# "length": it has the requested length; "end": the end token came; "positions": the model has no more.
EndReason = Literal["length", "end", "positions"]
TokenCallback = Callable[[int, int], None]  # (number of the request, token), as soon as it is chosen


@dataclass(frozen=True)
class Request:
    """One sample to write: a prompt's tokens, and the sample's number among this prompt's samples."""

    prompt: tuple[int, ...]
    sample: int = 0


@dataclass(frozen=True)
class Continuation:
    """Tokens after a prompt, without the end token, and the reason why they end."""

    tokens: tuple[int, ...]
    ended: EndReason


def continue_prompt(model: Stack, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """Return the prompt with a GPT-2's continuation, a function of the seed.

    The model sees only the end of a long prompt, so that positions are left for the continuation.
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
    """Return the prompt with each [MASK] filled in by a BERT; nothing is drawn, so `seed` is not used."""
    tokens = tokenizer.encode(prompt)[: model.shape.positions]
    filled = fill_masks(model, tokens, mask=tokenizer.mask_token_id)
    return str(tokenizer.decode(filled, skip_special_tokens=True))


@torch.no_grad()
def continue_all(
    model: Any, requests: Sequence[Request], length: int, *, sampling: Sampling | None, seed: int = 0,
    end: int | None = None, cached: bool = True, heard: TokenCallback = lambda request, token: None,
) -> list[Continuation]:  # fmt: skip
    """Write at most `length` tokens after each prompt, in one batch. Collective over the tensor group.

    Args:
        model: a GPT-2. A prompt has at least 1 token and at most as many as the model has positions.
        sampling: None takes the most likely token.
        seed: with a request's prompt and number it decides all of its text.
        end: the token that ends a text.
        cached: keep keys and values; otherwise every step computes all earlier tokens again.

    A text ends at the model's last position, after the token predicted there: there is no learned position
    beyond, and a sliding context would compute every token anew.
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
    ended: dict[int, EndReason] = {}
    rows = [*range(len(requests))]  # requests that go on, in the order of `text`
    past, new = Past(padding, columns, model.shape.layers), text
    while rows:
        logits = _finite(decode(model, new, past))
        chosen = _choose_tokens(logits, sampling, [numbers[row].random() for row in rows] if sampling else [])
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
    """Return a GPT-2's logits (B, V) of the token after `tokens` (B, S), on every rank.

    `tokens` follow those in `past` and are added to it. Collective over the tensor group.
    """
    assert model.position_ranks == 1, "decoding does not cut positions over ranks"
    new = tokens.shape[1]
    x = model.position(model.word(tokens), places=past.places(new))
    for layer, kept in zip(model.uses, past.layers, strict=True):
        x = layer(x, kept)
    past.advance(new)
    logits: Tensor = model.whole_logits(model.word(model.final_norm(x[:, -1]), project=True))
    return logits


def _finite(logits: Tensor) -> Tensor:
    """Return the logits. Raises FloatingPointError if one is NaN or infinite: no token follows from it."""
    if not logits.isfinite().all():
        raise FloatingPointError(f"the model's logits are not finite in {logits.dtype}")
    return logits


def _choose_tokens(logits: Tensor, sampling: Sampling | None, uniform: Sequence[float]) -> Tensor:
    """Choose tokens (B,) from logits (B, V)."""
    if sampling is None:
        return logits.argmax(-1)
    return sampling.draw(logits, torch.tensor(uniform, dtype=torch.float64, device=logits.device))


@torch.no_grad()
def fill_masks(model: Stack, tokens: Sequence[int], *, mask: int) -> list[int]:
    """Replace each `mask` in `tokens` ([CLS] ... [SEP]) by its most likely token, the surest one first.

    Collective over the model's tensor group.
    """
    model.eval()
    filled = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    while (masked := (filled == mask).nonzero()[:, 1]).numel():
        logits, _ = model(filled, torch.zeros_like(filled), None, masked[None])
        scores = _finite(model.whole_logits(logits))[0]  # (masks, V)
        scores[:, mask] = float("-inf")
        surest = scores.float().softmax(-1).amax(-1).argmax()
        filled[0, masked[surest]] = scores[surest].argmax()
    return filled[0].tolist()
