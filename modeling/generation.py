"""What a trained one-process model makes of a prompt: GPT-2 continues it, BERT fills in its masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerFast

from modeling.layer_list import Stack

Answer = Callable[[Stack, PreTrainedTokenizerFast, str, int], str]  # (model, tokenizer, prompt, seed) -> text
CONTINUED_TOKENS = 80


def continue_prompt(model: Stack, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """The prompt and what a GPT-2 writes after it, a function of the seed."""
    # A WordPiece vocabulary would add [CLS] and [SEP].
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    more = continue_tokens(model, tokens, CONTINUED_TOKENS, seed=seed, end=tokenizer.eos_token_id)
    return str(tokenizer.decode(tokens + more))


def fill_prompt(model: Stack, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """The prompt with each [MASK] filled in by a BERT; nothing is drawn, so `seed` is not used."""
    tokens = tokenizer.encode(prompt)[: model.shape.positions]
    filled = fill_masks(model, tokens, mask=tokenizer.mask_token_id)
    return str(tokenizer.decode(filled, skip_special_tokens=True))


@torch.no_grad()
def continue_tokens(
    model: Stack, prompt: Sequence[int], length: int, *, seed: int, end: int | None = None,
    temperature: float = 0.8, top_k: int = 40,
) -> list[int]:  # fmt: skip
    """`length` tokens sampled after `prompt` from the `top_k` most likely; ends early at token `end`.

    The context slides when it exceeds the positions. The model must hold the whole vocabulary.
    """
    assert model.group is None, "generation needs the whole vocabulary on one rank"
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    device = next(model.parameters()).device
    for _ in range(length):
        context = torch.tensor([tokens[-model.shape.positions :]], device=device)
        logits = model(context)[0, -1].float().cpu() / temperature
        best = logits.topk(min(top_k, len(logits)))
        choice = best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)]
        if int(choice) == end:
            break
        tokens.append(int(choice))
    return tokens[len(prompt) :]


@torch.no_grad()
def fill_masks(model: Stack, tokens: Sequence[int], *, mask: int) -> list[int]:
    """`tokens` ([CLS] ... [SEP]) with each `mask` replaced by its most likely token, the surest first."""
    assert model.group is None, "filling masks needs the whole vocabulary on one rank"
    model.eval()
    filled = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    while bool((filled == mask).any()):
        logits, _ = model(filled, torch.zeros_like(filled), None)
        logits[..., mask] = float("-inf")
        surest = logits.float().softmax(-1).amax(-1).masked_fill(filled != mask, -1.0).argmax()
        filled[0, surest] = logits[0, surest].argmax()
    return filled[0].tolist()
